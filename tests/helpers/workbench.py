"""Real texts cut into chunks, prompts made of them, and the numbers that are compared."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blendrag import Answer, BlendIndex
from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.client.stores import StoreClient
from blendrag.engine.wire.recipe import Recipe
from blendrag.options import BlendOptions
from blendrag.prompt import encode_document
from blendrag.ranges import read_ranges
from blendrag.store.catalogue import Catalogue
from blendrag.store.contexts import Chunk
from blendrag.store.identity import KVIdentity
from blendrag.store.stack import TierSpec
from waiting import until

CHUNK_TOKENS = 96
Open = Callable[..., BlendIndex]
"""Opens indexes that share the run's engine."""

FIRST = Sampling(max_tokens=1, logprobs=20)

# What blendrag and its packages depend on: their long descriptions are real prose, and always installed.
_PACKAGES = (
    "accelerate", "charset-normalizer", "chromadb", "filelock", "huggingface-hub", "jinja2", "matplotlib",
    "numpy", "pydantic", "pypdfium2", "rich", "safetensors", "sentence-transformers", "torch", "transformers",
    "typer",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and where the chunks stand in them."""

    token_ids: tuple[int, ...] = ()
    spans: tuple[tuple[str, int, int], ...] = ()

    def fresh(self, ids: Sequence[int]) -> Prompt:
        return replace(self, token_ids=(*self.token_ids, *ids))

    def cached(self, piece: Chunk) -> Prompt:
        span = (piece.key, len(self.token_ids), len(piece.token_ids))
        return Prompt((*self.token_ids, *piece.token_ids), (*self.spans, span))


@dataclass(slots=True)
class Bench:
    """An engine with an opened store, and chunks to make prompts of."""

    engine: Engine
    tokenizer: Any
    identity: KVIdentity
    root: Path
    pieces: list[Chunk] = field(default_factory=list)
    client: StoreClient = field(init=False)

    def open(self, ram_bytes: int = 1 << 30, stack: Sequence[dict[str, Any]] | None = None) -> Bench:
        """Register and prefill all pieces in a new store: RAM over disk, or another stack."""
        catalogue = Catalogue.open(self.root, self.identity)
        catalogue.register("tests", self.pieces)
        catalogue.close()
        tiers = list(stack or [{"kind": "ram", "bytes": ram_bytes}, {"kind": "disk"}])
        specs = [TierSpec.model_validate(tier) for tier in tiers]
        self.client = StoreClient.open(self.engine, self.root, self.identity, specs)
        self.ingest(self.pieces)
        return self

    def ingest(self, pieces: Sequence[Chunk]) -> None:
        for at in range(0, len(pieces), 16):
            self.client.ingest(pieces[at : at + 16])
        self.client.flush()

    def close(self) -> None:
        self.client.close()

    @property
    def store(self) -> str:
        return self.client.id

    def piece(self, text: str) -> Chunk:
        """A chunk that is not stored."""
        ids = self.encode(text)
        return Chunk(self.identity.chunk_key(ids), "", ids)

    def encode(self, text: str) -> tuple[int, ...]:
        return encode_document(self.tokenizer, text)

    def prompt(
        self,
        pieces: Iterable[Chunk],
        question: str = "\nIn short, the packages above are",
        *,
        aligned: bool = True,
    ) -> Prompt:
        """System text, the chunks with blank lines between them, and a beginning to be continued.

        aligned: the last chunk ends with a block of the paged cache, so that all that is stored of it is
        used; else prompts of any chunks begin alike.
        """
        pieces, between, line = list(pieces), self.encode("\n\n"), self.encode("\n")
        opening = self.encode("Read these descriptions of Python packages.\n\n")
        end = len(opening) + sum(len(piece.token_ids) + len(between) for piece in pieces) - len(between)
        room = -end % self.engine.facts.block_size if aligned else 0
        prompt = Prompt().fresh((*opening, *line * room))
        for piece in pieces:
            prompt = prompt.cached(piece).fresh(between)
        return prompt.fresh(self.encode(question))

    def recipe(self, prompt: Prompt, ratio: float = 0.15, selector: str = "hkvd", **options: Any) -> Recipe:
        return Recipe(self.store, prompt.spans, BlendOptions(ratio, selector, **options))

    def reset(self) -> None:
        """Empty the prefix cache. Fails if a request keeps its KV, which nothing but time would tell."""
        until(self.engine.reset_prefix_cache, said="requests that ended still hold KV")

    def preempt_all(self) -> None:
        """What the scheduler does when KV blocks run out: every running request loses its KV and waits."""
        engine = self.engine
        assert engine._submit(engine._llm.reset_prefix_cache(reset_running_requests=True)).result()

    def plain(self, prompt: Prompt, sampling: Sampling = FIRST) -> Delta:
        """Full prefill, nothing taken from the prefix cache."""
        self.reset()
        return self.engine.generate(prompt.token_ids, sampling)

    def blended(self, prompt: Prompt, sampling: Sampling = FIRST, **options: Any) -> Delta:
        """Fused prefill, nothing taken from the prefix cache."""
        self.reset()
        delta = self.engine.generate(prompt.token_ids, sampling, self.recipe(prompt, **options))
        assert delta.report is not None
        assert not delta.report.fallback, delta.report
        return delta


def real_texts(tokenizer: Any, tokens: int = CHUNK_TOKENS, per_package: int = 2) -> Iterator[tuple[int, ...]]:
    """Pieces of the packages' descriptions, ``tokens`` tokens each."""
    for name in _PACKAGES:
        text = importlib.metadata.distribution(name).read_text("METADATA") or ""
        ids = encode_document(tokenizer, text.partition("\n\n")[2])
        begin = min(150, max(0, len(ids) - tokens * per_package))  # past the badges
        for at in range(begin, begin + tokens * per_package, tokens):
            if at + tokens <= len(ids):
                yield ids[at : at + tokens]


def distance(one: Delta, other: Delta) -> float:
    """Largest difference between the first token's log probabilities that both report."""
    a, b = one.logprobs[0], other.logprobs[0]
    shared = a.keys() & b.keys()
    assert len(shared) >= min(len(a), len(b)) // 2
    return max(abs(a[token] - b[token]) for token in shared)


def divergence(reference: Delta, other: Delta) -> float:
    """KL(reference, other) of the first token over the tokens both report, the rest taken as one."""
    a, b = reference.logprobs[0], other.logprobs[0]
    shared = a.keys() & b.keys()
    p, q = ([math.exp(side[token]) for token in shared] for side in (a, b))
    p, q = ([*side, max(1e-9, 1 - sum(side))] for side in (p, q))
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))


def files(index: BlendIndex) -> set[str]:
    """Keys of the chunks whose KV is on disk."""
    return {path.stem for path in index.root.glob("kv/??/*.safetensors")}


def assert_consistent(index: BlendIndex) -> None:
    """Ledger, catalogue, vectors and KV speak of the same documents and chunks."""
    entries = index._library.catalogue.entries()
    assert {entry.key for entry in entries if entry.state == "ready"} == files(index)
    assert (
        index._ledger.sources()
        == {row.source for row in index._vectors.rows()}
        == set(index._library.catalogue.owners())
    )
    rows = index._ledger._execute("SELECT chunk_keys FROM documents")
    keys = {key for (listed,) in rows for key in json.loads(listed)}
    assert keys == {entry.key for entry in entries}


def assert_adds_up(answer: Answer) -> None:
    evidence = answer.evidence
    assert evidence.reused + evidence.recomputed + evidence.fresh + evidence.prefix == evidence.prompt
    assert sum(row["tokens"] for row in evidence.documents if row["kind"] != "not found") == evidence.prompt
    computed = sum(end - first for first, end in read_ranges(evidence.computed_at))
    assert evidence.fresh <= computed <= evidence.computed, "repaired ones are a mean over the layers"
