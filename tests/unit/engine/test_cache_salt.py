"""What a namespace's prompts, or blended ones, share in vLLM's prefix cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.generation import vllm_prompt
from blendrag.engine.recipe import Recipe

RECIPE = Recipe("store", (("key", 0, 4),))
NAMESPACES = st.text("aB0_.-é", max_size=3)
RECIPES = st.sampled_from([None, RECIPE, Recipe("store", (("key", 1, 4),))])


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
