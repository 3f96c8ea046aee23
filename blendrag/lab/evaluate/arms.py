"""The arms of an evaluation, by name: ways to answer one and the same prompt.

``full``: plain prefill, which all others are compared with. ``reordered``: the same with documents in an
order that the question has no say in, as ``order="tree"`` may have them. ``reuse``: stored KV as it is.
``SELECTOR[_METRIC]@RATIO``: stored KV of which the selector's choice is recomputed, ``hkvd_v@0.15``,
``query@0.1``. ``lmcache@RATIO``: the same by LMCache's published semantics, re-implemented.

Those with stored KV may add what chunks are prefilled behind (``:none``, ``:start``, ``:system``, as in the
setting ``shared_prefix``, and no text of their document; ``:context``, all that the settings say) and a
codec, ``:int8``. ``:ada:512`` has the answer decoded from a budget of 512 tokens of KV, shared by this
allocator; ``:random:512``, chosen by this scorer; alone, ``ada:512`` is of the settings' selector. Without
such an addition ``reuse`` (PromptCache) and ``lmcache`` prefill chunks alone whatever the settings say, as
their authors do: ``:none`` is another spelling of them, and the gap that arms close is that of full reuse so
defined. Selectors do as the settings say, which is what an index does. A selector without a ratio stands for
an arm at each of the ratios, ``paper`` for all selectors, ``adakv`` for all ways to share a budget, of 128 to
2,048 tokens.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from blendrag.compress import ALLOCATORS, SCORERS
from blendrag.engine.recipe import Recipe
from blendrag.errors import ConfigError
from blendrag.lab.bench.axes import read_ratio
from blendrag.options import Metric
from blendrag.select import SELECTORS
from blendrag.settings import Settings, SharedPrefix
from blendrag.store.codec import CODECS

FULL, REUSE, LMCACHE, PAPER, ADAKV, CONTEXT = "full", "reuse", "lmcache", "paper", "adakv", "context"
RATIOS = (0.05, 0.1, 0.15, 0.3)

ArmKind = Literal["full", "reordered", "stored"]
Variant = tuple[str, SharedPrefix, int]  # of stored KV: its codec, shared prefix and context's tokens

_PAPER_RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # CacheBlend's Figures 12 and 16 lie within them
_PAPER_SELECTORS = ("hkvd_v", "hkvd_k", "hkvd_kv", "gradual", "first_k", "query", "random", LMCACHE)
_RIVALS = ("hkvd_v", "first_k", "random")
_UNSTORED: tuple[ArmKind, ...] = ("full", "reordered")
_ALONE = (REUSE, LMCACHE)  # of other systems, which prefill chunks alone
_PREFIXES: tuple[SharedPrefix, ...] = get_args(SharedPrefix)
_METRICS: tuple[Metric, ...] = get_args(Metric)
_NO_CHOICE = ("all", "none")  # what ratios 1 and 0 are
_BUDGETS = (128, 256, 512, 1024, 2048)
_SHARED_BY = ("uniform", "ada", "pyramid", "ada_pyramid", "joint", "recent", "random")


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens of KV that a head keeps, on average; by: the allocator or scorer, the other is the settings'."""

    by: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.by}:{self.tokens}"

    @property
    def options(self) -> dict[str, Any]:
        return {"kv_budget": self.tokens, "kv_allocator" if self.by in ALLOCATORS else "kv_scorer": self.by}


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm. What is below ``kind`` describes stored KV, and is the default of other kinds.

    codec, shared_prefix: None is that of the settings. budget: None decodes from all KV.
    """

    name: str
    kind: ArmKind
    selector: str = "none"
    metric: Metric = "v"
    ratio: float = 0.0
    codec: str | None = None
    shared_prefix: SharedPrefix | None = None
    budget: Budget | None = None

    @property
    def whole(self) -> ArmSpec:
        """The same but decoded from all KV: what an arm with a budget is compared with."""
        return replace(self, name=self.name.removesuffix(f":{self.budget}"), budget=None)

    def variant(self, settings: Settings) -> Variant:
        """What its stored KV depends on: arms with the same can share a store."""
        context = settings.context_tokens if self.shared_prefix is None else 0
        return self.codec or settings.codec, self.shared_prefix or settings.shared_prefix, context

    def recipe(self, settings: Settings, store: str, spans: tuple[tuple[str, int, int], ...]) -> Recipe:
        """How a prompt is blended by it; check layers and threshold are those of the settings."""
        options = replace(
            settings.blending, selector=self.selector, recompute_ratio=self.ratio, metric=self.metric
        )
        budget = {"kv_budget": None} if self.budget is None else self.budget.options
        return Recipe(store, spans, replace(options, **budget))


def parse_arms(
    words: Sequence[str], ratios: Sequence[float] | None, settings: Settings
) -> tuple[ArmSpec, ...]:
    """The arms called ``words``, each once, ``full`` first. ratios: of selectors that name none.

    No words: full prefill, full reuse of chunks prefilled alone and as the settings say, and the selector of
    the settings next to its rivals. Raises ConfigError, with the nearest name there is.
    """
    found = {FULL: ArmSpec(FULL, "full")}
    for word in words or [*_reused(settings), *_compared(settings)]:
        for name, ratio in _expanded(word.strip(), ratios, settings):
            arm = parse_arm(name, ratio)
            found.setdefault(arm.whole.name, arm.whole)
            found[arm.name] = arm
    return tuple(found.values())


def parse_arm(name: str, ratio: float | None = None) -> ArmSpec:
    """One arm; ``ratio``: of a selector, instead of ``@RATIO``. Raises ConfigError."""
    base, *extras = name.split(":")
    if base in _UNSTORED:
        if extras:
            raise ConfigError(f"arm {name!r}: {base} uses no stored KV, so nothing of it can be set")
        return ArmSpec(base, base)
    selector, _, written = base.partition("@")
    if selector == REUSE:
        if written:
            raise ConfigError(f"arm {name!r}: full reuse recomputes nothing, so it has no ratio")
        return _with_extras(ArmSpec(REUSE, "stored"), extras)
    chosen, metric = _checked_selector(name, selector)
    at = _ratio(name, written) if written else ratio
    if at is None:
        raise ConfigError(f"arm {name!r}: a ratio is missing, as in {selector}@0.15")
    shown = f"hkvd_{metric}" if chosen == "hkvd" else selector
    return _with_extras(ArmSpec(f"{shown}@{at:g}", "stored", chosen, metric, at), extras)


def _reused(settings: Settings) -> tuple[str, str]:
    return REUSE, f"{REUSE}:{CONTEXT if settings.context_tokens else settings.shared_prefix}"


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
    if base == ADAKV:
        for tokens in _BUDGETS:
            yield from ((_of_settings(f"{by}:{tokens}", settings), None) for by in _SHARED_BY)
    elif base in (*ALLOCATORS, *SCORERS) and len(extras) == 1:  # "random" alone is a selector
        yield _of_settings(word, settings), None
    elif base == PAPER:
        yield from ((name, None) for name in _reused(settings))
        for selector in _PAPER_SELECTORS:
            for ratio in ratios or _PAPER_RATIOS:
                yield ":".join([selector, *extras]), ratio
    elif "@" in base or base == REUSE or base in _UNSTORED:
        yield word, None
    else:
        yield from ((word, ratio) for ratio in ratios or RATIOS)


def _of_settings(budget: str, settings: Settings) -> str:
    return f"{next(_compared(settings))}@{settings.recompute_ratio:g}:{budget}"


def _ratio(name: str, written: str) -> float:
    try:
        return read_ratio(written)
    except ValueError as error:
        raise ConfigError(f"arm {name!r}: {error}") from None


def _checked_selector(name: str, selector: str) -> tuple[str, Metric]:
    """A selector's name and metric: ``hkvd_k`` is ("hkvd", "k"), ``first_k`` a name of its own. Raises
    ConfigError, with the nearest name, for any other."""
    if selector == LMCACHE:
        return LMCACHE, "k"
    known = [each for each in SELECTORS if each not in (*_NO_CHOICE, LMCACHE)]
    chosen, metric = selector, "v"
    if selector not in known and selector.rpartition("_")[2] in _METRICS:
        chosen, _, metric = selector.rpartition("_")
    if chosen not in known:
        names = [*_UNSTORED, *_ALONE, PAPER, ADAKV, *known, *ALLOCATORS, *(f"hkvd_{one}" for one in _METRICS)]
        raise ConfigError(f"unknown arm {name!r}; {_nearest(chosen, sorted(names))}")
    return chosen, cast(Metric, metric)


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


def _with_extras(arm: ArmSpec, extras: Sequence[str]) -> ArmSpec:
    """In the order of names that are compared: the shared prefix first, unless the arm has it anyway."""
    behind = (*_PREFIXES, CONTEXT)
    known = [*behind, *CODECS, *ALLOCATORS, *SCORERS]
    budget, extras = _budget(arm, list(extras))
    for extra in extras:
        if extra not in known:
            raise ConfigError(f"arm {arm.name!r}: unknown addition {extra!r}; {_nearest(extra, known)}")
    prefix, codec = (_one_of(arm, kinds, extras) for kinds in (behind, CODECS))
    usual = "none" if arm.name.partition("@")[0] in _ALONE else CONTEXT
    prefix = prefix or usual
    shown = (prefix if prefix != usual else None, codec, str(budget or ""))
    name = ":".join([arm.name, *filter(None, shown)])
    shared = None if prefix == CONTEXT else cast(SharedPrefix, prefix)
    return replace(arm, name=name, shared_prefix=shared, codec=codec, budget=budget)


def _budget(arm: ArmSpec, extras: list[str]) -> tuple[Budget | None, list[str]]:
    """It, and the other additions."""
    places = [at for at, extra in enumerate(extras) if extra in (*ALLOCATORS, *SCORERS)]
    if not places:
        return None, extras
    at = places[0]
    by, *rest = extras[at:]
    if not rest or not rest[0].isdecimal() or not int(rest[0]):
        raise ConfigError(f"arm {arm.name!r}: {by} needs a budget, as in {arm.name}:{by}:512")
    if len(places) > 1:
        raise ConfigError(f"arm {arm.name!r}: one budget, not {' and '.join(extras[at] for at in places)}")
    return Budget(by, int(rest[0])), extras[:at] + rest[1:]


def _one_of(arm: ArmSpec, kinds: Iterable[str], extras: Sequence[str]) -> str | None:
    found = [kind for kind in kinds if kind in extras]
    if len(found) > 1:
        raise ConfigError(f"arm {arm.name!r}: KV is stored in one way, not as {' and '.join(found)}")
    return found[0] if found else None
