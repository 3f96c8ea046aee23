"""The choice of the decoder that runs a model's layers."""

from __future__ import annotations

from typing import Any

from blendrag.engine.compat.model import has_known_parts, is_of_transformers, text_model
from blendrag.engine.forward.decoder import Decoder
from blendrag.engine.forward.known_layers import KnownDecoder
from blendrag.engine.forward.transformers_layers import TransformersDecoder
from blendrag.engine.forward.whole_layers import WholeLayerDecoder


def make_decoder(model: Any, vllm_config: Any) -> Decoder:
    """Return the piecewise decoder where the structure is known, else one for whole layers."""
    if is_of_transformers(model):
        return TransformersDecoder(model, vllm_config)
    return (KnownDecoder if has_known_parts(text_model(model)) else WholeLayerDecoder)(model, vllm_config)
