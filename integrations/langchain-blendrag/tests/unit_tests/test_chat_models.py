"""``ChatBlend`` where no engine is needed."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from pydantic import ValidationError

from blendrag.errors import BlendragWarning, ConfigError, ModelNotFoundError
from blendrag.options import STEPS
from langchain_blendrag import ChatBlend


def request(llm: ChatBlend, **kwargs: Any) -> Any:
    return llm._request([HumanMessage("Hi.")], None, kwargs)


def test_making_one_imports_torch_or_vllm() -> None:
    script = (
        "import sys; from langchain_blendrag import ChatBlend; ChatBlend();"
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("wrong", [{"recompute_ratio": 1.5}, {"temperature": -1}, {"max_tokens": 0}])
def test_wrong_value_is_found_by_the_first_question(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ChatBlend(**wrong)


def test_typing_error_is_ignored_without_a_word() -> None:
    with pytest.warns(BlendragWarning, match="did you mean 'recompute_ratio'"):
        ChatBlend(recompute_ration=0.2)


def test_name_of_another_provider_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChatBlend(api_key="secret", stream_usage=True)


def test_setting_that_is_no_field_is_lost() -> None:
    for llm in (ChatBlend(kv_cache_gib=3), ChatBlend(settings={"kv_cache_gib": 3})):
        assert llm.settings.kv_cache_gib == 3


def test_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLENDRAG_RECOMPUTE_RATIO", "0.4")
    monkeypatch.setenv("BLENDRAG_BLEND", "false")
    llm = ChatBlend()
    assert llm.chat.settings.recompute_ratio == 0.4 and not llm.chat.settings.blend


def test_model_that_is_not_there_is_no_clear_error() -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model folder \./modle"):
        ChatBlend(model="./modle").get_num_tokens("Hi.")


def test_other_name_of_max_tokens_is_ignored() -> None:
    assert ChatBlend(max_completion_tokens=7).max_tokens == 7
    assert request(ChatBlend(), max_completion_tokens=7).sampling.max_tokens == 7


def test_option_of_a_call_is_overridden_by_the_field() -> None:
    llm = ChatBlend(temperature=0.5, stop=["a"], blend=False, recompute_ratio=0.3)
    made = request(llm, temperature=0.0, stop=["b"], blend=True, recompute_ratio=0.1, top_k=5)
    assert (made.sampling.temperature, made.sampling.stop, made.sampling.other) == (0.0, ("b",), {"top_k": 5})
    assert made.options.blend and made.options.recompute_ratio == 0.1
    assert not request(llm).options.blend


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mode": "off"}, "mode is called blend now: blend=False"),
        ({"recompute_ratio": 1.5}, "recompute_ratio"),
        ({"blend": "of"}, "blend"),
        ({"quality": "fats"}, "quality must be fast, balanced"),
    ],
)
def test_wrong_option_of_a_call_is_not_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        request(ChatBlend(), **wrong)
    with pytest.raises((ConfigError, ValidationError), match=said):
        ChatBlend(**wrong)


def test_option_of_a_call_is_refused_because_of_the_tiers() -> None:
    llm = ChatBlend(tiers=[{"kind": "ram"}, {"kind": "disk"}])
    options = request(llm, recompute_ratio=0.3, selector="hkvd").options
    assert (options.recompute_ratio, options.selector, options.blend) == (0.3, "hkvd", True)
    assert not request(llm, blend=False).options.blend and len(llm.settings.tiers) == 2


def test_ratio_of_the_model_overrules_the_quality_of_a_call() -> None:
    options = request(ChatBlend(recompute_ratio=0.4, quality="close"), quality="fast").options
    assert (options.selector, options.recompute_ratio) == STEPS["fast"]
    assert request(ChatBlend(recompute_ratio=0.4, quality="close")).options.recompute_ratio == 0.4


def test_choice_of_no_tool_is_found_out_by_the_engine() -> None:
    with pytest.raises(ConfigError, match="wether"):
        ChatBlend().bind_tools(
            [{"name": "weather", "description": "", "parameters": {}}], tool_choice="wether"
        )


def test_object_cannot_be_sent_to_another_process() -> None:
    llm = ChatBlend(temperature=0.3, kv_dir="kv")
    assert llm.chat is llm.chat
    again = pickle.loads(pickle.dumps(llm))
    assert again.model_dump() == llm.model_dump() and again.chat.settings == llm.chat.settings


def test_profile_has_no_window_though_the_model_is_at_hand(model_dir: Any) -> None:
    profile = ChatBlend(model=str(model_dir)).profile
    assert profile is not None and profile["max_input_tokens"] == 8192
    assert profile["tool_calling"] and not profile["image_inputs"]
