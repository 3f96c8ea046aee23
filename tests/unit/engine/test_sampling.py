"""Parameters of sampling on their way to vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from blendrag.engine.client.generation import Sampling, vllm_sampling
from blendrag.errors import ConfigError


def made(**given: Any) -> Any:
    return vllm_sampling(Sampling(max_tokens=5, **given), 100, None, "ticket")


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": "x"},
        {"seed": 1.5},
        {"seed": 1 << 70},
        {"other": {"logit_bias": {"a": 1.0}}},
        {"other": {"logit_bias": [1]}},
        {"other": {"skip_special_tokens": "x"}},
        {"other": {"top_k": "x"}},
    ],
    ids=str,
)
def test_what_the_engine_could_not_read_is_refused_before_it_is_sent(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="vLLM refuses"):
        made(**wrong)


def test_tokens_of_a_bias_may_be_text_as_in_json() -> None:
    assert made(other={"logit_bias": {"5": -100.0}}).logit_bias == {5: -100.0}


def test_extra_arguments_stand_beside_ours() -> None:
    assert made(other={"extra_args": {"mine": 1}}).extra_args == {"mine": 1}
    assert set(made(other={"extra_args": {"mine": 1}}, forced=(1, 2)).extra_args) > {"mine"}
