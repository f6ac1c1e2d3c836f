"""The file store passes the suite with every I/O engine, direct and buffered, on several paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtiers import native
from kvtiers.data.file_settings import FILE_HEADER_NBYTES, INDEX_BASE_NBYTES, INDEX_SLOT_NBYTES
from kvtiers.data.file_store import FileStore, FileStoreSettings
from kvtiers.data.slab import Slab
from kvtiers.data.store import BlockStore
from kvtiers.testing.faults import FaultyStore, LateStore
from kvtiers.testing.store_suite import StoreSuite


class FileStoreSuite(StoreSuite):
    num_examples = 15
    says_held = True
    settings: dict[str, object] = {}
    num_paths = 1

    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> FileStore:
        """Make a store whose frames have the suite's bytes, beside the index."""
        num = capacity_nbytes // slab.slot_nbytes
        overhead = self.num_paths * FILE_HEADER_NBYTES + INDEX_BASE_NBYTES + num * INDEX_SLOT_NBYTES
        paths = tuple(folder / f"disk{i}" for i in range(self.num_paths))
        settings = FileStoreSettings(paths, capacity_nbytes + overhead, **self.settings)
        return FileStore(slab, settings)

    def num_fitting(self, capacity_nbytes: int) -> int:
        num = capacity_nbytes // 12_288
        return num // self.num_paths * self.num_paths


@pytest.mark.skipif(not native.available(), reason="needs the compiled module")
class TestNative(FileStoreSuite):
    settings = {"io": "native"}


@pytest.mark.skipif(not native.available(), reason="needs the compiled module")
class TestUring(FileStoreSuite):
    settings = {"io": "uring"}


class TestAiofiles(FileStoreSuite):
    settings = {"io": "aiofiles"}


class TestBuffered(FileStoreSuite):
    settings = {"direct": "off"}


class TestThreePaths(FileStoreSuite):
    num_paths = 3


class TestBehindFaults(FileStoreSuite):
    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> BlockStore:
        return FaultyStore(super().make(slab, capacity_nbytes, folder), slab)


class TestLateAndOutOfOrder(FileStoreSuite):
    def make(self, slab: Slab, capacity_nbytes: int, folder: Path) -> BlockStore:
        return LateStore(super().make(slab, capacity_nbytes, folder), polls=2, seed=5)
