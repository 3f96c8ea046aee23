"""Measurements: ``blendrag bench``."""
