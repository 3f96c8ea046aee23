"""An index's use of the engine: started when first needed, with the index's store open in its worker."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.errors import BlendragError, BlendragWarning, EngineClosedError
from blendrag.eviction import make_policy
from blendrag.progress import SILENT, Progress
from blendrag.settings import Settings
from blendrag.store.identity import KVIdentity


class EngineSession:
    """Thread-safe. ``store_id`` is empty until the engine runs, and for a model that is not blended."""

    def __init__(
        self, root: Path, settings: Settings, identity: KVIdentity, prefix: Sequence[int] = ()
    ) -> None:
        """``prefix``: the token ids behind which ``identity`` says that chunks are prefilled."""
        self._root, self._settings, self._identity = root, settings, identity
        self._prefix = list(prefix)
        self.stack = settings.stack
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._later: list[Future[Any]] = []
        self._store_id = ""
        self._closed = self._warned = False

    @property
    def store_id(self) -> str:
        engine = self._engine
        return self._store_id if engine is not None and engine.alive else ""

    @property
    def running(self) -> bool:
        return self._engine is not None

    def start(self, progress: Progress | None = None) -> Engine:
        """The engine, started if it is not running. Raises EngineClosedError after :meth:`close`."""
        with self._lock:
            if self._closed:
                raise EngineClosedError(f"{str(self._root)!r} was closed: open it again")
            if self._engine is not None and not self._engine.alive:
                self._engine.release()
                self._engine, self._store_id = None, ""
            if self._engine is None:
                engine = Engine.shared(self._settings, (progress or SILENT).note)
                try:
                    if engine.blends:
                        self._store_id = engine.call(
                            "open_store",
                            str(self._root),
                            asdict(self._identity),
                            [spec.plain() for spec in self.stack],
                            self._profile(engine.facts),
                            self._prefix,
                        )
                except BaseException:
                    engine.release()
                    raise
                self._engine = engine
            return self._engine

    def _profile(self, facts: dict[str, Any]) -> dict[str, Any] | None:
        """What `blendrag profile` measured of model and selector here, for the controller. A profile that is
        there and cannot be used is warned of, once. facts: the engine's."""
        from blendrag.control.profile import NO_PROFILE, Profile, any_profile, load_profile, profile_digest
        from blendrag.machine import describe_machine

        cache_dir, digest = self._settings.cache_dir, profile_digest(self._identity)
        if not self._settings.controller or not any_profile(cache_dir, digest):
            return None
        machine = describe_machine(self._settings.model, facts)
        found = load_profile(cache_dir, digest, machine, self._settings.selector)
        if isinstance(found, Profile):
            return found.model_dump(mode="json")
        if found != NO_PROFILE and not self._warned:
            self._warned = True
            warnings.warn(f"the controller is off: {found}", BlendragWarning, stacklevel=2)
        return None

    def call(self, method: str, *args: Any) -> Any:
        """One of the data plane's operations on this index's store."""
        return self.start().call(method, self.store_id, *args)

    def call_later(self, method: str, *args: Any) -> None:
        """``call`` without waiting; :meth:`close` does. What goes wrong is left to the next ingest."""
        future = self.start().call_later(method, self.store_id, *args)
        with self._lock:
            self._later = [one for one in self._later if not one.done()] + [future]

    def use_policy(self, name: str) -> None:
        """Evict by another policy from now on, in all tiers of this machine, and when the engine is started
        again. Starts none. Raises ConfigError for an unknown policy."""
        make_policy(name)
        with self._lock:  # a start that goes on is waited for
            self.stack = tuple(spec.with_policy(name) for spec in self.stack)
        if self.store_id:
            self.call("use_policy", name)

    def close(self) -> None:
        """Finish what was left for later and give the engine back. Safe to call twice."""
        with self._lock:  # a start that goes on is waited for, or its engine would stay
            self._closed = True
            for future in self._later:
                with contextlib.suppress(Exception):
                    future.result()
            if self._engine is None:
                return
            with contextlib.suppress(BlendragError):
                if self.store_id:
                    self._engine.call("close_store", self.store_id)
            self._engine.release()
            self._engine, self._store_id = None, ""
