"""The codecs that encode KV in records: one interface, one registry, one file per codec."""

from blendrag.store.codec import fp8, int4, int8, raw  # noqa: F401  (each registers itself)
from blendrag.store.codec.interface import CODECS, Codec, make_codec

__all__ = ["CODECS", "Codec", "make_codec"]
