"""The identity that a chunk's KV depends on, and a chunk's key (design decision D5)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

LAYOUT_VERSION = 2  # of records and catalogues
HeadShape = tuple[int, int]
"""(kv_heads, numbers of a head)."""
NO_CONTEXT = ""  # the context of a chunk without text before it
ALONE = "alone"  # ``KVIdentity.prefix`` of chunks that are prefilled behind nothing


def latent_shape(size: int) -> HeadShape:
    """Return the shape of K, and of V, as which a token's ``size`` numbers are stored that are both (MLA)."""
    return 1, -(-size // 2)


def common_shape(shapes: Collection[HeadShape]) -> HeadShape | None:
    """Return the shape as which K and V of layers with these shapes are stored: heads of the one that has
    fewest, as wide as it takes. None if others have no multiple of them."""
    heads = min(each for each, _ in shapes)
    if any(each % max(1, heads) for each, _ in shapes):
        return None
    return heads, max(each * size for each, size in shapes) // max(1, heads)


def kv_shape(config: Mapping[str, Any]) -> HeadShape | None:
    """Return the shape as which K and V of a model are stored that has this ``config.json``; None if its
    layers' shapes have nothing in common."""
    if latent := config.get("kv_lora_rank"):
        return latent_shape(latent + (config.get("qk_rope_head_dim") or 0))
    heads = config.get("num_attention_heads") or 0
    size = config.get("head_dim") or (config.get("hidden_size") or 0) // max(1, heads)
    first = config.get("num_key_value_heads") or heads, size
    shapes = {first}
    for layer in (config.get("per_layer_config") or {}).values():
        shapes.add((layer.get("num_key_value_heads") or first[0], layer.get("head_dim") or size))
    if wide := config.get("global_head_dim"):  # Gemma 4 writes so of its layers without windows
        equal = config.get("attention_k_eq_v")
        shapes.add(((config.get("num_global_key_value_heads") if equal else None) or first[0], wide))
    return common_shape(shapes)


def sharing_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers have no KV of their own, in a model with this ``config.json``: the last ones,
    which read that of earlier ones."""
    return config.get("num_kv_shared_layers") or 0


def prefix_name(kind: str, token_ids: Sequence[int]) -> str:
    """Return the ``KVIdentity.prefix`` of chunks that are prefilled behind these tokens, of this kind."""
    if not len(token_ids):
        return ALONE
    return f"{kind} {xxhash.xxh3_128_hexdigest(np.asarray(token_ids, dtype='<i4').tobytes())}"


def context_name(token_ids: Sequence[int], after: str = "") -> str:
    """Return the name, in a chunk's key and record, of the text that it was prefilled behind: 32 hex digits.

    after: the key of the chunk that this text ends with, which stands for all that it has read.
    """
    if not len(token_ids):
        return NO_CONTEXT
    return xxhash.xxh3_128_hexdigest(np.asarray(token_ids, dtype="<i4").tobytes() + after.encode())


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Everything a chunk's KV depends on, apart from its tokens and those of its context.

    model: name shown to people; not part of the digest, since a model may be known by several.
    weights: digest of config, weights and any adapter that is merged into them.
    dtype: as the settings say; "auto" leaves it to the engine (see ``Layout``).
    prefix: how chunks are prefilled: "alone", or ``prefix_name`` of the tokens they stood behind.
    namespace: the tenant; equal text in two namespaces has two keys.
    layout: version of the records.
    """

    model: str
    weights: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    codec: str = "raw"
    prefix: str = ALONE
    namespace: str = ""
    layout: int = LAYOUT_VERSION

    @property
    def prefix_kind(self) -> str:
        """Return the kind of tokens that chunks stood behind; "none": there are none."""
        return "none" if self.prefix == ALONE else self.prefix.partition(" ")[0]

    def digest(self) -> str:
        parts = {name: value for name, value in asdict(self).items() if name != "model"}
        return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())

    def differences(self, other: KVIdentity) -> list[str]:
        """Return the names of the fields, other than the model's name, in which two identities differ."""
        names = [field.name for field in fields(self) if field.name != "model"]
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def chunk_key(self, token_ids: Sequence[int] | npt.NDArray[np.int32], context: str = NO_CONTEXT) -> str:
        """Return the content address of a chunk: 32 hex digits over this identity, the token ids, and the
        name of the context (:func:`context_name`)."""
        ids = np.asarray(token_ids, dtype="<i4")
        return xxhash.xxh3_128_hexdigest(self.digest().encode() + ids.tobytes() + context.encode())
