"""What a namespace's prompts, or blended ones, share in vLLM's prefix cache."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.generation import vllm_prompt
from blendrag.engine.recipe import Recipe, read_recipe

RECIPE = Recipe("store", (("key", 0, 4),))
NAMESPACES = st.text("aB0_.-é", max_size=3)
RECIPES = st.sampled_from([None, RECIPE, Recipe("store", (("key", 1, 4),)), RECIPE.as_lmcache()])


def test_plain_prompt_without_a_namespace_is_shared_with_nobody() -> None:
    assert vllm_prompt([1, 2], None) == {"prompt_token_ids": [1, 2]}


@given(st.tuples(NAMESPACES, RECIPES), st.tuples(NAMESPACES, RECIPES))
def test_two_namespaces_or_recipes_have_one_salt(
    one: tuple[str, Recipe | None], other: tuple[str, Recipe | None]
) -> None:
    salts = [vllm_prompt([1], recipe, namespace).get("cache_salt") for namespace, recipe in (one, other)]
    assert (salts[0] == salts[1]) == (one == other)
    assert all(salt is None or salt for salt in salts), "vLLM takes an empty salt for none"


def test_traced_request_does_not_hit_the_same_one_untraced() -> None:
    traced = Recipe("store", RECIPE.spans, trace=True)
    assert traced.cache_salt("a") == RECIPE.cache_salt("a")


def test_lmcache_semantics_are_never_taken_for_exact_ones() -> None:
    same_options = Recipe("store", RECIPE.spans, "hkvd", 0.15, "k", (1,))
    lmcache = RECIPE.as_lmcache()
    assert (lmcache.selector, lmcache.metric, lmcache.check_layers) == ("hkvd", "k", (1,))
    assert lmcache.cache_salt() != same_options.cache_salt()


@given(RECIPES.filter(bool))
def test_recipe_does_not_change_on_its_way_to_the_worker(recipe: Recipe) -> None:
    plain = json.loads(json.dumps(recipe.transfer_params("ticket")))
    assert read_recipe(plain) == recipe
