"""The samples of a run, a line of JSON per question and arm, from which it can go on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from blendrag.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lost:
    """Losses by decoding from a budget of KV. kl: mean divergence in nats from the same arm without, from the
    second token on of what that wrote. kept: tokens that a head kept; 0 where the prompt is no longer than
    the budget."""

    kl: float
    kept: int


@dataclass(frozen=True, slots=True)
class AnswerSample:
    """One question answered by one arm; the question's id and the arm's name together name the sample.

    nll: mean over the right answer's tokens of -log p, in nats, each token forced.
    logprobs: per token of the right answer {token id: log probability} of what the model itself thought
        likeliest there.
    text: the free answer. decision: the likeliest of the question's choices; None where there are none.
    ttft_ms: milliseconds to the first token; split_ms: those of load, select, recompute ({} if not blended).
    cached: tokens of documents whose KV was reused; recomputed: those of them that were computed again.
    nll_later: nll from the second token on; None where there is none. evicted: of an arm with a budget of KV.
    """

    question: str
    arm: str
    nll: float
    logprobs: list[dict[int, float]]
    text: str
    decision: str | None
    ttft_ms: float
    cached: int
    recomputed: int
    split_ms: dict[str, float]
    nll_later: float | None = None
    evicted: Lost | None = None

    @property
    def first_token(self) -> int:
        """The likeliest first token."""
        return max(self.logprobs[0], key=self.logprobs[0].__getitem__)

    def to_json(self) -> str:
        """Return one line, without its end. Raises ValueError for a number that is not finite."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the sample ``to_json`` wrote. Raises ValueError if the line is no sample."""
        return TypeAdapter(cls).validate_json(line)


def by_arm(samples: Iterable[AnswerSample]) -> dict[str, dict[str, AnswerSample]]:
    """Return samples by arm and question: of what was measured twice, the last one."""
    found: dict[str, dict[str, AnswerSample]] = {}
    for sample in samples:
        found.setdefault(sample.arm, {})[sample.question] = sample
    return found


class SampleLog:
    """The samples of one run, in memory and, where it has a file, there: a line with the run's configuration,
    then a line per sample.

    Every line is written by one call and handed to the system at once: a process that is killed leaves at
    most its last line unfinished, and that line is dropped when the file is opened again.

    samples: those already there; ``append`` adds to them.
    """

    def __init__(self, file: FileIO | None = None) -> None:
        self._file = file
        self.samples: list[AnswerSample] = []

    def append(self, sample: AnswerSample) -> None:
        """Keep ``sample``: it is in the file when the run is killed in the next moment."""
        self._write(sample.to_json())
        self.samples.append(sample)

    @classmethod
    @contextmanager
    def open(cls, path: Path | None, config: Mapping[str, Any]) -> Iterator[Self]:
        """Open the log in ``path``, made if it is not there. config: what the samples depend on, as JSON can
        hold it.

        Raises ConfigError if the file is of a run with another configuration, is no such file, or cannot be
        written.
        """
        if path is None:
            yield cls()
            return
        try:
            file = path.open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(f"samples cannot be kept in {str(path)!r}: {error.strerror}") from error
        with file:
            log = cls(file)
            log._resume(path, json.dumps({"config": config}))
            yield log

    def _resume(self, path: Path, header: str) -> None:
        assert self._file
        self._file.seek(0)
        content = self._file.read()
        *lines, unfinished = content.split(b"\n")
        if lines:
            _compare(path, lines[0], json.loads(header)["config"])
        elif not header.encode().startswith(unfinished):
            raise ConfigError(_foreign(path))
        for number, line in enumerate(lines[1:], start=2):
            try:
                self.samples.append(AnswerSample.from_json(line.decode()))
            except ValueError as error:
                raise ConfigError(
                    f"{str(path)!r}, line {number}, is no sample: delete the line or the file"
                ) from error
        self._file.truncate(len(content) - len(unfinished))
        if not lines:
            self._write(header)

    def _write(self, line: str) -> None:
        data = line.encode() + b"\n"
        if self._file and self._file.write(data) != len(data):
            raise ConfigError(
                f"{str(self._file.name)!r}: the disk is full; with room on it the run can go on"
            )


def _foreign(path: Path) -> str:
    return f"{str(path)!r} is no file of samples, and is left alone: name another"


def _compare(path: Path, line: bytes, wanted: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the file is of a run with the configuration that is wanted."""
    try:
        there = dict(json.loads(line)["config"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(_foreign(path)) from error
    other = [
        f"{name} was {_shown(there.get(name))}, is {_shown(wanted.get(name))}"
        for name in sorted(there.keys() | wanted.keys())
        if there.get(name) != wanted.get(name)
    ]
    if other:
        raise ConfigError(
            f"{str(path)!r} holds samples of another run ({'; '.join(other)}): name another file,"
            " or delete this one to start again"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
