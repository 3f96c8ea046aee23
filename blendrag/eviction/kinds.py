"""What a model learned from, against what is held here."""

from __future__ import annotations

from blendrag.errors import PredictorError
from blendrag.eviction.hazard import Hazard


def check_for_store(hazard: Hazard) -> None:
    """Raises PredictorError for a model of a prefix cache. It takes a prompt's chunks to be of no use without
    those before them, and learned how its blocks come again: in a store, each chunk is found by itself."""
    if hazard.prefix:
        raise PredictorError(
            "this model of lpc+ learned from a trace of prefixes, and a store holds chunks that are found one"
            " by one: learn from its own log (blendrag evictor train --from-log)"
        )
