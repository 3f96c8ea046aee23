"""From names to scorers and allocators."""

from __future__ import annotations

from blendrag.compress import ada, pyramid, static, window  # noqa: F401  (they register)
from blendrag.compress.allocator import ALLOCATORS, Allocator
from blendrag.compress.scorer import SCORERS, Scorer
from blendrag.errors import ConfigError
from blendrag.options import BlendOptions


def make_scorer(name: str) -> Scorer:
    """Raises ConfigError for a name that is not registered."""
    return SCORERS[name]()


def make_allocator(name: str, alpha: float) -> Allocator:
    """Raises ConfigError for a name that is not registered, and an alpha outside of 0 to 1."""
    return ALLOCATORS[name](alpha)


def least_budget(observed: int, block_size: int) -> int:
    """Tokens: what a head has to keep, of a window of so many observed, and the block that is written on."""
    return block_size * (-(-observed // block_size) + 1)


def check_budget(options: BlendOptions, block_size: int | None = None) -> None:
    """Raises ConfigError for a scorer or allocator that there is not, and a budget that leaves no choice.
    block_size: of the engine; None before it has started."""
    make_scorer(options.kv_scorer)
    make_allocator(options.kv_allocator, options.kv_alpha)
    if options.kv_budget is not None and block_size is not None:
        least = least_budget(options.kv_window, block_size)
        if options.kv_budget < least:
            raise ConfigError(
                f"kv_budget must be at least {least}, the window and one block of {block_size},"
                f" not {options.kv_budget}"
            )
