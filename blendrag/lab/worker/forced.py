"""Forced decoding: the log probability of a text that the model would not write itself.

vLLM's ``prompt_logprobs`` would have the whole prompt computed, stored KV or not. So the text is generated
instead, one given token after another. vLLM takes its log probabilities before any logits processor, so those
of the forced tokens, and of their rivals, are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from blendrag.engine.client.generation import FORCED
from blendrag.engine.compat.requests import (
    BatchUpdate,
    LogitsContext,
    LogitsProcessor,
    SlotLogitsProcessor,
    process_dict_updates,
)

# A row of logits, what its request is forced to generate, and how many tokens it has generated so far.
Next = tuple[int, Sequence[int], int]


class ForcedTokens(LogitsProcessor, SlotLogitsProcessor):
    """A logits processor that leaves a request that asks for it no choice but its next forced token; beyond
    its last, every choice.

    For both of vLLM's model runners. The first tells which rows of its batch come, move and go; which token
    is next says the length of its list of the request's output, whose ids are not read: with asynchronous
    scheduling they are filled in later. The second keeps a request in one slot, and says with every step
    which slot a row is, and how many tokens the request has by then.
    """

    def __init__(self, vllm_config: Any, state: Any, is_pin_memory: bool = False) -> None:
        """Begin with no request. state: the second runner's, of all slots; of the first, a device."""
        self._state = state
        self._rows: dict[int, tuple[Sequence[int], Sequence[int]]] = {}  # by row: forced, generated so far
        self._slots: dict[int, Sequence[int]] = {}  # by slot: forced

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError, which vLLM returns to the client, for anything but a list of token ids."""
        forced = _forced(sampling_params)
        if not isinstance(forced, list) or not all(type(token) is int and token >= 0 for token in forced):
            raise ValueError(f"{FORCED} must be a list of token ids")

    def apply(self, logits: torch.Tensor, step: LogitsContext | None = None) -> torch.Tensor:
        """Force the next token of each request. step: the second runner's; None from the first."""
        for row, forced, count in self._by_row() if step is None else self._by_slot(step):
            if 0 <= count < len(forced) and (token := forced[count]) < logits.shape[1]:
                logits[row] = -torch.inf
                logits[row, token] = 0.0
        return logits

    # -- the first runner's -------------------------------------------------------------------------------

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _new_state)

    def _by_row(self) -> Iterator[Next]:
        for row, (forced, generated) in self._rows.items():
            yield row, forced, len(generated)

    # -- the second runner's ------------------------------------------------------------------------------

    def add_request(self, slot: int, sampling_params: Any) -> bool:
        self._slots[slot] = _forced(sampling_params)
        return bool(self._slots[slot])

    def _by_slot(self, step: LogitsContext) -> Iterator[Next]:
        for row, slot in enumerate(step.idx_mapping_np.tolist()):  # one row each, as nothing is speculated
            tokens = int(step.seq_lens_upper_bound_np[row])
            yield row, self._slots[slot], tokens - int(self._state.prompt_len.np[slot])


def _forced(sampling_params: Any) -> Any:
    return (sampling_params.extra_args or {}).get(FORCED, [])


def _new_state(
    sampling_params: Any, prompt: Sequence[int] | None, generated: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]] | None:
    forced = _forced(sampling_params)
    return (forced, generated) if forced else None
