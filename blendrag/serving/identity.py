"""The KV identity of a model folder, without loading the model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from blendrag.adapter import adapter_for
from blendrag.errors import ModelNotFoundError
from blendrag.models import first_window, load_tokenizer, model_digest, model_window, read_json
from blendrag.prompt import shared_prefix, start_prefix
from blendrag.settings import AUTO_CODEC, Settings
from blendrag.store.catalogue import Catalogue
from blendrag.store.identity import KVIdentity, kv_shape, prefix_name, sharing_layers

# What a shape follows from, in any configuration that leaves out nothing.
_SHAPE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
# Between the names of a model and its adapter.
_ADAPTED = " with "
# Behind the name of a model whose KV is that of its longer window.
_LONGER = " with the angles of its longer window"


def prefix_ids(settings: Settings, model_path: Path) -> tuple[int, ...]:
    """Return the token ids behind which chunks are prefilled, as ``settings.shared_prefix`` says."""
    if settings.shared_prefix == "none":
        return ()
    tokenizer = load_tokenizer(model_path)
    if settings.shared_prefix == "start":
        return start_prefix(tokenizer)
    return shared_prefix(tokenizer, settings.system_prompt, settings.separator)


def codec_of(settings: Settings, root: Path) -> str:
    """Return how KV is stored in this folder: as the settings say, else as it is there already.

    Raises StoreError for an index that cannot be read.
    """
    if settings.codec != AUTO_CODEC or not Catalogue.is_in(root):
        return settings.new_codec
    return _made_with(root).codec


def with_model_of(root: Path, settings: Settings) -> Settings:
    """Return the settings for the index in this folder: if they name no model, with the one it was made with.

    Raises StoreError for an index that cannot be read, ModelNotFoundError if its model's folder is gone.
    """
    if "model" in settings.model_fields_set or not Catalogue.is_in(root):
        return settings
    name = _made_with(root).model.removesuffix(_LONGER)
    if not os.path.exists(name):  # the adapter, however it is named now, is another setting
        name = name.rpartition(_ADAPTED)[0] or name
    if os.path.isabs(name) and not os.path.exists(name):
        raise ModelNotFoundError(
            f"the index {str(root)!r} was made with the model in {name!r}, which is not there any more: name"
            " where that model is now (--model, model=)"
        )
    return settings.model_copy(update={"model": name})


def _made_with(root: Path) -> KVIdentity:
    catalogue = Catalogue.open(root, None)
    catalogue.close()
    return catalogue.identity


def kv_identity(
    settings: Settings, model_path: Path, prefix: Sequence[int] = (), codec: str | None = None
) -> KVIdentity:
    """Return what the KV of this model's chunks depends on, if they are prefilled behind ``prefix``. codec:
    None is that of a new place.

    Raises ModelError for an unreadable ``config.json``, or an adapter of another model.
    """
    config = _text_config(model_path)
    heads, size = kv_shape(config) or (0, 0)
    name, weights = settings.model, model_digest(model_path)
    if os.path.realpath(folder := os.path.expanduser(name)) == os.path.realpath(model_path):
        name = os.path.abspath(folder)  # from other working folders, too; a link may be switched later
    if settings.lora is not None:
        adapter = adapter_for(model_path, settings.lora)
        name += f"{_ADAPTED}{settings.lora}"
        weights = xxhash.xxh3_128_hexdigest((weights + adapter.digest).encode())
    window = settings.max_model_len or model_window(model_path) or 0
    if window > (first_window(config) or math.inf):
        name += _LONGER
        weights = xxhash.xxh3_128_hexdigest(f"{weights} long".encode())
    return KVIdentity(
        model=name,
        weights=weights,
        dtype=settings.dtype,
        num_layers=(config.get("num_hidden_layers") or 0) - sharing_layers(config),
        num_kv_heads=heads,
        head_size=size,
        codec=codec or settings.new_codec,
        prefix=prefix_name(settings.shared_prefix, prefix),
        namespace=settings.namespace,
    )


def _text_config(model_path: Path) -> dict[str, Any]:
    """Return a model's configuration, of texts if it reads images, too. Files may leave out what their class
    has by default; classes that transformers does not know are taken as they are written."""
    config = read_json(model_path / "config.json")
    config |= config.get("text_config") or {}
    if all(name in config for name in _SHAPE):
        return config
    try:
        from transformers import AutoConfig

        whole: dict[str, Any] = AutoConfig.from_pretrained(model_path).get_text_config().to_dict()
    except Exception:
        return config
    return whole
