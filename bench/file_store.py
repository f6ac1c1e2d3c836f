"""Measure the file store against plain positioned calls on the same disk, in the same run.

    python bench/file_store.py --folder /mnt/nvme0/bench --out bench/results/file_store.json

Every side moves the same frames in batches of 16, four batches at a time, between the same slab
and preallocated files of the same size on the same disk, past the page cache. The raw sides know
no keys, keep no index and sync nothing: one call a frame, on Python threads, on C++ threads or
through an io_uring. All sides take turns; medians, and medians of the ratio to the raw side with
the best median in the cell. `--churn` fills a store and writes ten times its capacity through it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import resource
import shutil
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtiers.data.file_settings import FILE_HEADER_NBYTES, INDEX_BASE_NBYTES, INDEX_SLOT_NBYTES
from kvtiers.data.file_store import FileStore, FileStoreSettings
from kvtiers.data.io.base import DEFAULT_DEPTH, IoBatch, IoEngine, IoOp
from kvtiers.data.io.choice import make_io
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

KIB, MIB = 2**10, 2**20
SIZES = (128 * KIB, 512 * KIB, 2 * MIB)
SAMPLE_NBYTES = 512 * MIB
BATCH, UNDER_WAY = 16, 4
POLL_SECONDS = 0.0002
ENGINES = ("native", "uring", "aiofiles")


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


class StoreSide(Side):
    """The file store, with one of its engines."""

    def __init__(self, io: str, slab: Slab, folder: Path, num_frames: int) -> None:
        self.name = f"store, {io}"
        num = (
            2 * num_frames + num_frames // 4
        )  # so that no write waits for the removal of what it replaces
        capacity = FILE_HEADER_NBYTES + INDEX_BASE_NBYTES
        capacity += num * (slab.slot_nbytes + INDEX_SLOT_NBYTES)
        settings = FileStoreSettings((folder / io,), capacity, io=io, direct="on")
        self._nbytes = slab.slot_nbytes
        self.store = FileStore(slab, settings)
        self._life = 0
        self._num_batches = num_frames // BATCH

    def submit(self, batch: int, *, writes: bool) -> None:
        frames = [
            FrameRef(self._key(self._life, batch, i), slot, self._nbytes)
            for i, slot in enumerate(slots_of(batch))
        ]
        (self.store.put if writes else self.store.get)(frames)

    def num_ended(self) -> int:
        answers = self.store.poll()
        for answer in answers:
            assert set(answer.outcomes) == {Outcome.OK}, answer
        return len(answers)

    def after(self, *, writes: bool) -> None:
        """Drop the sample before this one, and wait for the index."""
        if not writes:
            return
        old = itertools.product([self._life - 1], range(self._num_batches), range(BATCH))
        self.store.delete([self._key(*name) for name in old])
        self._life += 1
        time.sleep(self.store.settings.publish_seconds + 0.2)

    def before_read(self) -> None:
        """Read what was written last."""
        self._life -= 1

    def after_read(self) -> None:
        self._life += 1

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


@dataclass(frozen=True)
class Row:
    """One side of one cell: medians; the ratio is to the cell's best raw side."""

    nbytes: int
    direction: str
    busy: bool
    side: str
    gigabytes_per_second: float
    cpu_seconds_per_gigabyte: float
    ratio: float
    ratio_low: float
    ratio_high: float


def cpu_seconds() -> float:
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


