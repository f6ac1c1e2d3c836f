"""Measure the shared LMDB store: reads against memcpy, writes against a default LMDB, rewriting.

    python bench/lmdb_store.py --out bench/results/lmdb_store.json

Both sides of a ratio run in turn in one process on the same bytes; each pair gives one ratio, and
the median and the quartiles are reported. A read is timed from `get` to its answer. Its reference
is one memcpy a frame from a private buffer into the slab, on as many threads, but at least two: the
store reads two batches at once. A write is timed from
`put` to its answer; its reference is plain LMDB with its default of syncing each commit, in batches
of the same frames.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import lmdb
import numpy as np
from options import at_least
from quiet import Quiet

from kvtiers.data.lmdb_settings import LMDBStoreSettings
from kvtiers.data.lmdb_store import LMDBStore
from kvtiers.data.slab import Slab
from kvtiers.data.slot_filler import SlotFiller
from kvtiers.data.store import FrameRef, StoreTicket
from kvtiers.model.frame import FrameFormat
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

KIB, MIB = 2**10, 2**20
SIZES = (128 * KIB, 512 * KIB, 2 * MIB)
BATCH = 16
NUM_PAGES = 32  # of a payload: layers


@dataclass(frozen=True)
class Row:
    """One cell; speeds are medians in GB/s, cost is CPU seconds of this process per GB."""

    what: str
    value_nbytes: int
    num_threads: int
    reference: float
    ours: float
    ratio: float
    ratio_low: float
    ratio_high: float
    cpu_seconds_per_gb: float
    reference_cpu_seconds_per_gb: float
    disturbed: int  # pairs during which other processes used the machine


class Bench:
    """A slab of sealed frames, and keys without end."""

    def __init__(self, payload_nbytes: int, num_slots: int) -> None:
        self.format = FrameFormat((payload_nbytes // NUM_PAGES,) * NUM_PAGES)
        self.nbytes = self.format.frame_nbytes
        self.slab = Slab(num_slots, self.format.slot_nbytes, pin="off")
        generator = np.random.default_rng(payload_nbytes)
        for slot in range(num_slots):
            view = np.frombuffer(self.slab.view(slot), np.uint8)
            view[:] = generator.integers(0, 256, len(view), np.uint8)
        self._generator = generator

    def keys(self, num: int) -> list[StoreKey]:
        return [StoreKey(self._generator.bytes(32)) for _ in range(num)]

    def refs(self, keys: Sequence[StoreKey]) -> list[FrameRef]:
        return [FrameRef(key, slot, self.nbytes) for slot, key in enumerate(keys)]

    def seal(self, refs: Sequence[FrameRef]) -> None:
        for ref in refs:
            self.format.seal(self.slab.view(ref.slot), ref.key)

    def verify(self, refs: Sequence[FrameRef]) -> None:
        for ref in refs:
            fault = self.format.fault(self.slab.view(ref.slot), ref.key)
            assert fault is None, fault


def settle(store: LMDBStore, tickets: Sequence[StoreTicket]) -> None:
    waiting = set(tickets)
    while waiting:
        for answer in store.poll():
            assert set(answer.outcomes) == {Outcome.OK}, answer.outcomes
            waiting.discard(answer.ticket)
        time.sleep(0.0001)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return seconds on the wall, and of this process's CPUs."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


Timed = tuple[float, float]
Pair = tuple[Timed, Timed]  # the reference's and our own


def in_pairs(
    quiet: Quiet, num: int, theirs: Callable[[], object], *ours: Callable[[], object]
) -> tuple[list[list[Pair]], int]:
    """Time a reference and others in turn, again while others disturb and patience lasts.

    Returns:
        For each of ours its pairs; and how many turns were disturbed all the same.
    """
    found: list[list[Pair]] = [[] for _ in ours]
    disturbed = 0
    while len(found[0]) < num:
        quiet.wait()
        quiet.restart()
        started = time.monotonic()
        reference = timed(theirs)
        times = [timed(call) for call in ours]
        if not quiet.held():
            quiet.patience_seconds -= time.monotonic() - started
            if quiet.patience_seconds > 0:
                continue
            disturbed += 1
        for pairs, own in zip(found, times, strict=True):
            pairs.append((reference, own))
    return found, disturbed


def row(
    what: str, bench: Bench, threads: int, nbytes: int, pairs: list[Pair], disturbed: int = 0
) -> Row:
    """Summarize pairs of as many bytes."""
    ratios = sorted(theirs[0] / ours[0] for theirs, ours in pairs)
    low, _, high = statistics.quantiles(ratios, n=4)
    gb = nbytes / 1e9
    found = Row(
        what,
        bench.format.payload_nbytes,
        threads,
        gb / statistics.median(pair[0][0] for pair in pairs),
        gb / statistics.median(pair[1][0] for pair in pairs),
        statistics.median(ratios),
        low,
        high,
        statistics.median(pair[1][1] for pair in pairs) / gb,
        statistics.median(pair[0][1] for pair in pairs) / gb,
        disturbed,
    )
    print(
        f"{what:24} {found.value_nbytes // KIB:5} KiB  {threads} threads  {found.reference:6.2f} "
        f"{found.ours:6.2f} GB/s  ratio {found.ratio:.2f} [{low:.2f}, {high:.2f}]  "
        f"CPU s/GB {found.reference_cpu_seconds_per_gb:.2f} {found.cpu_seconds_per_gb:.2f}, "
        f"{disturbed} disturbed",
        flush=True,
    )
    return found


@contextmanager
def store_in(folder: Path, bench: Bench, nbytes: int, **more: int) -> Iterator[LMDBStore]:
    path = Path(tempfile.mkdtemp(dir=folder)) / "shared.lmdb"
    store = LMDBStore(bench.slab, LMDBStoreSettings(path, nbytes, **more))  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.close()
        shutil.rmtree(path.parent)


def measure_reads(folder: Path, size: int, threads: int, pairs: int, quiet: Quiet) -> list[Row]:
    """Warm reads of all of a store in batches, with and without verification."""
    num = max(64, 256 * MIB // size)
    bench = Bench(size, num)
    keys = bench.keys(num)
    refs = bench.refs(keys)
    bench.seal(refs)
    nbytes = num * bench.nbytes
    views = [memoryview(frame) for frame in np.ones((num, bench.nbytes), np.uint8)]
    filler = SlotFiller(bench.slab, max(2, threads))
    batch = max(BATCH, 32 * MIB // size)
    groups = [range(start, min(num, start + batch)) for start in range(0, num, batch)]
    with store_in(folder, bench, 2 * nbytes, num_copy_threads=threads) as store:
        settle(store, [store.put(refs)])

        def memcpy() -> None:
            for group in groups:
                filler.fill([(i, 0, views[i]) for i in group], method="memcpy")

        def read() -> None:
            settle(store, [store.get([refs[i] for i in group]) for group in groups])

        def read_and_verify() -> None:
            tickets = {store.get([refs[i] for i in group]): group for group in groups}
            while tickets:
                for answer in store.poll():
                    bench.verify([refs[i] for i in tickets.pop(answer.ticket)])
                time.sleep(0.00005)

        read()
        (plain, checked), disturbed = in_pairs(quiet, pairs, memcpy, read, read_and_verify)
    bench.slab.close()
    return [
        row("warm read", bench, threads, nbytes, plain, disturbed),
        row("warm read, verified", bench, threads, nbytes, checked, disturbed),
    ]


def measure_writes(folder: Path, size: int, pairs: int, quiet: Quiet) -> Row:
    """New frames into a store with room, against LMDB as it is by default."""
    num = max(64, 128 * MIB // size)
    bench = Bench(size, num)
    nbytes = num * bench.nbytes
    room = 3 * (pairs + 2) * nbytes  # of which disturbed turns take some
    plain = tempfile.mkdtemp(dir=folder)
    env = lmdb.open(plain, map_size=2 * room)
    with store_in(folder, bench, room) as store:

        def write(refs: Sequence[FrameRef]) -> None:
            parts = [refs[i : i + BATCH] for i in range(0, num, BATCH)]
            settle(store, [store.put(part) for part in parts])

        def write_synced(refs: Sequence[FrameRef]) -> None:
            for start in range(0, num, BATCH):
                with env.begin(write=True) as txn:
                    for ref in refs[start : start + BATCH]:
                        txn.put(ref.key, bench.slab.view(ref.slot)[: ref.nbytes])

        def fresh() -> list[FrameRef]:
            return bench.refs(bench.keys(num))

        write(fresh())
        write_synced(fresh())
        (times,), disturbed = in_pairs(
            quiet, pairs, lambda: write_synced(fresh()), lambda: write(fresh())
        )
    env.close()
    shutil.rmtree(plain)
    bench.slab.close()
    return row("write", bench, 1, nbytes, times, disturbed)


def measure_rewriting(folder: Path, size: int, share: float, capacity_nbytes: int) -> Row:
    """Ten times the capacity, deleting the oldest at a share of it: last tenth over the second."""
    bench = Bench(size, 64)
    held = int(capacity_nbytes * share) // bench.nbytes
    num = 10 * capacity_nbytes // bench.nbytes // 10 * 10
    alive: list[StoreKey] = []
    tenths: list[tuple[float, float]] = []
    with store_in(folder, bench, capacity_nbytes) as store:
        for _ in range(10):

            def write() -> None:
                for _ in range(max(1, num // 10 // 64)):
                    refs = bench.refs(bench.keys(64))
                    alive.extend(ref.key for ref in refs)
                    if share < 1.0 and len(alive) > held:  # else the store evicts by itself
                        store.delete(alive[: len(alive) - held])
                        del alive[: len(alive) - held]
                    settle(store, [store.put(refs)])

            tenths.append(timed(write))
    bench.slab.close()
    nbytes = max(1, num // 10 // 64) * 64 * bench.nbytes
    pair = (tenths[1], tenths[-1])
    what = f"rewriting at {share:.0%}"
    return row(what, bench, 1, nbytes, [pair] * 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--pairs", type=at_least(2), default=9)
    parser.add_argument("--threads", type=at_least(1), nargs="+", default=[1, 2])
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for quiet")
    parser.add_argument("--rewrite-mib", type=at_least(1), default=512)
    arguments = parser.parse_args()
    rows: list[Row] = []
    quiet = Quiet(arguments.patience)
    for size in SIZES:
        for threads in arguments.threads:
            rows += measure_reads(arguments.folder, size, threads, arguments.pairs, quiet)
        rows.append(measure_writes(arguments.folder, size, arguments.pairs, quiet))
        for share in (0.8, 1.0):
            nbytes = arguments.rewrite_mib * MIB
            rows.append(measure_rewriting(arguments.folder, size, share, nbytes))
    if arguments.out:
        about = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} x {platform.machine()}",
            "lmdb": ".".join(map(str, lmdb.version())),
        }
        found = {"about": about, "rows": [asdict(one) for one in rows]}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
