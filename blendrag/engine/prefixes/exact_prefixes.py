"""The worker's half of exact prefixes: nodes go from requests' blocks into the tree, and back."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blendrag.control.guard import LoadGuard
from blendrag.engine.forward.blocks import KVBlocks
from blendrag.engine.forward.ranks import ALONE, Ranks, open_on_all
from blendrag.engine.forward.slices import Finished
from blendrag.engine.hooks import Blending, Step, WorkerHook
from blendrag.engine.jobs import by_owner
from blendrag.engine.wire.prefixes import NodeLoad, NodeSave
from blendrag.engine.wire.recipe import BlendOrder
from blendrag.engine.wire.report import BlendReport
from blendrag.errors import EngineError, StoreError
from blendrag.store.identity import KVIdentity
from blendrag.store.stack import TierSpec
from blendrag.store.tiers import Tier
from blendrag.tree.layout import NodeBlocks
from blendrag.tree.store import NodeMissingError, NodeStore, StoredNode

_MOST_WAITING = 1 << 29  # bytes of nodes that wait to be stored, apart from the tiers; others are dropped

_log = logging.getLogger(__name__)


class _RefusedError(Exception):
    """The guard refuses to load a path: the message says why."""


class ExactPrefixes(WorkerHook):
    """The exact prefixes of one loaded model. ``writer`` stores what was copied out, and deletes after that.
    guard: refuses what is sooner prefilled. owner: whether this engine stores. Of several ranks, each has its
    own part of every node."""

    name = "prefixes"

    def __init__(
        self,
        cache: KVBlocks,
        dtype: str,
        writer: Executor,
        guard: LoadGuard,
        ranks: Ranks = ALONE,
        *,
        owner: bool = True,
    ) -> None:
        self._cache, self._dtype, self._writer, self._owner = cache, dtype, writer, owner
        self._guard, self._ranks = guard, ranks
        self._trees: dict[str, NodeStore] = {}
        self._waiting: dict[Future[bool], int] = {}  # bytes by write
        self._spoiled: set[str] = set()  # requests whose KV may depend on blocks that could not be loaded

    def bring(self, step: Step) -> Iterator[Finished]:
        for order in step.of(self.name).claims:
            try:
                report = self.load(order)
            except _RefusedError as why:
                yield Finished(order, BlendReport.refused(str(why), order.written))
            except Exception as error:
                yield Finished(order, error)
            else:
                if report is not None:
                    yield Finished(order, report)

    def blending(self, order: BlendOrder) -> Blending:
        left, exact = self.put_head(order)
        return Blending(left, finish=None if exact is None else partial(behind, exact))

    def after_forward(self, step: Step, failed: Set[int]) -> None:
        self.save(step.of(self.name).others, failed)
        self.ended(step.ended)

    # -- trees --------------------------------------------------------------------------------------------

    @property
    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "open_tree": self.open,
            "close_tree": self.close_tree,
            "delete_nodes": self.delete,
            "tree_stats": lambda tree: self._trees[tree].kv.stats(),
        }

    def open(self, root: str, identity: dict[str, Any], stack: Sequence[dict[str, Any]]) -> str:
        """Open the tree in folder ``root``. Returns its id. Raises StoreError where several would write."""
        if not self._owner:
            raise StoreError("data parallel engines cannot share a tree")
        if root not in self._trees:
            cache, ranks, kind = self._cache, self._ranks, KVIdentity(**identity)
            specs = [TierSpec.model_validate(spec).share(1 / ranks.size) for spec in stack]
            state_bytes = cache.states.state_bytes if cache.states else 0
            sizes = NodeBlocks(cache.block_size, cache.block_bytes, state_bytes)
            begin = partial(
                NodeStore.open, Path(root), kind, self._dtype, specs, sizes, ranks.rank, ranks.size
            )
            self._trees[root] = open_on_all(ranks, begin)
        return root

    def close(self) -> None:
        """Close all trees, once what was copied out is stored."""
        for tree in list(self._trees):
            self.close_tree(tree)

    def close_tree(self, tree: str) -> None:
        self._writer.submit(lambda: None).result()
        if opened := self._trees.pop(tree, None):
            opened.close()

    def delete(self, tree: str, keys: Sequence[str]) -> Generator[bool, None, None]:
        """Drop nodes, even while they are being stored."""
        if (opened := self._trees.get(tree)) is None:
            return
        yield from by_owner(self._ranks, self._writer, partial(opened.delete, keys))
        if not self._ranks.first and self._trees.get(tree) is opened:  # it may have closed meanwhile
            opened.delete(keys)

    @property
    def tiers(self) -> list[Tier]:
        """Return the tiers of all trees."""
        return [tier for tree in self._trees.values() for tier in tree.kv.tiers]

    # -- requests -----------------------------------------------------------------------------------------

    def load(self, order: NodeLoad) -> BlendReport | None:
        """Put a path's nodes into a request's blocks, except what is written there, and return the report
        that travels back. None for an order without tokens, which only says that they were used: nobody waits
        for it, so it never fails. Raises, on all ranks, the first one's _RefusedError, NodeMissingError,
        KeyError for a closed tree, or error of the device."""
        if not order.token_ids:
            if tree := self._trees.get(order.tree):
                tree.kv.used([*(key for key, _ in order.nodes), *filter(None, [order.state])])
            return None
        tree, report, error = self._trees[order.tree], None, None
        try:
            report = self._load(tree, order)
        except Exception as problem:
            error = problem
        told = self._ranks.everyone(error and _plain(error))
        for rank, one in enumerate(told):
            if rank and isinstance(one, NodeMissingError) and one.damaged:
                tree.kv.damaged(*one.damaged)
        for rank, one in enumerate(told):
            if one is not None:
                raise error if error is not None and rank == self._ranks.rank else one
        return report

    def _load(self, tree: NodeStore, order: NodeLoad) -> BlendReport:
        """Put this rank's part of a path's nodes into a request's blocks."""
        begin = time.perf_counter()
        starts = [0, *(end for _, end in order.nodes)]
        wanted = [at for at, (_, end) in enumerate(order.nodes) if end > order.written]
        nodes = [(key, order.token_ids[:end]) for key, end in order.nodes]
        lengths = [starts[at + 1] - starts[at] for at in wanted]

        def allow(tiers: Sequence[Tier]) -> None:
            loads: Counter[Tier] = Counter()
            for tier, tokens in zip(tiers, lengths, strict=True):
                loads[tier] += tokens
            if why := self._guard.refuses(loads, len(order.token_ids) - order.written):
                raise _RefusedError(why)

        found = tree.load(nodes[wanted[0] :], use=order.use, allow=allow)
        if order.use:
            tree.kv.used([key for key, _ in order.nodes[: wanted[0]]])
        if (states := self._cache.states) is not None:
            if not order.state or not all(order.state_blocks):
                raise NodeMissingError(f"{order.nodes[-1][0]} has no state, or no block for one")
            behind_last = order.token_ids[: order.nodes[-1][1]]
            [(record, _)] = tree.load([(order.state, behind_last)], use=order.use)
            states.write_state(order.state_blocks, record.own.rows.flatten())
        first = order.written // self._cache.block_size  # blocks before it are other requests', too
        for at, (record, _) in zip(wanted, found, strict=True):
            blocks = tree.layout.blocks(starts[at], starts[at + 1])
            skip = max(0, first - blocks.start)
            last = at == wanted[-1] or starts[at + 1] % self._cache.block_size == 0
            count = len(blocks) - (not last)  # the next node has the rest of that block
            # A claim without the prompt's last token may have no block for that token.
            count = min(count, len(order.block_ids) - blocks.start)
            if count > skip:
                rows = record.own.rows.view(len(self._cache.attentions), len(blocks), -1)[:, skip:count]
                self._cache.write_blocks(
                    [order.block_ids[block] for block in blocks[skip:count]], rows.flatten(1)
                )
        spent = time.perf_counter() - begin
        tiers = {tier for _, tier in found}
        if len(tiers) == 1:  # of several, no one knows which took how long
            self._guard.loaded(tiers.pop(), sum(lengths), spent)
        return BlendReport(
            prefix=order.written,
            exact=len(order.token_ids) - order.written,
            tiers=dict(Counter(tier.name for _, tier in found)),
            ms={"load": 1e3 * spent, "select": 0.0, "recompute": 0.0},
        )

    def put_head(self, order: BlendOrder) -> tuple[BlendOrder, BlendReport | None]:
        """Put the exact prefix of a prompt whose rest is blended into its blocks. Returns what is left to do,
        and what was loaded. If the prefix cannot be had, the prompt is blended from its beginning."""
        tree, end = order.recipe.tree, order.recipe.exact_end
        if tree not in self._trees or not order.written < end < len(order.token_ids):
            return order, None
        nodes, ids = order.recipe.head, order.token_ids[:end]
        try:
            report = self.load(
                NodeLoad(order.request_id, order.ticket, tree, nodes, ids, order.block_ids, order.written)
            )
        except (_RefusedError, NodeMissingError) as error:
            _log.info("a prompt is blended from its beginning: %s", error)
            return order, None
        return replace(order, written=len(ids)), report

    def save(self, orders: Iterable[NodeSave], failed: Set[int]) -> None:
        """Copy out the nodes that this step has computed. They are stored at the same time as the next ones
        are computed. failed: blocks without what should have been loaded. Nothing of a request with such a
        block is stored, now or later."""
        for order in orders:
            rows = self._copied(order, failed)
            if not self._ranks.all(rows is not None) or rows is None:
                continue
            whole = self._ranks.whole(rows, self._ranks.size)
            if whole is not None:
                node = StoredNode(order.key, order.parent, order.start, order.token_ids)
                stored = self._writer.submit(self._trees[order.tree].put, node, whole)
                self._waiting[stored] = whole.nbytes
                stored.add_done_callback(_log_failure)

    def _copied(self, order: NodeSave, failed: Set[int]) -> torch.Tensor | None:
        """Return this rank's part of a node, copied out of a request's blocks; None if it is not stored."""
        size = self._cache.block_size
        state = self._cache.states if order.start == len(order.token_ids) else None
        used = order.block_ids if state else order.block_ids[: -(-len(order.token_ids) // size)]
        if not failed.isdisjoint(used) or (state and not all(used)):
            self._spoiled.add(order.request_id)
        self._waiting = {one: nbytes for one, nbytes in self._waiting.items() if not one.done()}
        tree, waiting = self._trees.get(order.tree), sum(self._waiting.values())
        if tree is None or order.request_id in self._spoiled or waiting >= _MOST_WAITING:
            return None
        try:
            if state:
                return tree.layout.state_rows(state.read_state(used))
            return self._cache.read_blocks(used[order.start // size :])
        except Exception:  # no memory, perhaps: the request goes on
            _log.exception("a node of an exact prefix could not be copied")
            self._spoiled.add(order.request_id)
            return None

    def ended(self, requests: Iterable[str]) -> None:
        self._spoiled.difference_update(requests)


def _plain(error: Exception) -> Exception:
    """Return an error that other ranks can be told of."""
    if isinstance(error, (_RefusedError, NodeMissingError)):
        return error
    return EngineError(f"{type(error).__name__}: {error}")


def _log_failure(stored: Future[bool]) -> None:
    if not stored.cancelled() and (error := stored.exception()):
        _log.error("a node of an exact prefix could not be stored", exc_info=error)


def behind(head: BlendReport, blend: BlendReport) -> BlendReport:
    """Return the report of a prompt whose exact prefix was loaded, and whose rest was blended."""
    ms = {**blend.ms, "load": blend.ms["load"] + head.ms["load"]}
    tiers = dict(Counter(head.tiers) + Counter(blend.tiers))
    return replace(blend, prefix=head.prefix, exact=blend.prefix - head.prefix, ms=ms, tiers=tiers)
