"""The share of prompts that is recognised without a word from anybody, and what recognition takes.

Applications' prompts are replayed, with documents that come again as popular ones do, and no engine: what it
would prefill counts as stored at once.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any

import numpy as np
from rich.table import Table

from blendrag.errors import ConfigError
from blendrag.index.split import Splitter
from blendrag.lab.bench.shapes import SHAPES, Shape
from blendrag.lab.options import RecognitionOptions
from blendrag.lab.results import Results
from blendrag.lab.texts import installed_texts
from blendrag.machine import Machine
from blendrag.progress import Progress
from blendrag.prompt import PromptPlan, Recogniser, encode_document, render_chat
from blendrag.prompt.escaped import find_escaped
from blendrag.serving.library import Library
from blendrag.serving.repeats import OWNERS, Repeats, forget
from blendrag.settings import Settings
from blendrag.tables import table_with

TOKENS = 32_000
"""Tokens of the one prompt that is searched."""

_PLACED = 100  # chunks that it may have, at the most
_CHARACTERS = 2000  # of a chunk, which are some 500 tokens
_REPEATS = 7

_ROOM = 1 << 40  # bytes of KV: more than a replay fills


@dataclass(frozen=True, slots=True)
class Replayed:
    """A shape's prompts. tokens: of a prompt, on average. second, later: shares of documents' characters that
    were known when they came for the second time, and later; share: of all. plan_ms, note_ms: processor time
    of a prompt, to plan it before its answer and to read it behind that. kv: bytes in the end."""

    tokens: float
    second: float
    later: float
    share: float
    plan_ms: float
    note_ms: float
    kv: int


@dataclass(frozen=True, slots=True)
class Searched:
    """One prompt of 32,000 tokens among known chunks. plain_ms: with chunks as they are; none_ms: with none
    of them; escaped_ms: as JSON in JSON. Milliseconds of the processor, the least of several."""

    chunks: int
    plain_ms: float
    none_ms: float
    escaped_ms: float


@dataclass(frozen=True, slots=True)
class RecognitionResults(Results):
    options: RecognitionOptions
    machine: Machine
    shapes: dict[str, Replayed]
    searched: Searched | None

    def parts(self) -> Iterator[Table | str]:
        """Yield what was recognised, shape by shape, and what a search takes."""
        table = table_with(
            "prompts of", "known, 2nd time", "later", "of all", "plan, ms", "read, ms", "KV, MiB"
        )
        for name, one in self.shapes.items():
            shares = (f"{share:.0%}" for share in (one.second, one.later, one.share))
            table.add_row(name, *shares, f"{one.plan_ms:.1f}", f"{one.note_ms:.1f}", f"{one.kv / 2**20:,.0f}")
        options = self.options
        yield table
        yield (
            f"{options.prompts:,} prompts of each, {options.top_k} of {options.documents:,} documents of up"
            f" to {options.chunk_tokens} tokens in each, drawn by rank**-{options.zipf:g}."
        )
        if searched := self.searched:
            found = table_with(
                "known chunks", "prompt of known chunks, ms", "of unknown text", "of JSON escaped twice"
            )
            times = (f"{ms:.1f}" for ms in (searched.plain_ms, searched.none_ms, searched.escaped_ms))
            found.add_row(f"{searched.chunks:,}", *times)
            yield found


def run_recognition(
    settings: Settings, options: RecognitionOptions, progress: Progress
) -> RecognitionResults:
    """Replay all shapes, and search one prompt. Raises ConfigError, ModelError."""
    shapes = dict[str, Replayed]()
    progress.total(len(SHAPES) + bool(options.chunks))
    with TemporaryDirectory() as folder, closing(Library(Path(folder) / "kv", settings)) as library:
        documents = _documents(library.tokenizer, options)
        for name, shape in SHAPES.items():
            progress.note(name)
            shapes[name] = _replayed(library, shape, documents, options)
            progress.advance()
        model, dtype = settings.model, settings.dtype
        machine = Machine.here(model, threads=1, device="cpu", vllm="", dtype=dtype)
        searched = None
        if options.chunks:
            progress.note(f"{options.chunks:,} chunks")
            searched = search(library.tokenizer, options.chunks, options.seed)
            progress.advance()
    return RecognitionResults(options, machine, shapes, searched)


def _documents(tokenizer: Any, options: RecognitionOptions) -> list[str]:
    """Return texts that machines have, cut as an index cuts them, of a quarter of a chunk at the least."""
    splitter, found = Splitter(tokenizer, chunk_tokens=options.chunk_tokens), dict[str, None]()
    for text in installed_texts():
        for piece in splitter.split(text)[:4]:
            if 4 * len(piece.token_ids) >= options.chunk_tokens:
                found[piece.text] = None
        if len(found) >= options.documents:
            return list(found)[: options.documents]
    raise ConfigError(f"--documents {options.documents}: this machine's packages have {len(found)}")


def _replayed(
    library: Library, shape: Shape, documents: Sequence[str], options: RecognitionOptions
) -> Replayed:
    rng = np.random.default_rng(options.seed)
    weights = (rng.permutation(len(documents)) + 1.0) ** -options.zipf
    weights /= weights.sum()
    forget(library.texts)
    met, characters, known = Counter[int](), Counter[int](), Counter[int]()
    tokens, planning, noting = 0, 0.0, 0.0
    with closing(Repeats(library.texts, library.tokenizer, _ROOM, options.chunk_tokens)) as repeats:
        for number in range(options.prompts):
            drawn = rng.choice(len(documents), options.top_k, replace=False, p=weights).tolist()
            messages = shape([documents[at] for at in drawn], f"Question {number}: what is said of {drawn}?")
            text = render_chat(library.tokenizer, messages)
            placed = [_written(documents[at], text) for at in drawn]
            begun = time.process_time()
            plan = library.plan(text)
            planned = time.process_time()
            blended = plan.cached_tokens >= library.settings.blending.min_cached_tokens
            repeats.answered(plan, 0 if blended else None)
            repeats.wait()
            noting += time.process_time() - planned
            planning += planned - begun
            tokens += len(plan.token_ids)
            _store(library, plan, number)
            for at, form in zip(drawn, placed, strict=True):
                sight = min(met[at], 2)
                met[at] += 1
                characters[sight] += len(form)
                known[sight] += _known(plan, form)
        kv = sum(one.bytes for one in library.catalogue.kept(OWNERS))
    second, later = (known[sight] / max(1, characters[sight]) for sight in (1, 2))
    each = 1 / options.prompts
    share = known.total() / characters.total()
    return Replayed(tokens * each, second, later, share, 1e3 * planning * each, 1e3 * noting * each, kv)


def _written(document: str, prompt: str) -> str:
    """Return a document as the prompt has it."""
    once = [json.dumps(document, ensure_ascii=ascii)[1:-1] for ascii in (True, False)]
    twice = [json.dumps(text, ensure_ascii=ascii)[1:-1] for text in once for ascii in (True, False)]
    forms = (document, *once, *twice, indent(document, "    ").strip())
    return next(form for form in forms if form in prompt)


def _known(plan: PromptPlan, form: str) -> int:
    """Return how many characters of a text in the prompt are in known segments."""
    begin = plan.text.index(form)
    end, at, known = begin + len(form), 0, 0
    for segment in plan.segments:
        past = at + len(segment.text)
        if segment.chunk_key is not None:
            known += max(0, min(end, past) - max(begin, at))
        at = past
    return known


def _store(library: Library, plan: PromptPlan, now: int) -> None:
    """Note that what waits is stored, in two bytes a number, and that what the prompt has was used."""
    identity = library.identity
    each = 4 * identity.num_layers * identity.num_kv_heads * identity.head_size
    for one in library.catalogue.kept(OWNERS):
        if one.state != "pending":
            break
        library.catalogue.mark_ready(one.key, each * one.tokens)
    library.catalogue.touch({key: (now + 1, 1) for key in plan.cached_keys})


def search(tokenizer: Any, chunks: int, seed: int = 0) -> Searched:
    """Make so many chunks known, of installed texts, and search prompts among them. Each chunk takes 5 kB of
    memory meanwhile."""
    text = "\n".join(islice(installed_texts(), 400))
    rng = np.random.default_rng(seed)
    begins = rng.integers(0, len(text) - _CHARACTERS, chunks).tolist()
    recogniser, ids = Recogniser(tokenizer), encode_document(tokenizer, text[:_CHARACTERS])

    def chunk(at: int) -> str:
        number = f"{at:07d}"  # behind a heading that half of the chunks share, or first
        begin = f"A page of the handbook, number {number}. " if at % 2 else f"{number} "
        return (begin + text[begins[at] : begins[at] + _CHARACTERS])[:_CHARACTERS]

    for at in range(chunks):
        recogniser.add(f"{at:032x}", chunk(at), ids)
    placed = [chunk(at) for at in rng.integers(0, chunks, _PLACED).tolist()]
    none = [part[_CHARACTERS // 2 :] for part in placed for _ in range(2)]
    twice = [json.dumps(json.dumps({"text": part})) for part in placed]

    def prompt(parts: Iterable[str]) -> str:
        sizes = accumulate(len(encode_document(tokenizer, part)) for part in parts)
        return "\n\n".join(part for part, size in zip(parts, sizes, strict=True) if size < TOKENS)

    def least(parts: Iterable[str]) -> float:
        text, times = prompt(parts), []
        for _ in range(_REPEATS):
            begun = time.thread_time()
            find_escaped(text, recogniser, recogniser.find(text))
            times.append(1e3 * (time.thread_time() - begun))
        return min(times)

    return Searched(chunks, *map(least, (placed, none, twice)))
