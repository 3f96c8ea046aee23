"""A store on one tier for the time of a measurement."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.stores import StoreClient
from blendrag.errors import BlendragError
from blendrag.lab.cold import drop_page_cache, temporary_folder
from blendrag.lab.prompts import StoredChunk
from blendrag.serving.identity import kv_identity, prefix_ids
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue
from blendrag.store.identity import KVIdentity
from blendrag.store.stack import TierSpec


@dataclass(frozen=True, slots=True)
class TrialStore:
    store: StoreClient
    identity: KVIdentity
    tier: str
    chunks: tuple[StoredChunk, ...]

    @property
    def id(self) -> str:
        """For recipes; the folder of its catalogue and files."""
        return self.store.id

    def make_cold(self) -> None:
        """Have RAM forget what came from the tier below, and the system what the files hold; unless the tier
        is RAM itself."""
        if self.tier != "ram":
            self.store.empty_ram()
            drop_page_cache(Path(self.id))


@contextlib.contextmanager
def trial_store(
    engine: Engine, settings: Settings, spec: TierSpec, pieces: Sequence[tuple[int, ...]]
) -> Iterator[TrialStore]:
    """Chunks of these tokens, prefilled, in a tier like ``spec``, below RAM if it is another; gone
    afterwards.

    Records in RAM need a home below; servers are asked under a namespace of its own.
    """
    prefix = prefix_ids(settings, engine.model_path)
    identity = kv_identity(settings, engine.model_path, prefix)
    identity = replace(identity, namespace=f"trial-{uuid.uuid4().hex}")
    chunks = tuple(StoredChunk(identity.chunk_key(ids), ids) for ids in pieces)
    own = spec.model_copy(update={"write": "through", "bytes": None, "chunks": None, "path": None})
    stack = (own, TierSpec(kind="disk")) if spec.kind == "ram" else (TierSpec(kind="ram"), own)
    with temporary_folder(settings, spec) as folder:
        with contextlib.closing(Catalogue.open(folder, identity)) as catalogue:
            catalogue.register("trial", [(chunk.key, "", chunk.token_ids) for chunk in chunks])
        store = StoreClient.open(engine, folder, identity, stack, prefix)
        try:
            for chunk in chunks:
                store.ingest([chunk])
            store.flush()
            yield TrialStore(store, identity, spec.label, chunks)
        finally:
            with contextlib.suppress(BlendragError):  # the engine may be what failed
                store.delete([chunk.key for chunk in chunks])
            with contextlib.suppress(BlendragError):
                store.close()
