"""The formats an evaluation reads. A module per family; importing it registers its formats."""

from blendrag.lab.evaluate.formats import kv, listed, nq, squad  # noqa: F401
from blendrag.lab.evaluate.formats.format import FORMATS, Format, Row, find_format, register_format

__all__ = ["FORMATS", "Format", "Row", "find_format", "register_format"]
