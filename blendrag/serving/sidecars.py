"""The helpers that a library keeps beside its engine while that runs: a forecaster, and exact prefixes."""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from blendrag.engine.client.running import RunningEngine
from blendrag.engine.wire.prefixes import PrefixPath
from blendrag.engine.wire.recipe import Recipe
from blendrag.errors import BlendragWarning, ConfigError, StoreError
from blendrag.progress import Progress
from blendrag.prompt import PromptPlan
from blendrag.serving.forecaster import FORECASTS, Forecaster, wants_forecasts
from blendrag.serving.prefixes import Prefixes, tree_folder
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue

# Why there is no tree where neither the model's reason is one nor an error.
_SEVERAL = (
    "several engines or API servers keep none yet, nor do models whose layers have all windows, or differ in"
    " shape"
)


class Sidecars:
    """The forecaster and the exact prefixes beside a library's engine. Thread-safe."""

    def __init__(
        self, root: Path, settings: Settings, catalogue: Catalogue, session: EngineSession, *, shared: bool
    ) -> None:
        """Begin without any. shared: other processes may have the tree of prefixes open."""
        self._root, self._settings, self._catalogue, self.session = root, settings, catalogue, session
        self._lock = threading.Lock()
        self.forecaster: Forecaster | None = None
        """The forecaster, while the policy of a tier goes by forecasts, or their outcomes are logged."""
        self.prefixes: Prefixes | None = None
        """Exact prefixes, where they are switched on and this process has the engine to itself."""
        self._has_tree = bool(settings.tree)
        self._warned = self._closed = False
        if not shared and not settings.tree_stays:
            shutil.rmtree(tree_folder(root), ignore_errors=True)

    def start(self, progress: Progress | None = None) -> RunningEngine:
        """Start the engine if it is not running, with those that are wanted beside it."""
        engine = self.session.start(progress)
        self._forecast()
        self._open_prefixes(engine)
        return engine

    def _forecast(self) -> None:
        wanted = self._settings.outcome_log or wants_forecasts(self.session.stack)
        with self._lock:
            if wanted and not self._closed and self.forecaster is None and self.session.store is not None:
                self.forecaster = Forecaster(self.session, self._settings, self._root)

    def _open_prefixes(self, engine: RunningEngine) -> None:
        with self._lock:
            opened = self.prefixes is not None and self.prefixes.client.engine is engine
            if opened or self._closed or not self._has_tree:
                return
            self._close_prefixes()
            try:
                self.prefixes = Prefixes.open(self._root, self._settings, self._catalogue, engine)
                if self.prefixes is None:
                    reason = "" if engine.facts.states else engine.facts.reason
                    self._without_tree(reason or _SEVERAL)
            except (StoreError, ConfigError) as error:
                self._without_tree(error)
            self._has_tree = self.prefixes is not None

    def _without_tree(self, reason: object) -> None:
        """Answer prompts without a tree from now on. Warns once."""
        if not self._warned:
            self._warned = True
            said = f"no exact prefixes, whatever tree_bytes the tiers have: {reason}"
            warnings.warn(said, BlendragWarning, stacklevel=2)

    def _close_prefixes(self) -> None:
        if self.prefixes is not None:
            self.prefixes.close()
            self.prefixes = None

    @property
    def _usable(self) -> Prefixes | None:
        return self.prefixes if self.prefixes is not None and self.prefixes.alive else None

    def order(self, keys: Sequence[str]) -> list[int]:
        """Return the places of documents (chunk keys, "" for unknown ones), in the order in which they go
        into a prompt: as they came, unless the setting ``order`` says otherwise and there is a tree."""
        if self._settings.documents_first and (prefixes := self._usable):
            with contextlib.suppress(StoreError):  # the prompt is answered in any order
                return prefixes.tree.order(keys)
        return list(range(len(keys)))

    def path(self, plan: PromptPlan, recipe: Recipe | None) -> tuple[PrefixPath | None, Recipe | None]:
        """Return a plan's way through the tree of exact prefixes, if it is not blended or all of its
        documents are there; else how it is blended, behind those that are (:meth:`Prefixes.path`)."""
        if (prefixes := self._usable) is None:
            return None, recipe
        try:
            return prefixes.path(plan, recipe)
        except StoreError as error:  # a full disk, perhaps
            prefixes.failed += 1
            self._without_tree(error)
            return None, recipe

    def forget(self, keys: Iterable[str]) -> None:
        """Remove the exact prefixes that hold one of these chunks."""
        with self._lock:  # none is opened meanwhile
            if (prefixes := self._usable) is None:
                shutil.rmtree(tree_folder(self._root), ignore_errors=True)  # it can grow again
        if prefixes is not None:
            prefixes.forget(keys)

    def stop(self) -> None:
        """End them for good; what was noted of prompts is written. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._close_prefixes()
            if self.forecaster is not None:
                self.forecaster.close()
                with contextlib.suppress(StoreError):
                    self._catalogue.count(FORECASTS, self.forecaster.counted())
                self.forecaster = None
