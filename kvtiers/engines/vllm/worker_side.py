"""vLLM's worker hooks in terms of the engine-neutral connector."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvtiers.connector.rank import RankFacts, build_host_rank, build_torch_rank
from kvtiers.connector.worker import ALL_GROUPS, Loaded, WorkerConnector
from kvtiers.engines.vllm.identity import engine_fingerprint, engine_instance
from kvtiers.engines.vllm.layout import flat_allocations, layout_of
from kvtiers.engines.vllm.metadata import KVTiersHandshake, KVTiersMetadata, KVTiersWorkerMetadata
from kvtiers.engines.vllm.ranges import check_layers, check_ranges, ranges_of
from kvtiers.engines.vllm.support import check_groups
from kvtiers.model.config import Config
from kvtiers.model.errors import ProtocolError, UnsupportedEngineError
from kvtiers.model.keys import Rank
from kvtiers.model.layout import KVLayout

logger = logging.getLogger(__name__)

UNTRIED = (
    "vLLM on a GPU has not been run with kvtiers: its CUDA copies are checked at start, and were "
    "tested on a pretended device; those through torch on a GPU, without an engine. Check answers "
    "before you rely on it"
)


class WorkerSide:
    """One per rank."""

    def __init__(self, config: Config, vllm_config: Any, kv_cache_config: Any) -> None:
        check_groups(kv_cache_config)
        self._num_ranges = config.reload.layer_ranges
        check_ranges(self._num_ranges, vllm_config, kv_cache_config)
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._connector: WorkerConnector | None = None
        self._kv_caches: dict[str, Any] = {}
        self._failed_blocks: set[int] = set()
        self._range_of: dict[str, int] = {}

    @property
    def connector(self) -> WorkerConnector:
        """The engine-neutral connector.

        Raises:
            ProtocolError: vLLM has not registered its KV tensors yet.
        """
        if self._connector is None:
            raise ProtocolError("vLLM has not registered its KV caches")
        return self._connector

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Handle `register_kv_caches`: build slab, copier and executor."""
        device = device_type(kv_caches)
        self._kv_caches = dict(kv_caches)  # the memory must outlive the copier
        layout, bases = layout_of(self._kv_cache_config, kv_caches, self._num_ranges)
        if self._num_ranges > 1:
            names = self._kv_cache_config.kv_cache_groups[0].layer_names
            check_layers(self._num_ranges, self._vllm_config, names)
            ranges = ranges_of(names, self._num_ranges)
            self._range_of = {name: i for i, layers in enumerate(ranges) for name in layers}
        parallel = self._vllm_config.parallel_config
        facts = RankFacts(
            rank=Rank(tensor=get_tensor_model_parallel_rank()),
            num_ranks=int(parallel.tensor_parallel_size),
            fingerprint=engine_fingerprint(self._vllm_config, layout),
            instance=engine_instance(self._vllm_config),
        )
        self._connector = self._build(device, layout, bases, facts)

    def _build(
        self, device: str, layout: KVLayout, bases: Sequence[int], facts: RankFacts
    ) -> WorkerConnector:
        if device == "cpu":
            return build_host_rank(self._config, layout, bases, facts)
        if not facts.rank.tensor:  # once an engine, not once a rank
            logger.warning(UNTRIED)
        allocations = flat_allocations(self._kv_caches, bases)
        return build_torch_rank(self._config, layout, allocations, facts)

    def handshake(self) -> KVTiersHandshake:
        """Handle `get_handshake_metadata`."""
        return KVTiersHandshake(self.connector.hello)

    def before_step(self, meta: KVTiersMetadata) -> None:
        """Handle `handle_preemptions`: take a step's orders in, before anything is overwritten.

        Where vLLM clears new blocks, loads do not begin yet: it clears those that a load within
        the step fills as well, after this, and before it binds the orders.
        """
        clears = bool(getattr(self._kv_cache_config, "needs_kv_cache_zeroing", False))
        self.connector.begin_step(meta.orders, load=not clears)

    def begin_step(self, meta: KVTiersMetadata) -> None:
        """Handle `bind_connector_metadata`: take a step's orders in, and begin its loads."""
        self.connector.begin_step(meta.orders)

    def before_forward(self) -> None:
        """Handle `start_load_kv`: wait for the loads of this step, unless its layers do."""
        if not self._range_of:
            self.connector.load_in_step()

    def before_layer(self, layer_name: str) -> None:
        """Handle `wait_for_layer_load`; a layer that nobody named waits for everything."""
        self.connector.load_in_step(self._range_of.get(layer_name, ALL_GROUPS))

    def take_loaded(self) -> Loaded:
        """Return the settled reloads, and keep their failed blocks for the next question."""
        loaded = self.connector.take_loaded()
        self._failed_blocks |= loaded.failed_blocks
        return loaded

    def take_failed_blocks(self) -> set[int]:
        """Handle `get_block_ids_with_load_errors`."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def worker_meta(self) -> KVTiersWorkerMetadata | None:
        """Handle `build_connector_worker_meta`."""
        report = self.connector.take_report()
        return None if report is None else KVTiersWorkerMetadata(report)

    def close(self) -> None:
        """Stop copying, then let go of vLLM's tensors."""
        if self._connector is not None:
            self._connector.close()
        self._kv_caches = {}


def device_type(kv_caches: Mapping[str, Any]) -> str:
    """Return where all KV tensors are: "cpu" or "cuda".

    Raises:
        UnsupportedEngineError: on another device, or on more than one.
    """
    devices = sorted({str(tensor.device) for tensor in kv_caches.values()})
    types: set[str] = {tensor.device.type for tensor in kv_caches.values()}
    if len(devices) != 1 or not types <= {"cpu", "cuda"}:
        raise UnsupportedEngineError(
            f"KV tensors on {', '.join(devices)}; this version of kvtiers serves tensors that are "
            "all on the CPU or all on one CUDA device"
        )
    return types.pop()
