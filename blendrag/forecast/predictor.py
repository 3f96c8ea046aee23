"""The predictor as others use it: from windows of conversations to the chance that they go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from blendrag.embedder import Embedder
from blendrag.errors import PredictorError
from blendrag.forecast.classifier import MANIFEST, Classifier, Manifest, load_manifest, load_weights
from blendrag.forecast.conversation import Window
from blendrag.forecast.features import Features, Rows, VectorCache
from blendrag.forecast.words import open_embedder


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """An embedder and the classifier that was trained on its vectors; not for several threads at once.

    Without a classifier it says 0.5 of everything, which makes LPC's order that of LRU.
    """

    features: Features
    classifier: Classifier | None
    manifest: Manifest | None = None

    @classmethod
    def load(
        cls, folder: Path, embedder: Embedder | None = None, cache: VectorCache | None = None
    ) -> Predictor:
        """The one that ``save_weights`` put into ``folder``; its embedder is loaded with the first window.

        embedder: one that is there already, instead of one of its own. Raises PredictorError, also for
        an embedder other than that it was trained with.
        """
        manifest = load_manifest(folder)
        classifier = load_weights(folder, manifest)
        if embedder is not None and embedder.name != manifest.embedder:
            raise PredictorError(
                f"the predictor in {str(folder)!r} was trained with the embedder {manifest.embedder}, not"
                f" with {embedder.name}: train it again with --embedder {embedder.name}"
            )
        return cls(Features(embedder or open_embedder(manifest.embedder), cache), classifier, manifest)

    @classmethod
    def or_untrained(cls, folder: Path, features: Features) -> Predictor:
        """That in ``folder`` where there is one, with an embedder of its own; else one without a classifier,
        which lets a log be filled before there is anything to train on. Raises PredictorError."""
        return cls.load(folder) if (folder / MANIFEST).exists() else cls(features, None)

    def probability(self, windows: Sequence[Window]) -> npt.NDArray[np.float64]:
        """[n]: the chance that each conversation goes on after its window.

        Raises ModelNotFoundError, and PredictorError for an embedder that is no longer the one it was.
        """
        return self.judge(self.features.rows(windows)) if windows else np.empty(0)

    def judge(self, rows: Rows) -> npt.NDArray[np.float64]:
        """[n]: of rows [n, width] that ``features`` made."""
        if self.classifier is None:
            return np.full(len(rows), 0.5)
        if self.manifest and rows.shape[1] != self.manifest.width:
            raise PredictorError(
                f"{self.manifest.embedder} makes rows of {rows.shape[1]} numbers, and the predictor was"
                f" trained on {self.manifest.width}: train it again"
            )
        return self.classifier.probability(rows)
