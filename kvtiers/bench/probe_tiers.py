"""Reads and writes of a configured tier's medium, timed in a store of their own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from kvtiers.bench.probe_pace import Pace
from kvtiers.bench.probe_plan import MIB, ProbePlan, Shape
from kvtiers.bench.scratch import drop_page_cache, empty, scratch_beside
from kvtiers.connector.calibrated import tier_facts
from kvtiers.cost.calibration import Cell, TierFacts
from kvtiers.cost.links import read_link, write_link
from kvtiers.data.disk_check import check_room, describe_mount
from kvtiers.data.executor import PIECE_NBYTES
from kvtiers.data.file_settings import FileStoreSettings
from kvtiers.data.file_store import FileStore
from kvtiers.data.lmdb_settings import LMDBStoreSettings
from kvtiers.data.lmdb_store import LMDBStore
from kvtiers.data.memory_store import MemoryStore
from kvtiers.data.slab import Slab
from kvtiers.data.store import BlockStore, FrameRef
from kvtiers.model.config_tiers import LmdbTier, MemoryTier, NvmeTier, StoreTier
from kvtiers.model.errors import StoreError
from kvtiers.model.keys import STORE_KEY_NBYTES, StoreKey
from kvtiers.model.outcome import Outcome

_POLL_SECONDS: Final = 50e-6
_PATIENCE_SECONDS: Final = 30.0  # for one job; a disk that takes longer is not measured
_ROOM_SECONDS: Final = 5.0  # for what was deleted to leave a store


class TierProbe:
    """The medium of one tier, in a store that nobody else knows.

    Args:
        folders: scratch, one for each of the tier's paths; none for a memory tier.
    """

    def __init__(self, tier: StoreTier, folders: Sequence[Path], plan: ProbePlan) -> None:
        self.tier = tier
        self._folders = tuple(folders)
        self._capacity_nbytes = plan.scratch_nbytes
        self._slab: Slab | None = None
        self._store: BlockStore | None = None
        self._direct = False
        self._random = np.random.default_rng(0)
        self._flushed = np.zeros(0 if folders else plan.cache_nbytes, np.uint8)

    @property
    def facts(self) -> TierFacts:
        """Which medium this is."""
        facts = tier_facts(self.tier)
        if not self._folders:
            return facts
        return facts.model_copy(update={"filesystem": describe_mount(self._folders[0]).fs_type})

    def open(self, slot_nbytes: int, num_slots: int) -> None:
        """Make slab and store, the slots filled with what no disk can compress."""
        self._slab = slab = Slab(num_slots, slot_nbytes, pin="off")
        for slot in range(num_slots):
            slab.view(slot)[:] = self._random.bytes(slot_nbytes)
        self._open_store()

    def close(self) -> None:
        """Close what is open, and remove its files; idempotent."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        for folder in self._folders:
            empty(folder)  # or the next size would take its room in addition
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.close()

    def times(self, depth: int) -> tuple[float, float]:
        """Write blocks and read them back from the medium, then drop them; returns seconds.

        Raises:
            StoreError: a block did not arrive, or the store did not answer.
        """
        assert self._slab is not None
        nbytes = self._slab.slot_nbytes
        slots = self._random.permutation(self._slab.num_slots)[:depth].tolist()
        keys = [StoreKey(os.urandom(STORE_KEY_NBYTES)) for _ in slots]
        frames = [FrameRef(key, slot, nbytes) for key, slot in zip(keys, slots, strict=True)]
        for frame in frames:
            self._slab.view(frame.slot)[:STORE_KEY_NBYTES] = frame.key
        written = self._write(frames)
        self._cool()
        for frame in frames:
            self._slab.view(frame.slot)[:STORE_KEY_NBYTES] = bytes(STORE_KEY_NBYTES)
        read, outcomes = self._job(frames, writes=False)
        wrong = {outcome.name for outcome in outcomes if outcome is not Outcome.OK}
        if any(bytes(self._slab.view(f.slot)[:STORE_KEY_NBYTES]) != f.key for f in frames):
            wrong.add("other bytes")
        if wrong:
            raise StoreError(f"blocks just written were read back as {', '.join(sorted(wrong))}")
        self._present.delete(keys)
        return written, read

    # -- internals --------------------------------------------------------------------

    @property
    def _present(self) -> BlockStore:
        assert self._store is not None
        return self._store

    def _write(self, frames: Sequence[FrameRef]) -> float:
        """Write until there is room for all: what was deleted leaves a store behind."""
        deadline = time.monotonic() + _ROOM_SECONDS
        while True:
            seconds, outcomes = self._job(frames, writes=True)
            found = set(outcomes)
            if found == {Outcome.OK}:
                return seconds
            self._present.delete([frame.key for frame in frames])
            if found - {Outcome.OK, Outcome.FULL} or time.monotonic() > deadline:
                names = ", ".join(sorted(outcome.name for outcome in found))
                raise StoreError(f"writing {len(frames)} blocks ended as {names}")
            time.sleep(0.1)

    def _job(self, frames: Sequence[FrameRef], *, writes: bool) -> tuple[float, list[Outcome]]:
        """Move blocks in the batches that the executor would order; wait for all of them."""
        store = self._present
        per_batch = max(1, PIECE_NBYTES // frames[0].nbytes)
        submit = store.put if writes else store.get
        started = time.perf_counter()
        waiting = {
            submit(frames[first : first + per_batch]) for first in range(0, len(frames), per_batch)
        }
        outcomes: list[Outcome] = []
        while True:
            for answer in store.poll():
                waiting.discard(answer.ticket)
                outcomes += answer.outcomes
            if not waiting:
                return time.perf_counter() - started, outcomes
            if time.perf_counter() - started > _PATIENCE_SECONDS:
                raise StoreError(f"no answer within {_PATIENCE_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def _cool(self) -> None:
        """Make the next reads come from the medium; a mapped file must be closed for that."""
        if not self._folders:
            self._flushed.fill(1)
        if not self._folders or self._direct:
            return
        mapped = isinstance(self.tier, LmdbTier)
        if mapped:
            self._present.close()
        for folder in self._folders:
            drop_page_cache(folder)
        if mapped:
            self._open_store()

    def _open_store(self) -> None:
        assert self._slab is not None
        slab, nbytes, tier = self._slab, self._capacity_nbytes, self.tier
        if isinstance(tier, MemoryTier):
            self._store = MemoryStore(slab, nbytes)
        elif isinstance(tier, NvmeTier):
            settings = FileStoreSettings(self._folders, nbytes, io=tier.io, direct=tier.direct)
            self._store = store = FileStore(slab, settings)
            self._direct = all(path.direct for path in store.paths)
        else:
            path = self._folders[0] / "lmdb"
            live_nbytes = (nbytes - 9 * MIB) * 4 // 5  # its files take up to so much more
            self._store = LMDBStore(slab, LMDBStoreSettings(path, live_nbytes))


@contextlib.contextmanager
def tier_probe(tier: StoreTier, plan: ProbePlan) -> Iterator[TierProbe]:
    """Make scratch folders beside a tier's paths, and remove them at the end.

    Raises:
        StoreError, CapacityError: there is no place for them; says why.
    """
    paths: tuple[Path, ...] = ()
    if isinstance(tier, NvmeTier):
        paths = tier.paths
    elif isinstance(tier, LmdbTier):
        paths = (tier.path,)
    with contextlib.ExitStack() as stack:
        folders = []
        for path in paths:
            check_room(path, plan.scratch_nbytes // len(paths), 0, "a measurement")
            inside = isinstance(tier, NvmeTier)  # its own folders lie below, one an engine
            folders.append(stack.enter_context(scratch_beside(path, inside_mount=inside)))
        probe = TierProbe(tier, folders, plan)
        stack.callback(probe.close)
        yield probe


def measure_tier(
    probe: TierProbe, plan: ProbePlan, pace: Pace, on_shape: Callable[[str, Shape], None]
) -> Iterator[Cell]:
    """Write and read in turn, at every shape; yields a cell a direction.

    Raises:
        StoreError, CapacityError: the store cannot be had, or did not answer.
    """
    name = probe.tier.name
    links = (write_link(name), read_link(name))
    for size, shapes in plan.by_size():
        if pace.exhausted:
            return
        slot_nbytes = plan.format_of(size).slot_nbytes
        deepest = max(shape.depth for shape in shapes)
        probe.open(slot_nbytes, plan.num_slots(size))
        try:
            probe.times(deepest)  # so that what is measured is not the file's first use
            for shape in shapes:
                found = [probe.times(shape.depth) for _ in pace.repeats()]
                on_shape(name, shape)
                for link, seconds in zip(links, zip(*found, strict=True), strict=True):
                    nbytes = shape.depth * slot_nbytes
                    yield Cell(link=link, num_blocks=shape.depth, nbytes=nbytes, seconds=seconds)
        finally:
            probe.close()
