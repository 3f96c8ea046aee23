"""What prompts hold again and again is kept, within its budget. No engine is started here."""

from __future__ import annotations

import html
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from blendrag.prompt import PromptPlan
from blendrag.serving.collection import Collection
from blendrag.serving.library import Library
from blendrag.serving.repeats import OWNERS, Repeats, forget
from blendrag.settings import Settings

KV = 10_000  # bytes of a token here
NOW = itertools.count(1)


def page(number: int) -> str:
    said = (f"In year {number + at} it was said {number * at} times that all is well.\n" for at in range(12))
    return f"Report number {number} of the company\n\n{''.join(said)}".strip()


@pytest.fixture
def begin(tmp_path: Path, model_dir: Path) -> Iterator[Callable[..., Library]]:
    opened: list[Library] = []

    def one(**options: Any) -> Library:
        room = options.pop("repeats_bytes", 1 << 30)
        settings = Settings.load(**{"max_model_len": 4096} | options)
        opened.append(Library(tmp_path / f"kv{len(opened)}", settings, repeats_bytes=room))
        return opened[-1]

    yield one
    for each in opened:
        each.close()


def told(library: Library, plan: PromptPlan, held: int | None = None, marked: Sequence[str] = ()) -> None:
    """Have a prompt read that was answered."""
    assert library.repeats is not None
    library.repeats.answered(plan, held, marked)
    library.repeats.wait()


def asked(library: Library, *pages: str, about: str = "") -> int:
    """Ask about these, and do what the engine would. Returns how many of the prompt's tokens were known."""
    texts = "\n\n".join(f"[{at}] {text}" for at, text in enumerate(pages, 1))
    begins = f"<|im_start|>user\nPrompt of {about or len(library.catalogue.known())} and {hash(pages)}:\n"
    plan = library.plan(f"{begins}{texts}\n\nWhat has been said of {about}?<|im_end|>\n")
    told(library, plan, 0 if plan.cached_tokens else None)
    library.texts.learn(plan.forms)
    for entry in library.catalogue.pending():
        library.catalogue.mark_ready(entry.key, KV * len(entry.token_ids))
        library.catalogue.touch({entry.key: (next(NOW), 0)})
    library.catalogue.touch({key: (next(NOW), 1) for key in plan.cached_keys})
    return plan.cached_tokens


def kept(library: Library) -> list[str]:
    keys = [one.key for one in library.catalogue.kept(OWNERS)]
    return [entry.text for entry in library.catalogue.entries_of(keys)]


def test_text_is_kept_at_its_second_sight_and_known_at_the_third(begin: Callable[..., Library]) -> None:
    library = begin()
    tokens = len(library.plan(page(1)).token_ids)
    assert asked(library, page(2), page(1), about="tea") == 0 and kept(library) == []
    assert asked(library, page(1), page(3), about="coffee") == 0
    (text,) = kept(library)
    assert text in page(1)
    assert asked(library, page(4), page(1), page(5), about="milk") > 0.9 * tokens
    row = next(row for row in library.explain(library.plan(page(1))) if row["kind"] == "cached")
    assert row["source"].startswith("repeat ")


def test_what_is_kept_stays_below_its_budget_and_what_is_reused_stays_longest(
    begin: Callable[..., Library],
) -> None:
    budget = 12 * KV * 300
    library = begin(repeats_bytes=budget)
    for about in ("tea", "coffee", "milk", "water"):
        asked(library, page(1), page(2), about=about)
        asked(library, page(2), page(1), about=f"no {about}")
    useful = kept(library)
    assert len(useful) == 2
    for number in range(100, 180):  # hostile: everything comes twice, and never again
        asked(library, page(number), about="one")
        asked(library, page(9999 - number), page(number), about="two")
        sizes = [one.bytes for one in library.catalogue.kept(OWNERS)]
        assert sum(sizes) <= budget and all(sizes)
    texts = kept(library)
    assert {*useful} < {*texts} and 5 < len(texts) < 16
    assert any(text in page(179) for text in texts), "the newest has room"


def test_text_that_does_not_fit_is_not_kept(begin: Callable[..., Library]) -> None:
    library = begin(repeats_bytes=1)
    for about in ("tea", "coffee", "milk"):
        asked(library, page(1), about=about)
    assert kept(library) == [] and library.catalogue.pending() == []


def test_text_whose_kv_was_evicted_is_kept_again_when_it_comes_again(begin: Callable[..., Library]) -> None:
    library = begin()
    asked(library, page(1), page(2), about="tea")
    asked(library, page(2), page(1), about="coffee")
    library.catalogue.mark([one.key for one in library.catalogue.kept(OWNERS)], "evicted")
    asked(library, page(3), about="milk")
    asked(library, page(4), page(3), about="water")
    assert [text in page(3) for text in kept(library)] == [True], "what is left of nothing is gone"
    asked(library, page(5), page(1), about="wine")
    assert len(kept(library)) == 2


