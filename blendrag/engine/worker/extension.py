"""The methods added to vLLM's worker class (``worker_extension_cls``), called through ``collective_rpc``."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, is_dataclass
from typing import Any, ClassVar

import torch

from blendrag.engine.compat import head_attention, norms, weights
from blendrag.engine.compat.connector import own_connector
from blendrag.engine.compat.drafts import drafting_model
from blendrag.engine.compat.groups import groups_of_runner
from blendrag.engine.compat.model import LoadedWorker, leave_rows_whole
from blendrag.engine.compat.parallel import tensor_group
from blendrag.engine.compat.platform import LOGGER, VLLM_VERSION, device_name
from blendrag.engine.compat.requests import discard_without_seeds
from blendrag.engine.compat.states import HybridLayers
from blendrag.engine.compat.unsupported import unsupported_reason
from blendrag.engine.forward.blocks import KVBlocks
from blendrag.engine.forward.decoders import make_decoder
from blendrag.engine.forward.paged import PagedCache
from blendrag.engine.forward.prompt_forward import LoadedModel
from blendrag.engine.forward.ranks import ALONE, Ranks, SeveralRanks
from blendrag.engine.wire import start_error
from blendrag.engine.worker.connector import BlendConnector, StatesConnector
from blendrag.engine.worker.data_plane import DataPlane, Plane, StatePlane
from blendrag.engine.worker.selfcheck import join_drafts, not_apart, unfit_reason
from blendrag.errors import BlendragError
from blendrag.models import weights_digest

# vLLM imports this module before a worker loads its model.
start_error.keep(LOGGER)
weights.register()
head_attention.register()
norms.register()


class BlendWorker:
    """The class that vLLM mixes into its worker class; hence the prefix of its names. Arguments and results
    are plain data.

    User errors come back as ``{"error": [class name, message]}``: vLLM would turn an exception into a
    dead engine's log.
    """

    blendrag_data_plane: ClassVar[type[DataPlane]] = DataPlane
    _blendrag: Plane
    model_runner: Any
    vllm_config: Any

    def blendrag_bind(self) -> dict[str, Any]:
        """Give the connector its model, once, and return facts about it. ``reason`` says why it cannot be
        blended."""
        self._blendrag_facts = getattr(self, "_blendrag_facts", None) or self._bind()
        return self._blendrag_facts

    def _bind(self) -> dict[str, Any]:
        worker = LoadedWorker.of(self.vllm_config, self.model_runner)
        model, size = worker.model, worker.ranks
        leave_rows_whole(model)
        norms.fuse()
        discard_without_seeds(self.model_runner)
        device = device_name(worker.device)
        facts: dict[str, Any] = {
            "architecture": type(model).__name__,
            "device": device if size == 1 else f"{size} x {device}",
            "dtype": worker.dtype,
            "vllm": VLLM_VERSION,
            "threads": torch.get_num_threads(),
            "block_size": worker.block_size,
            "prefix_caching": worker.prefix_caching,
            "reason": unsupported_reason(self.vllm_config, self.model_runner, model),
        }
        ranks = ALONE if size == 1 else SeveralRanks(tensor_group())
        if facts["reason"]:
            return facts | self._keep_states(worker, ranks)
        try:
            decoder = make_decoder(model, self.vllm_config)
        except Exception as problem:  # whatever an unknown structure may do
            return facts | {"reason": not_apart(problem)}
        groups = groups_of_runner(self.model_runner)
        cache = PagedCache(decoder.attentions, self.model_runner, groups)
        facts["block_size"] = cache.block_size
        facts["reason"] = next(filter(None, ranks.everyone(unfit_reason(decoder, cache, ranks))), None)
        if facts["reason"]:
            return facts
        drafts, cache = join_drafts(decoder, cache, ranks)
        connector = own_connector(BlendConnector)
        assert connector is not None, "whoever has the engine started gave it our connector"
        loaded = LoadedModel(decoder, cache, ranks, drafts)
        share = float(connector.options.get("blend_share", 1.0))
        self._blendrag = self.blendrag_data_plane(loaded, share, owner=worker.first)
        connector.bind(self._blendrag)
        # Those behind a window are given up.
        whole = cache.with_drafts
        there = len(groups) == 1 and not groups[0].window
        blocks = self._named(whole.format, size) if there else ""
        kept = {"blocks": blocks, "block_layers": len(whole.attentions)}
        return facts | {"num_layers": decoder.num_layers} | kept

    def _keep_states(self, worker: LoadedWorker, ranks: Ranks) -> dict[str, Any]:
        """Keep the exact prefixes of a hybrid model. Returns facts; none where they are not kept."""
        layers = HybridLayers.of(self.vllm_config, self.model_runner)
        connector = own_connector(StatesConnector)
        if layers is None or connector is None:
            return {}
        blocks = KVBlocks(layers.attentions, worker.block_size, layers)
        self._blendrag = StatePlane(blocks, worker.dtype, ranks, owner=worker.first)
        connector.bind(self._blendrag)
        name = self._named(blocks.format, ranks.size)
        return {"blocks": name, "block_layers": len(layers.attentions), "states": True}

    def _named(self, blocks: str, ranks: int) -> str:
        """Return the name of a format of blocks of which each rank has a part, with the model that drafts."""
        if blocks and (draft := drafting_model(self.vllm_config)):
            blocks += f" beside drafts of {draft} {weights_digest({}, draft.glob('*.safetensors'))}"
        return f"{blocks} of {ranks} ranks" if blocks and ranks > 1 else blocks

    def blendrag_call(self, client: str, number: int, operation: str, *args: Any) -> dict[str, Any]:
        """Run one of the operations. Returns ``{"ok": result}`` or ``{"error": [name, message]}``. A long one
        is only begun: ``{"more": None}``, for :meth:`blendrag_go_on`. client, number: whose call it is, and
        which."""
        try:
            result = self._blendrag.operations()[operation](*args)
        except BlendragError as error:
            return _wrong(error)
        if isinstance(result, Generator):
            self._blendrag.jobs.begin((client, number), result)
            return {"more": None}
        return _right(result)

    def blendrag_go_on(self, client: str, number: int) -> dict[str, Any]:
        """Run the next slice of a long operation, or nothing. Answers as :meth:`blendrag_call` does."""
        job = client, number
        if job not in self._blendrag.jobs:
            return _right(None)
        try:
            ended, result = self._blendrag.jobs.go_on(job)
        except BlendragError as error:
            return _wrong(error)
        return _right(result) if ended else {"more": None}


def _right(result: Any) -> dict[str, Any]:
    return {"ok": asdict(result) if is_dataclass(result) and not isinstance(result, type) else result}


def _wrong(error: BlendragError) -> dict[str, Any]:
    return {"error": [type(error).__name__, str(error)]}
