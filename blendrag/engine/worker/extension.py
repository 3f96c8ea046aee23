"""Methods added to vLLM's worker class (``worker_extension_cls``), called through ``collective_rpc``."""

from __future__ import annotations

from typing import Any

from blendrag.errors import BlendragError


class BlendWorker:
    """Names carry a prefix because vLLM mixes this class into its own. Arguments and results are plain data.

    User errors come back as ``{"error": [class name, message]}``: vLLM would turn an exception into a
    dead engine's log.
    """

    model_runner: Any
    vllm_config: Any

    def blendrag_bind(self) -> dict[str, Any]:
        """Give the connector its model; facts about it. ``reason`` says why it cannot be blended."""
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from blendrag.engine import compat
        from blendrag.engine.worker.data_plane import Blender
        from blendrag.engine.worker.decoder import make_decoder
        from blendrag.engine.worker.masks import choose_mask
        from blendrag.engine.worker.selfcheck import unfit_reason

        compat.output_ids_not_read(self.model_runner)
        model = self.model_runner.get_model()
        facts: dict[str, Any] = {
            "architecture": type(model).__name__,
            "device": str(self.model_runner.device),
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "block_size": self.vllm_config.cache_config.block_size,
            "reason": compat.unsupported_reason(self.vllm_config, self.model_runner, model),
        }
        if facts["reason"]:
            return facts
        decoder = make_decoder(model, self.vllm_config)
        facts["reason"] = unfit_reason(decoder, self.model_runner, facts["block_size"])
        if facts["reason"]:
            return facts
        extra = self.vllm_config.kv_transfer_config.kv_connector_extra_config
        wanted = extra.get("mask", "auto")
        mask, mask_ms = choose_mask(decoder, self.model_runner, facts["block_size"])
        facts |= {"mask": mask if wanted == "auto" else wanted, "mask_ms": mask_ms}
        self._blendrag = Blender(
            decoder, self.model_runner, facts["block_size"], facts["mask"], int(extra.get("in_flight", 8))
        )
        get_kv_transfer_group().bind(self._blendrag)
        heads, size = decoder.kv_shape
        return facts | {
            "decoder": type(decoder).__name__,
            "num_layers": decoder.num_layers,
            "num_kv_heads": heads,
            "head_size": size,
        }

    def blendrag_call(self, method: str, *args: Any) -> dict[str, Any]:
        """Run one of the data plane's operations: ``{"ok": result}`` or ``{"error": [name, message]}``."""
        try:
            return {"ok": getattr(self, f"_blendrag_{method}")(*args)}
        except BlendragError as error:
            return {"error": [type(error).__name__, str(error)]}

    def _blendrag_open_store(
        self,
        root: str,
        identity: dict[str, Any],
        stack: list[dict[str, Any]],
        profile: dict[str, Any] | None = None,
        prefix: list[int] | None = None,
    ) -> str:
        from blendrag.control.estimate import Estimator
        from blendrag.control.profile import Profile
        from blendrag.store.identity import KVIdentity
        from blendrag.store.tiers import TierSpec

        specs = [TierSpec.model_validate(spec) for spec in stack]
        estimate = Estimator.of(Profile.model_validate(profile)) if profile else None
        return self._blendrag.open_store(root, KVIdentity(**identity), specs, estimate, prefix or ())

    def _blendrag_close_store(self, store: str) -> None:
        self._blendrag.close_store(store)

    def _blendrag_ingest(self, store: str, chunks: list[tuple[str, list[int]]]) -> dict[str, Any]:
        return self._blendrag.ingest(store, chunks)

    def _blendrag_flush(self, store: str) -> int:
        return self._blendrag.flush(store)

    def _blendrag_delete(
        self, store: str, keys: list[str], everywhere: bool = False
    ) -> tuple[int, list[str]]:
        return self._blendrag.store(store).delete(keys, everywhere=everywhere)

    def _blendrag_empty_ram(self, store: str) -> None:
        self._blendrag.store(store).empty_ram()

    def _blendrag_prefetch(self, store: str, keys: list[str]) -> None:
        self._blendrag.prefetch(store, keys)

    def _blendrag_forecast(self, store: str, forecasts: list[tuple[str, float, list[str]]]) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._blendrag.store(store).forecast(forecasts)
        for conversation, chance, _ in forecasts:
            get_kv_transfer_group().forecast(conversation, chance)

    def _blendrag_use_policy(self, store: str, name: str) -> None:
        self._blendrag.store(store).use_policy(name)

    def _blendrag_learn(self, store: str, folder: str) -> None:
        from pathlib import Path

        from blendrag.forecast.hazard_file import load_hazard

        self._blendrag.store(store).learn(load_hazard(Path(folder))[0])

    def _blendrag_stats(self, store: str) -> dict[str, Any]:
        return self._blendrag.stats(store)

    def _blendrag_report(self, ticket: str) -> dict[str, Any] | None:
        report = self._blendrag.report(ticket)
        return report.to_plain() if report else None

    def _blendrag_selfcheck(self, token_ids: list[int], split: int) -> dict[str, float]:
        from blendrag.engine.worker.selfcheck import check_model

        return check_model(self._blendrag, token_ids, split)

    def _blendrag_kernels(self, *shape: Any) -> dict[str, Any]:
        from blendrag.lab.worker.kernel_times import time_pieces

        return time_pieces(self._blendrag, *shape)

    def _blendrag_probe_layers(self, *prompt: Any) -> dict[str, Any]:
        from blendrag.lab.worker.layer_probe import probe_layers

        return probe_layers(self._blendrag, *prompt)
