"""Sealed frames in an LMDB store, for tests and the processes that they start."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvtiers.data.lmdb_settings import LMDBStoreSettings
from kvtiers.data.lmdb_store import LMDBStore
from kvtiers.data.slab import Slab
from kvtiers.data.store import FrameRef
from kvtiers.model.frame import FrameFormat
from kvtiers.model.keys import StoreKey
from kvtiers.model.outcome import Outcome

FORMAT = FrameFormat((6000, 2192))
NBYTES = FORMAT.frame_nbytes
MIB = 2**20


@functools.cache
def key_of(number: int) -> StoreKey:
    return StoreKey(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest())


@functools.lru_cache(4096)
def image(number: int) -> bytes:
    """Return the frame of a number."""
    key = key_of(number)
    payload = (key * (FORMAT.payload_nbytes // len(key) + 1))[: FORMAT.payload_nbytes]
    frame = bytearray(FORMAT.header_nbytes) + payload
    FORMAT.seal(memoryview(frame), key)
    return bytes(frame)


def settings_of(path: Path, capacity_nbytes: int = 4 * MIB, **more: Any) -> LMDBStoreSettings:
    more = {"reprobe_seconds": 0.05, "num_copy_threads": 1} | more
    return LMDBStoreSettings(path, capacity_nbytes, **more)


class Box:
    """A store with a slab of its own."""

    def __init__(self, settings: LMDBStoreSettings, num_slots: int = 64) -> None:
        self.slab = Slab(num_slots, FORMAT.slot_nbytes, pin="off")
        self.store = LMDBStore(self.slab, settings)

    def settle(self, ticket: int, seconds: float = 60.0) -> list[Outcome]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for answer in self.store.poll():
                assert answer.ticket == ticket
                return list(answer.outcomes)
            time.sleep(0.0005)
        raise AssertionError(f"no answer to {ticket}")

    def put(self, *numbers: int) -> list[Outcome]:
        for slot, number in enumerate(numbers):
            self.slab.view(slot)[:NBYTES] = image(number)
        return self.settle(self.store.put(self._frames(numbers)))

    def get(self, *numbers: int) -> list[Outcome]:
        """Get frames; those that are OK are what they should be."""
        outcomes = self.settle(self.store.get(self._frames(numbers)))
        for slot, (number, outcome) in enumerate(zip(numbers, outcomes, strict=True)):
            if outcome is Outcome.OK:
                assert FORMAT.fault(self.slab.view(slot), key_of(number)) is None
                assert bytes(self.slab.view(slot)[:NBYTES]) == image(number)
        return outcomes

    def held(self) -> set[StoreKey]:
        return set(self.store.keys())

    def close(self) -> None:
        self.store.close()
        self.slab.close()

    def _frames(self, numbers: Iterable[int]) -> list[FrameRef]:
        return [FrameRef(key_of(number), slot, NBYTES) for slot, number in enumerate(numbers)]


def fill(path: Path, *numbers: int, clean: bool = True, **more: object) -> None:
    """Leave frames in a store, as a process that closes it or that is killed does."""
    box = Box(settings_of(path, **more))
    assert box.put(*numbers) == [Outcome.OK] * len(numbers)
    if not clean:
        state = (path / "state.json").read_bytes()
    box.close()
    if not clean:
        (path / "state.json").write_bytes(state)
