"""Which blocks a step must not overwrite before they were read."""

from __future__ import annotations

from kvtiers.control.fences import Fences
from kvtiers.model.messages import NO_BLOCK, JobId

ONE, TWO = JobId(1), JobId(2)


def taken(fences: Fences) -> dict[JobId, list[int]]:
    return {job_id: blocks.tolist() for job_id, blocks in fences.take().items()}


def fences_of(**readers) -> Fences:
    fences = Fences()
    for job_id, blocks in ((ONE, readers.get("one", ())), (TWO, readers.get("two", ()))):
        for block in blocks:
            fences.reading(block, job_id)
    return fences


def test_step_is_told_the_blocks_that_it_overwrites_and_no_others():
    fences = fences_of(one=[1, 2, 3], two=[7])
    fences.overwritten([3, NO_BLOCK, 9, 1])
    fences.overwritten([3])
    assert taken(fences) == {ONE: [1, 3]}
    assert taken(fences) == {}, "of one step"


def test_block_that_was_read_is_free():
    fences = fences_of(one=[1, 2])
    fences.read([1, 5], ONE)
    fences.overwritten([1, 2])
    assert taken(fences) == {ONE: [2]}


def test_block_with_two_readers_waits_for_both():
    """Its ranges of layers were not taken in one step; either may be the last to be read."""
    for first, second in ((ONE, TWO), (TWO, ONE)):
        fences = fences_of(one=[4], two=[4])
        fences.overwritten([4])
        assert taken(fences) == {ONE: [4], TWO: [4]}
        fences.read([4], first)
        fences.overwritten([4])
        assert taken(fences) == {second: [4]}
        fences.read([4], second)
        assert len(fences) == 0


def test_block_that_one_job_reads_twice_is_read_once_that_job_has():
    """One row for each range of layers."""
    fences = fences_of(one=[4, 4])
    fences.read([4, 4], ONE)
    assert len(fences) == 0
