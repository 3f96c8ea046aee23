"""The arms of an evaluation, by name: ways to answer one and the same prompt.

``full``: plain prefill, which all others are compared with. ``reordered``: the same with documents in an
order that the question has no say in, as ``order="tree"`` may have them. ``reuse``: stored KV as it is.
A selector as it is written anywhere (:mod:`blendrag.choice`): stored KV of which its choice is recomputed,
``query@0.1``, ``hkvd@0.15:metric=k``. ``lmcache@RATIO``: the same by LMCache's published semantics,
re-implemented.

Those with stored KV may add what chunks are prefilled behind (``:none``, ``:start``, ``:system``, as in the
setting ``shared_prefix``, and no text of their document; ``:context``, all that the settings say) and a
codec, ``:int8``. A budget of KV, as it is written anywhere, comes last: ``:512``, ``:512:uniform``; alone,
``512`` is of the settings' selector. Without such an addition ``reuse`` (PromptCache) and ``lmcache`` prefill
chunks alone whatever the settings say, as their authors do: ``:none`` is another spelling of them, and the
gap that arms close is that of full reuse so defined. Selectors do as the settings say, which is what an index
does. A selector without a ratio stands for an arm at each of the ratios, ``paper`` for all selectors,
``adakv`` for all ways to share a budget, of 128 to 2,048 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast, get_args

from blendrag.choice import Choice, written
from blendrag.compress import check_budget
from blendrag.engine.wire.recipe import Recipe
from blendrag.errors import ConfigError
from blendrag.lab.bench.axes import read_ratio
from blendrag.names import closest
from blendrag.options import BlendOptions
from blendrag.select import SELECTORS, make_selector
from blendrag.settings import Settings, SharedPrefix
from blendrag.store.codec import CODECS

FULL, REUSE, LMCACHE, PAPER, ADAKV, CONTEXT = "full", "reuse", "lmcache", "paper", "adakv", "context"
RATIOS = (0.05, 0.1, 0.15, 0.3)

ArmKind = Literal["full", "reordered", "stored"]

_PAPER_RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # CacheBlend's Figures 12 and 16 lie within them
_PAPER_VARIANTS = ("hkvd:metric=k", "hkvd:metric=kv", "query:shift=no", LMCACHE)  # besides all selectors
_RIVALS = ("hkvd", "first_k", "random")
_UNSTORED: tuple[ArmKind, ...] = ("full", "reordered")
_ALONE = (REUSE, LMCACHE)  # arms of other systems, which prefill chunks alone
_PREFIXES: tuple[SharedPrefix, ...] = get_args(SharedPrefix)
_NO_CHOICE = ("all", "none")  # what ratios 1 and 0 are
_BUDGETS = (128, 256, 512, 1024, 2048)
_SHARED_BY = ("uniform", "ada", "pyramid", "ada_pyramid", "critical")


class Variant(NamedTuple):
    """A variant of stored KV: what the settings of these names would be, for an index to have it."""

    codec: str
    shared_prefix: SharedPrefix
    context_tokens: int


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm of an evaluation. What is below ``kind`` describes stored KV, and is the default of other kinds.

    selector: with its arguments. codec, shared_prefix: None is that of the settings. budget: as it is
    written; None decodes from all KV.
    """

    name: str
    kind: ArmKind
    selector: str = "none"
    ratio: float = 0.0
    codec: str | None = None
    shared_prefix: SharedPrefix | None = None
    budget: str | None = None

    @property
    def whole(self) -> ArmSpec:
        """Return the same arm decoded from all KV: what an arm with a budget is compared with."""
        return replace(self, name=self.name.removesuffix(f":{self.budget}"), budget=None)

    def variant(self, settings: Settings) -> Variant:
        """Return the part of an arm that its stored KV depends on: arms with the same can share a store."""
        context = settings.context_tokens if self.shared_prefix is None else 0
        return Variant(
            self.codec or settings.new_codec, self.shared_prefix or settings.shared_prefix, context
        )

    def recipe(self, settings: Settings, store: str, spans: tuple[tuple[str, int, int], ...]) -> Recipe:
        """Return how a prompt is blended by it."""
        options = replace(
            settings.blending, selector=self.selector, recompute_ratio=self.ratio, kv_budget=self.budget
        )
        return Recipe(store, spans, options)


