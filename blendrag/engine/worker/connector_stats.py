"""What vLLM carries from both halves of the connector to the client's process, and counts there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blendrag.engine.compat import KVConnectorPromMetrics, KVConnectorStats
from blendrag.engine.worker.metrics import Recorder, Tally, merge, summary


@dataclass
class BlendStats(KVConnectorStats):
    """From both halves to the client's process."""

    data: Tally = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {**summary(self.data)}

    def is_empty(self) -> bool:
        return not self.data


class BlendMetrics(KVConnectorPromMetrics):
    """In the client's process: what the tallies add up to."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._recorder = Recorder(metric_types, labelnames, labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._recorder.observe(transfer_stats_data, engine_idx)
