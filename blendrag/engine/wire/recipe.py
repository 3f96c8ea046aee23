"""The plain data by which a request tells the engine how to blend it, and the cache salt that goes with
it."""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import xxhash

from blendrag.engine.wire.prefixes import PATH
from blendrag.errors import ConfigError
from blendrag.options import DEFAULTS, BlendOptions
from blendrag.prompt.plan import Span

FIELD = "blendrag"
_SEAL = "seal"

SECRET = "BLENDRAG__SECRET"
"""The environment variable of a server and its engine with the secret that recipes are sealed by. An engine
without it takes unsealed recipes: nobody else can send it any."""

# A longer fresh tail behind the last document is left to the engine, which prefills it in chunks between
# other requests' steps.
_MAX_FUSED_TAIL = 256


@dataclass(frozen=True, slots=True)
class Recipe:
    """The instructions for blending one prompt.

    store: id of an opened store (``StoreClient.open``).
    spans: of the prompt's cached segments, ascending.
    options: how to blend; ``blend`` and ``min_cached_tokens`` have been obeyed already.
    tree, head: an opened tree, and (key, end) of its nodes that the prompt begins with. Only what is behind
    them is blended; all of the prompt, if they cannot be had.
    """

    store: str
    spans: tuple[Span, ...]
    options: BlendOptions = DEFAULTS
    tree: str = ""
    head: tuple[tuple[str, int], ...] = ()

    @property
    def cached(self) -> int:
        """Return the number of cached tokens."""
        return sum(length for _, _, length in self.spans)

    @property
    def cached_end(self) -> int:
        """Return the position after the last cached token."""
        return max(start + length for _, start, length in self.spans)

    @property
    def exact_end(self) -> int:
        """Return the position behind the exact prefix."""
        return self.head[-1][1] if self.head else 0

    def reused_end(self, claimed: int, block_size: int) -> int:
        """Return the position behind the last cached token whose stored KV is used, if the fused prefill
        computes the first ``claimed`` tokens.

        It ends a block of the paged cache. Cached tokens in the next block are computed like fresh ones: the
        prefix cache holds whole blocks, so the engine computes that block, too, when the prompt comes again,
        and the answer stays the same.
        """
        return min(self.cached_end, claimed) // block_size * block_size

    def claim(self, num_prompt_tokens: int, block_size: int, own: int = 1) -> int:
        """Return how many leading tokens the fused prefill computes. The engine computes the others: ``own``
        or more; of a short question only half, as the fused prefill reads the first half."""
        tail = num_prompt_tokens - self.cached_end
        if tail > _MAX_FUSED_TAIL:
            return self.reused_end(num_prompt_tokens, block_size)
        return max(0, num_prompt_tokens - min(own, max(2, tail // 2)))

    def transfer_params(self, ticket: str) -> dict[str, Any]:
        """Return the value of ``SamplingParams.extra_args["kv_transfer_params"]``. ``ticket`` names the
        request."""
        return {FIELD: asdict(self), "ticket": ticket}

    @property
    def untraced(self) -> Recipe:
        """Return the recipe without what does not change its KV: the trace."""
        return replace(self, options=replace(self.options, trace=False))

    def cache_salt(self, namespace: str, token_ids: Sequence[int]) -> str:
        """Return the salt that keeps blended KV apart from exact KV in the prefix cache, and one recipe's
        from another's (decision D9).

        The prefix cache hashes the tokens before a block itself; the salt adds what else blended KV depends
        on: all text up to the last document, since what is repaired in one is chosen beside the others, and
        where the selector reads the question, the text behind it. The namespace is a plain part of it, so
        two namespaces never share a salt, whatever a hash does.
        """
        end = None if self._reads_question() else self.cached_end
        parts = json.dumps([asdict(self.untraced), list(token_ids[:end])])
        return f"{namespace}:{xxhash.xxh3_128_hexdigest(parts.encode())}"

    def _reads_question(self) -> bool:
        from blendrag.select import make_selector  # imports torch, which clients of a server do without

        try:
            return make_selector(self.options).reads_question
        except ConfigError:  # the worker says so, and the engine prefills plainly; or the worker knows more
            return False


@dataclass(frozen=True, slots=True)
class EvictionOrder:
    """An order to evict the KV of a prompt of ``tokens``, all of them computed, in the first of these blocks.
    The step at hand computes what follows. No blocks: they are not known, and nothing is evicted."""

    request_id: str
    ticket: str
    block_ids: list[int]
    tokens: int


@dataclass(slots=True)
class BlendOrder:
    """An order to blend one prompt: the worker computes tokens [0, len(token_ids)), of which ``written`` are
    there. block_ids, others: its blocks in the first group of layers, and in each other one. behind: the
    prompt's other tokens, which may be read where the last blocks have room for them. next_id: the first of
    them, in any case."""

    request_id: str
    ticket: str
    token_ids: list[int]
    block_ids: list[int]
    written: int
    recipe: Recipe
    behind: list[int] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)
    next_id: int = 0


def read_recipe(params: dict[str, Any] | None) -> Recipe | None:
    """Return the recipe in a request's ``kv_transfer_params``; None for a plain request."""
    fields = (params or {}).get(FIELD)
    if not fields or not fields.get("spans"):
        return None
    spans = tuple((str(key), int(start), int(length)) for key, start, length in fields["spans"])
    head = tuple((str(key), int(end)) for key, end in fields.get("head", ()))
    return Recipe(**{**fields, "spans": spans, "options": BlendOptions(**fields["options"]), "head": head})


def sealed(params: dict[str, Any], salt: str | None, secret: str) -> dict[str, Any]:
    """Return ``transfer_params`` with a seal that only who knows the secret can make. Anyone may send
    requests to a server, and blended KV under another prompt's salt would be taken for that prompt's."""
    return {**params, _SEAL: _seal(params, salt or "", secret)}


def is_sealed(params: dict[str, Any], salt: str | None, secret: str) -> bool:
    """Return whether ``params`` were sealed with this secret, for this salt."""
    seal = str(params.get(_SEAL)).encode("utf-8", "surrogatepass")
    return hmac.compare_digest(seal, _seal(params, salt or "", secret).encode())


def _seal(params: dict[str, Any], salt: str, secret: str) -> str:
    signed = json.dumps([params.get(FIELD), params.get(PATH), params.get("ticket"), salt], sort_keys=True)
    return hmac.new(secret.encode(), signed.encode(), "sha256").hexdigest()
