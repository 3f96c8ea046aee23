"""A budget of KV, as it is written: ``512``, ``512:ada:alpha=0.2``, ``512:uniform:critical:window=16``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blendrag.choice import Choice
from blendrag.compress import ada, pyramid, window  # noqa: F401  (they register)
from blendrag.compress.allocator import ALLOCATORS, Allocator
from blendrag.compress.scorer import SCORERS, Scorer
from blendrag.errors import ConfigError
from blendrag.names import closest
from blendrag.options import BlendOptions

_ALLOCATOR, _SCORER = "ada", "window"


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget of KV: the tokens that a head keeps, on average and with the window; how heads share them;
    which they are."""

    tokens: int
    allocator: Allocator
    scorer: Scorer

    def least(self, block_size: int) -> int:
        """Return what a head has to keep, in tokens: the window, and the block that is still written to."""
        return block_size * (-(-self.scorer.window // block_size) + 1)


def make_budget(written: int | str) -> Budget:
    """Return the budget that ``written`` describes, as in ``BlendOptions.kv_budget``.

    Raises ConfigError for an unknown allocator, scorer or argument, and for two of a kind.
    """
    choice = Choice.read(str(written))
    allocator = _named(choice, ALLOCATORS, _ALLOCATOR)
    scorer = _named(choice, SCORERS, _SCORER)
    for word in choice.words:
        if word not in (*ALLOCATORS, *SCORERS):
            known = [*sorted(ALLOCATORS), *sorted(SCORERS)]
            raise ConfigError(
                f"kv_budget {str(choice)!r}: unknown allocator or scorer {word!r}; there are"
                f" {', '.join(known)}{closest(word, known)}"
            )
    of_allocator, of_scorer = choice.read_arguments(
        "kv_budget", ALLOCATORS[allocator].arguments, SCORERS[scorer].arguments
    )
    return Budget(int(choice.name), ALLOCATORS[allocator](**of_allocator), SCORERS[scorer](**of_scorer))


def _named(choice: Choice, registry: dict[str, Any], default: str) -> str:
    found = [word for word in choice.words if word in registry]
    if len(found) > 1:
        raise ConfigError(f"kv_budget {str(choice)!r}: {' and '.join(found)} are two of a kind")
    return found[0] if found else default


def check_budget(options: BlendOptions, block_size: int | None = None) -> None:
    """Raise ConfigError for a budget that cannot be had, and for one that leaves no choice.
    block_size: the engine's; None before it has started."""
    if options.kv_budget is None:
        return
    budget = make_budget(options.kv_budget)
    if block_size is not None and budget.tokens < (least := budget.least(block_size)):
        raise ConfigError(
            f"kv_budget must be at least {least}, the window and one block of {block_size}, not"
            f" {budget.tokens}"
        )
