"""Opens the stores of one rank, and says in its hello what they hold."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from kvtiers.data.file_settings import FileStoreSettings
from kvtiers.data.file_store import FileStore
from kvtiers.data.lmdb_settings import LMDBStoreSettings
from kvtiers.data.lmdb_store import LMDBStore
from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.slab import Slab
from kvtiers.data.store import BlockStore
from kvtiers.model.config import Config
from kvtiers.model.config_tiers import LmdbTier, MemoryTier, NvmeTier, StoreTier
from kvtiers.model.errors import CapacityError, KVTiersError, PlacedError, StoreError
from kvtiers.model.messages import StoreHello
from kvtiers.model.units import format_size, whole_mib

logger = logging.getLogger(__name__)


class RankStores:
    """All stores of a rank; if one of them cannot be opened, the others are closed again.

    Attributes:
        stores: by name. hellos: what the rank says of each.

    Args:
        slab: whose frames they keep. instance: folder of the engine where the YAML names none.
        rank_idx, num_ranks: which share of the capacities of private stores is this rank's.

    Raises:
        PlacedError: a store cannot be had; names the key of the configuration.
    """

    def __init__(
        self, config: Config, slab: Slab, instance: str, rank_idx: int, num_ranks: int
    ) -> None:
        self.stores: dict[str, BlockStore] = {}
        self.hellos: dict[str, StoreHello] = {}
        self._slab = slab
        self._instance = instance
        self._rank_idx = rank_idx
        self._num_ranks = num_ranks
        try:
            for idx, tier in enumerate(config.stores, 1):
                with _placed(idx):
                    self._open(tier)
        except KVTiersError:
            self.close()
            raise

    def close(self) -> None:
        """Close what is open."""
        for store in self.stores.values():
            store.close()
        self.stores = {}

    def _open(self, tier: StoreTier) -> None:
        if isinstance(tier, MemoryTier):
            self._open_memory(tier)
        elif isinstance(tier, NvmeTier):
            self._open_files(tier)
        else:
            self._require_one_block(tier)
            self.stores[tier.name] = LMDBStore(self._slab, lmdb_settings(tier))
            self.hellos[tier.name] = StoreHello(None)

    def _open_memory(self, tier: MemoryTier) -> None:
        self._require_one_block(tier)
        nbytes = tier.capacity // self._num_ranks
        self.stores[tier.name] = MemoryStore(self._slab, nbytes)
        self.hellos[tier.name] = StoreHello(nbytes // self._slab.slot_nbytes)

    def _require_one_block(self, tier: MemoryTier | LmdbTier) -> None:
        least = self._num_ranks * self._slab.slot_nbytes
        if tier.capacity < least:
            raise CapacityError(
                f"{format_size(tier.capacity)} over {self._num_ranks} rank(s) does not hold one "
                f"block of {self._slab.slot_nbytes} bytes; write at least {whole_mib(least)}"
            )

    def _open_files(self, tier: NvmeTier) -> None:
        store = FileStore(
            self._slab,
            FileStoreSettings(
                tier.paths,
                tier.capacity // self._num_ranks,
                io=tier.io,
                direct=tier.direct,
                instance=tier.instance or self._instance,
                rank=self._rank_idx,
            ),
        )
        self.stores[tier.name] = store
        self.hellos[tier.name] = StoreHello(store.num_slots, store.inventory)
        if not self._rank_idx:
            for path in store.paths:
                refusal = path.refusal or "as configured"
                how = "O_DIRECT" if path.direct else f"page cache ({refusal})"
                logger.info(
                    "%s: %d blocks in %s (%s), %s, %s; %d of an earlier life",
                    tier.name,
                    store.num_slots,
                    path.folder,
                    path.filesystem,
                    store.io,
                    how,
                    store.num_inherited,
                )


def lmdb_settings(tier: LmdbTier) -> LMDBStoreSettings:
    """Return how a shared store is opened, by ranks and by the index reader alike."""
    return LMDBStoreSettings(tier.path, tier.capacity)


def lasting_folders(config: Config, instance: str) -> list[Path]:
    """Return a folder of each store that outlives the process: where its records are kept."""
    folders = []
    for tier in config.stores:
        if isinstance(tier, NvmeTier):
            folders.append(tier.paths[0] / (tier.instance or instance))
        elif isinstance(tier, LmdbTier):
            folders.append(tier.path)
    return folders


@contextlib.contextmanager
def _placed(idx: int) -> Iterator[None]:
    """Name the tier that an error is about."""
    try:
        yield
    except PlacedError as error:
        error.path = error.path or ("tiers", idx)
        raise
    except KVTiersError as error:
        raise StoreError(str(error), ("tiers", idx)) from error
