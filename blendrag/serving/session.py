"""An index's use of the engine: started when first needed, with the index's store open in its worker."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from blendrag.control.profile import NO_PROFILE, Profile, any_profile, load_profile, profile_digest
from blendrag.engine.client.engine import Engine
from blendrag.engine.client.running import RunningEngine
from blendrag.engine.client.stores import StoreClient
from blendrag.engine.wire.operations import EngineFacts
from blendrag.errors import BlendragError, BlendragWarning, EngineClosedError
from blendrag.eviction.fitted import with_file
from blendrag.progress import SILENT, Progress
from blendrag.settings import Settings
from blendrag.store.identity import KVIdentity
from blendrag.store.stack import TierSpec

StartEngine = Callable[[Settings, Callable[[str], None]], RunningEngine]


class EngineSession:
    """An index's use of an engine. Thread-safe."""

    def __init__(
        self,
        root: Path,
        settings: Settings,
        identity: KVIdentity,
        prefix: Sequence[int] = (),
        engine: StartEngine | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """Start nothing yet. ``prefix``: the token ids behind which ``identity`` says that chunks are
        prefilled. ``engine``: gives one for these settings, by default the one that the process shares.
        ``shared``: nobody here has the folder locked, so the engine's worker does that."""
        self._root, self.settings, self._identity = root, settings, identity
        self._start_engine = engine or Engine.shared
        self.prefix, self._shared = list(prefix), shared
        self.stack = settings.stack
        self._engine: RunningEngine | None = None
        self._lock = threading.Lock()
        self._later: list[Future[Any]] = []
        self._store: StoreClient | None = None
        self._closed = self._warned = False

    @property
    def store(self) -> StoreClient | None:
        """The store; None until the engine runs, and for a model that is not blended."""
        store = self._store
        return store if store is not None and store.engine.alive else None

    @property
    def idle(self) -> bool:
        """Return whether the engine runs, with nothing to do."""
        engine = self._engine
        return engine is not None and engine.alive and engine.idle

    def start(self, progress: Progress | None = None) -> RunningEngine:
        """Start the engine if need be, and return it. Raises EngineClosedError after :meth:`close`."""
        with self._lock:
            if self._closed:
                raise EngineClosedError(f"{str(self._root)!r} was closed: open it again")
            if self._engine is not None and not self._engine.alive:
                self._engine.release()
                self._engine = self._store = None
            if self._engine is None:
                engine = self._start_engine(self.settings, (progress or SILENT).note)
                try:
                    if engine.blends:
                        profile = self._profile(engine.facts)
                        self._store = StoreClient.open(
                            engine,
                            self._root,
                            self._identity,
                            [self._with_file(spec) for spec in self.stack],
                            self.prefix,
                            profile,
                            lock=self._shared,
                        )
                except BaseException:
                    engine.release()
                    raise
                self._engine = engine
            return self._engine

    def open(self, progress: Progress | None = None) -> StoreClient | None:
        """Return the store, with its engine started; None for a model that is not blended."""
        self.start(progress)
        return self._store

    def _with_file(self, spec: TierSpec) -> TierSpec:
        """Return the tier with what its policy was fitted to; warns if there is nothing."""
        policy = with_file(spec.policy, self.settings.cache_dir) if spec.evicts else spec.policy
        return spec if policy == spec.policy else spec.model_copy(update={"policy": policy})

    def _profile(self, facts: EngineFacts) -> Profile | None:
        """Return what `blendrag profile` measured of model and selector here, for the controller. A profile
        that is there and cannot be used is warned of, once. facts: the engine's."""
        cache_dir, digest = self.settings.cache_dir, profile_digest(self._identity)
        if not any_profile(cache_dir, digest):
            return None
        here = facts.machine(self.settings.model)
        found = load_profile(cache_dir, digest, here, self.settings.blending.selector)
        if isinstance(found, Profile):
            return found
        if found != NO_PROFILE and not self._warned:
            self._warned = True
            warnings.warn(f"the controller is off: {found}", BlendragWarning, stacklevel=2)
        return None

    def later(self, work: Future[Any]) -> None:
        """Have :meth:`settle` and :meth:`close` wait for an operation that nobody else waits for."""
        with self._lock:
            self._later = [one for one in self._later if not one.done()] + [work]

    def settle(self) -> None:
        """Wait for what was left for later. What went wrong with it is found again by who needs it."""
        for future in self._later:
            with contextlib.suppress(Exception):
                future.result()

    def close(self) -> None:
        """Finish what was left for later and give the engine back. Safe to call twice."""
        with self._lock:  # a start that goes on is waited for, or its engine would stay
            self._closed = True
            self.settle()
            if self._engine is None:
                return
            with contextlib.suppress(BlendragError):
                if store := self.store:
                    store.close()
            self._engine.release()
            self._engine = self._store = None
