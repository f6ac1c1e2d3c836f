"""The columnar messages between the plane that decides and the plane that copies.

Per-block facts are numpy columns, never objects: pickling 8,192 objects costs 53 ms,
arrays 0.04 ms. Every message can be pickled; orders and answers name the epoch they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NewType

import numpy as np
import numpy.typing as npt

from kvtiers.model.keys import KEY_NBYTES, BlockKey, Rank, pack_keys, unpack_keys

JobId = NewType("JobId", int)
Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]

HBM: Final = "hbm"
DRAM: Final = "dram"
RELEASED: Final = "released"
NO_SLOT: Final = -1
NO_BLOCK: Final = -1  # a position without an engine block: outside a sliding window
NOT_LOOKED_UP: Final = 2  # in `Presence.present`: there was no time for it; ask again


def int64s(values: object) -> Int64s:
    """Return values as one contiguous int64 column."""
    return np.ascontiguousarray(values, dtype=np.int64)


class TransferKind(IntEnum):
    """Which chain the data plane runs, by itself, for one `Transfer`."""

    OFFLOAD = 0  # HBM -> slot [-> each store in `targets`]
    RELOAD = 1  # slot -> HBM, or store -> slot -> HBM, block by block as `sources` says
    DEMOTE = 2  # slot -> each store in `targets`
    PROMOTE = 3  # store -> slot, as `sources` says; through the window it is read and dropped


@dataclass(frozen=True, slots=True)
class Link:
    """What one link did for one job: for learning its speed."""

    name: str  # "hbm>dram", "dram>hbm", "dram>STORE", "STORE>dram"
    num_blocks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreHello:
    """What a rank says of one of its stores.

    Attributes:
        num_frames: that fit, of any block; None for a store that several engines share.
        inventory: the first 8 bytes of each store key that an earlier life left, sorted: a hint
            of what can be found there.
    """

    num_frames: int | None
    inventory: bytes = b""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank tells control before the first step.

    Attributes:
        rank: its place in the engine's grid.
        fingerprint: 32 bytes. num_slots, slot_nbytes: the slab.
        payload_nbytes: bytes of one block, per KV group.
        pinned: whether the slab is page-locked for DMA.
        stores: by name, all that are configured.
    """

    rank: Rank
    fingerprint: bytes
    num_slots: int
    slot_nbytes: int
    payload_nbytes: tuple[int, ...]
    pinned: bool
    stores: Mapping[str, StoreHello] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transfer:
    """An order to move blocks along a chain. Columns have one row per block.

    Attributes:
        keys: concatenated `BlockKey`s. block_ids: engine blocks (-1 for DEMOTE
            and PROMOTE).
        slots: the slab slot of each block: source or landing place; `NO_SLOT` means
            "through the window", or, for a block whose source is DRAM, "already gone".
        sources: RELOAD, PROMOTE: where each block is, 0 for DRAM (RELOAD only), else 1 + index
            into `stores`.
        targets: OFFLOAD, DEMOTE: which stores get each block, bit i for ``stores[i]``.
        stores: names, at most 8.
        window: staging slots that belong to this job and are recycled block by block.
        deadline: seconds on the data plane's clock after submission; blocks whose copy has
            not begun by then are TIMED_OUT.
        request_id: whom a RELOAD is for, as the engine names it; "" otherwise.
    """

    job_id: JobId
    epoch: int
    kind: TransferKind
    keys: bytes
    block_ids: Int64s
    slots: Int64s
    sources: UInt8s
    targets: UInt8s
    stores: tuple[str, ...]
    window: Int64s
    deadline: float
    request_id: str = ""

    @property
    def num_blocks(self) -> int:
        """Rows of the columns."""
        return len(self.keys) // KEY_NBYTES

    def block_keys(self) -> list[BlockKey]:
        """Return the key column as a list."""
        return list(unpack_keys(self.keys))


@dataclass(frozen=True, slots=True)
class Completion:
    """The fate of every block of one hop of one job, on one rank.

    Attributes:
        hop: the place that the blocks reached: `DRAM`, `HBM`, or a store's name; `RELEASED`
            says only that the slots of a RELOAD or PROMOTE which was answered early (its deadline
            or its epoch had passed, or the executor failed) are free at last.
        outcomes: one `Outcome` per row of the order.
        last: whether the rank is done with the job, and holds none of its slots.
    """

    job_id: JobId
    epoch: int
    rank: Rank
    hop: str
    outcomes: UInt8s
    last: bool


@dataclass(frozen=True, slots=True)
class Lookup:
    """A question of control to an index reader: which of these keys does its store hold?

    Asked of shared stores, and of private ones about what an earlier life has left.
    """

    store: str
    keys: bytes
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Presence:
    """The answer to a `Lookup`; a hint, since another process may evict at any time.

    Attributes:
        present: one flag per key: 0, 1, or `NOT_LOOKED_UP`. epoch: of the question.
        seconds: from the question to this answer.
    """

    store: str
    keys: bytes
    present: UInt8s
    epoch: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Forget:
    """An order to delete keys from stores: control has evicted or condemned them."""

    store: str
    keys: bytes

    @classmethod
    def of(cls, store: str, keys: list[BlockKey]) -> Forget:
        """Make the order from a list of keys."""
        return cls(store, pack_keys(keys))

    def block_keys(self) -> list[BlockKey]:
        """Return the keys as a list."""
        return list(unpack_keys(self.keys))


@dataclass(frozen=True, slots=True)
class StepOrders:
    """All that control asks of every rank in one engine step.

    Attributes:
        step: consecutive number; a rank takes each step's orders once.
        before: transfers whose sources are complete: submitted before the forward pass.
        after: offloads of blocks that this step's forward pass fills.
        fences: engine blocks that the forward pass overwrites, by the offload that must have read
            them before.
        sync_loads: RELOAD jobs that this step's forward pass needs.
        forgets: keys to delete from stores.
        epoch: orders of an earlier epoch are void.
        generation: what the names of frames are made with from this step on.
    """

    step: int
    epoch: int
    before: tuple[Transfer, ...] = ()
    after: tuple[Transfer, ...] = ()
    fences: Mapping[JobId, Int64s] = field(default_factory=dict)
    sync_loads: tuple[JobId, ...] = ()
    forgets: tuple[Forget, ...] = ()
    num_scheduled_tokens: int = 0
    generation: int = 0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """All that one or several ranks answer in one engine step.

    Attributes:
        completions: one per hop and rank. links: what links did. counters: by name; they add up.
    """

    completions: tuple[Completion, ...] = ()
    links: tuple[Link, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)

    def merged(self, other: WorkerReport) -> WorkerReport:
        """Return both reports as one; counters add up."""
        names = self.counters.keys() | other.counters.keys()
        counters = {n: self.counters.get(n, 0) + other.counters.get(n, 0) for n in sorted(names)}
        return WorkerReport(
            self.completions + other.completions, self.links + other.links, counters
        )
