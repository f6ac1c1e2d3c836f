"""A file store that is always full, against the plain engine in the same places."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from file_sides import BATCH, POLL_SECONDS, UNDER_WAY, capacity_of, raw_file, slots_of

from kvtiers.data.file_settings import FILE_HEADER_NBYTES
from kvtiers.data.file_store import FileStore, FileStoreSettings
from kvtiers.data.io.base import IoBatch, IoOp
from kvtiers.data.io.choice import make_io
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

CHURN_NBYTES = 2**30
TIMES = 10


def churn(folder: Path, nbytes: int, share: float, repeats: int) -> dict[str, list[float]]:
    """Write ten times the capacity through a store and past it, in turns; returns speeds.

    Args:
        share: of the store's slots that hold frames, once it is full.

    Returns:
        "store" and "raw": GB/s of each tenth, medians over the repeats. "store ratio" and
        "raw ratio": of the last tenth to the second, one per repeat.
    """
    slab = Slab(BATCH * UNDER_WAY, nbytes, pin="off")
    for slot in range(slab.num_slots):
        slab.view(slot)[:] = os.urandom(nbytes)
    num_slots = CHURN_NBYTES // nbytes
    sides: dict[str, Callable[[], list[float]]] = {
        "store": lambda: _through_store(folder, slab, num_slots, share),
        "raw": lambda: _past_it(folder, slab, num_slots),
    }
    runs: dict[str, list[list[float]]] = {name: [] for name in sides}
    for turn in range(repeats):
        for name in sorted(sides, reverse=bool(turn % 2)):
            runs[name].append(sides[name]())
    slab.close()
    found = {}
    for name, speeds in runs.items():
        found[name] = [statistics.median(tenth) for tenth in zip(*speeds, strict=True)]
        found[f"{name} ratio"] = [tenths[-1] / tenths[1] for tenths in speeds]
    return found


def _through_store(folder: Path, slab: Slab, num_slots: int, share: float) -> list[float]:
    nbytes = slab.slot_nbytes
    settings = FileStoreSettings(
        (folder / "churn",), capacity_of(num_slots, nbytes), io="native", direct="on"
    )
    store = FileStore(slab, settings)
    num_held = int(store.num_slots * share) // BATCH
    held: deque[list[StoreKey]] = deque()

    def submit(batch: int) -> None:
        if len(held) >= num_held:
            store.delete(held.popleft())
        names = [StoreKey(b"%24d%8d" % (batch, i)) for i in range(BATCH)]
        refs = zip(names, slots_of(batch), strict=True)
        store.put([FrameRef(name, slot, nbytes) for name, slot in refs])
        held.append(names)

    def num_ended() -> int:
        answers = store.poll()
        for answer in answers:
            assert set(answer.outcomes) == {Outcome.OK}, answer
        return len(answers)

    speeds = _tenths(submit, num_ended, num_slots, nbytes)
    store.close()
    shutil.rmtree(folder / "churn")
    return speeds


def _past_it(folder: Path, slab: Slab, num_slots: int) -> list[float]:
    """Write the same bytes in rounds over a file of the same size, one call a frame."""
    nbytes = slab.slot_nbytes
    fd = raw_file(folder, FILE_HEADER_NBYTES + num_slots * nbytes)
    engine = make_io("native")

    def submit(batch: int) -> None:
        places = (
            FILE_HEADER_NBYTES + (batch * BATCH + i) % num_slots * nbytes for i in range(BATCH)
        )
        ops = tuple(
            IoOp(fd, offset, ((slab.address + slot * nbytes, nbytes),))
            for offset, slot in zip(places, slots_of(batch), strict=True)
        )
        engine.submit(IoBatch(batch, True, ops))

    def num_ended() -> int:
        ended = engine.poll()
        for done in ended:
            assert set(done.results) == {nbytes}, done
        return len(ended)

    speeds = _tenths(submit, num_ended, num_slots, nbytes)
    engine.close()
    os.close(fd)
    (folder / "raw").unlink()
    return speeds


def _tenths(
    submit: Callable[[int], None], num_ended: Callable[[], int], num_slots: int, nbytes: int
) -> list[float]:
    """Move ten times as many frames as there are slots; returns GB/s of each tenth."""
    total = TIMES * num_slots // BATCH
    stamps = [time.perf_counter()]
    begun = ended = 0
    while ended < total:
        while begun < min(total, ended + UNDER_WAY):
            submit(begun)
            begun += 1
        found = num_ended()
        for _ in range(found):
            ended += 1
            if ended % (total // 10) == 0:
                stamps.append(time.perf_counter())
        if not found:
            time.sleep(POLL_SECONDS)
    gigabytes = total // 10 * BATCH * nbytes / 1e9
    return [gigabytes / (b - a) for a, b in itertools.pairwise(stamps)][:10]
