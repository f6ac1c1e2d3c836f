"""No copy overtakes the engine, and the engine overtakes no copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from interleavings import plays
from ranks import OK, assert_at_rest, memory, offloaded

from kvtiers.data.copier import Direction, Marker
from kvtiers.data.copier_host import HostCopier
from kvtiers.data.copier_portable import PortableCopier
from kvtiers.model.messages import DRAM, HBM, JobId
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FakeRank, key_of, keys_of

A, B, C, D = keys_of(1, 2, 3, 4)
FILLED, LOADED, FREE = 0, 1, 2  # engine blocks: used twice, reloaded into, for checks


class Reuse:
    """An engine fills a block, offloads it, fills it anew, and reloads what it held.

    Args:
        fenced: wait for offloads before their blocks are overwritten, as `begin_step` does.
        marked: copy behind the engine's work; else as soon as the host has counted tokens.
        chained: reload the block before its offload has landed.
        make_copier: None for the device's queues; else one that copies when it is asked,
            for an engine whose work is done when the call returns.
    """

    def __init__(
        self,
        make_copier: Callable[..., object] | None = None,
        *,
        fenced: bool = True,
        marked: bool = True,
        chained: bool = False,
    ) -> None:
        self.rank = FakeRank(make_layout(3, [[64]]), 4, make_copier=make_copier)
        self.queued = make_copier is None
        self.fenced, self.marked = fenced, marked
        self.rank.device.fill(LOADED, D)
        self.offloads: dict[bytes, JobId] = {}
        self.reload: JobId | None = None
        self.script = [
            lambda: self._offload(D, LOADED, 3),
            lambda: self._compute(A, FILLED),
            lambda: self._offload(A, FILLED, 0),
            lambda: self._overwrite(A, B, FILLED),
            lambda: self._offload(B, FILLED, 1),
            lambda: self._reload(A, LOADED, 0, after_reading=D),
            lambda: self._overwrite(B, C, FILLED),
        ]
        if chained:
            self.script.insert(3, self.script.pop(5))

    @property
    def moves(self) -> tuple[Callable[[], object], ...]:
        device = self.rank.device
        return (
            self._next,
            self.rank.advance,
            lambda: device.work(1),
            lambda: device.step(Direction.GATHER),
            lambda: device.step(Direction.SCATTER),
        )

    def finish(self) -> bool:
        """Play to the end; whether every block that is called right has the right bytes."""
        while self.script:
            if not self._next():
                self.rank.settle()
        self.rank.settle()
        assert_at_rest(self.rank)
        right = self.rank.outcomes(self.reload) != {HBM: [OK]} or self.rank.holds(LOADED, A)
        for key, slot in ((A, 0), (B, 1), (D, 3)):
            if self.rank.outcomes(self.offloads[key]) == {DRAM: [OK]}:
                assert self.rank.run(self.rank.orders.reload([key], [FREE], [slot])) == {HBM: [OK]}
                right &= self.rank.holds(FREE, key)
        return right

    def _next(self) -> bool:
        """Take the host's next step; False while it waits for a fence."""
        if not self.script or self.script[0]() is False:
            return False
        del self.script[0]
        return True

    def _compute(self, key: bytes, block: int) -> None:
        if self.queued:
            self.rank.device.compute(block, key)
        else:
            self.rank.device.fill(block, key)

    def _overwrite(self, old: bytes, new: bytes, block: int) -> bool:
        if not self._was_read(old):
            return False
        self._compute(new, block)
        return True

    def _offload(self, key: bytes, block: int, slot: int) -> None:
        order = self.rank.orders.offload([key], [block], [slot])
        self.offloads[key] = self.rank.submit(order, None if self.marked else Marker(0))

    def _reload(self, key: bytes, block: int, slot: int, after_reading: bytes) -> bool:
        if not self._was_read(after_reading):
            return False
        self.reload = self.rank.submit(self.rank.orders.reload([key], [block], [slot]))
        return True

    def _blocks(self, key: bytes) -> dict[JobId, list[int]]:
        return {self.offloads[key]: [LOADED if key == D else FILLED]}

    def _was_read(self, key: bytes) -> bool:
        return not self.fenced or not self.rank.executor.fence(self._blocks(key)).jobs


@pytest.mark.parametrize("chained", [False, True])
def test_every_order_of_turns_gives_right_bytes(chained):
    """R02, R05: fill, offload, reuse and reload on one block."""
    num = 0
    for play in plays(lambda: Reuse(chained=chained), max_turns=11):
        assert play.finish()
        num += 1
    assert num > 400


@pytest.mark.parametrize("make_copier", [PortableCopier, HostCopier], ids=["portable", "host"])
@pytest.mark.parametrize("chained", [False, True])
def test_every_order_of_turns_gives_right_bytes_with_copiers_that_have_no_queue(
    make_copier, chained
):
    """R07: a fallback has the same order."""
    for play in plays(lambda: Reuse(make_copier, chained=chained), max_turns=30):
        assert play.finish()


@pytest.mark.parametrize("make_copier", [None, PortableCopier, HostCopier])
def test_without_fences_some_order_gives_wrong_bytes(make_copier):
    """The tests above can fail."""
    assert not all(p.finish() for p in plays(lambda: Reuse(make_copier, fenced=False), 7))


def test_without_markers_some_order_gives_wrong_bytes():
    """R02: what the host has counted as computed need not have been computed."""
    assert not all(p.finish() for p in plays(lambda: Reuse(marked=False), 7))


