"""The arms of an evaluation, by name: ways to answer one and the same prompt.

``full``: plain prefill, which all others are compared with. ``reuse``: stored KV as it is.
``SELECTOR[_METRIC]@RATIO``: stored KV of which the selector's choice is recomputed, ``hkvd_v@0.15``,
``first_k+query@0.1``. ``lmcache@RATIO``: the same by LMCache's published semantics, re-implemented.
``map_reduce``, ``map_rerank``: a request per document, as LangChain's chains of these names make them.

Those with stored KV may add what chunks are prefilled behind (``:none``, ``:start``, ``:system``, as in the
setting ``shared_prefix``) and a codec, ``:int8``. Without such an addition ``reuse`` (PromptCache) and
``lmcache`` prefill chunks alone whatever the settings say, as their authors do: ``:none`` is another spelling
of them, and the gap that arms close is that of full reuse so defined. Selectors do as the settings say, which
is what an index does. A selector without a ratio stands for an arm at each of the ratios, ``paper`` for all
selectors.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from blendrag.engine.recipe import Recipe, Semantics
from blendrag.errors import ConfigError
from blendrag.lab.bench.axes import read_ratio
from blendrag.options import BlendOptions, Metric
from blendrag.select import SELECTORS, make_selector
from blendrag.settings import Settings, SharedPrefix
from blendrag.store.codec import codec_names

Kind = Literal["full", "stored", "map_reduce", "map_rerank"]
Variant = tuple[str, SharedPrefix]  # of stored KV: its codec and shared prefix

RATIOS = (0.05, 0.1, 0.15, 0.3)
PAPER = "paper"
_PAPER_RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # CacheBlend's Figures 12 and 16 lie within them
_PAPER_SELECTORS = (
    "hkvd_v", "hkvd_k", "hkvd_kv", "gradual", "first_k", "query", "gradual_query", "weighted", "random",
    "first_k+hkvd", "lmcache",
)  # fmt: skip
_RIVALS = ("hkvd_v", "weighted", "first_k", "random")
_PLAIN: tuple[Kind, ...] = ("full", "map_reduce", "map_rerank")
_REUSE, _LMCACHE = "reuse", "lmcache"
_PREFIXES: tuple[SharedPrefix, ...] = get_args(SharedPrefix)
_METRICS: tuple[Metric, ...] = get_args(Metric)
_NO_CHOICE = ("all", "none")  # what ratios 1 and 0 are
_ALONE = (_REUSE, _LMCACHE)  # of other systems, which prefill chunks alone


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm. What is below ``kind`` describes stored KV, and is the default of other kinds.

    codec, shared_prefix: None is that of the settings.
    """

    name: str
    kind: Kind
    selector: str = "none"
    metric: Metric = "v"
    ratio: float = 0.0
    codec: str | None = None
    shared_prefix: SharedPrefix | None = None
    semantics: Semantics = "exact"

    def variant(self, settings: Settings) -> Variant:
        """What its stored KV depends on: arms with the same can share a store."""
        return self.codec or settings.codec, self.shared_prefix or settings.shared_prefix

    def recipe(self, settings: Settings, store: str, spans: tuple[tuple[str, int, int], ...]) -> Recipe:
        """How a prompt is blended by it; check layers and threshold are those of the settings."""
        options = replace(
            settings.blending, selector=self.selector, recompute_ratio=self.ratio, metric=self.metric
        )
        own = Recipe(store, spans, options)
        return own.as_lmcache() if self.semantics == "lmcache" else own


def parse_arms(
    words: Sequence[str], ratios: Sequence[float] | None, settings: Settings
) -> tuple[ArmSpec, ...]:
    """The arms called ``words``, each once, ``full`` first. ratios: of selectors that name none.

    No words: full prefill, full reuse of chunks prefilled alone and as the settings say, and the selector of
    the settings next to its rivals. Raises ConfigError, with the nearest name there is.
    """
    found = {"full": ArmSpec("full", "full")}
    for word in words or [*_reused(settings), *_compared(settings)]:
        for name, at in _expanded(word.strip(), ratios, settings):
            arm = parse_arm(name, at)
            found[arm.name] = arm
    return tuple(found.values())


