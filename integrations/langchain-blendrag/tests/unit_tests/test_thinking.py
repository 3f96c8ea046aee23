"""What a model thinks stays apart from what it says, on every way that LangChain goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from blendrag.errors import BlendragWarning
from langchain_blendrag import ChatBlend
from langchain_rig import WAYS
from scripted_engine import Scripted

pytestmark = pytest.mark.filterwarnings(f"error::{BlendragWarning.__module__}.BlendragWarning")

SAID, THOUGHT, TEXT = "Let me see.\n</think>\n\nGood day.", "Let me see.\n", "Good day."
CALL: Any = {"name": "clock", "args": {}, "id": "a"}


@pytest.fixture
def make(
    tmp_path: Path, thinking_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ChatBlend]]:
    model, made = str(thinking_dir), []

    def make(**options: Any) -> ChatBlend:
        llm = ChatBlend(model=model, kv_dir=tmp_path / "kv", blend=False, **options)
        library = llm.chat.library
        engine = Scripted(library.tokenizer, [SAID])
        monkeypatch.setattr(library.session, "start", lambda progress=None: engine)
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


@pytest.mark.parametrize("way", WAYS)
def test_thinking_is_apart_from_the_text_and_where_langchain_looks(
    make: Callable[..., ChatBlend], way: str
) -> None:
    message: Any = reduce(add, WAYS[way](make(), "Hi."))
    assert (message.content, message.text) == (TEXT, TEXT)
    assert message.additional_kwargs["reasoning_content"] == THOUGHT
    assert message.content_blocks == [
        {"type": "reasoning", "reasoning": THOUGHT},
        {"type": "text", "text": TEXT},
    ]


def test_variables_of_the_template_arrive_on_every_way(make: Callable[..., ChatBlend]) -> None:
    llm, off = make(), {"enable_thinking": False}
    assert llm.render("Hi.").endswith("<think>\n")
    ways = [llm.render("Hi.", chat_template_kwargs=off), make(chat_template_kwargs=off).render("Hi.")]
    assert all(prompt.endswith("<think>\n\n</think>\n\n") for prompt in ways)
    answer = llm.bind(chat_template_kwargs=off).invoke("Hi.")
    assert answer.text.startswith("Let me see."), "all is said, where nothing is thought"


@pytest.mark.parametrize(
    "said",
    [
        AIMessage("", additional_kwargs={"reasoning_content": "Look at the clock."}, tool_calls=[CALL]),
        AIMessage([{"type": "reasoning", "reasoning": "Look at the clock."}], tool_calls=[CALL]),
    ],
    ids=["additional_kwargs", "block"],
)
def test_what_was_thought_before_a_call_is_shown_until_the_next_question(
    make: Callable[..., ChatBlend], said: AIMessage
) -> None:
    llm, now = make(), [HumanMessage("When?"), said, ToolMessage("Noon.", tool_call_id="a")]
    assert "<think>\nLook at the clock.\n</think>" in llm.render(now)
    assert "Look at" not in llm.render([*now, HumanMessage("Sure?")])
