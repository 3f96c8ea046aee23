"""A prompt of stored chunks of random KV, blended by a small model without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from blendrag.control.guard import LoadGuard
from blendrag.engine.blend.blending import Choices, RequestBlend
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.forward.slices import Pace, exhaust
from blendrag.engine.wire.recipe import BlendOrder, Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.load.loader import LayerLoader
from blendrag.options import BlendOptions
from blendrag.store.identity import KVIdentity
from blendrag.store.record import NO_DRAFTS, DraftLayers
from blendrag.store.tiers import TierSpec
from small_decoder import KV_HEADS, SIZE
from stores import make_chunk, open_stack, put, register

TOKENS = (70, 96, 33)  # of the chunks
NEXT_ID = 7  # of the token behind the prompt
BLOCK_IDS = [7, 3, 12, 0, 9, 30, 1, 5]


class ChunkedPrompt:
    """Chunks, three if nothing else is said, between other tokens. drafts: layers of a model that drafts,
    behind the others."""

    def __init__(self, layers: int, lengths: Sequence[int] = TOKENS, drafts: DraftLayers = NO_DRAFTS) -> None:
        self.identity = KVIdentity("small", "weights-1", "float32", layers, KV_HEADS, SIZE)
        self.chunks = [
            make_chunk(n, count, torch.float32, self.identity, drafts) for n, count in enumerate(lengths)
        ]
        self.ids, self.spans = list(range(20)), list[tuple[str, int, int]]()
        for chunk in self.chunks:
            self.spans.append((chunk.key, len(self.ids), len(chunk.token_ids)))
            self.ids += [*chunk.token_ids, 500, 501]
        self.ids += range(300, 330)

    def blend(
        self,
        model: LoadedModel,
        root: Path,
        options: BlendOptions,
        written: int = 0,
        choices: Choices | None = None,
        idle: bool = True,
        block_ids: Sequence[Sequence[int]] = (BLOCK_IDS,),
        guard: LoadGuard | None = None,
        head: int = 0,
        stored: int | None = None,
    ) -> BlendReport:
        """written: so many of its first tokens are there already. idle: not beside answers, in small
        pieces. block_ids: in each group of layers. head: tokens of its exact prefix. stored: how many of its
        chunks are there; None: all."""
        register(root, self.chunks, identity=self.identity)
        tiers = TierSpec(kind="ram", bytes=1 << 24), TierSpec(kind="disk")
        store = open_stack(root, *tiers, identity=self.identity, dtype="float32")
        for chunk in self.chunks[:stored]:
            put(store, chunk)
        recipe = Recipe("", tuple(self.spans), options, head=(("node", head),) if head else ())
        first, *others = map(list, block_ids)
        order = BlendOrder("", "", self.ids, first, written, recipe, others=others, next_id=NEXT_ID)
        pace = Pace()
        pace.begin(60.0, idle=idle)
        try:
            told = None, pace, None, choices or Choices(), guard or LoadGuard()
            return exhaust(RequestBlend(model, LayerLoader(4), store, order, *told).run())
        finally:
            store.close()
