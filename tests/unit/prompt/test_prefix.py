from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendrag.prompt import KnownText, assemble, decode, shared_prefix, start_prefix

TRIMMING = "{% for message in messages %}<|im_start|>{{ message.content | trim }}<|im_end|>\n{% endfor %}"
NO_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)
DATED = (
    "{{ bos_token }}Today: {{ strftime_now('%d %b %Y') }}\n{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)
SYSTEMS = st.one_of(st.just(""), st.text("Aa. <|im_end|>\n", max_size=20), st.just("Answer <|im_end|> é."))


def before_first(tokenizer: Any, document: KnownText, system: str, separator: str) -> tuple[int, ...]:
    plan = assemble(
        tokenizer, system_prompt=system, documents=[document], separator=separator, question="Who?"
    )
    _, start, _ = plan.spans[0]
    return plan.token_ids[:start]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SYSTEMS, st.sampled_from([None, TRIMMING, NO_SYSTEM]), st.sampled_from(["\n\n", " "]))
def test_prefix_is_what_stands_before_the_first_document(
    tokenizer: Any,
    with_template: Callable[[str], Any],
    ingested: list[KnownText],
    system: str,
    template: str | None,
    separator: str,
) -> None:
    model = with_template(template) if template else tokenizer
    found = shared_prefix(model, system, separator)
    assert found == before_first(model, ingested[0], system, separator)


def test_date_in_a_template_does_not_make_another_prefix_every_day(
    with_template: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_template(DATED)
    text = decode(model, shared_prefix(model, "Answer.", "\n\n"))
    assert "Today: 26 Jul 2024\n" in text and text.endswith("Answer.<|im_end|>\n<|im_start|>user\n")


def test_base_model_has_the_system_prompt_as_its_prefix(tokenizer: Any, sentencepiece_like: Any) -> None:
    base = copy(tokenizer)
    base.chat_template = None
    assert decode(base, shared_prefix(base, "Answer.", "\n\n")) == "Answer.\n\n"
    assert shared_prefix(base, "", "\n\n") == ()
    assert shared_prefix(sentencepiece_like, "", "\n\n") == (sentencepiece_like.bos_token_id,)


@pytest.mark.parametrize("template", [None, TRIMMING, NO_SYSTEM, DATED])
def test_start_depends_on_no_message(
    tokenizer: Any, with_template: Callable[[str], Any], template: str | None
) -> None:
    model = with_template(template) if template else tokenizer
    start = start_prefix(model)
    assert start, "this template begins with markup"
    for system in ("Answer.", "Be brief and kind."):
        whole = shared_prefix(model, system, "\n\n")
        if template is NO_SYSTEM:  # its only message begins with the user's role
            assert decode(model, start) == "<|im_start|>user\n"
        assert whole[: len(start)] == start
        assert "brief" not in decode(model, start) and "Answer" not in decode(model, start)


def test_base_model_starts_with_its_bos_or_nothing(tokenizer: Any, sentencepiece_like: Any) -> None:
    base = copy(tokenizer)
    base.chat_template = None
    assert start_prefix(base) == ()
    assert start_prefix(sentencepiece_like) == (sentencepiece_like.bos_token_id,)