def parse_arms(
    words: Sequence[str], ratios: Sequence[float] | None, settings: Settings
) -> tuple[ArmSpec, ...]:
    """Return the arms called ``words``, each once, ``full`` first. ratios: of selectors that name none.

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
    """Read one arm; ``ratio``: of a selector, instead of ``@RATIO``. Raises ConfigError."""
    stored, budget = _split(name)
    choice = Choice.read(stored)
    if choice.name in _UNSTORED:
        if name != choice.name:
            raise ConfigError(f"arm {name!r}: {choice.name} uses no stored KV, so nothing of it can be set")
        return ArmSpec(choice.name, choice.name)
    if choice.name == REUSE:
        if choice.at is not None:
            raise ConfigError(f"arm {name!r}: full reuse recomputes nothing, so it has no ratio")
        choice.read_arguments("arm", {})
        return _with_additions(ArmSpec(REUSE, "stored"), choice.words, budget)
    _check_name(name, choice.name)
    at = ratio if choice.at is None else _ratio(name, choice.at)
    own = Choice(choice.name, arguments=choice.arguments)
    if at is None:
        raise ConfigError(f"arm {name!r}: a ratio is missing, as in {replace(own, at=0.15)}")
    if choice.name == LMCACHE:
        choice.read_arguments("arm", {})
    else:
        make_selector(BlendOptions(selector=str(own)))
    arm = ArmSpec(str(replace(own, at=at)), "stored", str(own), at)
    return _with_additions(arm, choice.words, budget)


def _split(name: str) -> tuple[str, str | None]:
    """Return an arm without its budget of KV, and that."""
    parts = [part.strip() for part in name.split(":")]
    at = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    return (name, None) if at is None else (":".join(parts[:at]), ":".join(parts[at:]))


def _reused(settings: Settings) -> tuple[str, str]:
    return REUSE, f"{REUSE}:{CONTEXT if settings.context_tokens else settings.shared_prefix}"


def _compared(settings: Settings) -> Iterator[str]:
    own = settings.blending.selector
    if own not in _NO_CHOICE:
        yield own
    yield from _RIVALS


def _expanded(
    word: str, ratios: Sequence[float] | None, settings: Settings
) -> Iterator[tuple[str, float | None]]:
    """Yield a preset, or a selector without a ratio, as one name per ratio."""
    stored, budget = _split(word)
    own = next(_compared(settings)), settings.blending.recompute_ratio
    if word == ADAKV:
        for tokens in _BUDGETS:
            yield from ((f"{own[0]}:{tokens}:{by}", own[1]) for by in _SHARED_BY)
    elif not stored and budget:
        yield f"{own[0]}:{budget}", own[1]
    elif (base := word.partition(":")[0]) == PAPER:
        yield from ((name, None) for name in _reused(settings))
        for selector in (*_choosing(), *_PAPER_VARIANTS):
            for ratio in ratios or _PAPER_RATIOS:
                yield selector + word.removeprefix(PAPER), ratio
    elif "@" in base or base == REUSE or base in _UNSTORED:
        yield word, None
    else:
        yield from ((word, ratio) for ratio in ratios or RATIOS)


def _ratio(name: str, at: float) -> float:
    try:
        return read_ratio(written(at))
    except ValueError as error:
        raise ConfigError(f"arm {name!r}: {error}") from None


def _choosing() -> list[str]:
    """Return the selectors that leave a choice."""
    return [name for name in SELECTORS if name not in (*_NO_CHOICE, LMCACHE)]


def _check_name(arm: str, selector: str) -> None:
    """Raise ConfigError, with the nearest name, for one that is no selector's."""
    if selector not in (*_choosing(), LMCACHE):
        names = sorted([*_UNSTORED, *_ALONE, PAPER, ADAKV, *_choosing()])
        raise ConfigError(f"unknown arm {arm!r}; there are {', '.join(names)}{closest(selector, names)}")


def _with_additions(arm: ArmSpec, words: Sequence[str], budget: str | None) -> ArmSpec:
    """Return an arm with its additions, in the order of names that are compared: the shared prefix first,
    unless the arm has it anyway."""
    behind = (*_PREFIXES, CONTEXT)
    known = (*behind, *CODECS)
    for word in words:
        if word not in known:
            raise ConfigError(
                f"arm {arm.name!r}: unknown addition {word!r}; there are {', '.join(known)}"
                f"{closest(word, known)}"
            )
    prefix, codec = (_one_of(arm, kinds, words) for kinds in (behind, CODECS))
    usual = "none" if arm.selector == LMCACHE or arm.name == REUSE else CONTEXT
    prefix = prefix or usual
    check_budget(BlendOptions(kv_budget=budget))
    shown = (prefix if prefix != usual else None, codec, budget)
    name = ":".join([arm.name, *filter(None, shown)])
    shared = None if prefix == CONTEXT else cast(SharedPrefix, prefix)
    return replace(arm, name=name, shared_prefix=shared, codec=codec, budget=budget)


def _one_of(arm: ArmSpec, kinds: Iterable[str], words: Sequence[str]) -> str | None:
    found = [kind for kind in kinds if kind in words]
    if len(found) > 1:
        raise ConfigError(f"arm {arm.name!r}: KV is stored in one way, not as {' and '.join(found)}")
    return found[0] if found else None
