"""blendrag: answer from retrieved documents without prefilling them again."""

__version__ = "0.1.0"
