"""The reference store passes the suite, and so it does behind wrappers that only delay."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.slab import Slab
from kvtiers.data.store import BlockStore
from kvtiers.model.errors import CapacityError
from kvtiers.testing.faults import FaultyStore, LateStore
from kvtiers.testing.store_suite import StoreSuite


class TestMemoryStore(StoreSuite):
    says_held = True

    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> BlockStore:
        return MemoryStore(slab, capacity_nbytes)

    @pytest.mark.parametrize("capacity", [0, -1])
    def test_capacity_must_be_positive(self, slab: Slab, capacity: int) -> None:
        with pytest.raises(CapacityError, match=str(capacity)):
            MemoryStore(slab, capacity)


class TestMemoryStoreWithoutFaults(StoreSuite):
    says_held = True

    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> BlockStore:
        return FaultyStore(MemoryStore(slab, capacity_nbytes), slab)


class TestMemoryStoreWithLateAnswers(StoreSuite):
    says_held = True

    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> BlockStore:
        return LateStore(MemoryStore(slab, capacity_nbytes), polls=3)


class TestMemoryStoreWithAnswersOutOfOrder(StoreSuite):
    says_held = True

    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> BlockStore:
        return LateStore(MemoryStore(slab, capacity_nbytes), polls=2, seed=5)
