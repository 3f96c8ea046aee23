"""A server blends by recipes of its own only: others would put blended KV under anyone's salt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.recipe import FIELD, Recipe, is_sealed, sealed

SECRET = "of this server"
RECIPE = Recipe("store", (("key", 3, 5),))


def sent(params: dict[str, Any]) -> dict[str, Any]:
    """As it comes out at the other side."""
    return json.loads(json.dumps(params))


def test_own_recipe_is_refused() -> None:
    assert is_sealed(sent(sealed(RECIPE.transfer_params("t"), "salt", SECRET)), "salt", SECRET)


@pytest.mark.parametrize(
    "change",
    [
        {"seal": None},
        {"seal": ""},
        {"ticket": "another"},
        {FIELD: Recipe("store", (("key", 0, 5),)).transfer_params("t")[FIELD]},
    ],
)
def test_forged_recipe_is_taken_for_ours(change: dict[str, Any]) -> None:
    params = sent(sealed(RECIPE.transfer_params("t"), "salt", SECRET)) | change
    assert not is_sealed(params, "salt", SECRET)


def test_recipe_is_used_under_another_salt() -> None:
    params = sent(sealed(RECIPE.transfer_params("t"), "salt", SECRET))
    assert not is_sealed(params, "another", SECRET)
    assert not is_sealed(params, None, SECRET)


def test_recipe_of_another_server_is_taken_for_ours() -> None:
    assert not is_sealed(sent(sealed(RECIPE.transfer_params("t"), "salt", "theirs")), "salt", SECRET)


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists), max_size=4))
def test_whatever_is_sent_breaks_the_scheduler(params: dict[str, Any]) -> None:
    assert not is_sealed(params, "salt", SECRET)
