"""What the catalogue counts: how much there is, what was used, and what the tiers did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blendrag.store.catalogue_schema import CataloguePart


@dataclass(frozen=True, slots=True)
class Totals:
    """Chunks and bytes by state, and owners."""

    chunks: int
    ready: int
    pending: int
    evicted: int
    tokens: int
    bytes: int
    owners: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """How often the chunks of an owner were used from the store."""

    owner: str
    chunks: int
    tokens: int
    uses: int


class CatalogueUsage(CataloguePart):
    """The part of :class:`~blendrag.store.catalogue.Catalogue` that counts."""

    def touch(self, uses: Mapping[str, tuple[int, int]]) -> None:
        """Note (time of the last use, number of uses since the last note) by key.

        The time is in any unit that grows. An earlier one than noted before, from a clock that was set back,
        is not believed.
        """
        with self._file.transaction() as db:
            db.executemany(
                "UPDATE records SET used = MAX(used, ?), uses = uses + ? WHERE key = ?",
                [(at, count, key) for key, (at, count) in uses.items()],
            )

    def count(self, tier: str, counts: Mapping[str, int]) -> None:
        """Add to a tier's counters, which outlive the process."""
        with self._file.transaction() as db:
            db.executemany(
                "INSERT INTO counters VALUES (?, ?, ?)"
                " ON CONFLICT DO UPDATE SET value = value + excluded.value",
                [(tier, name, by) for name, by in counts.items()],
            )

    def counters(self) -> dict[str, dict[str, int]]:
        """What was counted, by tier and name."""
        found: dict[str, dict[str, int]] = {}
        for tier, name, value in self._file.rows("SELECT tier, name, value FROM counters"):
            found.setdefault(tier, {})[name] = value
        return found

    def totals(self) -> Totals:
        ((chunks, ready, pending, evicted, tokens, size),) = self._file.rows(
            "SELECT COUNT(*), IFNULL(SUM(state = 'ready'), 0), IFNULL(SUM(state = 'pending'), 0),"
            " IFNULL(SUM(state = 'evicted'), 0), IFNULL(SUM(tokens), 0), IFNULL(SUM(bytes), 0) FROM records"
        )
        ((owners,),) = self._file.rows("SELECT COUNT(*) FROM (SELECT DISTINCT owner FROM owners)")
        return Totals(chunks, ready, pending, evicted, tokens, size, owners)

    def reuse(self, limit: int) -> list[Reuse]:
        """The owners whose chunks were used most often, at most ``limit``."""
        rows = self._file.rows(
            "SELECT owner, COUNT(*), SUM(tokens), SUM(uses) AS total FROM owners JOIN records USING (key)"
            " GROUP BY owner ORDER BY total DESC, owner LIMIT ?",
            (limit,),
        )
        return [Reuse(*row) for row in rows]
