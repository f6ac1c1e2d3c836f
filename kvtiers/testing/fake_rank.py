"""The copying plane of one rank over a fake device, with a clock and orders made by hand."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtiers.data.copier import Copier, Marker
from kvtiers.data.executor import PIECE_NBYTES, Executor
from kvtiers.data.key_space import KeySpace
from kvtiers.data.portions import PORTIONS, Portions
from kvtiers.data.slab import Slab
from kvtiers.data.store import BlockStore
from kvtiers.data.workshop import Workshop
from kvtiers.model.frame import slot_nbytes_for
from kvtiers.model.keys import BlockKey, Rank, StoreKey, block_key, group_of, pack_keys
from kvtiers.model.layout import KVLayout
from kvtiers.model.messages import (
    NO_SLOT,
    Completion,
    JobId,
    Transfer,
    TransferKind,
    UInt8s,
    int64s,
)
from kvtiers.model.outcome import Outcome
from kvtiers.testing.fake_device import FakeDevice, make_layout
from kvtiers.testing.pattern import block_pattern

FINGERPRINT = bytes(32)
FOREVER = 1e9  # seconds


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Move on."""
        self.now += seconds


def key_of(number: int, group: int = 0) -> BlockKey:
    """Return the key of a numbered block."""
    return block_key(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest(), group)


def keys_of(*numbers: int, group: int = 0) -> list[BlockKey]:
    """Return the keys of numbered blocks."""
    return [key_of(number, group) for number in numbers]


@dataclass(frozen=True, slots=True)
class Orders:
    """Makes transfers with consecutive job ids.

    Attributes:
        ids: where the next id comes from. stores: names, as every order lists them.
    """

    ids: itertools.count[int]
    stores: tuple[str, ...] = ()

    def offload(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        slots: Sequence[int],
        targets: int = 0,
        *,
        deadline: float = FOREVER,
        epoch: int = 0,
    ) -> Transfer:
        """Make an OFFLOAD; `targets` are the stores of every block, as bits."""
        kind = TransferKind.OFFLOAD
        columns = block_ids, slots, [0] * len(keys), [targets] * len(keys)
        return self._make(kind, keys, columns, (), deadline, epoch)

    def reload(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        slots: Sequence[int] | None = None,
        sources: Sequence[int] | int = 0,
        *,
        window: Sequence[int] = (),
        deadline: float = FOREVER,
        epoch: int = 0,
    ) -> Transfer:
        """Make a RELOAD; without slots all goes through the window."""
        slots = [NO_SLOT] * len(keys) if slots is None else slots
        sources = [sources] * len(keys) if isinstance(sources, int) else sources
        columns = block_ids, slots, sources, [0] * len(keys)
        return self._make(TransferKind.RELOAD, keys, columns, window, deadline, epoch)

    def demote(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        targets: int = 1,
        *,
        deadline: float = FOREVER,
        epoch: int = 0,
    ) -> Transfer:
        """Make a DEMOTE."""
        num = len(keys)
        columns = [-1] * num, slots, [0] * num, [targets] * num
        return self._make(TransferKind.DEMOTE, keys, columns, (), deadline, epoch)

    def promote(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int] | None = None,
        sources: Sequence[int] | int = 1,
        *,
        window: Sequence[int] = (),
        deadline: float = FOREVER,
        epoch: int = 0,
    ) -> Transfer:
        """Make a PROMOTE; without slots all is read through the window, and dropped."""
        num = len(keys)
        slots = [NO_SLOT] * num if slots is None else slots
        sources = [sources] * num if isinstance(sources, int) else sources
        columns = [-1] * num, slots, sources, [0] * num
        return self._make(TransferKind.PROMOTE, keys, columns, window, deadline, epoch)

    def _make(
        self,
        kind: TransferKind,
        keys: Sequence[BlockKey],
        columns: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
        window: Sequence[int],
        deadline: float,
        epoch: int,
    ) -> Transfer:
        block_ids, slots, sources, targets = columns
        job_id = JobId(next(self.ids))
        return Transfer(
            job_id=job_id,
            epoch=epoch,
            kind=kind,
            keys=pack_keys(keys),
            block_ids=int64s(block_ids),
            slots=int64s(slots),
            sources=np.array(sources, np.uint8),
            targets=np.array(targets, np.uint8),
            stores=self.stores,
            window=int64s(window),
            deadline=deadline,
            request_id=f"request-{job_id}" if kind is TransferKind.RELOAD else "",
        )


