"""One conversation, one id."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from blendrag.forecast.history import conversation_id, window_of
from blendrag.forecast.window import Window

SYSTEM = {"role": "system", "content": "Be brief."}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.none() | st.text(max_size=4)}
    )
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@given(MESSAGES)
def test_id_does_not_change_while_the_conversation_grows(later: list[dict[str, Any]]) -> None:
    opening = [SYSTEM, user("Where is it?")]
    assert conversation_id([*opening, *later]) == conversation_id(opening)
    assert conversation_id([*opening, *later], "mine") == conversation_id([], "mine")


def test_different_conversations_do_not_share_an_id() -> None:
    ids = [
        conversation_id([user("a")]),
        conversation_id([user("b")]),
        conversation_id([SYSTEM, user("a")]),
        conversation_id([user("a")], "1"),
        conversation_id([user("a")], "2"),
        conversation_id([], "a"),
    ]
    assert len(set(ids)) == len(ids)


def test_empty_history_has_no_id() -> None:
    assert conversation_id([]) is None
    assert conversation_id([SYSTEM, {"role": "assistant", "content": "hi"}, user(None), {}], "") is None
    assert window_of([SYSTEM]) == Window((), 0)


def test_parts_and_broken_text_are_read() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "image_url"}, "odd", {"text": 7}, {"text": "two"}]
    assert window_of([user(parts), user("\ud800")]) == Window(("one\ntwo", "\ud800"), 2)
    assert conversation_id([user(parts)]) == conversation_id([user("one\ntwo")])
    assert conversation_id([user("\ud800")])
