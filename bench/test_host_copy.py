"""Host copies under pytest-benchmark: `pytest bench/test_host_copy.py --benchmark-enable`.

Prints bytes and GB/s per case; `host_copy.py` beside it compares in pairs, with the ceiling.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from host_copy import KIB, MIB, POOL_NBYTES, Arena
from pytest_benchmark.fixture import BenchmarkFixture

from kvtiers import native
from kvtiers.data.copier import Direction
from kvtiers.data.copier_host import CopyMethod, default_num_threads

pytestmark = pytest.mark.skipif(not native.available(), reason="compiled module not built")


@pytest.fixture(scope="module")
def memory() -> npt.NDArray[np.uint8]:
    return np.ones(POOL_NBYTES, np.uint8)


@pytest.fixture(params=[4 * KIB, 64 * KIB, 2 * MIB], ids=["4K", "64K", "2M"], scope="module")
def arena(memory: npt.NDArray[np.uint8], request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = Arena(memory, request.param)
    yield arena
    arena.close()


@pytest.mark.parametrize("batch_nbytes", [4 * MIB, 64 * MIB], ids=["4M", "64M"])
@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
@pytest.mark.parametrize("side", ["memcpy a block", "ours"])
def test_host_copy(
    benchmark: BenchmarkFixture, arena: Arena, side: str, direction: Direction, batch_nbytes: int
) -> None:
    method: CopyMethod = "auto" if side == "ours" else "memcpy"
    copier = arena.copier(method, default_num_threads() if side == "ours" else 1)
    benchmark.group = f"{direction.value} {arena.piece_nbytes} bytes x {batch_nbytes} a batch"
    benchmark.extra_info["batch_nbytes"] = batch_nbytes
    batches = arena.batches(batch_nbytes)

    def copy() -> None:
        copier.done(copier.submit(direction, next(batches), None))

    benchmark(copy)
    if benchmark.stats is not None:
        speed = batch_nbytes / benchmark.stats["median"] / 1e9
        benchmark.extra_info["gb_per_second"] = speed
        print(f"\n{benchmark.group}, {side}: {speed:.1f} GB/s")
