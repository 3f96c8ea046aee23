"""The guard against loading what is sooner prefilled, by what was measured of the last loads and prefills."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from blendrag.store.tiers import Tier

LEAST_TOKENS = 256
"""The least tokens of a prompt that are worth a decision, and of a load or a prefill that tell a rate: of
fewer, what a call takes would be taken for what a token takes."""

_LAST = 3  # loads of a tier, or prefills, that tell its rate
_PROBE = 16  # one in so many prompts is loaded that would be refused, since a tier may have become fast


class _Rate:
    """Tokens per second: the best of the last three, since whatever disturbs one makes it slower."""

    def __init__(self) -> None:
        self.last: deque[float] = deque(maxlen=_LAST)

    def add(self, tokens: float, seconds: float) -> None:
        self.last.append(tokens / max(seconds, 1e-9))

    def seconds(self, tokens: float) -> float:
        return tokens / max(self.last)


class LoadGuard:
    """The guard of one engine, over all of its tiers. Thread-safe.

    It refuses nothing until a tier was loaded from three times, and something was prefilled.
    """

    def __init__(self) -> None:
        self._tiers: WeakKeyDictionary[Tier, _Rate] = WeakKeyDictionary()
        self._engine, self._own = _Rate(), _Rate()
        self._refused = 0
        self._lock = threading.Lock()

    def loaded(self, tier: Tier, tokens: int, seconds: float) -> None:
        """Note that all layers of so many tokens were read from a tier, verified and decoded."""
        if tokens >= LEAST_TOKENS:
            with self._lock:
                self._tiers.setdefault(tier, _Rate()).add(tokens, seconds)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Note that the engine has prefilled so many tokens."""
        if tokens >= LEAST_TOKENS:
            with self._lock:
                self._engine.add(tokens, seconds)

    def computed(self, tokens: float, seconds: float) -> None:
        """Note that our own forward has computed so many tokens, however few. It computes slower than the
        engine does, and counts until the engine has prefilled something."""
        with self._lock:
            self._own.add(tokens, seconds)

    def refuses(self, loads: Mapping[Tier, int], tokens: int) -> str | None:
        """Return why a prompt should be prefilled, ``tokens`` of which would be loaded otherwise; None: load
        it. loads: the tokens to read, by tier, also of what is there already."""
        with self._lock:
            prefill = self._engine if self._engine.last else self._own
            known = {tier: rate for tier in loads if (rate := self._tiers.get(tier))}
            rates = {tier: rate for tier, rate in known.items() if len(rate.last) == _LAST}
            if tokens < LEAST_TOKENS or not prefill.last or not rates:
                return None
            load_s = sum(rate.seconds(loads[tier]) for tier, rate in rates.items())
            if load_s <= (prefill_s := prefill.seconds(tokens)):
                return None
            self._refused += 1
            if self._refused % _PROBE == 0:
                return None
        read, names = sum(loads[tier] for tier in rates), " and ".join(tier.name for tier in rates)
        return f"loading {read:,} tokens from {names} would take {load_s:.3g} s, prefilling {prefill_s:.3g} s"
