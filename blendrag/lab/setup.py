"""The setup that results were measured with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from blendrag.engine.client.engine import Engine
from blendrag.lab.prompts import Prompt
from blendrag.machine import Machine
from blendrag.settings import Settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

_SETTINGS = {"codec", "tiers", "blend_share"}


@dataclass(frozen=True, slots=True)
class Setup(Generic[Options]):
    """The setup of a measurement. options: the command's. prompt_tokens: lengths of the prompts, each once,
    ascending."""

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
        config |= self.settings.model_dump(mode="json", include=_SETTINGS) | asdict(self.options)
        return {"machine": asdict(self.machine), "config": config | {"prompt_tokens": self.prompt_tokens}}
