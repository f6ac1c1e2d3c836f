"""Builds the data plane of one rank: slab, copier, stores and executor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtiers.connector.build import slots_for
from kvtiers.connector.fit import check_memory
from kvtiers.connector.stores import RankStores
from kvtiers.connector.worker import WorkerConnector
from kvtiers.data.copier import Copier
from kvtiers.data.copier_host import make_host_copier
from kvtiers.data.executor import Executor
from kvtiers.data.executor_thread import ExecutorThread
from kvtiers.data.key_space import KeySpace
from kvtiers.data.slab import PinMode, Slab
from kvtiers.data.store import BlockStore
from kvtiers.data.workshop import Workshop
from kvtiers.model.config import Config
from kvtiers.model.errors import KVTiersError
from kvtiers.model.fingerprint import Fingerprint
from kvtiers.model.frame import slot_nbytes_for
from kvtiers.model.keys import Rank
from kvtiers.model.layout import KVLayout
from kvtiers.model.messages import Hello

logger = logging.getLogger(__name__)


WrapStore = Callable[[str, BlockStore], BlockStore]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Who a worker is, and what its blocks mean.

    Attributes:
        rank, num_ranks: its place, and how many share the configured capacities.
        fingerprint: everything that changes the meaning of the bytes.
        instance: folder of the engine in private stores, where the configuration names none.
    """

    rank: Rank
    num_ranks: int
    fingerprint: Fingerprint
    instance: str = "0"


def build_host_rank(
    config: Config,
    layout: KVLayout,
    bases: Sequence[int],
    facts: RankFacts,
    wrap_store: WrapStore | None = None,
) -> WorkerConnector:
    """Build slab, host copier, stores and executor for KV tensors in host memory.

    Args:
        bases: address of each of the layout's allocations. The engine owns that memory, and
            must keep it until `WorkerConnector.close`.
        wrap_store: given each store's name and the store, returns what stands in for it, such as
            a slower one in a benchmark.

    Raises:
        CapacityError: a tier cannot hold one block, or the machine lacks the space.
        StoreError: a store cannot be had.
    """
    threads = config.copying.num_threads(len(os.sched_getaffinity(0)))

    def make_copier(slab: Slab) -> Copier:
        return make_host_copier(layout, bases, slab, threads, config.copying.native)

    how = f"{threads} copy threads"
    return _build_rank(config, layout, facts, _Media(_host_slab, make_copier, wrap_store, how))


def build_torch_rank(
    config: Config,
    layout: KVLayout,
    allocations: Sequence[Any],
    facts: RankFacts,
    wrap_store: WrapStore | None = None,
    current_stream: Callable[[], int] | None = None,
) -> WorkerConnector:
    """Build slab, copier, stores and executor for KV arrays on a device.

    On a CUDA device kvtiers' own kernels and DMA copy, once they were checked there; else torch
    does. `copy.native` insists on the first, or on the second.

    Args:
        allocations: a contiguous array over each of the layout's allocations, of torch, CuPy or
            another library with DLPack. The copier holds them until `WorkerConnector.close`.
        wrap_store: as in `build_host_rank`.
        current_stream: returns the handle of the stream that the engine works on; None asks the
            arrays' library, torch or CuPy.

    Raises:
        CapacityError: a tier cannot hold one block, or the machine lacks the memory.
        LayoutError: the arrays do not fit the layout, or lie on two devices.
        NativeModuleError: `copy.native: on`, and the kernels cannot be used here.
    """
    # Imported here: who serves an engine on the CPU needs nothing of it.
    from kvtiers.data.copier_device import DeviceMedia  # noqa: PLC0415

    device = DeviceMedia(layout, allocations, config.copying.native, current_stream=current_stream)
    media = _Media(device.make_slab, device.make_copier, wrap_store, device.where)
    return _build_rank(config, layout, facts, media)


def _host_slab(num_slots: int, slot_nbytes: int, pin: PinMode) -> Slab:
    """Return a slab that no device needs page-locked."""
    return Slab(num_slots, slot_nbytes, pin=pin)


@dataclass(frozen=True, slots=True)
class _Media:
    """What differs between devices, and what stands in for stores."""

    make_slab: Callable[[int, int, PinMode], Slab]
    make_copier: Callable[[Slab], Copier]
    wrap_store: WrapStore | None
    how: str


def _build_rank(
    config: Config, layout: KVLayout, facts: RankFacts, media: _Media
) -> WorkerConnector:
    """Build what is the same for every copier."""
    slot_nbytes = slot_nbytes_for(layout.groups)
    num_slots = slots_for(config, facts.num_ranks, slot_nbytes)
    check_memory(config)
    slab = media.make_slab(num_slots, slot_nbytes, config.dram.pin)
    try:
        copier = media.make_copier(slab)
    except KVTiersError:
        slab.close()
        raise
    try:
        stores = RankStores(config, slab, facts.instance, facts.rank.tensor, facts.num_ranks)
    except KVTiersError:
        copier.close()
        slab.close()
        raise
    if media.wrap_store is not None:
        stores.stores = {n: media.wrap_store(n, store) for n, store in stores.stores.items()}
    key_space = KeySpace(facts.fingerprint.digest, facts.rank)
    shop = Workshop(slab, copier, layout, key_space, stores.stores, facts.rank)
    executor = Executor(shop, verify_dram=config.integrity == "all")
    hello = Hello(
        rank=facts.rank,
        fingerprint=facts.fingerprint.digest,
        num_slots=num_slots,
        slot_nbytes=slot_nbytes,
        payload_nbytes=tuple(group.payload_nbytes for group in layout.groups),
        pinned=slab.pinned,
        stores=stores.hellos,
    )
    logger.info("slab of %d slots of %d bytes, %s", num_slots, slot_nbytes, media.how)
    return WorkerConnector(hello, ExecutorThread(executor), copier.mark)
