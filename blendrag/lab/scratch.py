"""Stores and files that live for a measurement."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Sampling
from blendrag.engine.client.stores import StoreClient
from blendrag.engine.prefixes.trees import TreeClient
from blendrag.engine.wire.prefixes import PrefixPath
from blendrag.errors import BlendragError, StoreError
from blendrag.lab.prompts import Prompt
from blendrag.serving.identity import kv_identity, prefix_ids
from blendrag.serving.prefill import batches
from blendrag.serving.prefixes import tree_identity, tree_kind
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue
from blendrag.store.contexts import Chunk, Contexts, Ids
from blendrag.store.identity import KVIdentity
from blendrag.store.kv_reader import read_whole
from blendrag.store.record import Layout
from blendrag.store.stack import TierSpec
from blendrag.store.tiers.disk import DiskTier
from blendrag.store.tiers.interface import Opened
from blendrag.tree import Nodes
from blendrag.tree.tree import Tree


@dataclass(frozen=True, slots=True)
class ScratchStore:
    """A store made by :func:`scratch_store`. chunks: those it was opened with. tier: the one below RAM, or
    RAM.

    A chunk is kept as long as an owner registered it.
    """

    client: StoreClient
    identity: KVIdentity
    catalogue: Catalogue
    chunks: tuple[Chunk, ...]
    tier: str
    contexts: Contexts

    @property
    def id(self) -> str:
        """The store's id, for recipes; also the folder of its catalogue and files."""
        return self.client.id

    def document(self, pieces: Iterable[Ids], before: Ids = ()) -> list[Chunk]:
        """Return the chunks of a document, in order, as an index would prefill them. before: text before the
        first of them, that no chunk has."""
        preceding = Chunk("", "", before) if before else None
        return self.contexts.document((("", ids) for ids in pieces), preceding)

    def fill(self, chunks: Iterable[Chunk]) -> None:
        """Prefill the chunks that are not stored; all are on disk when it returns. What belongs to nobody is
        not stored.

        Raises StoreFullError, EngineError.
        """
        wanted = {chunk.key: chunk for chunk in chunks}
        there = self.catalogue.ready(wanted)
        self.ingest(chunk for key, chunk in wanted.items() if key not in there)

    def ingest(self, chunks: Iterable[Chunk]) -> None:
        """Prefill chunks in batches, as a real ingest does; all are on disk when it returns."""
        for batch in batches(chunks):
            self.client.ingest(batch)
        self.client.flush()

    def release(self, owner: str) -> None:
        """Delete the KV of chunks that nobody else owns."""
        if over := self.catalogue.release(owner):
            self.client.delete(over)

    def read_back(self, chunks: Iterable[Chunk], dtype: str) -> list[torch.Tensor]:
        """Return the KV of chunks that are on disk, from the files that the engine wrote: [layers, 2 (K
        before RoPE, V), tokens, heads, size] each. dtype: the engine's."""
        layout = Layout(self.identity, dtype)
        disk = DiskTier(TierSpec(kind="disk", write="never"), layout, Path(self.id) / "kv")
        found = []
        for opened in disk.open([chunk.key for chunk in chunks]).values():
            if not isinstance(opened, Opened):
                raise opened
            found.append(read_whole(opened).decode())
            disk.close_record(opened)
        return found

    def make_cold(self) -> None:
        """Have RAM forget what came from a tier below, and the system what its files hold."""
        if self.tier != "ram":
            self.client.empty_ram()
            drop_page_cache(Path(self.id) / "kv")


@contextlib.contextmanager
def scratch_store(
    engine: Engine,
    settings: Settings,
    pieces: Iterable[Ids] = (),
    tier: TierSpec | None = None,
    *,
    filled: bool = True,
) -> Iterator[ScratchStore]:
    """Open a store for KV as the settings want it (codec, shared prefix), of chunks of these tokens, a
    document in order; gone afterwards, whatever happens.

    tier: in a tier like this, below RAM if it is another; None: RAM over disk. filled: whether the chunks are
    prefilled at once. Servers are asked under a namespace of its own.
    """
    prefix = prefix_ids(settings, engine.model_path)
    identity = kv_identity(settings, engine.model_path, prefix)
    identity = replace(identity, namespace=f"scratch-{uuid.uuid4().hex}")
    stack, label = (ram_of(settings), TierSpec(kind="disk")), "disk"
    if tier is not None:
        label = tier.label
        own = tier.model_copy(update={"write": "through", "bytes": None, "chunks": None, "path": None})
        # Records in RAM need a home below.
        stack = (own, TierSpec(kind="disk")) if tier.kind == "ram" else (TierSpec(kind="ram"), own)
    with contextlib.ExitStack() as exits:
        folder = exits.enter_context(temporary_folder(settings, tier or TierSpec(kind="disk")))
        catalogue = exits.enter_context(contextlib.closing(Catalogue.open(folder, identity)))
        client = StoreClient.open(engine, folder, identity, stack, prefix)
        # No separators: prompts of measurements have a document's chunks one right behind the other.
        contexts = Contexts(identity, (), settings.context_tokens, engine.max_model_len - len(prefix) - 1)
        chunks = tuple(contexts.document((("", ids) for ids in dict.fromkeys(pieces)), None))
        store = ScratchStore(client, identity, catalogue, chunks, label, contexts)
        try:
            catalogue.register("scratch", chunks)
            if filled:
                store.fill(chunks)
            yield store
        finally:
            with contextlib.suppress(BlendragError):  # the engine may be what failed
                client.delete([entry.key for entry in catalogue.entries()])  # from servers, too
            with contextlib.suppress(BlendragError):
                client.close()


