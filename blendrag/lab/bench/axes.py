"""Axes of a sweep: one parameter of a prompt or of where its KV is, the others at their defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blendrag.errors import ConfigError
from blendrag.options import STEPS, Step, step_of
from blendrag.settings import Settings
from blendrag.store.codec import CODECS
from blendrag.store.stack import TierSpec

Value = int | float | str

# Step for measuring only: our forward computes all tokens. On CPU its norm is fused, and vLLM's is not.
ALL = "all"

_LOCAL = {
    "ram": TierSpec(kind="ram"),
    "disk": TierSpec(kind="disk"),
    "slow disk": TierSpec(kind="disk", throttle=200_000_000),
}


def tiers_of(settings: Settings) -> dict[str, TierSpec]:
    """Return the tiers to read from, by name: RAM, disk, one slowed to 200 MB/s, and every server that is
    configured and may be written."""
    servers = (spec for spec in settings.tiers if spec.on_server)
    return _LOCAL | {spec.label: spec for spec in servers if spec.writes != "never"}


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a sweep: the values of all parameters. quality: a step, instead of selector and ratio."""

    chunks: int
    chunk_tokens: int
    ratio: float
    codec: str
    tier: str = "ram"
    quality: str = ""

    @property
    def prompts(self) -> tuple[int, int]:
        """The values that the prompts depend on: points that agree in them are asked the same prompts."""
        return self.chunks, self.chunk_tokens

    @property
    def store(self) -> tuple[str, str]:
        return self.codec, self.tier

    @property
    def step(self) -> Step:
        """The step that the quality stands for. Raises ConfigError."""
        return Step("all", 1.0) if self.quality == ALL else step_of(self.quality)


@dataclass(frozen=True, slots=True)
class Axis:
    """A parameter that can be varied: how a value is read, and those that are measured by default."""

    name: str
    label: str
    read: Callable[[str], Value]
    default: Callable[[Settings], Sequence[Value]]

    def values(self, text: str | None, settings: Settings) -> tuple[Value, ...]:
        """Return the values in ``text``, by commas, each once. Raises ConfigError."""
        if text is None:
            return tuple(self.default(settings))
        values = []
        for word in map(str.strip, text.split(",")):
            try:
                values.append(self.read(word))
            except ValueError as error:
                raise ConfigError(f"--values: {word!r} is not a value of {self.name}: {error}") from None
        names = [value for value in self.default(settings) if isinstance(value, str)]
        for value in values:
            if isinstance(value, str) and value not in names:
                raise ConfigError(f"--values: no {self.name} {value!r} here, but {', '.join(names)}")
        return tuple(dict.fromkeys(values))

    def at(self, start: Point, value: Value) -> Point:
        return replace(start, **{self.name: value})  # type: ignore[arg-type]  # read as the field's type


def axis_named(name: str) -> Axis:
    """Return the axis of this name. Raises ConfigError for one that there is not."""
    if name not in AXES:
        raise ConfigError(f"--axis: no axis {name!r}, but {', '.join(AXES)}")
    return AXES[name]


def read_ratio(word: str) -> float:
    """Return ``"0.15"`` as a number. Raises ValueError, saying what is wrong."""
    try:
        ratio = round(float(word), 6)
    except ValueError:
        raise ValueError(f"{word.strip()!r} is not a number") from None
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"{ratio:g} is not above 0 and at most 1 (0 is the arm 'reuse')")
    return ratio


def parse_ratios(text: str) -> tuple[float, ...]:
    """Return ``"0.05,0.15"`` as numbers, each once. Raises ConfigError, naming what is wrong."""
    try:
        return tuple(dict.fromkeys(map(read_ratio, text.split(","))))
    except ValueError as error:
        raise ConfigError(f"--ratios: {error}") from None


def _whole(least: int) -> Callable[[str], int]:
    def read(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise ValueError(f"a whole number from {least} on is wanted")
        return int(word)

    return read


AXES = {
    axis.name: axis
    for axis in (
        Axis("chunks", "chunks in a prompt", _whole(2), lambda _: (2, 4, 6, 8, 12)),
        Axis("chunk_tokens", "tokens in a chunk", _whole(8), lambda _: (128, 256, 512, 1024)),
        Axis("ratio", "recompute ratio", read_ratio, lambda _: (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)),
        Axis("codec", "codec of stored KV", str, lambda _: sorted(CODECS)),
        Axis("quality", "step of quality", str, lambda _: (*STEPS, ALL)),
        Axis("tier", "tier that KV is read from", str, lambda settings: tuple(tiers_of(settings))),
    )
}