def cells(nbytes: int, folder: Path, repeats: int, busy: Sequence[bool]) -> list[Row]:
    """Measure both directions at one frame size."""
    num_frames = SAMPLE_NBYTES // nbytes
    slab = Slab(BATCH * UNDER_WAY, nbytes, pin="off")
    for slot in range(slab.num_slots):
        slab.view(slot)[:] = os.urandom(nbytes)
    fd = raw_file(folder, FILE_HEADER_NBYTES + SAMPLE_NBYTES)
    sides: list[Side] = [RawPython(slab, fd), RawEngine("native", slab, fd)]
    sides.append(RawEngine("uring", slab, fd))
    sides += [StoreSide(io, slab, folder, num_frames) for io in ENGINES]
    for side in sides:  # so that every block of every file has been written once
        for _ in range(3 if isinstance(side, StoreSide) else 1):
            side.sample(num_frames // BATCH, writes=True)
    rows = []
    for computing in busy:
        samples = measure(sides, num_frames // BATCH, repeats, computing)
        rows += rows_of(nbytes, computing, samples)
    for side in sides:
        side.close()
    os.close(fd)
    slab.close()
    for name in (*ENGINES, "raw"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return rows


Samples = dict[tuple[str, str], list[tuple[float, float]]]


def measure(sides: Sequence[Side], num_batches: int, repeats: int, busy: bool) -> Samples:
    """Let all sides take turns."""
    samples: Samples = {}
    for turn in range(repeats):
        order = sides[turn % len(sides) :] + sides[: turn % len(sides)]
        for writes in (True, False):
            for side in order:
                if isinstance(side, StoreSide) and not writes:
                    side.before_read()
                with busy_thread(busy):
                    found = side.sample(num_batches, writes=writes)
                if isinstance(side, StoreSide) and not writes:
                    side.after_read()
                direction = "write" if writes else "read"
                samples.setdefault((direction, side.name), []).append(found)
    return samples


def rows_of(nbytes: int, busy: bool, samples: Samples) -> list[Row]:
    rows = []
    gigabytes = SAMPLE_NBYTES / 1e9
    for direction in ("write", "read"):
        times = {
            name: [seconds for seconds, _ in found]
            for (way, name), found in samples.items()
            if way == direction
        }
        raw = [name for name in times if name.startswith("raw")]
        best = times[min(raw, key=lambda name: statistics.median(times[name]))]
        for name, seconds in times.items():
            ratios = [b / s for b, s in zip(best, seconds, strict=True)]
            low, ratio, high = statistics.quantiles(ratios, n=4)
            cpu = statistics.median(cpu for _, cpu in samples[direction, name])
            rows.append(
                Row(
                    nbytes,
                    direction,
                    busy,
                    name,
                    gigabytes / statistics.median(seconds),
                    cpu / gigabytes,
                    ratio,
                    low,
                    high,
                )
            )
    return rows


def churn(folder: Path, nbytes: int, times: int = 10) -> dict[str, float]:
    """Write a multiple of the capacity through a full store; GB/s of each tenth."""
    num_frames = 2 * SAMPLE_NBYTES // nbytes
    slab = Slab(BATCH * UNDER_WAY, nbytes, pin="off")
    capacity = FILE_HEADER_NBYTES + INDEX_BASE_NBYTES
    capacity += num_frames * (nbytes + INDEX_SLOT_NBYTES)
    settings = FileStoreSettings((folder / "churn",), capacity, direct="on")
    store = FileStore(slab, settings)
    num_frames = store.num_slots // BATCH * BATCH
    total = times * num_frames // BATCH
    stamps = [time.perf_counter()]
    begun = ended = 0
    held: list[list[StoreKey]] = []
    while ended < total:
        while begun < min(total, ended + UNDER_WAY):
            if len(held) * BATCH >= num_frames:
                store.delete(held.pop(0))
            names = [StoreKey(b"%24d%8d" % (begun, i)) for i in range(BATCH)]
            refs = zip(names, slots_of(begun), strict=True)
            store.put([FrameRef(name, slot, nbytes) for name, slot in refs])
            held.append(names)
            begun += 1
        answers = store.poll()
        for answer in answers:
            assert set(answer.outcomes) == {Outcome.OK}, answer
            ended += 1
            if ended % (total // 10) == 0:
                stamps.append(time.perf_counter())
        if not answers:
            time.sleep(POLL_SECONDS)
    store.close()
    slab.close()
    shutil.rmtree(folder / "churn")
    share = total // 10 * BATCH * nbytes / 1e9
    speeds = [share / (b - a) for a, b in itertools.pairwise(stamps)]
    return {f"tenth {i + 1}": speed for i, speed in enumerate(speeds[:10])}


def device_facts(folder: Path, repeats: int) -> dict[str, object]:
    """Return what a reader needs to know of the machine and the session."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in info if "model name" in line), "?")
    disk = os.statvfs(folder)
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "CPU": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "disk bytes free": disk.f_bavail * disk.f_frsize,
        "Python": platform.python_version(),
        "bytes a sample": SAMPLE_NBYTES,
        "samples a side": repeats,
        "load average before": os.getloadavg()[0],
        "fio": shutil.which("fio") or "not installed",
    }


def table(rows: Sequence[Row], churned: dict[str, dict[str, float]], device: object) -> str:
    """Return the results as Markdown."""
    lines = ["# File store", "", *__doc__.splitlines()[4:], ""]
    lines += [f"- {name}: {value}" for name, value in dict(device).items()]  # type: ignore[call-overload]
    lines += ["", "| frame | direction | beside | side | GB/s | CPU s/GB | over best raw |"]
    lines.append("|---|---|---|---|---|---|---|")
    lines.extend(
        f"| {row.nbytes // KIB} KiB | {row.direction} | {'busy thread' if row.busy else ''} "
        f"| {row.side} | {row.gigabytes_per_second:.2f} | {row.cpu_seconds_per_gigabyte:.3f} "
        f"| {row.ratio:.2f} ({row.ratio_low:.2f} to {row.ratio_high:.2f}) |"
        for row in rows
    )
    for name, speeds in churned.items():
        lines += ["", f"Full store, {name}: GB/s of each tenth of ten times its capacity: "]
        lines.append(", ".join(f"{speed:.2f}" for speed in speeds.values()))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="an empty one, on the disk")
    parser.add_argument("--out", type=Path, help="JSON file; the table goes beside it as .md")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="bytes")
    parser.add_argument("--idle-only", action="store_true", help="not beside a busy thread")
    parser.add_argument("--churn", action="store_true", help="also ten times the capacity")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    busy = (False,) if args.idle_only else (False, True)
    device = device_facts(args.folder, args.repeats)
    rows = [row for size in args.sizes for row in cells(size, args.folder, args.repeats, busy)]
    churned = {f"{size // KIB} KiB": churn(args.folder, size) for size in args.sizes if args.churn}
    text = table(rows, churned, device)
    print(text)
    if args.out is not None:
        body = {"device": device, "results": [asdict(row) for row in rows], "churn": churned}
        args.out.write_text(json.dumps(body, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
