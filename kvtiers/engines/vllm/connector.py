"""The class that vLLM instantiates, once in the scheduler and once per worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtiers.engines.vllm.metadata import KVTiersMetadata, KVTiersWorkerMetadata
from kvtiers.engines.vllm.metrics import KVTiersPromMetrics, KVTiersStats
from kvtiers.engines.vllm.scheduler_side import SchedulerSide
from kvtiers.engines.vllm.support import check_engine
from kvtiers.engines.vllm.worker_side import WorkerSide
from kvtiers.model.config import Loaded, resolve_config
from kvtiers.model.errors import ConfigError, PlacedError

logger = logging.getLogger(__name__)


class KVTiersConnector(KVConnectorBase_V1, SupportsHMA):
    """Offloads vLLM's KV blocks through kvtiers, and reloads them.

    ``kv_connector_extra_config`` takes one key, ``config``: the path of a YAML file, or the
    configuration itself. Without it ``KVTIERS_CONFIG`` names the file, or the defaults apply.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _share_log()
        check_engine(vllm_config)
        extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        explicit = extra.pop("config", None)
        if extra:
            raise ConfigError(
                f"kv_connector_extra_config: unknown key {min(extra)!r}; the only one is 'config'"
            )
        self._loaded = loaded = resolve_config(explicit)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            logger.info("kvtiers configuration from %s", loaded.source)
            self._scheduler = SchedulerSide(loaded.config, vllm_config, kv_cache_config)
        else:
            self._worker = WorkerSide(loaded.config, vllm_config, kv_cache_config)

    @property
    def scheduler_side(self) -> SchedulerSide:
        """What works in the scheduler's process."""
        assert self._scheduler is not None, "this connector is a worker's"
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        """What works in a worker's process."""
        assert self._worker is not None, "this connector is the scheduler's"
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not offloaded is computed again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether steps wait between layers, which a graph of a whole step cannot do.

        vLLM asks before it loads a model, so that a wrong file is told of in seconds.

        Raises:
            ConfigError: the configuration is wrong.
        """
        loaded = resolve_config((extra_config or {}).get("config"))
        return loaded.config.reload.layer_ranges > 1

    # -- worker side ------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Build the copying plane over the engine's KV tensors."""
        with _placed(self._loaded):
            self.worker_side.register(kv_caches)

    def get_handshake_metadata(self) -> Any:
        """Say hello."""
        return self.worker_side.handshake()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Take the step's orders, before the engine overwrites anything."""
        assert isinstance(kv_connector_metadata, KVTiersMetadata)
        self.worker_side.before_step(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take the step's orders, where `handle_preemptions` has not; begin its loads."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, KVTiersMetadata)
        self.worker_side.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Wait for the loads of this step; asynchronous ones are under way already."""
        self.worker_side.before_forward()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the loads of this step, as far as a layer reads them."""
        self.worker_side.before_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole blocks are offloaded after the forward pass."""

    def wait_for_save(self) -> None:
        """Start the offloads of the blocks that this step has filled."""
        self.worker_side.connector.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Return the requests whose asynchronous load is over."""
        loaded = self.worker_side.take_loaded()
        return None, set(loaded.request_ids) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return the requests whose load is over, and which of them failed as a whole."""
        loaded = self.worker_side.take_loaded()
        failed: set[str] = set()
        if len(self._kv_cache_config.kv_cache_groups) > 1:  # blocks cannot be named there
            failed = set(loaded.failed_requests)
            self.worker_side.take_failed_blocks()
        return KVConnectorTransferResults(
            finished_recving=set(loaded.request_ids), failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the engine blocks that must be computed after all."""
        return self.worker_side.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVTiersWorkerMetadata | None:
        """Report to the scheduler side."""
        return self.worker_side.worker_meta()

    # -- scheduler side ---------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Remember vLLM's cache manager, to take failed blocks out of its prefix cache."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.kv_cache_manager = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take in the hellos of all ranks."""
        with _placed(self._loaded):
            self.scheduler_side.connect(metadata)

    def on_new_request(self, request: Any) -> None:
        """Note a new request."""
        self.scheduler_side.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Answer how many tokens beyond the engine's own can be reloaded."""
        return self.scheduler_side.num_matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Start the reload for which the engine has made room."""
        self.scheduler_side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVTiersMetadata:
        """Return the orders of this step."""
        return self.scheduler_side.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the ranks answered."""
        self.scheduler_side.output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Note the end of a request; its blocks may be freed at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Note the end of a request; its blocks may be freed at once: fences guard them."""
        self.scheduler_side.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine should keep stepping until the ranks have answered."""
        return self.scheduler_side.connector.busy

    def reset_cache(self) -> bool:
        """Serve nothing that was stored before: the weights may have changed.

        False where a store that outlives this process could not take note of it.
        """
        return self.scheduler_side.connector.reset()

    # -- both -------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVTiersStats | None:
        """Return what the scheduler side has counted."""
        return None if self._scheduler is None else self._scheduler.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTiersStats:
        """Rebuild statistics that crossed a process boundary."""
        return KVTiersStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTiersPromMetrics:
        """Register the metrics on vLLM's page."""
        return KVTiersPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Stop copying and release all memory."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.connector.close()


@contextmanager
def _placed(loaded: Loaded) -> Iterator[None]:
    """Say where in the configuration a capacity or path stands that turns out to be wrong."""
    try:
        yield
    except PlacedError as error:
        if not error.path:
            raise
        raise type(error)(f"{loaded.where(error.path)}: {error}", error.path) from None


def _share_log() -> None:
    """Let kvtiers' log go where vLLM's goes, in its format: vLLM configures only its own.

    An application that has configured logging itself, for kvtiers or for everything, keeps that.
    """
    ours, engines = logging.getLogger("kvtiers"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.setLevel(engines.getEffectiveLevel())
        for handler in engines.handlers:
            ours.addHandler(handler)
