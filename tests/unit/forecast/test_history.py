"""One conversation, one id."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from blendrag.forecast.history import conversation_id, window_of, without_documents
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


def test_retrieved_documents_change_the_id_and_are_read_as_the_users_words() -> None:
    def asked(*documents: str) -> list[dict[str, Any]]:
        context = "\n\n".join(documents)
        return [
            {"role": "system", "content": f"Answer from these:\n\n{context}"},
            user("Where is it?"),
            {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
            user([{"type": "text", "text": f"{context} And when?"}]),
        ]

    first = without_documents(asked("One text.", "One text. And more."), ["One text.", "One text. And more."])
    later = without_documents(asked("Another."), ["Another.", "not there", ""])
    assert conversation_id(first) == conversation_id(later) is not None
    assert conversation_id(asked("One text.")) != conversation_id(asked("Another."))
    assert window_of(first) == window_of(later) == Window(("Where is it?", "And when?"), 2)


@given(MESSAGES, st.lists(st.text(max_size=2)))
def test_leaving_documents_out_loses_a_turn(messages: list[dict[str, Any]], documents: list[str]) -> None:
    assert window_of(without_documents(messages, documents)).turns == window_of(messages).turns
