"""Results of commands that measure: with what they were measured, as JSON, and their tables on pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rich.console import Console
from rich.table import Table

from blendrag.errors import ConfigError
from blendrag.machine import Machine
from blendrag.tables import Page

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from blendrag.engine.client.engine import Engine
    from blendrag.lab.prompts import Prompt
    from blendrag.settings import Settings

Options = TypeVar("Options", bound="DataclassInstance")

_SETTINGS = {"tiers", "blend_share"}


@dataclass(frozen=True, slots=True)
class Setup(Generic[Options]):
    """The setup of a measurement. prompt_tokens: lengths of the prompts, each once, ascending."""

    options: Options
    settings: Settings
    machine: Machine
    prompt_tokens: tuple[int, ...]

    @classmethod
    def of(cls, engine: Engine, settings: Settings, options: Options, prompts: Iterable[Prompt]) -> Self:
        lengths = tuple(sorted({len(prompt.token_ids) for prompt in prompts}))
        return cls(options, settings, engine.facts.machine(settings.model), lengths)

    def to_dict(self) -> dict[str, Any]:
        """Return ``machine`` and ``config``, for JSON."""
        blending = self.settings.blending
        config = {"ratio": blending.recompute_ratio, "selector": blending.selector}
        config["codec"] = self.settings.new_codec
        config |= self.settings.model_dump(mode="json", include=_SETTINGS) | asdict(self.options)
        return {"machine": asdict(self.machine), "config": config | {"prompt_tokens": self.prompt_tokens}}


class Results(ABC):
    """Results of a command that measures: a dataclass, which is JSON field by field."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; of an engine, with its ``machine``."""
        return asdict(self)  # type: ignore[call-overload]

    @abstractmethod
    def parts(self) -> Iterator[Table | str]:
        """Yield tables, and in words what was measured, in the order in which they are printed."""

    def show(self, console: Console) -> None:
        """Print the parts."""
        for part in self.parts():
            console.print(part, markup=False)

    def draw(self, path: Path) -> None:
        """Write the picture. Raises ConfigError where there is none."""
        raise ConfigError("--plot: these results have no picture")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResults(Results, Generic[Options]):
    """Results beside what they were measured with."""

    setup: Setup[Options]

    def to_dict(self) -> dict[str, Any]:
        own = asdict(self)
        del own["setup"]
        return own | self.setup.to_dict()


def pasted(name: str, path: Path | None) -> Callable[[Results, Console], None]:
    """Return what shows results; where there is a page, their tables are pasted into it, too. Raises
    ConfigError if it has no place for any."""
    if path is None:
        return lambda results, console: results.show(console)
    page = Page(path, name)

    def show(results: Results, console: Console) -> None:
        page.watch(console)
        results.show(console)
        machine = Machine(**results.to_dict()["machine"])
        page.paste(f"Commit {str(machine.commit)[:7]}, {where(machine)}.")

    return show


def where(machine: Machine) -> str:
    """Return a machine in a line, for a footnote."""
    return f"{Path(machine.model).name} on {machine.cpu}, {machine.threads} threads"
