"""What a namespace's prompts, or blended ones, share in vLLM's prefix cache."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.client.generation import vllm_prompt
from blendrag.engine.client.prior_turns import PriorTurns
from blendrag.engine.wire.recipe import Recipe, read_recipe
from blendrag.options import BlendOptions

RECIPE = Recipe("store", (("key", 0, 4),), BlendOptions(selector="hkvd"))
NAMESPACES = st.text("aB0_.-é", max_size=3)
RECIPES = st.sampled_from(
    [
        None,
        RECIPE,
        Recipe("store", (("key", 1, 4),), RECIPE.options),
        replace(RECIPE, options=BlendOptions(selector="lmcache")),
    ]
)


def test_plain_prompt_without_a_namespace_has_no_salt() -> None:
    assert vllm_prompt([1, 2], None, PriorTurns()) == {"prompt_token_ids": [1, 2]}


@given(st.tuples(NAMESPACES, RECIPES), st.tuples(NAMESPACES, RECIPES))
def test_two_namespaces_or_recipes_have_two_salts(
    one: tuple[str, Recipe | None], other: tuple[str, Recipe | None]
) -> None:
    prompts = [vllm_prompt([1], recipe, PriorTurns(), namespace) for namespace, recipe in (one, other)]
    salts = [prompt.get("cache_salt") for prompt in prompts]
    assert (salts[0] == salts[1]) == (one == other)
    assert all(salt is None or salt for salt in salts), "vLLM takes an empty salt for none"


def test_traced_request_hits_the_same_one_untraced() -> None:
    traced = replace(RECIPE, options=replace(RECIPE.options, trace=True))
    assert traced.cache_salt("a", [1]) == RECIPE.cache_salt("a", [1])


@pytest.mark.parametrize(
    ("selector", "ratio", "reads"),
    [("query", 0.1, True), ("hkvd", 0.1, False), ("query", 0.0, False)],
)
def test_kv_repaired_for_one_question_answers_no_other(selector: str, ratio: float, reads: bool) -> None:
    recipe = Recipe("store", RECIPE.spans, BlendOptions(ratio, selector))
    salts = {recipe.cache_salt("", [1, 2, 3, 4, *question]) for question in ((5,), (6,), (5, 6))}
    assert len(salts) == (3 if reads else 1)
    assert recipe.cache_salt("", [1, 2, 3, 4, 5]) in salts  # the same one again is found


@pytest.mark.parametrize("selector", ["query", "hkvd"])
def test_kv_repaired_beside_one_text_between_documents_stands_beside_no_other(selector: str) -> None:
    recipe = Recipe("store", (("a", 1, 2), ("b", 4, 2)), BlendOptions(0.1, selector))
    salts = {recipe.cache_salt("", [1, 2, 3, between, 5, 6, 7]) for between in (4, 8)}
    assert len(salts) == 2


@given(RECIPES.filter(bool))
def test_recipe_does_not_change_on_its_way_to_the_worker(recipe: Recipe) -> None:
    plain = json.loads(json.dumps(recipe.transfer_params("ticket")))
    assert read_recipe(plain) == recipe
