"""Exact prefixes of a library's prompts: which are there, which are worth having, and which have to go."""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blendrag.engine.client.running import RunningEngine
from blendrag.engine.prefixes.trees import TreeClient
from blendrag.engine.wire.operations import EngineFacts
from blendrag.engine.wire.prefixes import MIN_LOADED, PrefixPath
from blendrag.engine.wire.recipe import Recipe
from blendrag.errors import BlendragError, BlendragWarning
from blendrag.progress import Progress
from blendrag.prompt import PromptPlan
from blendrag.serving.growth import Growth, Wanted
from blendrag.serving.prefill import PrefillReport
from blendrag.settings import Settings
from blendrag.store.catalogue import Catalogue
from blendrag.store.contexts import Chunk
from blendrag.store.identity import KVIdentity
from blendrag.store.policies import Seen
from blendrag.tree import Nodes
from blendrag.tree.states import StateTree
from blendrag.tree.tree import Tree


def tree_folder(root: Path) -> Path:
    """Return the folder of the tree, in that of a library."""
    return root / "tree"


def tree_identity(identity: KVIdentity, blocks: str, layers: int) -> KVIdentity:
    """Return what a node's KV depends on besides its tokens. blocks: ``EngineFacts.blocks``, in place of how
    chunks are kept and prefilled. layers: how many have KV."""
    return replace(identity, codec="raw", prefix=f"blocks {blocks}", num_layers=layers)


def tree_kind(facts: EngineFacts) -> type[Tree]:
    """Return the kind of tree that an engine's exact prefixes are in."""
    return StateTree if facts.states else Tree