def parse_arm(name: str, ratio: float | None = None) -> ArmSpec:
    """One arm; ``ratio``: of a selector, instead of ``@RATIO``. Raises ConfigError."""
    base, *extras = name.split(":")
    if base in _PLAIN:
        if extras:
            raise ConfigError(f"arm {name!r}: {base} uses no stored KV, so nothing of it can be set")
        return ArmSpec(base, base)
    selector, _, written = base.partition("@")
    at = _ratio(name, written) if written else ratio
    if selector == _REUSE:
        if written:
            raise ConfigError(f"arm {name!r}: full reuse recomputes nothing, so it has no ratio")
        return _with_extras(ArmSpec(_REUSE, "stored"), extras)
    _check_selector(name, selector)
    if at is None:
        raise ConfigError(f"arm {name!r}: a ratio is missing, as in {selector}@0.15")
    if selector == _LMCACHE:
        arm = ArmSpec(f"{_LMCACHE}@{at:g}", "stored", "hkvd", "k", at, semantics="lmcache")
    else:
        chosen, metric = _metric_of(selector)
        shown = f"hkvd_{metric}" if chosen == "hkvd" else selector
        make_selector(BlendOptions(at, chosen, metric))  # raises for two that cannot share a budget
        arm = ArmSpec(f"{shown}@{at:g}", "stored", chosen, metric, at)
    return _with_extras(arm, extras)


def _reused(settings: Settings) -> tuple[str, str]:
    return _REUSE, f"{_REUSE}:{settings.shared_prefix}"


def _compared(settings: Settings) -> Iterator[str]:
    own = settings.selector
    if own not in _NO_CHOICE:
        yield own if settings.metric == "v" else f"{own}_{settings.metric}"
    yield from _RIVALS


def _expanded(
    word: str, ratios: Sequence[float] | None, settings: Settings
) -> Iterator[tuple[str, float | None]]:
    """A preset, or a selector without a ratio, as one name per ratio."""
    base, *extras = word.split(":")
    if base == PAPER:
        yield from ((name, None) for name in _reused(settings))
        for selector in _PAPER_SELECTORS:
            for ratio in ratios or _PAPER_RATIOS:
                yield ":".join([selector, *extras]), ratio
    elif "@" in base or base == _REUSE or base in _PLAIN:
        yield word, None
    else:
        yield from ((word, ratio) for ratio in ratios or RATIOS)


def _ratio(name: str, written: str) -> float:
    try:
        return read_ratio(written)
    except ValueError as error:
        raise ConfigError(f"arm {name!r}: {error}") from None


def _metric_of(selector: str) -> tuple[str, Metric]:
    """``hkvd_k`` as ("hkvd", "k"); ``first_k`` is a name of its own."""
    last = selector.rpartition("+")[2]
    stem, _, metric = selector.rpartition("_")
    if last in _selectors() or metric not in _METRICS:
        return selector, "v"
    return stem, metric


def _selectors() -> list[str]:
    return [name for name in SELECTORS if name not in _NO_CHOICE]


def _check_selector(name: str, selector: str) -> None:
    """Raise ConfigError unless every part of it is a selector, the last perhaps with a metric."""
    known = _selectors()
    parts = _metric_of(selector)[0].split("+")
    for part in parts:
        if part not in known and not (part == _LMCACHE and len(parts) == 1):
            names = [*_PLAIN, _REUSE, _LMCACHE, PAPER, *known, *(f"hkvd_{metric}" for metric in _METRICS)]
            near = difflib.get_close_matches(part, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(names))}"
            raise ConfigError(f"unknown arm {name!r}; {hint}")


def _with_extras(arm: ArmSpec, extras: Sequence[str]) -> ArmSpec:
    """In the order of names that are compared: the shared prefix first, unless the arm has it anyway."""
    known = [*_PREFIXES, *codec_names()]
    for extra in extras:
        if extra not in known:
            near = difflib.get_close_matches(extra, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"arm {arm.name!r}: unknown addition {extra!r}; {hint}")
    prefixes: list[str] = [kind for kind in _PREFIXES if kind in extras]
    codecs = [codec for codec in codec_names() if codec in extras]
    for several in (prefixes, codecs):
        if len(several) > 1:
            raise ConfigError(f"arm {arm.name!r}: KV is stored in one way, not as {' and '.join(several)}")
    shown = prefixes
    if arm.name.partition("@")[0] in _ALONE:
        prefixes = prefixes or ["none"]
        shown = [kind for kind in prefixes if kind != "none"]
    prefix, codec = (several[0] if several else None for several in (prefixes, codecs))
    name = ":".join([arm.name, *shown, *codecs])
    return replace(arm, name=name, shared_prefix=cast(SharedPrefix | None, prefix), codec=codec)
