"""From names to scorers and allocators."""

from __future__ import annotations

from blendrag.compress import ada, pyramid, static, uniform, window  # noqa: F401  (they register)
from blendrag.compress.allocator import ALLOCATORS, Allocator
from blendrag.compress.scorer import SCORERS, Scorer
from blendrag.errors import ConfigError


def make_scorer(name: str) -> Scorer:
    """Raises ConfigError for a name that is not registered."""
    if name not in SCORERS:
        raise ConfigError(f"unknown kv_scorer {name!r}; there are {', '.join(sorted(SCORERS))}")
    return SCORERS[name]()


def make_allocator(name: str, alpha: float) -> Allocator:
    """Raises ConfigError for a name that is not registered, and an alpha outside of 0 to 1."""
    if name not in ALLOCATORS:
        raise ConfigError(f"unknown kv_allocator {name!r}; there are {', '.join(sorted(ALLOCATORS))}")
    return ALLOCATORS[name](alpha)
