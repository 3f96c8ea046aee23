"""One library per configuration and process, however many wrapper objects frameworks make of it."""

from __future__ import annotations

import functools
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendrag.settings import Settings

if TYPE_CHECKING:  # imported on use: making a lease must be quick
    from blendrag.serving.library import Library

_Key = tuple[Any, ...]


class Lease:
    """A wrapper's claim on its library. Making one starts nothing; copies of a wrapper share theirs.

    A library stays open when its last wrapper goes, since frameworks make and drop wrappers all the time.
    It is closed by :meth:`close`, at the end of the process, or to make room when another configuration is
    asked for and nobody claims it any more.
    """

    _open: dict[_Key, Library] = {}  # noqa: RUF012
    _claims: dict[_Key, weakref.WeakSet[Lease]] = {}  # noqa: RUF012
    _registry = threading.RLock()

    def library(self, settings: Settings, kv_dir: Path | None = None) -> Library:
        """The library in ``kv_dir`` (by default in the cache folder, one per model), opened if need be.

        Raises what :class:`Library` does, and EngineBusyError if another configuration that is still in use
        has the folder; if it has the device, that is found out when the engine is started.
        """
        from blendrag.engine.configuration import busy
        from blendrag.serving.library import Library
        from blendrag.serving.owners import VOLATILE, ended

        root = _root(settings, kv_dir)
        key = _key(settings, root)
        with self._registry:
            for other in [other for other in self._open if other != key and not self._claims[other] - {self}]:
                del self._claims[other]
                self._open.pop(other).close()
            for other, library in self._open.items():
                if other != key and library.root == root:
                    raise busy(library.settings, settings)
            if key not in self._open:
                library = Library(root, settings)
                library.release(ended(library.catalogue.owners(VOLATILE)))
                self._open[key], self._claims[key] = library, weakref.WeakSet()
            self._claims[key].add(self)
            return self._open[key]

    def opened(self, settings: Settings, kv_dir: Path | None = None) -> Library | None:
        """The library, if it is open already: opens nothing, waits for nothing, and makes no claim."""
        if not self._open or not self._registry.acquire(blocking=False):
            return None
        try:
            return self._open.get(_key(settings, _root(settings, kv_dir)))
        finally:
            self._registry.release()

    def close(self) -> None:
        """Close the libraries that this lease claims, for all who use them. Safe to call twice."""
        with self._registry:
            for key in [key for key, claims in self._claims.items() if self in claims]:
                del self._claims[key]
                self._open.pop(key).close()

    def __reduce__(self) -> tuple[type[Lease], tuple[()]]:
        return Lease, ()  # a wrapper that was pickled makes its own claim, perhaps in another process


def _key(settings: Settings, root: Path) -> _Key:
    from blendrag.engine.configuration import engine_key

    return *engine_key(settings), root


def _root(settings: Settings, kv_dir: Path | None) -> Path:
    return (kv_dir or default_kv_dir(settings)).expanduser().resolve()


def default_kv_dir(settings: Settings) -> Path:
    """Where KV is kept for wrappers that name no folder: texts have the same KV wherever they are used."""
    return _kv_dir(settings.model, settings.revision, settings.dtype, settings.cache_dir)


@functools.cache
def _kv_dir(model: str, revision: str | None, dtype: str, cache_dir: Path) -> Path:
    from blendrag.models import resolve_model
    from blendrag.serving.identity import kv_identity

    settings = Settings.load(model=model, revision=revision, dtype=dtype, cache_dir=cache_dir)
    identity = kv_identity(settings, resolve_model(model, cache_dir, revision=revision))
    return cache_dir / "kv" / identity.digest()
