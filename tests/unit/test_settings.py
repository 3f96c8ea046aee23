"""Settings come from the right place, and a wrong one is named."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from blendrag.chat.request import make_request
from blendrag.choice import Choice
from blendrag.errors import ConfigError
from blendrag.options import (
    STEPS,
    BlendKeywords,
    BlendOptions,
    BlendOverrides,
    Quality,
    resolved,
    spelled_out,
)
from blendrag.select import make_selector
from blendrag.settings import _SERVICE_LINK, Settings
from blendrag.store.stack import TierSpec


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults_of_hkvd_are_the_papers() -> None:
    hkvd = make_selector(Settings.load(selector="hkvd").blending)
    assert (hkvd.reads_deviation, hkvd.check_layers(32)) == ("v", (1,))


@pytest.mark.parametrize("quality", STEPS)
def test_quality_means_the_same_to_a_setting_as_to_a_request(quality: Quality) -> None:
    step, given = STEPS[quality], make_request(Settings.load(), "Hello.", {"quality": quality}).options
    assert given is not None
    for options in (Settings.load(quality=quality).blending, given):
        assert (options.selector, options.recompute_ratio) == step
    assert (Settings.load().blending == given) == (quality == "balanced"), "which is the default"


def test_ratio_that_is_given_with_a_quality_overrules_it(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "blendrag.yaml").write_text("recompute_ratio: 0.4\nquality: fast\n")
    blending = Settings.load().blending
    assert (blending.recompute_ratio, blending.selector) == (0.4, STEPS["fast"].selector)
    both = make_request(Settings.load(), "Hello.", {"quality": "close", "selector": "hkvd"}).options
    assert both is not None and both.selector == "hkvd"
    assert both.recompute_ratio == STEPS["close"].recompute_ratio


def test_quality_of_the_call_overrules_a_ratio_of_the_file(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "blendrag.yaml").write_text("recompute_ratio: 0.4\n")
    assert Settings(quality="close").blending.recompute_ratio == STEPS["close"].recompute_ratio
    monkeypatch.setenv("BLENDRAG_QUALITY", "fast")
    assert Settings.load().blending.recompute_ratio == STEPS["fast"].recompute_ratio
    assert Settings.load(quality="close").blending.recompute_ratio == STEPS["close"].recompute_ratio
    monkeypatch.setenv("BLENDRAG_RECOMPUTE_RATIO", "0.2")
    blending = Settings.load().blending
    assert (blending.recompute_ratio, blending.selector) == (0.2, STEPS["fast"].selector)


def test_ratio_in_the_selectors_name_counts_where_that_is_said(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "blendrag.yaml").write_text("selector: hkvd@0.4:metric=k\n")
    blending = Settings.load().blending
    assert (blending.selector, blending.recompute_ratio) == ("hkvd:metric=k", 0.4)
    monkeypatch.setenv("BLENDRAG_RECOMPUTE_RATIO", "0.2")
    assert Settings.load().blending.recompute_ratio == 0.2
    assert Settings.load(selector="first_k@0.3").blending == BlendOptions(0.3, "first_k")
    asked = make_request(Settings.load(), "Hello.", {"selector": "gradual@0.25"}).options
    assert asked == BlendOptions(0.25, "gradual")
    for say in (
        lambda **said: Settings.load(**said),
        lambda **said: make_request(Settings.load(), "Hello.", said),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match="give one ratio"):
            say(selector="hkvd@0.1", recompute_ratio=0.2)
    with pytest.raises(ConfigError, match="its ratio is the option recompute_ratio here"):
        BlendOptions(selector="hkvd@0.1")


@given(st.sampled_from(["query", "hkvd:metric=k", "gradual"]), st.floats(0, 1), st.none() | st.just("fast"))
def test_spelled_out_options_stay_as_they_are(name: str, ratio: float, quality: Quality | None) -> None:
    choice = Choice.read(name)
    said = {"selector": str(replace(choice, at=ratio)), "quality": quality}
    given = spelled_out(said)
    assert (given["selector"], given["recompute_ratio"]) == (name, ratio)
    assert spelled_out(given) == given
    assert resolved(said) == resolved(given) == BlendOptions(ratio, name)


def test_every_option_of_blending_is_a_setting_and_an_option_of_requests_constructors_and_commands() -> None:
    from blendrag.chat.request import RequestOptions
    from blendrag.cli.ask import ask
    from blendrag.server.blending import BlendFields
    from langchain_blendrag import ChatBlend
    from llama_index.llms.blendrag import BlendLLM

    overrides = set(BlendOverrides.model_fields)
    assert overrides | {"trace"} == {field.name for field in fields(BlendOptions)} | {"quality"}
    assert overrides | {"trace"} == set(BlendKeywords.__annotations__)
    assert set(BlendKeywords.__annotations__) <= set(RequestOptions.__annotations__)
    kinds = get_type_hints(BlendKeywords)
    for home in (Settings, BlendFields, ChatBlend, BlendLLM):
        for name, field in BlendOverrides.model_fields.items():
            assert home.model_fields[name].description == field.description
            assert field.annotation == kinds[name]
    assert overrides <= inspect.signature(ask).parameters.keys()


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"blend": "of"}, "blend must be True or False"),
        ({"min_cached_tokens": -1}, "min_cached_tokens must be a number of tokens, not -1"),
        ({"selector": 3}, "selector must be a name"),
        *(
            ({"kv_budget": budget}, rf"kv_budget must be a number of tokens, .*, not {budget!r}")
            for budget in (True, 0, 64.5, "64.5", "ada", "ada:512")
        ),
        ({"trace": 1}, "trace must be True or False"),
    ],
)
def test_wrong_option_of_a_request_is_named(said: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        make_request(Settings.load(), "Hello.", said)  # type: ignore[arg-type]
    if said.get("kv_budget", True) is not True:  # which a setting takes for 1
        with pytest.raises(ConfigError, match="kv_budget"):
            Settings.load(**said)


@pytest.mark.parametrize("wrong", ["fats", 3, ["fast"]])
def test_quality_that_there_is_not_is_a_clear_error(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"quality.*fast"):
        Settings.load(quality=wrong)
    with pytest.raises(ConfigError, match=r"quality.*fast"):
        make_request(Settings.load(), "Hello.", {"quality": wrong})


def test_keyword_beats_environment_beats_file_beats_default(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = empty_folder / "blendrag.yaml"
    file.write_text("similarity_top_k: 2\nmax_tokens: 22\nmin_cached_tokens: 222\n")
    monkeypatch.setenv("BLENDRAG_SIMILARITY_TOP_K", "3")
    monkeypatch.setenv("BLENDRAG_MAX_TOKENS", "33")
    settings = Settings.load(similarity_top_k=4)
    assert (settings.similarity_top_k, settings.max_tokens) == (4, 33)
    assert Settings.load(similarity_top_k=None).similarity_top_k == 3, "None means not given"
    assert settings.blending.min_cached_tokens == 222
    assert settings.chunk_tokens == Settings.model_fields["chunk_tokens"].default


def test_cache_folder_of_no_name_is_not_the_one_where_the_program_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLENDRAG_CACHE_DIR", "")
    assert Settings.load().cache_dir != Path()
    monkeypatch.delenv("BLENDRAG_CACHE_DIR")
    assert Settings.load(cache_dir="").cache_dir != Path()


def test_named_config_file_replaces_the_one_in_the_folder(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "blendrag.yaml").write_text("similarity_top_k: 2\n")
    (empty_folder / "other.yaml").write_text("max_tokens: 9\n")
    monkeypatch.setenv("HOME", str(empty_folder))
    for name in ("other.yaml", "~/other.yaml"):
        monkeypatch.setenv("BLENDRAG_CONFIG", name)
        settings = Settings.load()
        assert settings.max_tokens == 9
        assert settings.similarity_top_k == Settings.model_fields["similarity_top_k"].default


def test_missing_named_config_file_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDRAG_CONFIG", "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        Settings.load()


def test_misspelt_keyword_is_named_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"'recompute_ration'; did you mean recompute_ratio\?"):
        Settings.load(recompute_ration=0.1)
    with pytest.raises(ConfigError, match="'trust_remote_code': an argument of vLLM goes into engine_args"):
        Settings.load(trust_remote_code=True)


@pytest.mark.parametrize("name", ["RECOMPUTE_RATIO", "DTYPE", "QUALITY", "TIERS"])
def test_misspelt_variable_is_named_with_the_right_one_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    misspelt = f"BLENDRAG_{name[:2]}{name[3:]}"
    monkeypatch.setenv(misspelt, "0.1")
    with pytest.raises(ConfigError, match=rf"unknown variable {misspelt}; did you mean BLENDRAG_{name}\?$"):
        Settings.load()


def test_variables_of_a_service_in_kubernetes_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("BLENDRAG", "BLENDRAG_ROUTER"):
        for end, text in {
            "SERVICE_HOST": "10.0.0.1",
            "SERVICE_PORT": "8000",
            "SERVICE_PORT_HTTP": "8000",
            "PORT": "tcp://10.0.0.1:8000",
            "PORT_8000_TCP": "tcp://10.0.0.1:8000",
            "PORT_8000_TCP_ADDR": "10.0.0.1",
            "PORT_8000_TCP_PORT": "8000",
            "PORT_8000_TCP_PROTO": "tcp",
        }.items():
            monkeypatch.setenv(f"{service}_{end}", text)
    assert Settings.load() == Settings()
    assert not [name for name in Settings.model_fields if _SERVICE_LINK.search(f"{name.upper()}=x://")]
    monkeypatch.setenv("BLENDRAG_PORT", "8000")
    with pytest.raises(ConfigError, match="unknown variable BLENDRAG_PORT"):
        Settings.load()


def test_key_that_is_named_as_a_setting_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDRAG_API_KEY", "SECRET")
    with pytest.raises(ConfigError, match=r"BLENDRAG_API_KEY; did you mean BLENDRAG__API_KEY\?$"):
        Settings.load()


def test_empty_variable_is_not_given_unless_it_says_something(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*Settings.model_fields, "tree_ram_bytes"):
        monkeypatch.setenv(f"BLENDRAG_{name.upper()}", "")
    given = {name: "" for name in ("namespace", "separator", "system_prompt")}
    assert Settings.load().model_dump(exclude_unset=True) == given


@pytest.mark.parametrize("written", ["similarity_topk", "BLENDRAG_SIMILARITY_TOP_K"])
def test_misspelt_key_in_the_file_is_not_ignored(empty_folder: Path, written: str) -> None:
    (empty_folder / "blendrag.yaml").write_text(f"{written}: 2\n")
    with pytest.raises(ConfigError, match="did you mean similarity_top_k"):
        Settings.load()


def test_number_of_chunks_is_told_by_its_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is called similarity_top_k now"):
        Settings.load(top_k=3)
    monkeypatch.setenv("BLENDRAG_TOP_K", "3")
    with pytest.raises(ConfigError, match="is called similarity_top_k now"):
        Settings.load()


@pytest.mark.parametrize("name", ["BLENDRAG_TIERS", "BLENDRAG_ENGINE_ARGS"])
def test_variable_that_is_not_json_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "redis://:SECRET@host")
    with pytest.raises(ConfigError, match=name) as caught:
        Settings.load()
    assert "SECRET" not in str(caught.value) and caught.value.__suppress_context__


@pytest.mark.parametrize(
    "text",
    [b"tiers: [SECRET", b"- SECRET\n", b"SECRET", b"\xffSECRET", b"a: !!python/name:SECRET x", b"1: SECRET"],
)
def test_broken_config_file_is_named_and_not_shown(empty_folder: Path, text: bytes) -> None:
    (empty_folder / "blendrag.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"blendrag\.yaml") as caught:
        Settings.load()
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "given", [{"tiers": ["SECRET"], "tree_ram_bytes": 1}, {"engine_args": "SECRET", "enforce_eager": True}]
)
@pytest.mark.filterwarnings("ignore::blendrag.errors.BlendragWarning")
def test_former_setting_beside_what_is_none_is_named_and_the_rest_not_shown(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=list(given)[1]) as caught:
        Settings.load(**given)
    assert "SECRET" not in str(caught.value)


def test_empty_config_file_is_none(empty_folder: Path) -> None:
    (empty_folder / "blendrag.yaml").write_text("# similarity_top_k: 2\n")
    assert Settings.load() == Settings()


def test_name_without_a_value_in_the_file_is_not_given(empty_folder: Path) -> None:
    (empty_folder / "blendrag.yaml").write_text(
        "model:\nengine_args:\n#  seed: 1\ntiers:\nsystem_prompt: ~\n"
    )
    assert Settings.load().model_dump(exclude_unset=True) == {}


@pytest.mark.parametrize("name", ["model", "embedder", "lora"])
def test_folder_of_a_model_may_be_a_path_object(name: str) -> None:
    assert getattr(Settings.load(**{name: Path("models/mine")}), name) == "models/mine"


def test_vllms_arguments_of_a_file_are_kept_beside_those_of_a_variable(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "blendrag.yaml").write_text("engine_args:\n  max_logprobs: 50\n  seed: 1\n")
    assert Settings.load().engine_args == {"max_logprobs": 50, "seed": 1}
    monkeypatch.setenv("BLENDRAG_ENGINE_ARGS", '{"max_logprobs": 60}')
    assert Settings.load().engine_args == {"max_logprobs": 60, "seed": 1}


def test_argument_that_is_no_plain_data_is_refused_where_it_is_used() -> None:
    with pytest.raises(ConfigError, match="engine_args") as caught:
        Settings.load(engine_args={"hf_token": b"SECRET"})
    assert "SECRET" not in str(caught.value)


@given(st.one_of(st.floats(max_value=-1e-9), st.floats(min_value=1.000001), st.just("much")))
def test_ratio_outside_zero_to_one_is_refused_by_name(ratio: object) -> None:
    with pytest.raises(ConfigError, match="recompute_ratio"):
        Settings.load(recompute_ratio=ratio)


def test_settings_cannot_change_under_a_running_engine() -> None:
    with pytest.raises(ValidationError):
        Settings.load().similarity_top_k = 1


def test_misspelt_eviction_policy_is_found_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'tiers'.*'lcp'.*gdsf.*did you mean lpc\?"):
        Settings.load(tiers=[{"kind": "ram", "policy": "lcp"}])
    monkeypatch.setenv("BLENDRAG_TIERS", '[{"kind": "ram", "policy": "lru"}]')
    assert [spec.policy for spec in Settings.load().stack] == ["lru"]


def test_tree_is_what_tiers_give_to_it() -> None:
    assert not Settings.load().tree and not Settings.load().tree_stays
    own = Settings.load(tiers=[{"kind": "ram", "tree_bytes": 5, "policy": "lru"}, {"kind": "disk"}])
    assert own.tree == (TierSpec(kind="ram", bytes=5, policy="lru"),) and not own.tree_stays
    assert Settings.load(tiers=[{"kind": "disk", "tree_bytes": 5}]).tree_stays
    with pytest.raises(ConfigError, match="a tier of kind 'redis' has no tree_bytes"):
        Settings.load(tiers=[{"kind": "redis", "url": "redis://host", "tree_bytes": 5}])


@pytest.mark.parametrize(
    ("order", "first", "window"),
    [
        ("retrieved", False, 0),
        ("tree", True, 0),
        ("tree:window=8", True, 8),
        ("retrieved:window=1", False, 1),
    ],
)
def test_order_says_that_of_documents_and_of_requests(order: str, first: bool, window: int) -> None:
    settings = Settings.load(order=order)
    assert (settings.documents_first, settings.reorder_window) == (first, window)


@pytest.mark.parametrize("order", ["treee", "tree:8", "tree@2", "tree:window=0", "tree:windows=8"])
def test_wrong_order_is_refused(order: str) -> None:
    with pytest.raises(ConfigError, match="order"):
        Settings.load(order=order)


def test_settings_are_few() -> None:
    assert len(Settings.model_fields) <= 32
