"""From the times of decodes beside arriving prompts to the numbers that are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blendrag.errors import ConfigError
from blendrag.lab.bench.load_summary import percentiles
from blendrag.lab.bench.timed import Timed
from blendrag.lab.statistics import spread

Gap = tuple[float, float]  # begin and end of the time between two tokens of an answer


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds on one clock. decodes: answers that ran; arrivals: prompts that came beside them."""

    begin: float
    end: float
    decodes: Sequence[Timed]
    arrivals: Sequence[Timed]

    @property
    def gaps(self) -> list[Gap]:
        """Between tokens, as far as the second of them came in the window; by time."""
        gaps = [gap for decode in self.decodes for gap in decode.gaps if self.begin <= gap[1] < self.end]
        return sorted(gaps, key=lambda gap: gap[1])

    @property
    def waits(self) -> list[float]:
        """Of the arrivals, for their first token."""
        return [arrival.tokens[0] - arrival.due for arrival in self.arrivals if arrival.tokens]

    @property
    def during(self) -> list[Gap]:
        """Those gaps that an arrival fell into, between its being due and its first token. Unlike ``gaps``
        they do not depend on how far the arrivals are apart. All gaps, where nothing arrived."""
        spans = [(arrival.due, arrival.tokens[0]) for arrival in self.arrivals if arrival.tokens]
        met = [gap for gap in self.gaps if any(gap[0] < stop and gap[1] > start for start, stop in spans)]
        return met if self.arrivals else self.gaps

    def trace(self) -> list[list[float]]:
        """[seconds since the beginning, ms since the answer's last token] per token."""
        return [[after - self.begin, 1e3 * (after - before)] for before, after in self.gaps]


def _itl(gaps: Sequence[Gap]) -> dict[str, float]:
    if not gaps:
        raise ConfigError("no token came in time: ask for a longer --gap")
    return percentiles([1e3 * (after - before) for before, after in gaps])


def summarise_windows(windows: Sequence[Window]) -> dict[str, Any]:
    """One condition. itl_ms: between tokens, of all windows; during_ms: of those that an arrival fell into;
    p50, p95 and max. arrival_ttft_ms: None where nothing arrived. tokens_per_s: of all decodes."""
    waits = [1e3 * wait for window in windows for wait in window.waits]
    return {
        "itl_ms": _itl([gap for window in windows for gap in window.gaps]),
        "during_ms": _itl([gap for window in windows for gap in window.during]),
        "arrival_ttft_ms": asdict(spread(waits)) if waits else None,
        "tokens_per_s": sum(len(window.gaps) for window in windows)
        / sum(window.end - window.begin for window in windows),
    }


def ratios_to_alone(windows: Mapping[str, Sequence[Window]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Per condition with arrivals, repeat by repeat against ``alone``: the spread of the ratios of ``itl``
    and ``during``, each of p50, p95 and max."""
    alone = [_itl(window.gaps) for window in windows["alone"]]
    return {
        name: {
            which: {
                key: asdict(spread([one[key] / base[key] for one, base in zip(own, alone, strict=True)]))
                for key in ("p50", "p95", "max")
            }
            for which, own in (
                ("itl", [_itl(window.gaps) for window in of]),
                ("during", [_itl(window.during) for window in of]),
            )
        }
        for name, of in windows.items()
        if name != "alone"
    }