def test_gather_waits_for_the_work_that_fills_its_block():
    """R02, step by step."""
    rank = FakeRank()
    rank.device.compute(5, A)
    job = rank.submit(rank.orders.offload([A], [5], [0]))
    rank.advance(3)
    assert not rank.device.step()
    assert rank.outcomes(job) == {}
    rank.device.work()
    assert rank.device.step()
    rank.advance()
    assert rank.outcomes(job) == {DRAM: [OK]}
    assert rank.run(rank.orders.reload([A], [6], [0])) == {HBM: [OK]}
    assert rank.holds(6, A)


def test_scatter_waits_for_the_work_that_reads_its_target():
    rank = FakeRank()
    [key] = offloaded(rank, 0)
    rank.device.compute(5, B)
    rank.device.compute(6, C)
    rank.submit(rank.orders.reload([key], [5], [0]))
    rank.advance(2)
    rank.device.work(1)
    assert not rank.device.step(Direction.SCATTER)
    rank.device.work(1)
    assert rank.device.step(Direction.SCATTER)
    assert rank.holds(5, key)


# Who goes first


def gathers_and_scatters(rank: FakeRank) -> tuple[int, int]:
    return rank.device.num_copies(Direction.GATHER), rank.device.num_copies(Direction.SCATTER)


def test_loads_go_before_gathers():
    rank = FakeRank()
    keys = offloaded(rank, 0)
    rank.submit(rank.orders.offload([B], [1], [1]))
    rank.submit(rank.orders.reload(keys, [5], [0]))
    rank.advance()
    assert gathers_and_scatters(rank) == (0, 1)
    rank.advance()
    assert gathers_and_scatters(rank) == (1, 1)


def test_loads_go_before_writes_to_stores():
    rank = FakeRank(None, 8, memory("m"))
    keys = offloaded(rank, 0)
    rank.submit(rank.orders.demote(keys, [0]))
    rank.submit(rank.orders.reload(keys, [5], [0]))
    rank.advance()
    assert rank.stores["m"].keys() == []
    assert gathers_and_scatters(rank) == (0, 1)
    rank.advance()
    assert rank.stores["m"].keys() == [rank.name(keys[0])]


def test_fenced_gathers_go_before_loads_and_other_gathers():
    rank = FakeRank()
    keys = offloaded(rank, 0)
    other = rank.submit(rank.orders.offload([B], [1], [1]))
    fenced = rank.submit(rank.orders.offload([C], [2], [2]))
    reload = rank.submit(rank.orders.reload(keys, [5], [0]))
    fence = rank.executor.fence({fenced: [2]})
    assert fence.jobs == {fenced}
    rank.advance()
    assert gathers_and_scatters(rank) == (1, 0)
    rank.advance()
    assert gathers_and_scatters(rank) == (1, 1), "a fence hurries its own jobs only"
    rank.device.step(Direction.GATHER)
    rank.advance()
    assert rank.executor.fence({other: [1], fenced: [2]}).jobs == {other}
    assert not fence.jobs
    rank.settle()
    assert rank.outcomes(reload) == {HBM: [OK]}


def test_load_overtakes_a_long_gather_between_two_pieces():
    rank = FakeRank(make_layout(8, [[100]]), 8, piece_nbytes=250)
    keys = offloaded(rank, 0)
    job = rank.submit(rank.orders.offload(keys_of(*range(10, 17)), range(1, 8), range(1, 8)))
    rank.advance()
    assert gathers_and_scatters(rank) == (1, 0)
    rank.submit(rank.orders.reload(keys, [0], [0]))
    rank.advance()
    assert gathers_and_scatters(rank) == (1, 1)
    rank.advance(5)
    assert gathers_and_scatters(rank) == (2, 1), "7 blocks of 100 bytes in pieces of 3, 3, 1"
    rank.device.step(Direction.GATHER)
    rank.advance(2)
    assert gathers_and_scatters(rank) == (2, 1), "no more than two pieces at once"
    rank.settle()
    assert rank.outcomes(job) == {DRAM: [OK] * 7}


def test_piece_is_at_least_one_block():
    rank = FakeRank(piece_nbytes=1)
    keys = offloaded(rank, 0, 1, 2)
    assert rank.run(rank.orders.reload(keys, [5, 6, 7], [0, 1, 2])) == {HBM: [OK] * 3}


# Fences


def test_given_up_offload_keeps_what_runs_and_drops_the_rest():
    rank = FakeRank(piece_nbytes=1)
    rank.fill([0, 1], [A, B])
    job = rank.submit(rank.orders.offload([A, B], [0, 1], [0, 1]))
    rank.advance()
    rank.executor.give_up({job})
    rank.advance(3)
    assert rank.executor.fence({job: [0]}).jobs, "the copy that runs still reads its block"
    assert not rank.executor.fence({job: [1]}).jobs
    rank.device.step()
    rank.advance()
    assert not rank.executor.fence({job: [0]}).jobs
    assert rank.outcomes(job) == {DRAM: [OK, Outcome.TIMED_OUT]}


def test_giving_up_reaches_an_order_that_was_only_just_submitted():
    rank = FakeRank()
    job = rank.submit(rank.orders.offload([A], [0], [0]))
    rank.executor.give_up({job})
    rank.advance()
    assert rank.outcomes(job) == {DRAM: [Outcome.TIMED_OUT]}
    assert gathers_and_scatters(rank) == (0, 0)


def test_offload_is_read_once_its_dram_hop_is_over():
    rank = FakeRank(None, 8, memory("m"))
    job = rank.submit(rank.orders.offload([key_of(1)], [0], [0], 1))
    fence = rank.executor.fence({job: [0], JobId(999): [0]})
    assert fence.jobs == {job}
    rank.advance()
    rank.device.step()
    rank.advance()
    assert fence.jobs == set()
    rank.settle()
    assert rank.executor.fence({job: [0]}).jobs == set()
