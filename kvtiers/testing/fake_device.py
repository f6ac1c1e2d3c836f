"""An accelerator whose queues move only when a test says so."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtiers.data.batch_check import check_batch, check_places
from kvtiers.data.copier import CopyBatch, Direction, Marker, Ticket
from kvtiers.data.slab import Slab
from kvtiers.model.errors import ProtocolError
from kvtiers.model.frame import FrameFormat
from kvtiers.model.keys import BlockKey, Rank
from kvtiers.model.layout import Axis, GroupLayout, KVLayout, TensorView
from kvtiers.model.messages import UInt8s
from kvtiers.testing.pattern import block_pattern


@dataclass(frozen=True, slots=True)
class _Copy:
    ticket: Ticket
    batch: CopyBatch
    after: int  # engine work items that must be done first


class FakeDevice:
    """KV tensors in host memory, an engine's queue of work, and one copy queue a direction.

    It is a `Copier`. ``submit`` copies nothing; ``step`` copies the next batch of a queue *at
    that moment*, so that a late copy sees overwritten bytes as DMA does, and only once the
    engine work before the batch's marker is done. All methods may be called by any thread.

    Args:
        layout: of the tensors, which the device allocates. slab: where the slots are.
    """

    def __init__(self, layout: KVLayout, slab: Slab) -> None:
        self.layout = layout
        self.memory: list[UInt8s] = [np.zeros(n, np.uint8) for n in layout.allocations]
        check_places(layout, self.bases, slab.slot_nbytes)
        self._slab = slab
        self._lock = threading.RLock()
        self._work: deque[Callable[[], object] | Ticket] = deque()
        self._num_queued = 0
        self._num_worked = 0
        self._queues: dict[Direction, deque[_Copy]] = {d: deque() for d in Direction}
        self._tickets = 0
        self._over: dict[Ticket, Exception | None] = {}
        self._fail_submits: deque[Exception] = deque()
        self._fail_copies: deque[Exception] = deque()
        self._closed = False

    # -- the engine -------------------------------------------------------------------

    @property
    def bases(self) -> list[int]:
        """The address of each allocation."""
        return [array.ctypes.data for array in self.memory]

    def payload(self, group: int, block_id: int) -> UInt8s:
        """Return a copy of the bytes of a block as they are now."""
        return np.concatenate([part.copy() for part in self._parts(group, block_id)])

    def overwrite(self, group: int, block_id: int, payload: UInt8s) -> None:
        """Write a block now, past all queues."""
        start = 0
        for part in self._parts(group, block_id):
            part[:] = payload[start : start + len(part)]
            start += len(part)

    def fill(self, block_id: int, key: BlockKey, group: int = 0, rank: Rank = Rank()) -> None:  # noqa: B008
        """Write the pattern of a key into a block now, past all queues."""
        self.overwrite(group, block_id, block_pattern(key, self.layout.groups[group], rank))

    def queue(self, work: Callable[[], object]) -> None:
        """Queue engine work."""
        with self._lock:
            self._work.append(work)
            self._num_queued += 1

    def compute(self, block_id: int, key: BlockKey, group: int = 0) -> None:
        """Queue engine work that writes the pattern of a key into a block."""
        self.queue(lambda: self.fill(block_id, key, group))

    def work(self, num: int | None = None) -> int:
        """Run queued engine work until a copy holds it, all unless limited; returns how much."""
        with self._lock:
            done, most = 0, len(self._work) if num is None else num
            while self._work and done < most:
                item = self._work[0]
                if callable(item):
                    item()
                elif self._is_queued(item):
                    break
                self._work.popleft()
                self._num_worked += 1
                done += 1
            return done

    # -- the copy queues --------------------------------------------------------------

    def step(self, direction: Direction | None = None) -> bool:
        """Copy one batch; False when none is queued whose marker has been reached."""
        with self._lock:
            directions = Direction if direction is None else (direction,)
            for queue in (self._queues[each] for each in directions):
                if queue and queue[0].after <= self._num_worked:
                    self._run(queue)
                    return True
            return False

    def num_copies(self, direction: Direction) -> int:
        """Return how many batches of a direction wait."""
        return len(self._queues[direction])

    def settle(self) -> None:
        """Run all engine work and all copies."""
        self.work()
        while self.step():
            pass

    def fail_submit(self, error: Exception) -> None:
        """Let the next submission that no earlier call has spoilt raise."""
        self._fail_submits.append(error)

    def fail_copy(self, error: Exception) -> None:
        """Let the next batch to be copied write nothing, and its ticket raise."""
        self._fail_copies.append(error)

    # -- as a copier ------------------------------------------------------------------

    def mark(self) -> Marker:
        """Return the present end of the engine's queue."""
        return Marker(self._num_queued)

    def submit(self, direction: Direction, batch: CopyBatch, after: Marker | None) -> Ticket:
        """Queue a batch; see `Copier.submit`."""
        with self._lock:
            if self._closed:
                raise ProtocolError("the device is closed")
            check_batch(direction, batch, self.layout.groups, self._slab.num_slots)
            if self._fail_submits:
                raise self._fail_submits.popleft()
            self._tickets += 1
            ticket = Ticket(self._tickets)
            self._queues[direction].append(_Copy(ticket, batch, 0 if after is None else after))
            return ticket

    def done(self, ticket: Ticket) -> bool:
        """Whether a batch is over; raises what the copy was told to fail with.

        Raises:
            ProtocolError: the ticket was never issued, or is consumed.
        """
        with self._lock:
            if ticket in self._over:
                error = self._over.pop(ticket)
                if error is not None:
                    raise error
                return True
            if not self._is_queued(ticket):
                raise ProtocolError(f"ticket {ticket} is not pending")
            return False

    def seconds(self, ticket: Ticket) -> float | None:  # noqa: ARG002
        """Return None: a copy takes no time here."""
        return None

    def wait(self, ticket: Ticket) -> None:
        """Run engine work and copies up to a ticket: what a blocking wait lets happen."""
        with self._lock:
            while self._is_queued(ticket):
                assert self.step() or self.work(1), "engine and copies wait for each other"

    def hold_engine(self, ticket: Ticket) -> bool:
        """Let engine work that is queued from now on wait for a batch."""
        with self._lock:
            self._work.append(ticket)
            self._num_queued += 1
            return True

    @property
    def num_tickets(self) -> int:
        """Tickets that nobody has consumed."""
        return len(self._over) + sum(map(len, self._queues.values()))

    def close(self) -> None:
        """Drop what is queued; idempotent."""
        with self._lock:
            self._closed = True
            for queue in self._queues.values():
                queue.clear()

    # -- internals --------------------------------------------------------------------

    def _is_queued(self, ticket: Ticket) -> bool:
        return any(copy.ticket == ticket for queue in self._queues.values() for copy in queue)

    def _run(self, queue: deque[_Copy]) -> None:
        copy = queue.popleft()
        error = self._fail_copies.popleft() if self._fail_copies else None
        self._over[copy.ticket] = error
        if error is not None:
            return
        group = copy.batch.group
        start = FrameFormat.of(self.layout.groups[group]).header_nbytes
        nbytes = self.layout.groups[group].payload_nbytes
        gather = queue is self._queues[Direction.GATHER]
        pairs = zip(copy.batch.block_ids.tolist(), copy.batch.slots.tolist(), strict=True)
        for block_id, slot in pairs:
            place = self._slab.view(slot)[start : start + nbytes]
            if gather:
                place[:] = self.payload(group, block_id).tobytes()
            else:
                self.overwrite(group, block_id, np.frombuffer(place, np.uint8))

    def _parts(self, group: int, block_id: int) -> list[UInt8s]:
        """Return writable views of a block's bytes, in payload order."""
        parts = []
        for run in self.layout.groups[group].runs:
            start = run.offset + block_id * run.block_stride
            parts.append(self.memory[run.allocation][start : start + run.nbytes])
        return parts


def make_layout(
    num_blocks: int = 8, page_nbytes: Sequence[Sequence[int]] = ((96, 96),)
) -> KVLayout:
    """Return a layout with one tensor a layer, K and V apart in it.

    Args:
        num_blocks: of every KV group.
        page_nbytes: by KV group, by layer, bytes of a page; multiples of 2.
    """
    allocations: list[int] = []
    groups: list[GroupLayout] = []
    axes = (Axis.KV, Axis.BLOCK, Axis.CONTENT)
    for index, layers in enumerate(page_nbytes):
        views = []
        for layer, nbytes in enumerate(layers):
            half = nbytes // 2
            shape, strides = (2, num_blocks, half), (num_blocks * half, half, 1)
            name = f"{index}.{layer}"
            views.append(TensorView(name, len(allocations), 0, axes, shape, strides, 1))
            allocations.append(num_blocks * nbytes)
        groups.append(
            GroupLayout.from_views(
                views, group=index, num_blocks=num_blocks, block_size=16, dtype="uint8"
            )
        )
    return KVLayout(tuple(allocations), tuple(groups))
