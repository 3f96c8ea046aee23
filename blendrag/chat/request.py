"""What is asked of a chat model, in plain data that every framework can make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blendrag.engine.client.generation import Sampling
from blendrag.errors import ConfigError
from blendrag.options import BlendOptions

AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request.

    messages: ``{"role", "content"}`` with text contents; an assistant's may have ``tool_calls`` (each
    ``{"id", "name", "arguments": dict}``), a tool's ``tool_call_id`` and ``name``. Or a text that is a
    rendered prompt already.
    documents: texts known to be in the prompt; they are looked for first, and reported on.
    tools: functions as OpenAI describes them. tool_choice: "auto", "none", "required", or a tool's name.
    schema: JSON schema that the answer has to match; the model is shown it, and held to it.
    options: how it is blended; None: as the settings say.
    max_retries: how often a request is sent again after the engine failed, before anything was given out.
    conversation: the caller's id of the conversation, for eviction policies that ask whether it goes on; None
    stands for the one that the messages' opening gives.
    """

    messages: Sequence[Mapping[str, Any]] | str
    sampling: Sampling = field(default_factory=Sampling)
    documents: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = AUTO
    schema: Mapping[str, Any] | None = None
    options: BlendOptions | None = None
    max_retries: int = 0
    conversation: str | None = None

    def __post_init__(self) -> None:
        names = [tool["function"]["name"] for tool in self.tools]
        if self.tool_choice not in (AUTO, NONE, REQUIRED, *names):
            raise ConfigError(f"tool_choice {self.tool_choice!r} names no tool; there are {names}")
        if self.tool_choice == REQUIRED and not names:
            raise ConfigError("tool_choice 'required' needs tools")

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a tool call."""
        return self.tool_choice not in (AUTO, NONE)

    @property
    def offered(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the model may call."""
        return () if self.tool_choice == NONE else self.tools
