"""Measurements of ``blendrag bench``."""