@dataclass(frozen=True, slots=True)
class ScratchTree:
    """A tree made by :func:`scratch_tree`. tiers: that it was opened with."""

    tree: Tree
    client: TreeClient
    tiers: tuple[TierSpec, ...]

    def path(self, prompt: Prompt) -> PrefixPath:
        """Return the path of all nodes of a prompt, which are there."""
        nodes = self._nodes(prompt)
        named = self.tree.held(nodes)
        return PrefixPath(self.client.id, named, len(named), len(named), state=self.tree.state(nodes))

    def hold(self, prompt: Prompt) -> None:
        """Have all nodes of this prompt, and none of other documents. Raises EngineError, StoreError."""
        documents = {key for key, _, _ in prompt.spans}
        self.client.delete(self.tree.forget(self.tree.documents() - documents))
        nodes, ids = self._nodes(prompt), prompt.token_ids
        while (held := self.tree.match(nodes)) < len(nodes):
            coming = self.tree.next(nodes, held, ids)
            self.tree.expect(coming.new, ids)
            path = self.client.growing(coming)
            self.client.engine.generate(ids[: coming.new[-1].end], Sampling(max_tokens=1, path=path))
            self.client.delete([])  # what is being stored is waited for
            if self.tree.match(nodes) <= held:
                raise StoreError("exact prefixes could not be stored: is there too little memory?")

    def _nodes(self, prompt: Prompt) -> Nodes:
        return self.tree.path(prompt.token_ids, prompt.spans)

    def make_cold(self) -> None:
        """Have RAM forget what disk has, and the system what the files hold."""
        self.client.close()
        TreeClient.open(self.client.engine, Path(self.client.id), self.tree.identity, self.tiers)
        drop_page_cache(Path(self.client.id) / "kv")


@contextlib.contextmanager
def scratch_tree(
    engine: Engine, settings: Settings, blocks: int | None = None, *, disk: bool = False
) -> Iterator[ScratchTree]:
    """Open an empty tree in RAM for a while. blocks: the engine's, at most. disk: over one, which several
    ranks share."""
    identity = kv_identity(settings, engine.model_path, prefix_ids(settings, engine.model_path))
    row = Layout(replace(identity, codec="raw"), engine.facts.dtype).row_bytes(engine.facts.block_size)
    limit = None if blocks is None else blocks * row * engine.facts.block_layers
    ram = TierSpec(kind="ram", bytes=limit, policy=ram_of(settings).policy)
    tiers = (ram, ram.model_copy(update={"kind": "disk"})) if disk else (ram,)
    with temporary_folder(settings, ram) as folder:
        tree, _ = tree_kind(engine.facts).open(
            folder, tree_identity(identity, engine.facts.blocks, engine.facts.block_layers)
        )
        with contextlib.closing(tree):
            client = TreeClient.open(engine, folder, tree.identity, tiers)
            try:
                yield ScratchTree(tree, client, tiers)
            finally:
                with contextlib.suppress(BlendragError):  # the engine may be what failed
                    client.close()


def ram_of(settings: Settings) -> TierSpec:
    """Return the first tier of the settings that is RAM, or the default one."""
    return next((spec for spec in settings.stack if spec.kind == "ram"), TierSpec(kind="ram", bytes=2 << 30))


@contextlib.contextmanager
def temporary_folder(settings: Settings, tier: TierSpec) -> Iterator[Path]:
    """Make a folder for a while, on the tier's own disk, else that of the cache folder."""
    beside = (tier.path or settings.cache_dir).expanduser()
    try:
        beside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".blendrag-", dir=beside, ignore_cleanup_errors=True) as name:
            yield Path(name)
    except OSError as error:
        raise StoreError(f"cannot write to {str(beside)!r}: {error.strerror}") from error


def drop_page_cache(folder: Path) -> None:
    """Have the system forget the contents of the files in ``folder``, where it can: they were all synced. No
    database may be among them: closing its file ends all locks that this process has on it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
