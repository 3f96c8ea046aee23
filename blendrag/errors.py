"""Every error blendrag raises on purpose, and its one kind of warning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BlendragError(Exception):
    """The base of all errors that blendrag raises."""


class ConfigError(BlendragError):
    """A setting is unknown or has a value that cannot be used: correct the one that is named."""


class MissingDependencyError(BlendragError):
    """A package is needed that is not installed, or is of another version than blendrag is for: install what
    is named."""


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Add a note to blendrag's errors that are raised inside: what was done all the same, what helps."""
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
    """There is no such model folder, package or id: correct the model's name or folder."""


class ModelNotSupportedError(ModelError):
    """The model can be served, but not blended: choose another one, or serve this one without blending."""


class SourceError(BlendragError):
    """A path given to ``ingest`` does not exist or cannot be read as text, or a vector store cannot be read:
    correct or remove the file that is named; start the store that is."""


class StoreError(BlendragError):
    """The index or its KV store cannot be used."""


class StoreMismatchError(StoreError):
    """The store was made for another model: open the index with that one."""


class StoreInUseError(StoreError):
    """Another process has this index open: close it there."""


class StoreFullError(StoreError):
    """The disk (or the configured limit) has no room for a chunk: free disk space, or raise the limit, and
    ingest again."""


class PredictorError(BlendragError):
    """There is no predictor of whether conversations go on, none that can be used, or nothing to train one
    on: fit it again (``blendrag fit``); until then, eviction is by LRU."""


class EmptyIndexError(BlendragError):
    """A question was asked of an index that holds no documents: ingest something first."""


class PromptTooLongError(BlendragError):
    """The prompt does not fit into the model's context window: ask for fewer or shorter documents."""


class EngineError(BlendragError):
    """The embedded engine stopped working, or failed at something: ask again, the next use starts it."""


class EngineStartError(EngineError):
    """The engine did not start, and would not with the same settings: correct what the message names, such as
    memory, weights, a setting, or the time that it may take."""


class EngineClosedError(EngineError):
    """The engine was closed, by this program: open another, or ask before ``close()``."""


class EngineBusyError(EngineError):
    """An engine of another configuration has the device: close the one that is named, or use its settings."""


class GenerationTimeoutError(EngineError):
    """The answer was not complete in the time allowed for it: allow more time, or fewer tokens."""


class ServerError(BlendragError):
    """A server failed at a request, or broke off: the message says what at."""


class ServerNotFoundError(ServerError):
    """No server answers at this URL, or one without blendrag: correct the URL that is named, or start
    ``blendrag serve`` there."""


class ServerBusyError(ServerError):
    """The server takes no more requests for now: ask again later. retry_after_s: in how many seconds, if it
    says."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerRefusalError(ServerError):
    """The key is missing or wrong, or has no right to this; or there is too much in one request: use a key
    that may do it, or ask its operator for less strict limits."""


class BrokenAnswerError(ServerError):
    """An answer broke off after its beginning was given out, so it was not asked for again: ask again."""


class BlendragWarning(UserWarning):
    """A warning that something given is ignored or outdated, or that answers come slower than they could: the
    message says what to do."""
