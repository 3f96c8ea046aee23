"""The field ``blendrag`` of a request's body."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from blendrag.server.blending import BlendFields


@pytest.mark.parametrize(
    ("name", "said"),
    [("recompte_ratio", "recompute_ratio"), ("hints", "documents now"), ("Evidence", "evidence")],
)
def test_typing_error_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        BlendFields.model_validate({name: 0.5})


@pytest.mark.parametrize("ratio", [-0.1, 1.1, "much"])
def test_ratio_out_of_bounds_is_refused(ratio: object) -> None:
    with pytest.raises(ValidationError):
        BlendFields.model_validate({"recompute_ratio": ratio})


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"selector": "hkvd@0.1", "recompute_ratio": 0.2}, "give one ratio"),
        ({"kv_budget": "ada"}, "kv_budget must be a number of tokens"),
        ({"kv_window": 16}, "kv_window is a part of the budget now"),
        ({"metric": "k"}, "metric is an argument of the selector now"),
    ],
)
def test_option_that_cannot_be_used_is_refused_with_what_to_write(said: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        BlendFields.model_validate(said)


def test_nothing_said_is_nothing_asked() -> None:
    fields = BlendFields.model_validate({})
    assert fields.blend is fields.quality is fields.recompute_ratio is fields.selector is None
    assert not fields.evidence
