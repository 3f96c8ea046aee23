"""A prompt's evidence as a strip of HTML, for notebooks, files and the server's page.

There is one template, escaped throughout, without script and style: the strip is SVG, whose colours stand in
attributes, so that it is shown under any Content-Security-Policy, and over light and dark paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Any
from unicodedata import category

import jinja2
import numpy as np

from blendrag.ranges import read_ranges
from blendrag.text import encodable

HEIGHT = 32
_COLUMNS = 1000  # a prompt of more tokens shares them: a bar is as high as their share that was repaired
_MAX_ROWS = 200  # of the table; the strip has them all
_MAX_CHARACTERS = 200  # of a name or a reason

COLOURS = {"reused": "#009e73", "repaired": "#e69f00", "fresh": "#8c8c8c", "prefix": "#56b4e9"}
"""Colours by what became of tokens, which people who see fewer colours can tell apart, too."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of the prompt. kind: a name in ``COLOURS``. row: of the table, if it is a document."""

    kind: str
    start: int
    tokens: int
    row: _Row | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """A document. reused, repaired: of its tokens."""

    source: str
    tokens: int
    reused: int
    repaired: int
    reason: str


class Strip:
    """A prompt as a strip: each document reused, repaired or computed, with source and reason.

    In a notebook it shows itself: ``Strip(message.response_metadata["blendrag"])``.
    """

    def __init__(self, evidence: Mapping[str, Any], text: str = "") -> None:
        """Make it of evidence, as ``Answer.facts`` or a server has it, or of ``{"documents": rows}`` for what
        ``explain`` gave. text: the answer's."""
        self._facts, self._text = evidence, encodable(text)

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """Return the strip as a piece of HTML."""
        return self._rendered(page=False)

    def page(self) -> str:
        """Return the strip as a page of its own."""
        return self._rendered(page=True)

    def _rendered(self, *, page: bool) -> str:
        facts, rows = self._facts, [dict(row) for row in self._facts.get("documents") or ()]
        ends = [row["start"] + row["tokens"] for row in rows if row["start"] is not None]
        prompt = max([int(facts.get("prompt") or 0), *ends])
        computed = self._computed(rows, prompt)
        parts = list(self._parts(rows, computed))
        absent = [row for row in rows if row["start"] is None]
        table = [part.row for part in parts if part.row] + [self._row(row, None) for row in absent]
        if "reused" in facts:
            counts = {name: int(facts.get(name) or 0) for name in ("reused", "fresh", "prefix")}
            counts["repaired"] = int(facts.get("recomputed") or 0)
        else:
            counts = dict.fromkeys(COLOURS, 0)
            for part in parts:
                counts[part.kind] += part.tokens
        return _template().render(
            page=page,
            text=self._text,
            facts=facts,
            plain=_shown(str(facts.get("plain") or "")),
            prompt=prompt,
            plan=bool(rows) and "computed_at" not in facts,
            parts=parts,
            marks=_marks(parts, computed),
            counts=[(name, colour, counts[name]) for name, colour in COLOURS.items()],
            rows=table[:_MAX_ROWS],
            more=len(table[_MAX_ROWS:]),
            height=HEIGHT,
            colours=COLOURS,
        )

    def _computed(self, rows: list[dict[str, Any]], prompt: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return [prompt] bool, whether each token was computed, or would be."""
        if (at := self._facts.get("computed_at")) is not None:
            computed = np.zeros(prompt, bool)
            for first, end in read_ranges(str(at)):
                computed[first:end] = True
            return computed
        computed = np.ones(prompt, bool)
        for row in rows if self._facts.get("plain") is None else ():
            if row["start"] is not None and row["reused"]:
                computed[row["start"] : row["start"] + row["tokens"]] = False
        return computed

    def _parts(self, rows: list[dict[str, Any]], computed: np.ndarray[Any, Any]) -> Iterator[_Part]:
        """Yield the prompt's parts, ascending: documents, and what stands between them."""
        documents = [row for row in rows if row["start"] is not None and (row["chunk_key"] or row["source"])]
        end = 0
        for row in sorted(documents, key=lambda row: int(row["start"])):
            start, tokens = int(row["start"]), int(row["tokens"])
            yield from _between(computed, end, start)
            shown = self._row(row, int(np.count_nonzero(computed[start : start + tokens])))
            yield _Part("reused" if shown.reused else "fresh", start, tokens, shown)
            end = start + tokens
        yield from _between(computed, end, len(computed))

    def _row(self, row: Mapping[str, Any], computed: int | None) -> _Row:
        """Return the row of a document. computed: of its tokens; None if it is not in the prompt."""
        tokens, facts = int(row["tokens"]), self._facts
        reused = 0 if computed is None else tokens - computed
        why = [row.get("reason")]
        if computed == tokens:
            missing = (facts.get("missing") or {}).get(row["chunk_key"])
            why += [missing, facts.get("plain") or (None if missing else facts.get("decision"))]
        return _Row(
            _shown(row["source"] or "a document"),
            tokens,
            reused,
            computed or 0 if reused else 0,
            _shown("; ".join(dict.fromkeys(str(reason) for reason in why if reason))),
        )


def _between(computed: np.ndarray[Any, Any], first: int, end: int) -> Iterator[_Part]:
    """Yield what is no document: computed, or found in the prefix cache."""
    for fresh, run in groupby(range(first, end), key=lambda at: bool(computed[at])):
        start, *others = run
        yield _Part("fresh" if fresh else "prefix", start, 1 + len(others))


def _marks(parts: list[_Part], computed: np.ndarray[Any, Any]) -> str:
    """Return the repaired tokens as an SVG path: a bar for every column of the strip that has some."""
    repaired = np.zeros_like(computed)
    for part in parts:
        if part.row and part.kind == "reused":
            repaired[part.start : part.start + part.tokens] = computed[part.start : part.start + part.tokens]
    width = max(1, -(-len(repaired) // _COLUMNS))
    columns = np.pad(repaired, (0, -len(repaired) % width)).reshape(-1, width).mean(axis=1)
    path, at = "", 0
    for share, run in groupby(columns.tolist()):
        wide = width * sum(1 for _ in run)
        if share:
            high = max(1, round(share * HEIGHT))
            path += f"M{at} {HEIGHT}v-{high}h{wide}v{high}z"
        at += wide
    return path


def _shown(text: str) -> str:
    """Return text of any origin as it is shown: on one line, at most so long, and without characters that
    change how others look."""
    line = " ".join(encodable(text[: 4 * _MAX_CHARACTERS]).split())
    line = "".join("\ufffd" if category(one) in ("Cc", "Cf") and one not in _JOINERS else one for one in line)
    return line if len(line) <= _MAX_CHARACTERS else line[: _MAX_CHARACTERS - 1] + "…"


_JOINERS = "\u200c\u200d"  # which Persian, Hindi and emoji are written with


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["count"] = "{:,}".format
    return environment.from_string(resources.files(__package__).joinpath("strip.html").read_text("utf-8"))
