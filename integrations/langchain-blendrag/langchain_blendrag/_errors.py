"""blendrag's errors, where LangChain has a name for what they say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from langchain_core.exceptions import ContextOverflowError

from blendrag import errors


class PromptTooLongError(errors.PromptTooLongError, ContextOverflowError):
    """The prompt does not fit into the model's context window: blendrag's error and LangChain's, which
    summarising middleware catches."""


@contextlib.contextmanager
def as_langchain_has_them() -> Iterator[None]:
    """Raise what is raised inside as LangChain knows it."""
    try:
        yield
    except GeneratorExit:  # perhaps as the program ends, when the names below are gone
        raise
    except errors.PromptTooLongError as error:
        raise PromptTooLongError(*error.args) from error
