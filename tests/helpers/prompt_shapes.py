"""Shapes of prompts: what the recognition tests of both integrations share.

A shape is one way in which a framework puts documents into prompts. It is run with the real framework; the
prompts that reach the engine are compared with a snapshot, the documents recognised in them with the texts
themselves, and the sums with the table in docs/recognition.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from blendrag.prompt import decode
from blendrag.serving.library import Library
from blendrag.store.contexts import Chunk
from places import DOCS
from scripted_engine import Asked

UPDATE = "UPDATE_PROMPTS"
PAGE = DOCS / "recognition.md"
_NEXT = "\n<<<<<<<< the next prompt >>>>>>>>\n"
_SAME = "<<<<<<<< {} lines as in the prompt before >>>>>>>>"
_PLACE = "<<<<<<<< document {} >>>>>>>>"
_LEAST = 32  # tokens: shorter beginnings of a document are not reused

QUESTION = "How long is the battery warranty?"

# Several lines each; with what templates, lists and HTML escaping may trip over.
DOCUMENTS = {
    "1": """Battery & drive unit
The battery and the drive unit are covered for 8 years or 160,000 km, whichever comes first.

If the battery holds < 70 % of its first capacity within that time, it is repaired or replaced. The dealer
notes "capacity", "mileage" and the date of the first registration on the claim.""",
    "2": """Settings {"unit": "km" & "h"}
The display reads its settings from a file:

{"unit": "km", "limits": {"charge": 80, "speed": {{max}}}}

Braces, even {context} or {% raw %}, are kept as they are. A file that cannot be read is put aside, and the
display starts with the settings it came with.""",
    "3": """Tyres & brakes > wear
- Tyres are changed in pairs, at 3 mm in summer and 4 mm in winter.
- Brake pads are checked every 30,000 km.

\tNeither is part of any warranty; the café in Zürich – and only that one – gives 10 € off a set of four
tyres, for which the receipt of an earlier set has to be shown.""",
    "4": """Charging & <temperature>
Keep the charge between 20 % and 80 % when the car stands for longer than two weeks.

