"""What the LMDB store says that its writes took, and which frames it did not write."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmdb_box import NBYTES, Box, image, key_of, settings_of

from kvtiers.data.link_meter import LinkMeter
from kvtiers.data.lmdb_registry import REGISTRY
from kvtiers.data.lmdb_settings import LMDBStoreSettings
from kvtiers.data.store import FrameRef, StoreAnswer
from kvtiers.data.store_desk import StoreDesk, Storing
from kvtiers.model.outcome import Outcome
from kvtiers.testing.store_machine import wait_answers


@pytest.fixture
def settings(tmp_path: Path) -> LMDBStoreSettings:
    return settings_of(tmp_path / "shared.lmdb", batch_frames=16)


@pytest.fixture
def box(settings: LMDBStoreSettings) -> Iterator[Box]:
    box = Box(settings)
    yield box
    box.close()


def frames_of(box: Box, *numbers: int) -> list[FrameRef]:
    for number in numbers:
        box.slab.view(number)[:NBYTES] = image(number)
    return [FrameRef(key_of(number), number, NBYTES) for number in numbers]


def put_together(
    box: Box, settings: LMDBStoreSettings, *batches: list[FrameRef]
) -> list[StoreAnswer]:
    """Put batches while another has the write lock, so that one transaction takes all of them."""
    env = REGISTRY.acquire(settings)
    with env.writing():
        first = box.store.put(frames_of(box, 63))  # which waits for the lock
        while box.store._order._changes:
            time.sleep(0.0005)
        tickets = [box.store.put(batch) for batch in batches]
    REGISTRY.release(env)
    answers = wait_answers(box.store, [first, *tickets])
    return [answers[ticket] for ticket in tickets]


def test_batch_that_was_held_takes_no_time_from_one_that_was_written_with_it(
    box: Box, settings: LMDBStoreSettings
) -> None:
    box.put(*range(8))
    held, written, both = put_together(
        box,
        settings,
        frames_of(box, *range(8)),
        frames_of(box, 20, 21, 22, 23),
        frames_of(box, 0, 30, 1, 31),
    )
    assert (held.held, written.held, both.held) == (set(range(8)), set(), {0, 2})
    assert held.seconds == 0.0
    assert written.seconds == pytest.approx(2 * both.seconds)
    assert both.seconds > 0.0


def test_transactions_that_wrote_nothing_are_no_time_of_the_one_that_did(box: Box) -> None:
    """Forty-eight frames are three transactions, of which the middle one writes."""
    box.put(*range(48))
    box.store.delete([key_of(20)])
    seconds: list[float] = []
    put_batch = box.store._writer._put_batch

    def timed(frames):  # type: ignore[no-untyped-def]
        started = time.perf_counter()
        fates = put_batch(frames)
        seconds.append(time.perf_counter() - started)
        return fates

    box.store._writer._put_batch = timed  # type: ignore[method-assign]
    ticket = box.store.put(frames_of(box, *range(48)))
    answer = wait_answers(box.store, [ticket])[ticket]
    assert answer.held == set(range(48)) - {20}
    assert len(seconds) == 3
    assert seconds[1] <= answer.seconds < sum(seconds)


@pytest.mark.parametrize("num_new", [0, 1, 5])
def test_meter_counts_what_was_written(box: Box, num_new: int) -> None:
    meter = LinkMeter()
    desk = StoreDesk({"lmdb": box.store}, meter)
    box.put(*range(10))
    rows = tuple(range(num_new, num_new + 10))
    desk.submit(Storing("lmdb", None, rows, tuple(frames_of(box, *rows)), True))  # type: ignore[arg-type]
    outcomes: list[Outcome] = []
    while not outcomes:
        outcomes = [what for _, found in desk.answers() for what in found]
    assert outcomes == [Outcome.OK] * 10
    counted = [(link.num_blocks, link.nbytes) for link in meter.take()]
    assert counted == [(num_new, num_new * NBYTES)] * bool(num_new)
