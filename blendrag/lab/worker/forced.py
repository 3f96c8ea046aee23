"""Forced decoding: the log probability of a text that the model would not write itself.

vLLM's ``prompt_logprobs`` would have the whole prompt computed, stored KV or not. So the text is generated
instead, one given token after another. vLLM takes its log probabilities before any logits processor, so those
of the forced tokens, and of their rivals, are the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from blendrag.engine.client.generation import FORCED
from blendrag.engine.compat import BatchUpdate, LogitsProcessor, process_dict_updates


class ForcedTokens(LogitsProcessor):
    """Leaves a request that asks for it no choice but its next forced token; beyond its last, every choice.

    Which one is next says the length of vLLM's list of the request's output. Its ids are not read: with
    asynchronous scheduling they are filled in later.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[Sequence[int], Sequence[int]]] = {}  # by row: forced, generated so far

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError, which vLLM returns to the client, for anything but a list of token ids."""
        forced = _forced(sampling_params)
        if not isinstance(forced, list) or not all(type(token) is int and token >= 0 for token in forced):
            raise ValueError(f"{FORCED} must be a list of token ids")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _new_state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (forced, generated) in self._rows.items():
            if len(generated) < len(forced) and (token := forced[len(generated)]) < logits.shape[1]:
                logits[row] = -torch.inf
                logits[row, token] = 0.0
        return logits


def _forced(sampling_params: Any) -> Any:
    return (sampling_params.extra_args or {}).get(FORCED, [])


def _new_state(
    sampling_params: Any, prompt: Sequence[int] | None, generated: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]] | None:
    forced = _forced(sampling_params)
    return (forced, generated) if forced else None
