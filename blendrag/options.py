"""Options of blending a prompt: what settings, requests, recipes and selectors hold, each declared once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypedDict

from pydantic import BaseModel, Field

from blendrag.choice import Choice
from blendrag.errors import ConfigError

Quality = Literal["fast", "balanced", "close"]


class Step(NamedTuple):
    """The options that a step of quality stands for."""

    selector: str
    recompute_ratio: float


STEPS: dict[Quality, Step] = {
    "fast": Step("query", 0.06),
    "balanced": Step("query", 0.12),
    "close": Step("query", 0.3),
}


def step_of(quality: object) -> Step:
    """Return the step of this quality. Raises ConfigError for one that there is not."""
    for name, step in STEPS.items():
        if quality == name:
            return step
    raise ConfigError(f"quality must be {', '.join(STEPS)}, not {quality!r}")


class BlendOverrides(BaseModel):
    """Options of blending that settings, constructors, commands and requests may give; None is not given."""

    quality: Quality | None = Field(
        default=None, description="How much stored KV is repaired: fast, balanced or close to full prefill."
    )
    blend: bool | None = Field(
        default=None,
        description="Whether prompts are blended; else all are prefilled plainly, for comparison.",
    )
    selector: str | None = Field(
        default=None, description="Which stored tokens are recomputed: query, hkvd@0.15:metric=k, ..."
    )
    recompute_ratio: float | None = Field(
        default=None, description="Share of the stored tokens that is recomputed: 0, none, to 1, all."
    )
    kv_budget: int | str | None = Field(
        default=None,
        description="Tokens of a prompt's KV that its answer is decoded from: 512, 512:ada:alpha=0.2, ...",
    )
    min_cached_tokens: int | None = Field(
        default=None, description="Prompts with fewer stored tokens are prefilled plainly."
    )


class BlendKeywords(TypedDict, total=False):
    """Options of blending as calls take them: :class:`BlendOverrides`, and ``trace``, for single requests."""

    quality: Quality | None
    blend: bool | None
    selector: str | None
    recompute_ratio: float | None
    kv_budget: int | str | None
    min_cached_tokens: int | None
    trace: bool | None


@dataclass(frozen=True, slots=True)
class BlendOptions:
    """The options by which a prompt is blended, each with its value.

    recompute_ratio: share of the request's cached tokens that is recomputed, on average over the layers
        (CacheBlend section 7.2 uses 0.15).
    selector: which tokens these are, with its arguments (:mod:`blendrag.select`).
    blend: False prefills plainly.
    min_cached_tokens: below so many cached tokens a prompt is prefilled plainly.
    kv_budget: tokens that the answer is decoded from, on average of a head, window included, and how they are
        chosen (:mod:`blendrag.compress`); None: all.
    trace: whether the evidence says what was loaded and computed when.

    Raises ConfigError for a value that no selector could use.
    """

    recompute_ratio: float = STEPS["balanced"].recompute_ratio
    selector: str = STEPS["balanced"].selector
    blend: bool = True
    min_cached_tokens: int = 128
    kv_budget: int | str | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        ratio, least = self.recompute_ratio, self.min_cached_tokens
        if not isinstance(ratio, int | float) or not 0.0 <= ratio <= 1.0:
            raise ConfigError(f"recompute_ratio must be between 0 and 1, not {ratio!r}")
        for name, value in (("blend", self.blend), ("trace", self.trace)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} must be True or False, not {value!r}")
        if not isinstance(least, int) or isinstance(least, bool) or least < 0:
            raise ConfigError(f"min_cached_tokens must be a number of tokens, not {least!r}")
        if not isinstance(self.selector, str):
            raise ConfigError(f"selector must be a name, not {self.selector!r}")
        if Choice.read(self.selector).at is not None:
            raise ConfigError(f"selector {self.selector!r}: its ratio is the option recompute_ratio here")
        if self.kv_budget is not None:
            _check_budget(self.kv_budget)


def _check_budget(written: object) -> None:
    if isinstance(written, int | str) and not isinstance(written, bool):
        choice = Choice.read(str(written))
        if choice.name.isdecimal() and int(choice.name) and choice.at is None:
            return
    raise ConfigError(f"kv_budget must be a number of tokens, as 512 or '512:ada', not {written!r}")


DEFAULTS = BlendOptions()


def spelled_out(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with selector and ratio each under its own name: what a quality stands for, where they
    are not given, and the ratio in ``hkvd@0.15``. Raises ConfigError for two ratios, and for a wrong quality.
    """
    given = dict(options)
    if isinstance(selector := given.get("selector"), str):
        choice = Choice.read(selector)
        if choice.at is not None:
            if given.get("recompute_ratio") is not None:
                raise ConfigError(
                    f"selector {selector!r} and recompute_ratio {given['recompute_ratio']!r}: give one ratio"
                )
            given |= {"selector": str(replace(choice, at=None)), "recompute_ratio": choice.at}
    if given.get("quality") is None:
        return given
    return step_of(given["quality"])._asdict() | {
        name: given[name] for name in given if given[name] is not None
    }


def resolved(options: Mapping[str, Any], base: BlendOptions = DEFAULTS) -> BlendOptions:
    """Return ``base`` with those of ``options`` that are not None. Raises ConfigError."""
    given = spelled_out(options)
    names = (field.name for field in fields(BlendOptions))
    return replace(base, **{name: given[name] for name in names if given.get(name) is not None})
