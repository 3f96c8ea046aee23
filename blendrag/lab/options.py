"""The options of ``blendrag bench``, each declared here and nowhere else: the commands are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from blendrag.errors import ConfigError

TREE_ARMS = ("full", "prefix", "tree", "blended", "unmixed", "both")
"""Names of the arms. unmixed: as ``both``, but what is not all in the tree is blended from its beginning."""

_Arrivals = Annotated[Path | None, Option(help="Times of questions (Azure); else Poisson.", metavar="FILE")]
_Chunks = Annotated[int, Option(min=2, help="Chunks in a prompt.")]
_ChunkTokens = Annotated[int, Option(min=8, help="Tokens in a chunk.")]
_MaxTokens = Annotated[int, Option(min=1, help="Tokens of every answer.")]
_Repeats = Annotated[int, Option(min=1, help="How often everything is measured.")]
_Seed = Annotated[int, Option(help="Seed of every random choice.")]
_Tries = Annotated[int, Option(min=1, help="How many rates are tried per arm, around what it can do.")]
_Zipf = Annotated[float, Option(min=0.0, help="Popularity of questions or documents: rank**-zipf.")]


@dataclass(frozen=True, slots=True)
class TtftOptions:
    """Options of ``bench ttft``: the axis of this name at ``values``. exact: exact prefixes, too."""

    axis: str
    values: tuple[int | float | str, ...]
    exact: bool = False
    chunks: _Chunks = 6
    chunk_tokens: _ChunkTokens = 512
    repeats: _Repeats = 5
    seed: _Seed = 0


@dataclass(frozen=True, slots=True)
class SpeculateOptions:
    """Options of ``bench ttft --speculate``. repeats: questions per arm and wait."""

    chunks: _Chunks = 6
    chunk_tokens: _ChunkTokens = 512
    repeats: _Repeats = 16
    seed: _Seed = 0


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of ``bench ttft --gpu``."""

    gpu: Annotated[
        str,
        Option(help="Estimate for it: H100, H200, A100, L40S, RTX 4090, MI300X.", metavar="NAME"),
    ]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of ``bench load``."""

    chunks: _Chunks = 6
    chunk_tokens: _ChunkTokens = 256
    pool: Annotated[int, Option(min=2, help="Chunks in the store.")] = 48
    max_tokens: _MaxTokens = 16
    seconds: Annotated[float, Option(min=1.0, help="Seconds of arrivals, for each arm and rate.")] = 24.0
    tries: _Tries = 5
    seed: _Seed = 0

    def __post_init__(self) -> None:
        if self.pool < self.chunks:
            raise ConfigError(f"--pool {self.pool}: fewer than the {self.chunks} chunks of a prompt")


@dataclass(frozen=True, slots=True)
class BesideOptions:
    """Options of ``bench load --beside``. repeats: long prompts of each condition."""

    chunks: _Chunks = 6
    chunk_tokens: _ChunkTokens = 512
    repeats: _Repeats = 6
    seed: _Seed = 0


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """Options of ``bench load --kv-budget``."""

    kv_budget: Annotated[int, Option(min=1, help="Decode from so many tokens a head.", metavar="TOKENS")]
    chunks: _Chunks = 15
    chunk_tokens: _ChunkTokens = 480
    answers: Annotated[int, Option(min=2, help="With a budget: answers at once, besides one alone.")] = 8
    max_tokens: _MaxTokens = 48
    repeats: _Repeats = 2
    seed: _Seed = 0


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """Options of ``bench tree``. zipf: None asks each question once."""

    data: Annotated[Path, Option(help="Questions in SQuAD's format.", metavar="FILE")]
    arrivals: _Arrivals = None
    articles: Annotated[int, Option(min=1, help="How many articles of the data are used.")] = 3
    chunk_tokens: Annotated[int, Option(min=8, help="Tokens of a document, at most.")] = 128
    top_k: Annotated[int, Option(min=2, help="Documents in a prompt.")] = 5
    zipf: Annotated[float | None, Option(min=0.0, help="Popularity of questions: rank**-zipf.")] = 1.0
    earlier: Annotated[int, Option(min=0, help="Questions that came before.")] = 2000
    pool: Annotated[int, Option(min=128, help="Tokens in vLLM's prefix cache.")] = 2048
    tree: Annotated[int, Option(min=128, help="Tokens in a tree.")] = 16384
    max_tokens: _MaxTokens = 8
    alone: Annotated[int, Option(min=2, help="Questions one after another.")] = 12
    requests: Annotated[int, Option(min=4, help="Requests at each rate, about.")] = 20
    tries: _Tries = 3
    arms: tuple[str, ...] = TREE_ARMS
    seed: _Seed = 0

    def __post_init__(self) -> None:
        if unknown := [arm for arm in self.arms if arm not in TREE_ARMS]:
            raise ConfigError(f"--arms: no arm {unknown[0]!r}, but {', '.join(TREE_ARMS)}")


@dataclass(frozen=True, slots=True)
class EvictionOptions:
    """Options of ``bench eviction``. rate: questions a second, where no arrivals are given. top_k: chunks of
    a prompt, closest first. ``lpc+`` learns from what is not counted, and without that from nothing."""

    trace: Annotated[
        Path,
        Option(help="Block trace (Mooncake), own log, dialogues, or questions (SQuAD).", metavar="FILE"),
    ]
    sizes: Annotated[
        str, Option(help="Sizes of the cache: blocks for block traces, else tokens.", metavar="A,B,...")
    ]
    policies: Annotated[
        str | None, Option(help="lru, lfu, gdsf, pgdsf, lpc, lpc+; else all.", metavar="A,B,...")
    ] = None
    seeds: Annotated[int, Option(min=1, help="Traces made of dialogues or questions, each replayed.")] = 5
    seconds: Annotated[float, Option(min=1.0, help="Length of a trace that is made.")] = 1200.0
    zipf: _Zipf = 1.0
    arrivals: _Arrivals = None
    paths: Annotated[
        bool, Option("--paths", help="A chunk is found behind the same chunks only, as in a tree.")
    ] = False
    turnovers: Annotated[int, Option(min=0, help="How often other questions become the popular ones.")] = 0
    warmup: Annotated[float, Option(min=0.0, max=0.99, help="Share of the requests that is not counted.")] = (
        0.0
    )
    rate: float = 2.0
    top_k: int = 5

    def __post_init__(self) -> None:
        if self.capacities[0] < 1:
            raise ConfigError(f"--sizes {self.sizes}: a cache must hold 1 or more")
        _ = self.names

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the policies, each once. Raises ConfigError."""
        from blendrag.eviction import POLICIES

        known = sorted(POLICIES)
        names = [word.strip() for word in self.policies.split(",")] if self.policies else known
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"--policies: unknown {unknown[0]!r}; there are {', '.join(known)}")
        return tuple(dict.fromkeys(names))

    @property
    def capacities(self) -> tuple[int, ...]:
        """Return the sizes as numbers, ascending. Raises ConfigError."""
        try:
            return tuple(sorted(set(map(int, self.sizes.split(",")))))
        except ValueError:
            raise ConfigError(f"--sizes {self.sizes}: not whole numbers with commas between them") from None


@dataclass(frozen=True, slots=True)
class RecognitionOptions:
    """Options of ``bench recognition``. chunks: 0 searches no prompt."""

    prompts: Annotated[int, Option(min=2, help="Prompts of each shape.")] = 500
    documents: Annotated[int, Option(min=2, help="How many documents there are.")] = 200
    chunk_tokens: Annotated[int, Option(min=64, help="Tokens of a document, at most.")] = 256
    top_k: Annotated[int, Option(min=1, help="Documents in a prompt.")] = 5
    zipf: _Zipf = 1.0
    chunks: Annotated[int, Option(min=0, help="Chunks known while one prompt is searched.")] = 100_000
    seed: _Seed = 0

    def __post_init__(self) -> None:
        if self.top_k > self.documents:
            raise ConfigError(f"--top-k {self.top_k}: there are {self.documents} documents")
