"""Forced tokens by both of vLLM's interfaces, as its two model runners use them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import MoveDirectionality, validate_logits_processors_parameters
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    build_custom_logits_processors_params_validator,
)

from as_requests import as_requests
from blendrag.attention.runs import dense_attention, find_runs
from blendrag.attention.scores import Scores
from blendrag.engine.client.generation import FORCED
from blendrag.engine.client.launch import SERVING, engine_args
from blendrag.engine.compat.requests import BatchUpdate, output_ids_not_read
from blendrag.lab.running import _LABORATORY
from blendrag.lab.worker.forced import ForcedTokens
from blendrag.lab.worker.lmcache import bottom_right
from blendrag.settings import Settings

NAMES = _LABORATORY.logits_processors


def asking(tokens: Any) -> Any:
    return SimpleNamespace(extra_args=tokens and {FORCED: tokens})


def first_runner(params: Any) -> None:
    validate_logits_processors_parameters(NAMES, params)


def second_runner(params: Any) -> None:
    build_custom_logits_processors_params_validator(NAMES)(params)


@pytest.mark.parametrize("check", [first_runner, second_runner])
def test_runner_takes_the_laboratorys_processor(check: Callable[[Any], None]) -> None:
    check(asking([1, 2]))
    with pytest.raises(VLLMValidationError, match="token ids"):
        check(asking([1.5]))


def test_serving_loads_no_processor(model_dir: Any) -> None:
    assert engine_args(Settings.load(), model_dir, _LABORATORY)["logits_processors"] == list(NAMES)
    assert engine_args(Settings.load(), model_dir, SERVING)["logits_processors"] == []


def test_output_ids_are_looked_for_only_where_a_runner_has_them() -> None:
    first = SimpleNamespace(input_batch=SimpleNamespace(logitsprocs_need_output_token_ids=True))
    output_ids_not_read(first)
    assert not first.input_batch.logitsprocs_need_output_token_ids
    output_ids_not_read(SimpleNamespace())


def test_row_that_is_moved_keeps_its_tokens() -> None:
    """As vLLM tells it: rows 0-2 are taken, 0 ends, 2 moves to 0 while 1 is swapped with it."""
    processor = ForcedTokens(None, torch.device("cpu"), False)
    generated: list[list[int]] = [[], [], []]
    forced = [None, [5, 6], [7]]
    added = [(row, asking(tokens), None, generated[row]) for row, tokens in enumerate(forced)]
    processor.update_state(BatchUpdate(3, [], added, []))  # type: ignore[arg-type]
    assert processor.apply(torch.zeros(3, 9)).argmax(1).tolist() == [0, 5, 7]
    for each in generated:
        each.append(-1)  # as asynchronous scheduling does until the id is known
    moved = [(2, 0, MoveDirectionality.UNIDIRECTIONAL), (0, 1, MoveDirectionality.SWAP)]
    processor.update_state(BatchUpdate(2, [0], [], moved))
    logits = processor.apply(torch.zeros(2, 9))
    assert logits[0].argmax() == 6 and logits[0].isneginf().sum() == 8
    assert not logits[1].isneginf().any()  # its one token has been forced


def test_slot_of_another_row_or_request_forces_none_of_its_tokens() -> None:
    """As the second runner has it: slots stay, rows do not; prompts are prefilled in pieces."""
    prompts = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([4, 2, 3, 9])))
    processor = ForcedTokens(None, prompts)
    assert isinstance(processor, LogitsProcessor)
    wanted = {2: [5, 6], 0: None, 1: [7], 3: [8]}
    assert [processor.add_request(slot, asking(tokens)) for slot, tokens in wanted.items()] == [
        True, False, True, True,
    ]  # fmt: skip

    def chosen(slots: list[int], tokens: list[int]) -> list[int]:
        return processor.apply(torch.zeros(len(slots), 10), step(slots, tokens)).argmax(1).tolist()

    assert chosen([2, 0, 1, 3], [3, 4, 2, 5]) == [5, 0, 7, 0], "the last is not at its prompt's end"
    assert chosen([3, 1, 2], [9, 3, 4]) == [8, 0, 6], "the second has no more to force"
    assert not processor.add_request(2, asking(None))
    assert chosen([2], [3]) == [0]


def step(slots: list[int], tokens: list[int]) -> LogitsContext:
    """A step with these slots in its rows, which have so many tokens with those of this step."""
    at, none = torch.tensor(slots), torch.zeros(len(slots))
    counts = np.array(tokens)
    return LogitsContext(at, at, at.numpy(), none, none, torch.tensor(tokens) - 1, counts)


# -- LMCache's mask --------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 80), min_size=1, max_size=60).map(sorted), st.integers(0, 9))
def test_bottom_right_mask_leaks_exactly_where_the_selected_are_scattered(
    positions: list[int], after: int
) -> None:
    """Why the mask of the released code is for comparison with it only."""
    m, n = len(positions), positions[-1] + 1 + after
    query, key, one_hot = torch.ones(m, 1, 4), torch.ones(n, 1, 4), torch.eye(n)[:, None]
    at = torch.tensor(positions)
    exact = dense_attention(query, key, one_hot, at, Scores(0.5))[:, 0]  # [m, n]: the weight of every key
    both = at.numpy(), bottom_right(at.numpy(), np.ones(m, bool), n)
    found = [find_runs(seen, np.zeros_like(seen)) for seen in both]
    runs, leaky = (as_requests(each, query, key, one_hot, 0.5)[:, 0] for each in found)
    future = torch.arange(n)[None, :] > at[:, None]
    assert not exact[future].any() and not runs[future].any()
    assert bool(leaky[future].any()) == (positions != list(range(n - m, n)))


def test_bottom_right_mask_leaks_for_tokens_that_were_not_selected() -> None:
    positions = np.array([0, 1, 4, 6, 9, 10])
    selected = np.array([False, False, True, True, False, False])
    assert bottom_right(positions, selected, end=9).tolist() == [0, 1, 7, 8, 9, 10]
    assert positions.tolist() == [0, 1, 4, 6, 9, 10], "its input was changed"
