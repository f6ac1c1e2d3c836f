"""What vLLM carries between the two connector objects."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtiers.model.messages import Hello, StepOrders, WorkerReport


@dataclass
class KVTiersHandshake(KVConnectorHandshakeMetadata):
    """A rank's hello, before the first step."""

    hello: Hello


@dataclass
class KVTiersMetadata(KVConnectorMetadata):
    """Scheduler to workers, every step."""

    orders: StepOrders


@dataclass
class KVTiersWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, every step that has news."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVTiersWorkerMetadata:
        """Return what two ranks reported as one."""
        assert isinstance(other, KVTiersWorkerMetadata)
        return KVTiersWorkerMetadata(self.report.merged(other.report))
