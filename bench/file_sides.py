"""The file store and plain positioned calls, as sides of one measurement."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from kvtiers.data.file_settings import FILE_HEADER_NBYTES, INDEX_BASE_NBYTES, INDEX_SLOT_NBYTES
from kvtiers.data.file_store import FileStore, FileStoreSettings
from kvtiers.data.io.base import DEFAULT_DEPTH, IoBatch, IoEngine, IoOp
from kvtiers.data.io.choice import make_io
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

BATCH, UNDER_WAY = 16, 4
POLL_SECONDS = 0.0002


class Side:
    """Moves a sample of frames, batch after batch."""

    name: str

    def submit(self, batch: int, *, writes: bool) -> None:
        """Begin a batch of the sample."""
        raise NotImplementedError

    def num_ended(self) -> int:
        """Return how many batches have ended since the last call."""
        raise NotImplementedError

    def after(self, *, writes: bool) -> None:
        """Get ready for the next sample, unmeasured."""

    def close(self) -> None:
        """Release everything."""

    def sample(self, num_batches: int, *, writes: bool) -> tuple[float, float]:
        """Move all batches; returns seconds, and CPU seconds."""
        before, started = cpu_seconds(), time.perf_counter()
        begun = ended = 0
        while ended < num_batches:
            while begun < min(num_batches, ended + UNDER_WAY):
                self.submit(begun, writes=writes)
                begun += 1
            found = self.num_ended()
            ended += found
            if not found:
                time.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - started
        cpu = cpu_seconds() - before
        self.after(writes=writes)
        return seconds, cpu


def slots_of(batch: int) -> list[int]:
    """Return the slab slots that a batch uses: scattered, as an allocator leaves them."""
    first = batch % UNDER_WAY * BATCH
    return [first + (i * 7) % BATCH for i in range(BATCH)]


def capacity_of(num_slots: int, slot_nbytes: int) -> int:
    """Return the capacity of a store with so many slots, spare ones included."""
    return FILE_HEADER_NBYTES + INDEX_BASE_NBYTES + num_slots * (slot_nbytes + INDEX_SLOT_NBYTES)


class StoreSide(Side):
    """The file store, with one of its engines."""

    def __init__(self, io: str, slab: Slab, folder: Path, num_frames: int) -> None:
        self.name = f"store, {io}"
        capacity = capacity_of(num_frames + num_frames // 8, slab.slot_nbytes)
        settings = FileStoreSettings((folder / io,), capacity, io=io, direct="on")
        self._nbytes = slab.slot_nbytes
        self.store = FileStore(slab, settings)
        self._life = 0
        self._num_batches = num_frames // BATCH

    def submit(self, batch: int, *, writes: bool) -> None:
        life = self._life if writes else self._life - 1  # what was written last is read
        frames = [
            FrameRef(self._key(life, batch, i), slot, self._nbytes)
            for i, slot in enumerate(slots_of(batch))
        ]
        (self.store.put if writes else self.store.get)(frames)

    def num_ended(self) -> int:
        answers = self.store.poll()
        for answer in answers:
            assert set(answer.outcomes) == {Outcome.OK}, answer
        return len(answers)

    def after(self, *, writes: bool) -> None:
        """Wait for the index; drop what was read."""
        if writes:
            self._life += 1
        else:
            old = itertools.product([self._life - 1], range(self._num_batches), range(BATCH))
            self.store.delete([self._key(*name) for name in old])
        time.sleep(self.store.settings.publish_seconds + 0.2)

    def close(self) -> None:
        self.store.close()

    @staticmethod
    def _key(life: int, batch: int, i: int) -> StoreKey:
        return StoreKey(b"%16d%8d%8d" % (life, batch, i))


class RawSide(Side):
    """One positioned call a frame."""

    def __init__(self, name: str, slab: Slab, fd: int) -> None:
        self.name = f"raw, {name}"
        self._slab = slab
        self._fd = fd

    def ops(self, batch: int) -> Iterator[tuple[int, int]]:
        """Yield file offset and slab slot of a batch's frames."""
        for i, slot in enumerate(slots_of(batch)):
            yield FILE_HEADER_NBYTES + (batch * BATCH + i) * self._slab.slot_nbytes, slot


class RawEngine(RawSide):
    """Through the compiled module."""

    def __init__(self, io: str, slab: Slab, fd: int) -> None:
        super().__init__({"native": "C++ threads", "uring": "io_uring"}[io], slab, fd)
        self._engine: IoEngine = make_io(io)
        self._ids = itertools.count()

    def submit(self, batch: int, *, writes: bool) -> None:
        nbytes = self._slab.slot_nbytes
        ops = tuple(
            IoOp(self._fd, offset, ((self._slab.address + slot * nbytes, nbytes),))
            for offset, slot in self.ops(batch)
        )
        self._engine.submit(IoBatch(next(self._ids), writes, ops))

    def num_ended(self) -> int:
        ended = self._engine.poll()
        for done in ended:
            assert set(done.results) == {self._slab.slot_nbytes}, done
        return len(ended)

    def close(self) -> None:
        self._engine.close()


class RawPython(RawSide):
    """On a pool of Python threads."""

    def __init__(self, slab: Slab, fd: int) -> None:
        super().__init__("Python threads", slab, fd)
        self._pool = ThreadPoolExecutor(DEFAULT_DEPTH)
        self._running: list[set[object]] = []

    def submit(self, batch: int, *, writes: bool) -> None:
        call = os.pwritev if writes else os.preadv
        self._running.append(
            {
                self._pool.submit(call, self._fd, [self._slab.view(slot)], offset)
                for offset, slot in self.ops(batch)
            }
        )

    def num_ended(self) -> int:
        ended = [batch for batch in self._running if all(call.done() for call in batch)]
        for batch in ended:
            assert {call.result() for call in batch} == {self._slab.slot_nbytes}
            self._running.remove(batch)
        return len(ended)

    def close(self) -> None:
        wait([call for batch in self._running for call in batch])
        self._pool.shutdown()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def busy_thread(wanted: bool) -> Iterator[None]:
    """Compute in Python beside the measurement, as an engine's scheduler does."""
    stop = threading.Event()

    def compute() -> None:
        total = 0
        while not stop.is_set():
            for i in range(1000):
                total += i * i

    thread = threading.Thread(target=compute)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()


def raw_file(folder: Path, nbytes: int) -> int:
    """Return a preallocated file of a size, open for direct I/O."""
    fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    return fd
