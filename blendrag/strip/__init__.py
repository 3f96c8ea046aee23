"""A prompt as a strip: which of its tokens were reused, repaired and computed."""

from blendrag.strip.strip import Strip

__all__ = ["Strip"]