Below −10 °C the battery is warmed before it is charged, which takes up to 30 minutes and 2 kWh. Charging at
home takes 7 hours; at a fast charger, it takes 35 minutes from 10 % to 80 %.""",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """``placed`` names the documents that the prompts hold, in order; ``found`` those that are recognised,
    with "~" behind one of which only the beginning is. ``escaped``: whether the documents are found in the
    next prompt only, in the form that this one has taught. ``like``: the shape whose snapshot it has."""

    name: str
    title: str
    placed: tuple[str, ...]
    found: tuple[str, ...]
    escaped: bool
    like: str
    run: Callable[[Any], None]

    def __str__(self) -> str:
        return self.name


class Shapes:
    """The shapes of one framework, with the results of those that were run. ``test_file`` lies beside the
    folder of snapshots."""

    def __init__(self, framework: str, test_file: str) -> None:
        self.framework, self._folder = framework, Path(test_file).with_name("prompts")
        self.all: list[Shape] = []
        self._rows: dict[str, str] = {}

    def shape(
        self, title: str, placed: str, found: str | None = None, escaped: bool = False, like: str = ""
    ) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """Registers a function that runs the framework. The snapshot has its name, or that of one like it."""

        def register(run: Callable[[Any], None]) -> Callable[[Any], None]:
            name, documents = run.__name__, tuple((placed if found is None else found).split())
            self.all.append(Shape(name, title, tuple(placed.split()), documents, escaped, like or name, run))
            return run

        return register

    def check_run(self, shape: Shape, rig: Any, library: Library, names: dict[str, str]) -> None:
        """Run a shape, and check what the rig's engine was asked; of an escaped one a second time, when its
        documents are known in the form that the first run has taught."""
        shape.run(rig)
        self.check(shape, rig.engine.asked, library, names)
        if shape.escaped:
            seen = len(rig.engine.asked)
            for form in library.catalogue.pending():  # what the engine would do
                library.catalogue.mark_ready(form.key, 1)
            shape.run(rig)
            self.check_again(shape, rig.engine.asked[seen:], library)

    def check(self, shape: Shape, requests: Sequence[Asked], library: Library, names: dict[str, str]) -> None:
        """``names``: text of a known document -> its name."""
        entries = [entry for entry in library.catalogue.entries() if entry.text in names]  # not forms learnt
        known = {entry.key: entry for entry in entries}
        by_name = {names[entry.text]: entry for entry in entries}
        prompts = [decode(library.tokenizer, request.token_ids) for request in requests]
        self._check_snapshot(shape, prompts, names)

        found, reused = [], 0
        for request in requests:
            for key, start, length in request.spans:
                document = known[key]
                text = decode(library.tokenizer, request.token_ids[start : start + length])
                whole = length == len(document.token_ids)
                assert document.text.startswith(text) and (text == document.text) == whole
                found.append(names[document.text] + ("" if whole else "~"))
                reused += length
        assert tuple(found) == shape.found, f"recognised: {found}"

        for name in {*shape.placed}:
            there = sum(prompt.count(by_name[name].text) for prompt in prompts)
            assert there == shape.found.count(name), f"document {name} is in the prompts {there} times"
        most = sum(_reusable(library.tokenizer, prompts, by_name[name]) for name in {*shape.placed})
        assert reused == most, f"{reused} tokens are reused, {most} could be"
        tokens = sum(len(by_name[name].token_ids) for name in shape.placed)
        self._rows[shape.title] = f"| {shape.title} | {reused} / {tokens} |"

    def check_again(self, shape: Shape, requests: Sequence[Asked], library: Library) -> None:
        """The requests of a second run, behind the first one's learning: all that is placed is reused."""
        forms = {entry.key: entry for entry in library.catalogue.entries()}
        spans = [span for request in requests for span in request.spans]
        assert len(spans) == len(shape.placed)
        for request in requests:
            for key, start, length in request.spans:
                text = decode(library.tokenizer, request.token_ids[start : start + length])
                assert text == forms[key].text and length == len(forms[key].token_ids)
        reused = sum(length for _, _, length in spans)
        self._rows[shape.title] = f"| {shape.title} | first 0, then {reused} / {reused} |"

    def _check_snapshot(self, shape: Shape, prompts: Iterable[str], names: dict[str, str]) -> None:
        """In snapshots, names stand for known texts that are whole."""
        file, shown = self._folder / f"{shape.like}.txt", list(prompts)
        for known in sorted(names, key=len, reverse=True):  # some end with others
            shown = [prompt.replace(known, _PLACE.format(names[known])) for prompt in shown]
        text = _NEXT.join(_changes(shown))
        if os.environ.get(UPDATE) and shape.like == shape.name:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(text.encode())
        kept = file.read_bytes().decode() if file.exists() else ""
        assert text == kept, (
            f"what reaches the model in the shape {shape.title!r} is not what {file.name} has: if "
            f"{self.framework} has changed it, run the tests with {UPDATE}=1 and look at the difference"
        )

    def check_page(self) -> None:
        """Prints the results and compares them with the page's; of shapes not run, only the names."""
        measured = [self._rows[shape.title] for shape in self.all if shape.title in self._rows]
        print(f"\n{self.framework}\n{_HEAD}", *measured, sep="\n")
        begin, end = f"{_BEGIN.format(self.framework)}\n{_HEAD}\n", "\n<!-- end -->"
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(begin)
        table, _, after = rest.partition(end)
        if os.environ.get(UPDATE) and len(measured) == len(self.all):
            table = "\n".join(measured)
            PAGE.write_text(before + begin + table + end + after, encoding="utf-8")
        rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
        hint = f"docs/recognition.md is out of date: run the tests with {UPDATE}=1 and look at the difference"
        assert list(rows) == [shape.title for shape in self.all], hint
        assert [rows[title] for title in self._rows] == [*self._rows.values()], hint


_BEGIN = "<!-- table: {} -->"
_HEAD = "| shape | tokens reused / tokens of the documents |\n|---|---:|"


def _changes(prompts: Iterable[str]) -> Iterator[str]:
    """Yield prompts, each without the lines with which it begins as the one before it."""
    before: list[str] = []
    for prompt in prompts:
        lines = prompt.split("\n")
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, lines, strict=False)))
        yield "\n".join([_SAME.format(same), *lines[same:]] if same > 1 else lines)
        before = lines


def _reusable(tokenizer: Any, prompts: Iterable[str], document: Chunk) -> int:
    """Tokens of ``document`` that ``prompts`` could reuse: counted the slow way, from every place where its
    beginning stands."""
    total, beginning = 0, document.text[:32]
    for prompt in prompts:
        at = prompt.find(beginning)
        while at >= 0:
            fits = [
                count
                for count in range(_LEAST, len(document.token_ids) + 1)
                if prompt.startswith(decode(tokenizer, document.token_ids[:count]), at)
            ]
            total += max(fits, default=0)
            at = prompt.find(beginning, at + 1)
    return total
