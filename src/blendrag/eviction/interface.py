"""What a tier asks of an eviction policy, and the registry of policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from blendrag.errors import ConfigError


class EvictionPolicy(ABC):
    """Keeps the order in which a tier's chunks leave. The tier serialises all calls."""

    @abstractmethod
    def added(self, key: str, size: int) -> None:
        """A chunk of ``size`` bytes came in (or was replaced)."""

    @abstractmethod
    def used(self, key: str) -> None:
        """A chunk was read."""

    @abstractmethod
    def removed(self, key: str) -> None:
        """A chunk left, for whatever reason."""

    @abstractmethod
    def victim(self) -> str | None:
        """The chunk that should leave next; None when there is none."""


POLICIES: dict[str, type[EvictionPolicy]] = {}


def register_policy(name: str) -> Callable[[type[EvictionPolicy]], type[EvictionPolicy]]:
    """Class decorator: make a policy available under ``name``."""

    def register(cls: type[EvictionPolicy]) -> type[EvictionPolicy]:
        POLICIES[name] = cls
        return cls

    return register


def make_policy(name: str) -> EvictionPolicy:
    """A new policy called ``name``. Raises ConfigError for an unknown one."""
    from blendrag.eviction import lru  # noqa: F401  (registers itself)

    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
