"""Arms by name: what they stand for, and what is said of a name that stands for nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.choice import Choice
from blendrag.compress import ALLOCATORS
from blendrag.errors import ConfigError
from blendrag.lab.evaluate.arms import RATIOS, ArmSpec, parse_arm, parse_arms
from blendrag.settings import Settings

SELECTORS = [
    "hkvd", "hkvd:metric=k", "hkvd:metric=kv:threshold=0.25", "gradual",
    "gradual:check_layers=1+4", "first_k", "query", "random", "lmcache",
]  # fmt: skip


WHOLE = "query@0.06:int8:512:ada:alpha=0.2"  # says all that can be said


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings.load()


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        ("full", ArmSpec("full", "full")),
        ("reuse", ArmSpec("reuse", "stored", shared_prefix="none")),
        ("reuse:none:int8", ArmSpec("reuse:int8", "stored", codec="int8", shared_prefix="none")),
        ("hkvd@0.15", ArmSpec("hkvd@0.15", "stored", "hkvd", 0.15)),
        ("hkvd@.2:metric=kv", ArmSpec("hkvd@0.2:metric=kv", "stored", "hkvd:metric=kv", 0.2)),
        ("first_k@0.1", ArmSpec("first_k@0.1", "stored", "first_k", 0.1)),
        ("gradual@1", ArmSpec("gradual@1", "stored", "gradual", 1.0)),
        ("lmcache@0.15:none", ArmSpec("lmcache@0.15", "stored", "lmcache", 0.15, None, "none")),
        ("reuse:system", ArmSpec("reuse:system", "stored", shared_prefix="system")),
        (WHOLE, ArmSpec(WHOLE, "stored", "query", 0.06, "int8", budget="512:ada:alpha=0.2")),
    ],
)
def test_name_stands_for_its_arm(name: str, arm: ArmSpec) -> None:
    assert parse_arm(name) == arm


@given(
    selector=st.sampled_from(SELECTORS),
    ratio=st.floats(0.001, 1.0).map(lambda ratio: round(ratio, 3)),
    shared=st.sampled_from([None, "none", "start", "system"]),
    codec=st.sampled_from([None, "raw", "fp8", "int8", "int4"]),
    turned=st.booleans(),
)
def test_arm_is_what_its_name_says(
    selector: str, ratio: float, shared: str | None, codec: str | None, turned: bool
) -> None:
    extras = [*([shared] if shared else []), *([codec] if codec else [])]
    own = Choice.read(selector)
    first = str(Choice(own.name, ratio, (), own.arguments))
    written = ":".join([first, *(reversed(extras) if turned else extras)])
    arm = parse_arm(written)
    alone = selector == "lmcache"
    settings = Settings.load(codec="fp8", shared_prefix="system")
    assert (arm.ratio, arm.codec) == (ratio, codec)
    behind = shared or ("none" if alone else "system")
    assert arm.variant(settings) == (codec or "fp8", behind, 0 if shared or alone else 256)
    assert parse_arm(arm.name) == arm  # the name of results can be asked for again
    shown = [extra for extra in extras if not (alone and extra == "none")]
    assert arm.name == ":".join([first, *shown])
    assert arm.selector == selector


@pytest.mark.parametrize("setting", ["none", "start", "system"])
def test_other_systems_are_not_given_what_the_settings_put_before_chunks(setting: str) -> None:
    own = Settings.load(shared_prefix=setting)
    for word in ("reuse", "reuse:none", "lmcache@0.15", "lmcache@0.15:none"):
        assert parse_arm(word).name == word.removesuffix(":none")
        assert parse_arm(word).variant(own) == ("raw", "none", 0)
    assert parse_arm("reuse:start").variant(own) == ("raw", "start", 0)
    assert parse_arm("reuse:context").variant(own) == ("raw", setting, 256)
    assert parse_arm("reuse:context").name == "reuse:context"
    assert parse_arm("hkvd@0.15:context") == parse_arm("hkvd@0.15")
    assert parse_arm("hkvd@0.15").variant(own) == ("raw", setting, 256)
    assert parse_arm("hkvd@0.15:none").variant(own) == ("raw", "none", 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hkdv@0.1", "did you mean hkvd?"),
        ("re-ordered", "did you mean reordered?"),
        ("quary@0.1", "did you mean query?"),
        ("first_k+hkvd@0.1", "did you mean first_k?"),
        ("zzz@0.1", "first_k, full, gradual"),
        ("", "first_k, full, gradual"),
        ("hkvd_k@0.1", "did you mean hkvd?"),
        ("hkvd@0.1:metric=q", "metric must be v or k or kv"),
        ("lmcache@0.1:metric=k", "unknown argument 'metric'"),
        ("reuse:metric=k", "unknown argument 'metric'"),
        ("all@0.1", "unknown arm"),
        ("hkvd", "a ratio is missing, as in hkvd@0.15"),
        ("hkvd@0", "above 0 and at most 1"),
        ("hkvd@nan", "above 0 and at most 1"),
        ("hkvd@1.5", "above 0 and at most 1"),
        ("hkvd@lots", "'lots' is not a number"),
        ("reuse@0.1", "has no ratio"),
        ("full:int8", "uses no stored KV"),
        ("reuse:int9", "did you mean int8?"),
        ("reuse:sytem", "did you mean system?"),
        ("reuse:int8:int4", "not as int4 and int8"),
        ("query@0.06:ada", "unknown addition 'ada'"),
        ("query@0.06:512:adda", "did you mean ada?"),
        ("query@0.06:512:ada:uniform", "ada and uniform are two of a kind"),
        ("query@0.06:512:256", "unknown allocator or scorer '256'"),
        ("query@0.06:0", "kv_budget must be a number of tokens"),
        ("full:512:ada", "uses no stored KV"),
    ],
)
def test_wrong_name_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_arm(name)
    assert said in str(error.value)


def test_default_has_full_and_reuse_and_the_selector_that_is_set(settings: Settings) -> None:
    own = settings.model_copy(update={"selector": "query"})
    names = [arm.name for arm in parse_arms([], None, own)]
    assert names[:3] == ["full", "reuse", "reuse:context"] and len(names) == len(set(names))
    assert {f"{selector}@{ratio:g}" for selector in ("query", "random") for ratio in RATIOS} <= set(names)


@pytest.mark.parametrize("selector", ["query", "none", "all", "random"])
def test_default_takes_no_night_and_is_not_refused(selector: str) -> None:
    own = Settings.load(selector=selector, shared_prefix="none", context_tokens=0)
    arms = parse_arms([], None, own)
    assert [arm.name for arm in arms[:2]] == ["full", "reuse"] and arms[2].ratio == RATIOS[0]
    assert len(arms) <= 20


def test_ratios_reach_the_arms_without_one(settings: Settings) -> None:
    names = [arm.name for arm in parse_arms(["hkvd:int8", " first_k@0.3", "reuse"], (0.1, 0.2), settings)]
    assert names == ["full", "hkvd@0.1:int8", "hkvd@0.2:int8", "first_k@0.3", "reuse"]


def test_arm_named_twice_is_asked_once(settings: Settings) -> None:
    names = [arm.name for arm in parse_arms(["hkvd@0.1", "full", "hkvd@0.10"], None, settings)]
    assert names == ["full", "hkvd@0.1"]


def test_paper_has_every_selector_and_ratio(settings: Settings) -> None:
    from blendrag.select import SELECTORS as REGISTERED

    arms = parse_arms(["paper"], None, settings)
    assert set(REGISTERED) - {"all", "none"} <= {arm.selector for arm in arms}
    assert {"hkvd", "hkvd:metric=k", "hkvd:metric=kv"} <= {arm.selector for arm in arms}
    assert [arm.name for arm in arms[:3]] == ["full", "reuse", "reuse:context"]
    blended = [arm for arm in arms if arm.ratio]
    ratios = {0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5}
    assert {(arm.selector, arm.ratio) for arm in blended} == {
        (arm.selector, ratio) for arm in blended for ratio in ratios
    }
    assert any(arm.selector == "lmcache" for arm in arms)


def test_recipe_is_that_of_the_arm(settings: Settings) -> None:
    own = settings.model_copy(update={"selector": "random"})
    spans = (("key", 3, 5),)
    recipe = parse_arm("hkvd@0.2:metric=k").recipe(own, "store", spans)
    options = recipe.options
    assert (options.selector, options.recompute_ratio) == ("hkvd:metric=k", 0.2)
    assert (recipe.store, recipe.spans) == ("store", spans)
    assert parse_arm("reuse").recipe(own, "store", spans).options.recompute_ratio == 0
    lmcache = parse_arm("lmcache@0.2").recipe(own, "store", spans).options
    assert (lmcache.selector, lmcache.recompute_ratio) == ("lmcache", 0.2)


def test_arm_with_a_budget_has_its_own_and_others_have_none(settings: Settings) -> None:
    words = ["512", "128:uniform", "random", "hkvd@0.3:64:critical"]
    arms = {arm.name: arm for arm in parse_arms(words, (0.1,), settings)}
    assert list(arms) == [
        "full", "query@0.12", "query@0.12:512", "query@0.12:128:uniform", "random@0.1", "hkvd@0.3",
        "hkvd@0.3:64:critical",
    ]  # fmt: skip
    own = settings.model_copy(update={"kv_budget": "9:uniform"})
    options = {name: arm.recipe(own, "store", ()).options for name, arm in arms.items() if arm.ratio}
    assert options["query@0.12"].kv_budget is None
    assert options["query@0.12:512"].kv_budget == "512"
    assert options["query@0.12:128:uniform"].kv_budget == "128:uniform"


def test_adakv_has_all_ways_to_share_every_budget(settings: Settings) -> None:
    found = [Choice.read(arm.budget) for arm in parse_arms(["adakv"], None, settings) if arm.budget]
    assert len(found) == 25 and {each.name for each in found} == {"128", "256", "512", "1024", "2048"}
    assert {*ALLOCATORS, "critical"} == {word for each in found for word in each.words}