def test_text_that_is_ingested_has_its_documents_name_and_stays_when_the_rest_is_forgotten(
    begin: Callable[..., Library],
) -> None:
    library = begin()
    asked(library, page(1), page(2), about="tea")
    asked(library, page(2), page(1), about="coffee")
    first, second = kept(library)
    library.texts.register(Collection(library, "handbook")._owned({"leave": [first]}, None)[0])
    rows = library.explain(library.plan(f"{first}\n\n{second}"))
    assert next(row["source"] for row in rows if row["source"]) == "leave"
    forget(library.texts)
    assert [entry.text for entry in library.catalogue.entries()] == [first]
    assert Collection(library, "handbook").ids() == {"leave"}


@pytest.mark.parametrize(
    "escape", [lambda text: json.dumps(text)[1:-1], html.escape, lambda text: json.dumps(json.dumps(text))]
)
@pytest.mark.parametrize("escaped_first", [False, True])
def test_text_and_its_escape_are_two(
    escape: Callable[[str], str], escaped_first: bool, begin: Callable[..., Library]
) -> None:
    library, text = begin(), page(1).replace("well.", 'well & "good".')
    forms = (escape(text), text) if escaped_first else (text, escape(text))
    for form in forms:
        for about in ("tea", "coffee", "milk"):
            asked(library, form, page(next(NOW) + 10_000), about=about)
    for form in forms:
        plan = library.plan(f"Of this: {form} and no more")
        assert plan.cached_tokens > 0.85 * len(library.plan(form).token_ids)
        assert plan.text == f"Of this: {form} and no more"


def test_tenants_with_the_same_text_know_nothing_of_each_other(begin: Callable[..., Library]) -> None:
    one, other = begin(namespace="one"), begin(namespace="other")
    for about in ("tea", "coffee", "milk"):
        asked(one, page(1), page(2), about=about)
        asked(one, page(2), page(1), about=f"no {about}")
    assert asked(other, page(1), page(3), about="tea") == 0 and kept(other) == []
    asked(other, page(4), page(1), about="coffee")
    assert len(kept(other)) == 1
    assert one.catalogue.known().isdisjoint(other.catalogue.known())


def test_what_cannot_be_kept_is_a_line_in_the_log_and_no_failure(
    begin: Callable[..., Library], caplog: pytest.LogCaptureFixture
) -> None:
    library = begin()
    plans = [library.plan(f"Prompt {at}, of {page(1)} Why {at}?") for at in range(2)]
    library.catalogue.close()
    assert library.repeats is not None
    with caplog.at_level("INFO", "blendrag"):
        for plan in plans:
            library.repeats.answered(plan, None)
        library.repeats.wait()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "what prompts repeat is not kept"
    ]
    assert "company" not in caplog.text, "what is in prompts is nobody's to read"
    library.repeats.close()
    library.repeats.answered(plans[0], None)  # closed: nobody reads it


def test_no_more_prompts_wait_than_there_is_room_for(
    begin: Callable[..., Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    library, going_on, read = begin(), threading.Event(), list[PromptPlan]()

    def slowly(_: Repeats, plan: PromptPlan, *__: object) -> None:
        going_on.wait()
        read.append(plan)

    monkeypatch.setattr(Repeats, "_read", slowly)
    assert library.repeats is not None
    for _ in range(100):
        library.repeats.answered(library.plan("Hello"), None)
    going_on.set()
    library.repeats.wait()
    assert len(read) == 32


def test_marked_text_is_known_from_the_second_prompt_on(begin: Callable[..., Library]) -> None:
    library = begin()
    for marked in ([page(1), "short", page(2) * 200], [page(1)]):
        told(library, library.plan("Hm?"), marked=marked)
        assert kept(library) == [page(1)]


@pytest.mark.parametrize("instead", [[], [page(2)]], ids=["deleted", "replaced"])
def test_text_that_a_document_loses_is_not_kept_for_having_come_again(
    instead: list[str], begin: Callable[..., Library]
) -> None:
    library = begin()
    told(library, library.plan("Hm?"), marked=[page(1), page(3)])
    handbook = Collection(library, "handbook")
    library.texts.register(handbook._owned({"leave": [page(1)]}, None)[0])
    if instead:
        library.texts.register(handbook._owned({"leave": instead}, None)[0])
    else:
        handbook.remove(["leave"])
    assert sorted(entry.text for entry in library.catalogue.entries()) == sorted([page(3), *instead])