class FakeRank:
    """A device, a slab, stores and an executor that nothing advances but the test.

    Args:
        layout: of the device. num_slots: of the slab.
        make_stores: what to build over the slab, by name.
        make_copier: another copier over the device's memory; None for the device's own queues.
    """

    def __init__(
        self,
        layout: KVLayout | None = None,
        num_slots: int = 8,
        make_stores: Callable[[Slab], Mapping[str, BlockStore]] | None = None,
        *,
        make_copier: Callable[[KVLayout, Sequence[int], Slab], Copier] | None = None,
        verify_dram: bool = False,
        piece_nbytes: int = PIECE_NBYTES,
        portions: Portions = PORTIONS,
    ) -> None:
        self.layout = make_layout() if layout is None else layout
        self.clock = FakeClock()
        self.slab = Slab(num_slots, slot_nbytes_for(self.layout.groups), pin="off")
        self.device = FakeDevice(self.layout, self.slab)
        self.copier: Copier = self.device
        if make_copier is not None:
            self.copier = make_copier(self.layout, self.device.bases, self.slab)
        self.stores = dict(make_stores(self.slab)) if make_stores else {}
        self.key_space = KeySpace(FINGERPRINT, Rank())
        self.shop = Workshop(
            self.slab, self.copier, self.layout, self.key_space, self.stores, Rank(), self.clock
        )
        self.executor = Executor(
            self.shop, verify_dram=verify_dram, piece_nbytes=piece_nbytes, portions=portions
        )
        self.orders = Orders(itertools.count(1), tuple(self.stores))
        self.answers: list[Completion] = []

    # -- time -------------------------------------------------------------------------

    def submit(self, transfer: Transfer, marker: Marker | None = None) -> JobId:
        """Submit an order behind a marker, by default the present end of the engine's queue."""
        self.executor.submit(transfer, self.copier.mark() if marker is None else marker)
        return transfer.job_id

    def advance(self, num: int = 1) -> bool:
        """Advance the executor, and collect its answers; whether the last turn did anything."""
        worked = False
        for _ in range(num):
            worked = self.executor.advance()
            self.answers += self.executor.poll()
        return worked

    def settle(self, max_turns: int = 100_000) -> None:
        """Run engine, copies and executor until nothing moves any more."""
        for _ in range(max_turns):
            self.device.work()
            moved = self.device.step()
            if not self.advance() and not moved:
                return
        raise AssertionError(f"still busy after {max_turns} turns")

    def run(self, transfer: Transfer) -> dict[str, list[Outcome]]:
        """Submit an order and settle; returns the outcomes by hop."""
        job_id = self.submit(transfer)
        self.settle()
        return self.outcomes(job_id)

    # -- answers ----------------------------------------------------------------------

    def completions(self, job_id: JobId) -> list[Completion]:
        """Return the answers of one job so far."""
        return [completion for completion in self.answers if completion.job_id == job_id]

    def outcomes(self, job_id: JobId) -> dict[str, list[Outcome]]:
        """Return the outcomes of one job so far, by hop."""
        return {
            completion.hop: [Outcome(int(value)) for value in completion.outcomes]
            for completion in self.completions(job_id)
        }

    # -- bytes ------------------------------------------------------------------------

    def fill(self, block_ids: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Write the patterns of keys into engine blocks, now."""
        for block_id, key in zip(block_ids, keys, strict=True):
            self.device.fill(block_id, key, group_of(key))

    def holds(self, block_id: int, key: BlockKey) -> bool:
        """Whether an engine block has the pattern of a key."""
        group = group_of(key)
        found = self.device.payload(group, block_id)
        return bool(np.array_equal(found, block_pattern(key, self.layout.groups[group])))

    def payload(self, block_id: int, group: int = 0) -> UInt8s:
        """Return the bytes of an engine block."""
        return self.device.payload(group, block_id)

    def name(self, key: BlockKey) -> StoreKey:
        """Return what a block's frame is stored under."""
        return self.key_space.name(key)

    def close(self) -> None:
        """Release everything."""
        self.executor.close()
