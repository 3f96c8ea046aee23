"""Leases of libraries: one per configuration and process, however many wrappers there are."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blendrag.engine.client.requirement import require_vllm
from blendrag.errors import BlendragError, StoreMismatchError
from blendrag.settings import Settings

if TYPE_CHECKING:  # imported on use: making a lease must be quick
    from blendrag.serving.library import Library

_Key = tuple[Any, ...]
_dirs: dict[_Key, Path] = {}  # the default ones, by the settings that they depend on


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
        """Return the library in ``kv_dir`` (by default in the cache folder, one per model, codec, namespace
        and shared prefix), opened if need be.

        Raises what :class:`Library` does; if a library that is still in use has the folder, EngineBusyError
        where it needs another engine, StoreMismatchError where its KV is another namespace's, codec's or
        shared prefix's. If another engine has the device, that is found out when this one is started.
        """
        require_vllm()
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
                    raise _taken(library, settings)
            if key not in self._open:
                library = Library(root, settings)
                try:
                    library.texts.release(ended(library.catalogue.owners(VOLATILE)))
                except BaseException:
                    library.close()
                    raise
                self._open[key], self._claims[key] = library, weakref.WeakSet()
            self._claims[key].add(self)
            return self._open[key]

    def opened(self, settings: Settings, kv_dir: Path | None = None) -> Library | None:
        """Return the library, if it is open already: opens nothing, waits for nothing, and makes no claim."""
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
    from blendrag.engine.client.launch import engine_key

    return *engine_key(settings), _of_kv(settings), root


def _taken(library: Library, settings: Settings) -> BlendragError:
    from blendrag.engine.client.launch import busy, engine_key

    if engine_key(library.settings) != engine_key(settings):
        return busy(library.settings, settings)
    theirs, ours = _of_kv(library.settings), _of_kv(settings)
    had, has = (
        ", ".join(f"{name}={value!r}" for name, value in one if (name, value) not in other)
        for one, other in ((theirs, ours), (ours, theirs))
    )
    return StoreMismatchError(
        f"the folder {str(library.root)!r} is open with {had}, not {has}: name a folder for each, or none"
    )


def _of_kv(settings: Settings) -> tuple[tuple[str, Any], ...]:
    """Return names and values of the settings that make other KV of the same model's."""
    names = ["namespace", "shared_prefix"]
    if settings.shared_prefix == "system":
        names += ["system_prompt", "separator"]
    return ("codec", settings.new_codec), *((name, getattr(settings, name)) for name in names)


def _root(settings: Settings, kv_dir: Path | None) -> Path:
    return (kv_dir or default_kv_dir(settings)).expanduser().resolve()


def default_kv_dir(settings: Settings) -> Path:
    """Return where KV is kept for wrappers that name no folder: within a namespace, texts have the same KV
    wherever they are used."""
    from blendrag.models import resolve_model
    from blendrag.serving.identity import kv_identity, prefix_ids

    names = ("model", "revision", "lora", "dtype", "cache_dir")
    own = (*((name, getattr(settings, name)) for name in names), *_of_kv(settings))
    if own not in _dirs:
        path = resolve_model(settings.model, settings.cache_dir, revision=settings.revision)
        identity = kv_identity(settings, path, prefix_ids(settings, path))
        _dirs[own] = settings.cache_dir / "kv" / identity.digest()
    return _dirs[own]
