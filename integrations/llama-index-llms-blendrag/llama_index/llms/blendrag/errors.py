"""Errors that are raised where LlamaIndex's own code would raise its own."""

from __future__ import annotations

from llama_index.core.output_parsers.base import OutputParserException

from blendrag.errors import BlendragError

_SHOWN = 300  # characters


class AnswerCutError(BlendragError, OutputParserException, ValueError):
    """A structured answer, or a tool call, was cut or cannot be read: allow more ``max_tokens``, ask again.

    LlamaIndex takes it for what its own parsers and programs raise. text: what came. reason: why a call that
    was not cut cannot be read.
    """

    def __init__(self, text: str, reason: str = "") -> None:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        said = f"the call cannot be read, ask again ({reason})"
        if not reason:
            said = "the answer was cut before it was whole (by max_tokens, or a stop), or cannot be read"
        super().__init__(f"{said}: {shown!r}")
        self.text, self.reason = text, reason

    def __reduce__(self) -> tuple[type[AnswerCutError], tuple[str, str]]:
        return type(self), (self.text, self.reason)
