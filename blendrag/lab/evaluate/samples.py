"""What was measured, one line of JSON per row and arm: an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from blendrag.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sample:
    """One row answered by one arm.

    row, arm: the row's id and the arm's name; together they name the sample.
    nll: mean over the gold answer's ``gold_tokens`` tokens of -log p, in nats, each token forced.
    first_token: the model's own first choice; logprobs: {token id: log probability} of its likeliest.
    text: the free answer. decision: the likeliest of the row's choices; None where there are none.
    ttft_ms: milliseconds to the first token; split_ms: those of load, select, recompute ({} if not blended).
    cached: tokens of documents whose KV was reused; recomputed: those of them that were computed again.
    """

    row: str
    arm: str
    nll: float
    gold_tokens: int
    first_token: int
    logprobs: dict[int, float]
    text: str
    decision: str | None
    ttft_ms: float
    cached: int
    recomputed: int
    split_ms: dict[str, float]

    def to_json(self) -> str:
        """One line, without its end. Raises ValueError for a number that is not finite."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The sample ``to_json`` wrote. Raises ValueError if the line is no sample."""
        found = json.loads(line)
        if not isinstance(found, dict) or found.keys() != {field.name for field in fields(cls)}:
            raise ValueError("not the fields of a sample")
        found["logprobs"] = {int(token): logprob for token, logprob in found["logprobs"].items()}
        return cls(**found)


class SampleFile:
    """The samples of one run: a line with the run's configuration, then a line per sample.

    Every line is written by one call and handed to the system at once: a process that is killed leaves at
    most its last line unfinished, and that line is dropped when the file is opened again.

    samples: those already there; ``append`` adds to them.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """Open ``path``, or make it. ``config``: what the samples depend on, as JSON can hold it.

        Raises ConfigError if the file is of a run with another configuration, is no such file, or cannot be
        written.
        """
        self._path = path
        wanted = json.loads(json.dumps(config))
        try:
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(f"samples cannot be kept in {str(path)!r}: {error.strerror}") from error
        try:
            self.samples = self._resume(wanted)
        except BaseException:
            self._file.close()
            raise

    def append(self, sample: Sample) -> None:
        """Keep ``sample``: it is there when the run is killed in the next moment."""
        self._write(sample.to_json())
        self.samples.append(sample)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _resume(self, wanted: dict[str, Any]) -> list[Sample]:
        self._file.seek(0)
        content = self._file.read()
        *lines, unfinished = content.split(b"\n")
        if not lines and not json.dumps({"config": wanted}).encode().startswith(unfinished):
            raise ConfigError(f"{str(self._path)!r} is no file of samples, and is left alone: name another")
        if lines:
            self._compare(self._config(lines[0]), wanted)
        samples = [self._sample(number, line) for number, line in enumerate(lines[1:], start=2)]
        if unfinished:
            self._file.truncate(len(content) - len(unfinished))
        if not lines:
            self._write(json.dumps({"config": wanted}))
        return samples

    def _config(self, line: bytes) -> dict[str, Any]:
        try:
            return dict(json.loads(line)["config"])
        except (ValueError, KeyError, TypeError) as error:
            message = f"{str(self._path)!r} is no file of samples, and is left alone: name another"
            raise ConfigError(message) from error

    def _compare(self, there: dict[str, Any], wanted: dict[str, Any]) -> None:
        other = [
            f"{name} was {_shown(there.get(name))}, is {_shown(wanted.get(name))}"
            for name in sorted(there.keys() | wanted.keys())
            if there.get(name) != wanted.get(name)
        ]
        if other:
            raise ConfigError(
                f"{str(self._path)!r} holds samples of another run ({'; '.join(other)}): name another file,"
                " or delete this one to start again"
            )

    def _sample(self, number: int, line: bytes) -> Sample:
        try:
            return Sample.from_json(line.decode())
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{str(self._path)!r}, line {number}, is no sample: delete the line or the file"
            ) from error

    def _write(self, line: str) -> None:
        data = line.encode() + b"\n"
        if self._file.write(data) != len(data):
            raise ConfigError(f"{str(self._path)!r}: the disk is full; with room on it the run can go on")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
