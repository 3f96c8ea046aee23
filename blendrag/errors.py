"""Every error blendrag raises on purpose, and its one kind of warning.

BlendragError
├── ConfigError              correct the setting that is named
├── MissingDependencyError   install what is named
├── ModelError
│   ├── ModelNotFoundError   correct the model's name or folder
│   └── ModelNotSupportedError  choose another model (or serve this one without blending)
├── SourceError              correct or remove the file that is named; start the vector store that is
├── StoreError
│   ├── StoreMismatchError   open the index with the model it was made for
│   ├── StoreInUseError      close the other process that has it open
│   └── StoreFullError       free disk space, or raise the limit, and ingest again
├── PredictorError           fit it again (blendrag fit); until then, eviction is by LRU
├── EmptyIndexError          ingest something first
├── PromptTooLongError       ask for fewer or shorter documents
├── EngineError              the engine died, or failed at something: ask again, the next use starts it
│   ├── EngineStartError     correct what the message names: memory, weights, a setting, time
│   ├── EngineClosedError    open another, or ask before close()
│   ├── EngineBusyError      close the other engine that is named, or use its settings
│   └── GenerationTimeoutError  allow more time, or fewer tokens
└── ServerError              the server failed: its message says what at
    ├── ServerNotFoundError  correct the URL that is named, or start `blendrag serve` there
    ├── ServerBusyError      ask again later, in ``retry_after_s`` seconds if it says so
    ├── ServerRefusalError   use a key that may do it, or ask its operator for less strict limits
    └── BrokenAnswerError    ask again: the answer broke off after its beginning was given out

BlendragWarning              nothing failed, but time may be lost: the message says what to do
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BlendragError(Exception):
    """The base of all errors that blendrag raises."""


class ConfigError(BlendragError):
    """A setting is unknown or has a value that cannot be used."""


class MissingDependencyError(BlendragError):
    """A package is needed that is not installed, or is of another version than blendrag is for."""


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Add a note to errors of blendrag's that are raised inside: what was done all the same, and
    what helps."""
    try:
        yield
    except BlendragError as error:
        error.add_note(note)
        raise


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Raise MissingDependencyError, with pip's command, for what is missing of an extra ("blendrag[redis]").

    Any other module that is missing is another mistake, and stays the error that it is."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or not _brings(extra, error.name):
            raise
        raise MissingDependencyError(f'{error.name} is not installed: pip install "{extra}"') from error


def _brings(extra: str, module: str) -> bool:
    """Return whether installing this brings a module, by the names of the packages that it asks for."""
    from importlib import metadata  # here: errors are imported first of all, and this is seldom needed
    from itertools import accumulate

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    wanted, name = Requirement(extra), canonicalize_name(module)
    parents = {canonicalize_name(parent) for parent in accumulate(module.split("."), "{}.{}".format)}
    for one in map(Requirement, metadata.requires(wanted.name) or ()):
        if one.marker is None or any(one.marker.evaluate({"extra": each}) for each in wanted.extras):
            package = canonicalize_name(one.name).removeprefix("python-")
            # Of a namespace that packages share, the missing module may be a part of a package's name.
            if package in parents or package.startswith(f"{name}-"):
                return True
            if one.extras and _brings(str(one), module):
                return True
    return False


class ModelError(BlendragError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError):
    """There is no such model folder, package or id."""


class ModelNotSupportedError(ModelError):
    """The model can be served, but not blended."""


class SourceError(BlendragError):
    """A path given to ``ingest`` does not exist or cannot be read as text, or a vector store cannot be
    read."""


class StoreError(BlendragError):
    """The index or its KV store cannot be used."""


class StoreMismatchError(StoreError):
    """The store was made for another model."""


class StoreInUseError(StoreError):
    """Another process has this index open."""


class StoreFullError(StoreError):
    """The disk (or the configured limit) has no room for a chunk."""


class PredictorError(BlendragError):
    """There is no predictor of whether conversations go on, none that can be used, or nothing to train one
    on."""


class EmptyIndexError(BlendragError):
    """A question was asked of an index that holds no documents."""


class PromptTooLongError(BlendragError):
    """The prompt does not fit into the model's context window."""


class EngineError(BlendragError):
    """The embedded engine stopped working, or failed at something."""


class EngineStartError(EngineError):
    """The engine did not start, and would not with the same settings."""


class EngineClosedError(EngineError):
    """The engine was closed, by this program."""


class EngineBusyError(EngineError):
    """An engine of another configuration has the device."""


class GenerationTimeoutError(EngineError):
    """The answer was not complete in the time allowed for it."""


class ServerError(BlendragError):
    """A server failed at a request, or broke off."""


class ServerNotFoundError(ServerError):
    """No server answers at this URL, or one without blendrag."""


class ServerBusyError(ServerError):
    """The server takes no more requests for now. retry_after_s: when to ask again, if it says."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerRefusalError(ServerError):
    """The key is missing or wrong, or has no right to this; or there is too much in one request."""


class BrokenAnswerError(ServerError):
    """An answer broke off after its beginning was given out, so it was not asked for again."""


class BlendragWarning(UserWarning):
    """A warning that something given is ignored or outdated, or that answers come slower than they could."""
