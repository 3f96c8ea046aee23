"""Requests, of which every trace and every generated workload is made, and readers of Mooncake's traces, of
our own log and of dialogues."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from blendrag.errors import SourceError
from blendrag.forecast.log import PromptLog
from blendrag.lab.records import records_of, wrong_line

_BLOCK = 512  # tokens, of Mooncake's


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as the cache sees it.

    at: seconds since the trace began. keys: of its blocks or chunks, in the prompt's order. sizes: in
        tokens.
    answer: so many of the last keys are not looked up: they are the answer's, kept when it is over.
    finished: seconds, when that is; 0 where it is unknown.
    conversation, prompts: whose turn this is, and the user's prompts so far with this one last.
    """

    at: float
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    answer: int = 0
    finished: float = 0.0
    conversation: str | None = None
    prompts: tuple[str, ...] = ()

    @property
    def over(self) -> float:
        """Return when the request is over, in seconds, as far as it is known; not before it arrives."""
        return max(self.at, self.finished)

    @property
    def asked(self) -> tuple[str, ...]:
        """The keys that are looked up: the prompt's."""
        return self.keys[: len(self.keys) - self.answer]


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests in the order of their arrival.

    prefix: whether a key is of use only if all keys before it in the prompt are found too (a prefix cache),
        or by itself (retrieved chunks, whose KV is blended).
    unit: what capacities are counted in: "blocks" or "tokens".
    tree: a prefix cache whose keys are nodes of a tree of exact prefixes: only leaves leave, and a node is
        kept from its second sighting on.
    """

    name: str
    requests: Sequence[Request]
    prefix: bool
    unit: str
    tree: bool = False

    def weights(self, request: Request) -> tuple[int, ...]:
        """Return what each key takes of the capacity: 1 where blocks are counted, its tokens elsewhere."""
        return (1,) * len(request.keys) if self.unit == "blocks" else request.sizes

    def events(self) -> Iterator[tuple[int, bool]]:
        """Yield (number of the request, whether it is over).

        A request is looked up when it arrives; what it used and what it made is kept when it is over, as vLLM
        frees a request's blocks, and LPC inserts them (section 3.4.1). What is over at a moment is found by
        what arrives at it.
        """
        running: list[tuple[float, int]] = []
        for number, request in enumerate(self.requests):
            while running and running[0][0] <= request.at:
                yield heapq.heappop(running)[1], True
            yield number, False
            heapq.heappush(running, (request.over, number))
        while running:
            yield heapq.heappop(running)[1], True


class _Record(BaseModel):
    """A record of Mooncake's. timestamp: milliseconds. hash_ids: of the prompt's blocks; each depends on all
    before it."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    timestamp: float = Field(ge=0)
    input_length: int = Field(gt=0)
    hash_ids: list[int] = Field(min_length=1)


def read_mooncake(path: Path) -> RequestTrace:
    """Read Mooncake's trace, one request per line. Its last block may be shorter than the others. Answers
    have no blocks.

    Raises SourceError, naming file and line, for what is no such record, for lengths that do not fit, and for
    times that run backwards.
    """
    requests: list[Request] = []
    for number, record in records_of(path, _Record):
        at, count = record.timestamp / 1000.0, len(record.hash_ids)
        last = record.input_length - _BLOCK * (count - 1)
        if not 0 < last <= _BLOCK:
            wanted = f"{count} blocks of {_BLOCK} tokens"
            raise wrong_line(path, number, f"input_length: {record.input_length} tokens are not {wanted}")
        if requests and at < requests[-1].at:
            raise wrong_line(path, number, "timestamp: earlier than that of the line before")
        requests.append(Request(at, tuple(map(str, record.hash_ids)), (_BLOCK,) * (count - 1) + (last,)))
    return RequestTrace(path.name, requests, prefix=True, unit="blocks")


def read_log(path: Path) -> RequestTrace:
    """Read the prompts of the store that had most of them, from blendrag's own log: chunks that are found one
    by one. Raises PredictorError, SourceError where there are none."""
    with closing(PromptLog(path, make=False)) as log:
        prompts = log.prompts()
    if not prompts:
        raise SourceError(f"{str(path)!r} holds no prompts yet")
    requests = [
        Request(
            prompt.at - prompts[0].at,
            tuple(key for key, _ in prompt.chunks),
            tuple(size for _, size in prompt.chunks),
            conversation=prompt.conversation,
        )
        for prompt in prompts
    ]
    return RequestTrace(path.name, requests, prefix=False, unit="tokens")


class DialogTurn(BaseModel):
    """A turn of a dialogue: what one side said."""

    model_config = ConfigDict(frozen=True)

    role: str
    text: str


class Dialog(BaseModel):
    """A conversation; what else its record holds is ignored."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)

    id: str = Field(min_length=1)
    turns: tuple[DialogTurn, ...]

    @property
    def prompts(self) -> tuple[str, ...]:
        """The user's prompts, oldest first."""
        return tuple(turn.text for turn in self.turns if turn.role == "user")


def read_dialogs(path: Path) -> list[Dialog]:
    """Return the conversations of a JSON Lines file, gzipped or not.

    Raises SourceError, naming file and line, for what is no ``{"id": ..., "turns": [{"role", "text"}]}``, and
    for a file in which no user says anything.
    """
    dialogs = [dialog for _, dialog in records_of(path, Dialog)]
    if not any(dialog.prompts for dialog in dialogs):
        raise SourceError(f"{str(path)!r}: in none of its conversations does a user say anything")
    return dialogs
