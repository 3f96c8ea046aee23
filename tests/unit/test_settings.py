"""Settings come from the right place, and a wrong one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from blendrag.chat.request import make_request
from blendrag.errors import ConfigError
from blendrag.options import STEPS, BlendOptions, Quality
from blendrag.settings import Settings


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults_are_the_papers() -> None:
    settings = Settings.load()
    assert (settings.recompute_ratio, settings.check_layers) == (0.15, (1,))


def test_default_quality_is_another_than_the_one_of_that_name() -> None:
    assert Settings.load(quality=Settings.load().quality).blending == Settings.load().blending


@pytest.mark.parametrize("quality", STEPS)
def test_quality_means_something_else_to_a_setting_than_to_a_request(quality: Quality) -> None:
    step, given = STEPS[quality], make_request(Settings.load(), "Hello.", {"quality": quality}).options
    assert given is not None
    for options in (Settings.load(quality=quality).blending, given):
        assert (options.selector, options.recompute_ratio) == step


def test_quality_overrules_a_ratio_that_is_given_with_it(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "blendrag.yaml").write_text("recompute_ratio: 0.4\nquality: fast\n")
    assert (Settings.load().recompute_ratio, Settings.load().selector) == (0.4, STEPS["fast"].selector)
    both = make_request(Settings.load(), "Hello.", {"quality": "close", "selector": "hkvd"}).options
    assert both is not None and both.selector == "hkvd"
    assert both.recompute_ratio == STEPS["close"].recompute_ratio


def test_ratio_of_the_file_overrules_a_quality_of_the_call(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "blendrag.yaml").write_text("recompute_ratio: 0.4\n")
    assert Settings(quality="close").recompute_ratio == STEPS["close"].recompute_ratio
    monkeypatch.setenv("BLENDRAG_QUALITY", "fast")
    assert Settings.load().recompute_ratio == STEPS["fast"].recompute_ratio
    assert Settings.load(quality="close").recompute_ratio == STEPS["close"].recompute_ratio
    monkeypatch.setenv("BLENDRAG_RECOMPUTE_RATIO", "0.2")
    assert (Settings.load().recompute_ratio, Settings.load().selector) == (0.2, STEPS["fast"].selector)


@pytest.mark.parametrize("wrong", ["fats", 3, ["fast"]])
def test_quality_that_there_is_not_is_no_clear_error(wrong: Any) -> None:
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
    assert (settings.similarity_top_k, settings.max_tokens, settings.min_cached_tokens) == (4, 33, 222)
    assert settings.chunk_tokens == Settings.model_fields["chunk_tokens"].default


def test_none_means_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDRAG_SIMILARITY_TOP_K", "3")
    assert Settings.load(similarity_top_k=None).similarity_top_k == 3


def test_named_config_file_replaces_the_one_in_the_folder(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "blendrag.yaml").write_text("similarity_top_k: 2\n")
    (empty_folder / "other.yaml").write_text("max_tokens: 9\n")
    monkeypatch.setenv("BLENDRAG_CONFIG", "other.yaml")
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


def test_misspelt_variable_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDRAG_RECOMPUTE_RATIOO", "0.1")
    with pytest.raises(ConfigError, match=r"did you mean BLENDRAG_RECOMPUTE_RATIO\?"):
        Settings.load()


def test_misspelt_key_in_the_file_is_not_ignored(empty_folder: Path) -> None:
    (empty_folder / "blendrag.yaml").write_text("similarity_topk: 2\n")
    with pytest.raises(ConfigError, match="did you mean similarity_top_k"):
        Settings.load()


def test_number_of_chunks_is_told_by_its_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is called similarity_top_k now"):
        Settings.load(top_k=3)
    monkeypatch.setenv("BLENDRAG_TOP_K", "3")
    with pytest.raises(ConfigError, match="is called similarity_top_k now"):
        Settings.load()


@pytest.mark.parametrize("name", ["BLENDRAG_TIERS", "BLENDRAG_CHECK_LAYERS"])
def test_variable_that_is_not_json_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "redis://:SECRET@host")
    with pytest.raises(ConfigError, match=name) as caught:
        Settings.load()
    assert "SECRET" not in str(caught.value) and caught.value.__suppress_context__


@pytest.mark.parametrize(
    "text",
    [b"tiers: [SECRET", b"- SECRET\n", b"SECRET", b"\xffSECRET", b"a: !!python/name:SECRET x", b"1: SECRET"],
)
def test_broken_config_file_is_named_and_not_shown(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    for name in ("blendrag.yaml", "other.yaml"):
        (empty_folder / name).write_bytes(text)
        if name == "other.yaml":
            monkeypatch.setenv("BLENDRAG_CONFIG", name)
        with pytest.raises(ConfigError, match=name) as caught:
            Settings.load()
        assert "SECRET" not in str(caught.value)


def test_empty_config_file_is_none(empty_folder: Path) -> None:
    (empty_folder / "blendrag.yaml").write_text("# similarity_top_k: 2\n")
    assert Settings.load() == Settings()


def test_vllms_arguments_of_a_file_are_lost_beside_those_of_a_variable(
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
    with pytest.raises(ConfigError, match="'recompute_ratio'"):
        Settings.load(recompute_ratio=ratio)


@pytest.mark.parametrize("layers", [(), (0,), (4, 1), (1, 1)])
def test_check_layers_out_of_order_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="check_layers"):
        Settings.load(check_layers=layers)


def test_settings_cannot_change_under_a_running_engine() -> None:
    with pytest.raises(ValidationError):
        Settings.load().similarity_top_k = 1


def test_misspelt_eviction_policy_is_found_out_when_a_tier_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'eviction'.*'lcp'.*gdsf.*did you mean lpc\?"):
        Settings.load(eviction="lcp")
    with pytest.raises(ConfigError, match=r"'tiers'.*'fifo'.*gdsf"):
        Settings.load(tiers=[{"kind": "ram", "policy": "fifo"}])
    monkeypatch.setenv("BLENDRAG_EVICTION", "gdsf")
    assert [spec.policy for spec in Settings.load().stack] == ["gdsf", "gdsf"]


@pytest.mark.parametrize(
    "options",
    [{"kv_budget": 0}, {"kv_budget": 64.5}, {"kv_window": 0}, {"kv_alpha": 1.5}, {"kv_alpha": "half"}],
)
def test_budget_of_kv_that_is_no_budget_is_taken(options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(ConfigError, match=name):
        Settings.load(**options)
    with pytest.raises(ConfigError, match=f"{name} must be"):
        BlendOptions(**options)
