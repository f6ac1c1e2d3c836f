"""Workers that are closed behind each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from workers import Worker

from kvtiers.data.copier_host import HostCopier
from kvtiers.testing.fake_rank import FakeRank
from kvtiers.testing.faults import HeldStore


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(**options) -> Worker:
        options.setdefault("make_copier", HostCopier)
        workers.append(Worker(FakeRank(**options)))
        return workers[-1]

    yield make
    for worker in workers:
        worker.rank.device.settle()
        for store in worker.rank.stores.values():
            if isinstance(store, HeldStore):
                store.release()
        worker.connector.close()
        assert not worker.thread.alive


@pytest.fixture
def worker(make_worker) -> Worker:
    return make_worker()