class Prefixes:
    """The exact prefixes of a library. Open them with :meth:`open` while an engine runs, close them before it
    ends. Thread-safe."""

    def __init__(self, tree: Tree, client: TreeClient, catalogue: Catalogue, *, sliced: bool) -> None:
        self.tree, self.client, self._catalogue = tree, client, catalogue
        self.growth = Growth(client, tree, self.expect, sliced=sliced)
        self._seen = Seen()
        self.failed = 0
        """The number of prompts that went without the tree: its catalogue could not be used."""

    @classmethod
    def open(
        cls, root: Path, settings: Settings, catalogue: Catalogue, engine: RunningEngine
    ) -> Prefixes | None:
        """Open those of the library in ``root``, which has this catalogue; None where its engine keeps none:
        it cannot blend, or has other clients. What is left of another engine's is removed.
        Raises StoreError."""
        folder = tree_folder(root)
        if not engine.facts.blocks or not engine.alone:
            return None
        if not settings.tree_stays:
            shutil.rmtree(folder, ignore_errors=True)
        stack = settings.tree
        of_blocks = tree_identity(catalogue.identity, engine.facts.blocks, engine.facts.block_layers)
        tree, emptied = tree_kind(engine.facts).open(folder, of_blocks)
        if emptied:
            warnings.warn(
                f"the prefixes in {str(folder)!r} were another engine's (model, namespace, KV cache or"
                " processor), or damaged, and are removed: they grow again",
                BlendragWarning,
                stacklevel=2,
            )
        try:
            documents = tree.documents()
            tree.forget(documents - catalogue.known(documents))  # a crash came between; opening removes files
            client = TreeClient.open(engine, folder, of_blocks, stack)
        except BaseException:
            tree.close()
            raise
        return cls(tree, client, catalogue, sliced=settings.prefix_caching)

    @property
    def alive(self) -> bool:
        """Return whether its engine still runs."""
        return self.client.engine.alive

    def path(self, plan: PromptPlan, recipe: Recipe | None) -> tuple[PrefixPath | None, Recipe | None]:
        """Return how a prompt is served that would be blended by this recipe, or prefilled (None): exact, by
        its path, if all of its documents are there; mixed, by a recipe that begins behind those that are; or
        as it would be without a tree.

        Nodes are kept from their second sighting on: of a prompt that is not blended as they are computed, of
        others later, while the engine is idle.
        """
        nodes = self.tree.path(plan.token_ids, plan.spans)
        if not nodes:
            return None, recipe
        held, seen = self.tree.match(nodes), self._seen.meet([node.key for node in nodes])
        later = recipe is not None or self.tree.has_states  # a state is that behind a prompt's last token
        # A state is large: one that is never loaded is not kept.
        if later and seen > held and (recipe is not None or nodes[seen - 1].end >= MIN_LOADED):
            self.growth.want(Wanted(nodes[:seen], plan.token_ids[: nodes[seen - 1].end]))
        if recipe is not None and held < len(nodes):
            if held and nodes[held - 1].document:
                recipe = replace(recipe, tree=self.client.id, head=self.tree.held(nodes[:held]))
            return None, recipe
        kept = held if later else max(held, seen)
        if kept > held and not self.expect(nodes[:kept], nodes[held:kept], plan.token_ids):
            kept = held
        named, state = self.tree.held(nodes[:kept]), self.tree.state(nodes[:held])
        stored = len(named) - (kept - held)
        return (PrefixPath(self.client.id, named, stored, len(named), state=state) if named else None), None

    def grow(self, plan: PromptPlan) -> int:
        """Grow a plan's nodes, if there is room, and wait for them. Returns how many are new."""
        nodes = self.tree.path(plan.token_ids, plan.spans)
        if not nodes:
            return 0
        held = self.tree.match(nodes)
        if held < len(nodes):
            self.growth.want(Wanted(nodes, plan.token_ids[: nodes[-1].end]))
            self.growth.wait()
        return self.tree.match(nodes) - held

    def grow_first(
        self,
        documents: Sequence[Chunk],
        before: Sequence[int],
        room: int,
        report: PrefillReport,
        progress: Progress,
        go_on: Callable[[], None],
    ) -> None:
        """Grow each of these documents in first place, behind the tokens ``before``, as long as they take no
        more than ``room`` bytes: of a hybrid model, for which nothing else is kept of a document. ``go_on``:
        called before each, to raise what ends it."""
        progress.total(sum(len(document.token_ids) for document in documents))
        for document in documents:
            go_on()
            ids = (*before, *document.token_ids)
            nodes = self.tree.path(ids, [(document.key, len(before), len(document.token_ids))])[-1:]
            if len(ids) >= MIN_LOADED and not self.tree.match(nodes):
                totals, begin = self.tree.totals(), time.perf_counter()
                if totals.bytes + 2 * totals.bytes // max(1, totals.ready) > room:  # one more, with its state
                    break
                self.growth.want(Wanted(nodes, ids))
                self.growth.wait()
                go_on()
                grown = self.tree.totals().bytes - totals.bytes
                if self.tree.match(nodes) and grown > 0:
                    report.chunks += 1
                    report.tokens += len(document.token_ids)
                    report.nbytes += grown
                    report.prefill_s += time.perf_counter() - begin
                elif self._catalogue.known([document.key]):  # not deleted meanwhile, so others had to leave
                    self.client.stats()  # or the engine has ended, which this raises
                    break
            progress.advance(len(document.token_ids))

    def expect(self, path: Nodes, new: Nodes, token_ids: Sequence[int]) -> bool:
        """Note that these new nodes of a path are about to be stored. Returns False, and they are not, if a
        document of the path has been deleted since its prompt was planned."""
        self.tree.expect(new, token_ids)
        documents = {node.document for node in path if node.document}
        # Deleting takes documents from the catalogue first, and nodes that it finds after.
        there = documents == self._catalogue.known(documents)
        gone = self.tree.prune(new) if there else self.tree.withdraw(new)
        if gone:
            self.client.delete_later(gone)
        return there

    def forget(self, documents: Iterable[str]) -> None:
        """Remove every node whose path holds one of these chunks, also one that is being stored."""
        if keys := self.tree.forget(documents):
            self.growth.forget(keys)
            self.client.delete(keys)

    def stats(self) -> dict[str, Any]:
        """Return stored nodes and their bytes, what is still to grow, and counters by tier."""
        totals = self.tree.totals()
        return {
            "nodes": totals.ready,
            "bytes": totals.bytes,
            "grown": self.growth.grown,
            "waiting": self.growth.waiting,
            "failed": self.failed,
            "refused": len(self.growth.refused),
            "tiers": self.client.stats(),
        }

    def close(self) -> None:
        """End growing; what was in memory is gone."""
        self.growth.close()
        with contextlib.suppress(BlendragError):  # of an engine that dies meanwhile
            if self.alive:
                self.client.close()
        self.tree.close()
