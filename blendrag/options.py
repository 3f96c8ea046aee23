"""How a prompt is blended: what settings, requests, recipes and selectors hold, each default once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from blendrag.errors import ConfigError

Metric = Literal["v", "k", "kv"]
Quality = Literal["fast", "balanced", "close"]

# Options that say from how much of its KV a prompt's answer is decoded.
BUDGET = ("kv_budget", "kv_allocator", "kv_scorer", "kv_alpha", "kv_window")


class Step(NamedTuple):
    """What a quality stands for (measured: docs/results.md)."""

    selector: str
    recompute_ratio: float


STEPS: dict[Quality, Step] = {
    "fast": Step("first_k", 0.05),
    "balanced": Step("query", 0.15),
    "close": Step("query", 0.3),
}


def step_of(quality: object) -> Step:
    """Raises ConfigError for one that there is not."""
    for name, step in STEPS.items():
        if quality == name:
            return step
    raise ConfigError(f"quality must be {', '.join(STEPS)}, not {quality!r}")


@dataclass(frozen=True, slots=True)
class BlendOptions:
    """Options of blending that may differ from request to request; settings have them under the same names.

    recompute_ratio: share of the request's cached tokens that is recomputed, on average over the layers
        (CacheBlend section 7.2 uses 0.15).
    selector: which tokens these are (:mod:`blendrag.select`).
    metric: what HKVD compares: V (the paper's released code), K (LMCache), or both.
    check_layers: layers at which deviation is measured (CacheBlend section 4.3).
    threshold: squared deviation relative to the tokens' mean squared norm below which a token is left
        alone; the ratio then is the cap.
    auto_ratio: recompute more than the ratio where loading leaves time for it (mode A of the controller).
    blend: False prefills plainly.
    min_cached_tokens: below so many cached tokens a prompt is prefilled plainly.
    kv_budget: tokens that the answer is decoded from, on average of a head, window included; None: all.
    kv_allocator: how heads share it (:mod:`blendrag.compress`); kv_scorer: which tokens they keep.
    kv_alpha: the share of every head's budget that is the uniform one (Ada-KV section 3.4).
    kv_window: the prompt's last tokens that score the others, and stay.
    trace: whether the evidence says what was loaded and computed when.

    Raises ConfigError for a value that no selector could use.
    """

    recompute_ratio: float = STEPS["balanced"].recompute_ratio
    selector: str = STEPS["balanced"].selector
    metric: Metric = "v"
    check_layers: tuple[int, ...] = (1,)
    threshold: float | None = None
    auto_ratio: bool = False
    blend: bool = True
    min_cached_tokens: int = 128
    kv_budget: int | None = None
    kv_allocator: str = "ada"
    kv_scorer: str = "window"
    kv_alpha: float = 0.5
    kv_window: int = 32
    trace: bool = False

    def __post_init__(self) -> None:
        ratio = self.recompute_ratio
        if not isinstance(ratio, int | float) or not 0.0 <= ratio <= 1.0:
            raise ConfigError(f"recompute_ratio must be between 0 and 1, not {ratio!r}")
        if not isinstance(self.blend, bool):
            raise ConfigError(f"blend must be True or False, not {self.blend!r}")
        if not isinstance(self.selector, str):
            raise ConfigError(f"selector must be a name, not {self.selector!r}")
        if self.metric not in ("v", "k", "kv"):
            raise ConfigError(f"metric must be v, k or kv, not {self.metric!r}")
        self._check_kv()

    def _check_kv(self) -> None:
        counts = {"kv_window": self.kv_window} | (
            {} if self.kv_budget is None else {"kv_budget": self.kv_budget}
        )
        for name, count in counts.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigError(f"{name} must be a number of tokens, at least 1, not {count!r}")
        if not isinstance(self.kv_alpha, int | float) or not 0.0 <= self.kv_alpha <= 1.0:
            raise ConfigError(f"kv_alpha must be between 0 and 1, not {self.kv_alpha!r}")
        for name, value in (("kv_allocator", self.kv_allocator), ("kv_scorer", self.kv_scorer)):
            if not isinstance(value, str):
                raise ConfigError(f"{name} must be a name, not {value!r}")


DEFAULTS = BlendOptions()
