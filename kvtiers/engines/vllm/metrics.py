"""kvtiers' metrics on vLLM's own page and in its log."""

from __future__ import annotations

from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtiers.observe.metrics import (
    BLOCKS_FAILED,
    BLOCKS_OFFLOADED,
    BLOCKS_RELOADED,
    OFFLOADS_DROPPED,
    Snapshot,
)
from kvtiers.observe.prometheus import PrometheusExporter

_LOGGED = (BLOCKS_OFFLOADED, BLOCKS_RELOADED, BLOCKS_FAILED, OFFLOADS_DROPPED)


class KVTiersStats(KVConnectorStats):
    """What was counted since the last step, as vLLM sends it between processes."""

    @property
    def snapshot(self) -> Snapshot:
        """The payload as counters and gauges."""
        return Snapshot.from_plain(self.data)

    def reset(self) -> None:
        """Forget what was counted."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Return both as one: counters add up, gauges are those of `other`."""
        return KVTiersStats(self.snapshot.merged(Snapshot.from_plain(other.data)).to_plain())

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of vLLM's periodic log line."""
        counters = self.snapshot.counters
        totals: dict[str, int | float] = {}
        for name in _LOGGED:
            short = name.removeprefix("kvtiers_").removesuffix("_total")
            totals[short] = sum(v for (n, _), v in counters.items() if n == name)
        return totals

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data or not self.snapshot.counters


class KVTiersPromMetrics(KVConnectorPromMetrics):
    """Shows the counters on vLLM's ``/metrics``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._exporter = PrometheusExporter(
            metric_types[prometheus_client.Counter],
            metric_types[prometheus_client.Gauge],
            labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's counters."""
        values = self.per_engine_labelvalues[engine_idx]
        self._exporter.apply(Snapshot.from_plain(transfer_stats_data), values)
