"""The progress of one transfer on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtiers.data.copier import Marker
from kvtiers.model.keys import HASH_NBYTES, KEY_NBYTES, BlockKey
from kvtiers.model.messages import NO_SLOT, Int64s, JobId, Transfer, TransferKind, UInt8s, int64s

PENDING = 255  # in an outcome column: not known yet


def key_groups(keys: bytes) -> Int64s:
    """Return the KV group of each key of a column."""
    raw = np.frombuffer(keys, np.uint8).reshape(-1, KEY_NBYTES)
    return raw[:, HASH_NBYTES:].copy().view(">u4").reshape(-1).astype(np.int64)


@dataclass(slots=True, eq=False)
class Run:
    """One transfer under way. Columns have one row per block.

    Attributes:
        keys: of each row. groups: KV group of each row.
        by_group: whether the rows of one KV group come after those of another.
        slots: where each row's frame lies or lands; a window slot while the row has one.
        hbm, dram: outcomes of those hops, `PENDING` until known; `stores`: by store index.
            The one hop of a PROMOTE is kept in `hbm`, like that of any load.
        todo: rows not begun on the present hop. ready: rows whose frame is in its slot.
        num_hurried: at the end of `todo`, an engine step waits for as many.
        free_window: staging slots not in use. in_flight: rows that a store is bringing.
        writes_left: by store index, rows not yet given to it.
        reported: whether the outcomes of a load have been answered.
    """

    transfer: Transfer
    marker: Marker | None
    deadline_at: float
    keys: list[BlockKey] = field(init=False)
    groups: Int64s = field(init=False)
    by_group: bool = field(init=False)
    slots: Int64s = field(init=False)
    hbm: UInt8s = field(init=False)
    dram: UInt8s = field(init=False)
    stores: dict[int, UInt8s] = field(init=False)
    todo: list[int] = field(init=False)
    num_hurried: int = 0
    ready: list[int] = field(default_factory=list)
    free_window: list[int] = field(init=False)
    writes_left: dict[int, list[int]] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)
    reported: bool = False

    def __post_init__(self) -> None:
        transfer = self.transfer
        num = transfer.num_blocks
        self.keys = transfer.block_keys()
        self.groups = key_groups(transfer.keys)
        self.by_group = bool((np.diff(self.groups) >= 0).all())
        self.slots = transfer.slots.copy()
        self.hbm = np.full(num, PENDING, np.uint8)
        self.dram = np.full(num, PENDING, np.uint8)
        self.stores = {}
        self.todo = list(range(num - 1, -1, -1))  # popped from the end: first rows first
        self.free_window = transfer.window.tolist()

    @property
    def promotes(self) -> bool:
        """Whether it brings blocks to their slots, and no further."""
        return self.transfer.kind is TransferKind.PROMOTE

    @property
    def epoch(self) -> int:
        """The epoch that the order belongs to."""
        return self.transfer.epoch

    def hurry(self, rows: Iterable[int]) -> None:
        """Begin some rows before all others, of those that have not begun."""
        first = {*rows, *self.todo[len(self.todo) - self.num_hurried :]}.intersection(self.todo)
        self.todo = [row for row in self.todo if row not in first] + sorted(first, reverse=True)
        self.num_hurried = len(first)

    def rows_of(self, blocks: Iterable[int]) -> Int64s:
        """Return the rows of some engine blocks."""
        return np.flatnonzero(np.isin(self.transfer.block_ids, int64s(list(blocks))))

    def lands(self, row: int) -> bool:
        """Whether a row of a load comes from a store."""
        return int(self.transfer.sources[row]) > 0

    def staged(self, row: int) -> bool:
        """Whether a row goes through the window, having no slot of its own."""
        return int(self.transfer.slots[row]) == NO_SLOT


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """Rows of offloads whose engine blocks are to be overwritten, once they were read.

    Any thread may ask: a row is settled when nothing reads its block any more, copied or not.
    """

    rows: Sequence[tuple[Run, Int64s]] = ()

    @property
    def jobs(self) -> set[JobId]:
        """The jobs that have yet to read some of the blocks."""
        return {run.transfer.job_id for run, rows in self.rows if (run.dram[rows] == PENDING).any()}
