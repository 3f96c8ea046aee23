"""The embedded engine, as the rest of blendrag uses it."""
