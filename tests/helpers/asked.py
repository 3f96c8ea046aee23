"""Requests as the scheduler's halves of mechanisms know them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from blendrag.engine.hooks import Asked
from blendrag.engine.wire.recipe import Recipe


def asked(
    params: dict[str, Any] | None,
    prompt: int,
    name: str = "r",
    salt: str | None = None,
    recipe: Recipe | None = None,
) -> Asked:
    """A request of so many tokens, with what its client has sent for connectors."""
    request = SimpleNamespace(
        request_id=name,
        cache_salt=salt,
        kv_transfer_params=params,
        num_prompt_tokens=prompt,
        num_computed_tokens=0,
        all_token_ids=list(range(prompt)),
    )
    return Asked(request, recipe)
