"""The copier for engine tensors of any torch device, ordered by streams and events."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvtiers.data.batch_check import check_batch, check_places
from kvtiers.data.copier import CopyBatch, Direction, Marker, Ticket
from kvtiers.data.slab import Slab
from kvtiers.model.errors import LayoutError, ProtocolError
from kvtiers.model.frame import FrameFormat
from kvtiers.model.layout import GroupLayout, KVLayout

logger = logging.getLogger(__name__)

STAGING_NBYTES: Final = 32 * 2**20  # a direction; 64 MiB of the device's memory in all
NUM_MARKERS: Final = 256  # some 100 steps; an offload rarely waits that long to begin

# Elements are moved as the widest integers that fit: a kernel over bytes does eight times the work.
_DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Group:
    """One KV group as tensors.

    Attributes:
        runs: [num_blocks, n] over the engine's memory, and its columns of a staging row.
        dtype: of the runs. start, nbytes: where a payload lies in its slot.
    """

    runs: tuple[tuple[torch.Tensor, slice], ...]
    dtype: torch.dtype
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Lane:
    """One direction: its stream, and the staging bytes that only this stream touches."""

    stream: Any
    staging: torch.Tensor


class TorchCopier:
    """Copies with torch's own operators: index a run, stage on the device, one copy a slot.

    On a CUDA device each direction has a stream. A batch waits there for its marker's event,
    and is done when the event behind its last copy is; nothing synchronises the device. On the
    CPU all of that is immediate. `submit`, `done` and `wait` belong to one thread, `mark` and
    `hold_engine` may be called from another; `submit` makes the device the current one of its
    thread.

    A slab that is not page-locked makes `submit` block until the batch is copied.

    Args:
        layout: the engine's tensors.
        allocations: a flat uint8 tensor over each of its allocations, all on one device; the
            copier keeps them alive.
        slab: where the slots are; it must outlive the copier.
        staging_nbytes: bytes of a direction's staging buffer, or one block where that is larger.
        num_markers: markers that keep an event of their own.
        engine_stream: returns the handle of the engine's current stream, where that is not the
            current one of torch.
        cuda: stands in for ``torch.cuda``; None chooses by the device.

    Raises:
        LayoutError: not one flat uint8 tensor of the right size per allocation, or two devices.
        CapacityError: a slot holds no frame.
    """

    def __init__(
        self,
        layout: KVLayout,
        allocations: Sequence[torch.Tensor],
        slab: Slab,
        *,
        staging_nbytes: int = STAGING_NBYTES,
        num_markers: int = NUM_MARKERS,
        engine_stream: Callable[[], int] | None = None,
        cuda: Any = None,
    ) -> None:
        check_places(layout, [flat.data_ptr() for flat in allocations], slab.slot_nbytes)
        self._device = device = _device_of(layout, allocations)
        if cuda is None:
            cuda = torch.cuda if device.type == "cuda" else _NoQueues()
        self._cuda = cuda
        self._layout = layout
        self._num_slots = slab.num_slots
        self._pinned = slab.pinned
        self._slots = _host_bytes(slab)
        self._groups = [_group(group, allocations) for group in layout.groups]
        nbytes = max(staging_nbytes, layout.max_payload_nbytes)
        self._lanes = {direction: self._lane(nbytes) for direction in Direction}
        streams = [lane.stream for lane in self._lanes.values()]
        self._markers = _Markers(cuda, streams, num_markers)
        self._engine_stream = engine_stream
        self._submitted = 0
        self._pending: dict[Ticket, tuple[Any, Any]] = {}
        self._seconds: dict[Ticket, float | None] = {}
        self._closed = False

    def mark(self) -> Marker:
        """Record an event on the engine's current stream; called on the engine's thread."""
        return self._markers.mark(self._current_stream())

    def submit(self, direction: Direction, batch: CopyBatch, after: Marker | None) -> Ticket:
        """Queue a batch on its direction's stream; see `Copier.submit`.

        Raises:
            RuntimeError: the device refused; whatever was queued is over.
            ProtocolError: the copier is closed, or the marker was never issued.
        """
        if self._closed:
            raise ProtocolError("the copier is closed")
        check_batch(direction, batch, self._layout.groups, self._num_slots)
        reached = None if after is None else self._markers.event(after)
        lane = self._lanes[direction]
        self._cuda.set_device(self._device)
        begun, over = (self._cuda.Event(enable_timing=True) for _ in range(2))
        try:
            with self._cuda.stream(lane.stream):
                if reached is not None:
                    lane.stream.wait_event(reached)
                begun.record(lane.stream)
                self._copy(direction, lane, batch)
                over.record(lane.stream)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # the slots are the caller's again
                lane.stream.synchronize()
            raise
        self._submitted += 1
        ticket = Ticket(self._submitted)
        self._pending[ticket] = (begun, over)
        return ticket

    def done(self, ticket: Ticket) -> bool:
        """Whether the batch has been copied; see `Copier.done`.

        Raises:
            ProtocolError: the ticket was never issued, or is consumed.
        """
        if ticket not in self._pending:
            raise ProtocolError(f"ticket {ticket} is not pending")
        begun, end = self._pending[ticket]
        over = True  # so it is if the query raises
        try:
            over = bool(end.query())
        finally:
            if over:
                del self._pending[ticket]
        if over:
            milliseconds = begun.elapsed_time(end)
            self._seconds = {ticket: None if milliseconds is None else milliseconds / 1e3}
        return over

    def seconds(self, ticket: Ticket) -> float | None:
        """Return what the batch took behind its marker; see `Copier.seconds`."""
        return self._seconds.get(ticket)

    def hold_engine(self, ticket: Ticket) -> bool:
        """Let the engine's current stream wait for a batch; see `Copier.hold_engine`.

        False while that stream is captured: a graph cannot hold the wait.

        Raises:
            ProtocolError: the ticket was never issued.
        """
        self._check_issued(ticket)
        events = self._pending.get(ticket)
        if events is None:
            return True
        if self._cuda.is_current_stream_capturing():
            return False
        self._current_stream().wait_event(events[1])
        return True

    def wait(self, ticket: Ticket) -> None:
        """Block until the batch has been copied; does not consume the ticket.

        Raises:
            ProtocolError: the ticket was never issued.
        """
        self._check_issued(ticket)
        if ticket in self._pending:
            self._pending[ticket][1].synchronize()

    def close(self) -> None:
        """Wait for what is queued, then let go of all tensors; idempotent."""
        self._closed = True
        for lane in self._lanes.values():
            try:
                lane.stream.synchronize()
            except RuntimeError as error:
                logger.error("waiting for the last copies failed: %s", error)
        self._lanes, self._groups = {}, []
        self._slots = torch.empty(0, 0, dtype=torch.uint8)

    # -- internals --------------------------------------------------------------------

    def _check_issued(self, ticket: Ticket) -> None:
        if not 0 < ticket <= self._submitted:
            raise ProtocolError(f"ticket {ticket} was never issued")

    def _current_stream(self) -> Any:
        """Return the stream that the engine is queueing on."""
        if self._engine_stream is None:
            return self._cuda.current_stream(self._device)
        return self._cuda.ExternalStream(self._engine_stream(), device=self._device)

    def _lane(self, nbytes: int) -> _Lane:
        """Make a stream, with memory that torch's allocator counts as that stream's own."""
        stream = self._cuda.Stream(device=self._device)
        with self._cuda.stream(stream):
            return _Lane(stream, torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def _copy(self, direction: Direction, lane: _Lane, batch: CopyBatch) -> None:
        group = self._groups[batch.group]
        block_ids = self._on_device(batch.block_ids)
        step = len(lane.staging) // group.nbytes
        for start in range(0, len(batch.slots), step):
            ids = block_ids[start : start + step]
            staged = lane.staging[: len(ids) * group.nbytes].view(len(ids), group.nbytes)
            wide = staged.view(group.dtype)
            slots = batch.slots[start : start + step].tolist()
            if direction is Direction.GATHER:
                for run, columns in group.runs:
                    torch.index_select(run, 0, ids, out=wide[:, columns])
                for row, payload in zip(staged, self._payloads(group, slots), strict=True):
                    payload.copy_(row, non_blocking=self._pinned)
            else:
                for row, payload in zip(staged, self._payloads(group, slots), strict=True):
                    row.copy_(payload, non_blocking=self._pinned)
                for run, columns in group.runs:
                    run.index_copy_(0, ids, wide[:, columns])

    def _payloads(self, group: _Group, slots: Sequence[int]) -> Iterator[torch.Tensor]:
        return (self._slots[slot, group.start : group.start + group.nbytes] for slot in slots)

    def _on_device(self, block_ids: Any) -> torch.Tensor:
        """Return ids as a tensor of the current stream, without waiting for that stream."""
        ids = torch.tensor(block_ids)
        if self._device.type == "cuda":  # torch keeps the pinned copy until its transfer is over
            ids = ids.pin_memory().to(self._device, non_blocking=True)
        return ids


class _Markers:
    """Events on the engine's stream by number, a bounded table of them.

    What leaves the table is waited for on every copying stream first: whatever is submitted
    later comes after it without an event of its own.
    """

    def __init__(self, cuda: Any, streams: Sequence[Any], limit: int) -> None:
        self._cuda = cuda
        self._streams = streams
        self._limit = limit
        self._lock = threading.Lock()
        self._events: dict[int, Any] = {}
        self._issued = 0

    def mark(self, stream: Any) -> Marker:
        """Record an event on a stream."""
        event = self._cuda.Event()
        event.record(stream)
        with self._lock:
            self._issued += 1
            self._events[self._issued] = event
            if len(self._events) > self._limit:
                oldest = next(iter(self._events))
                for copying in self._streams:
                    copying.wait_event(self._events[oldest])
                del self._events[oldest]
            return Marker(self._issued)

    def event(self, marker: Marker) -> Any:
        """Return a marker's event, None where no wait is needed any more.

        Raises:
            ProtocolError: the marker was never issued.
        """
        with self._lock:
            if not 0 < marker <= self._issued:
                raise ProtocolError(f"marker {marker} was never issued")
            return self._events.get(marker)


class _NoQueue:
    """A stream or event where operators are done when they return."""

    def __init__(self, device: object = None, *, enable_timing: bool = False) -> None:
        """Belong to any device."""

    def record(self, stream: object) -> None:
        """Do nothing: the point is reached."""

    def wait_event(self, event: object) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, end: object) -> float | None:  # noqa: ARG002
        """Return None: the caller's clock knows."""
        return None

    def synchronize(self) -> None:
        """Do nothing."""


class _NoQueues:
    """What is used of ``torch.cuda``, for the CPU."""

    Stream = Event = _NoQueue

    def set_device(self, device: object) -> None:
        """Do nothing."""

    def current_stream(self, device: object) -> _NoQueue:
        """Return a stream."""
        return _NoQueue(device)

    def is_current_stream_capturing(self) -> bool:
        """Return False."""
        return False

    def stream(self, stream: object) -> AbstractContextManager[None]:  # noqa: ARG002
        """Select nothing."""
        return nullcontext()


def _device_of(layout: KVLayout, allocations: Sequence[torch.Tensor]) -> torch.device:
    """Return the one device of all allocations, whose form it checks."""
    devices = sorted({str(flat.device) for flat in allocations})
    if len(devices) != 1:
        raise LayoutError(f"allocations on {devices}, expected one device")
    for idx, (flat, nbytes) in enumerate(zip(allocations, layout.allocations, strict=True)):
        if flat.dtype != torch.uint8 or flat.shape != (nbytes,) or not flat.is_contiguous():
            raise LayoutError(
                f"allocation {idx} is {flat.dtype} of shape {tuple(flat.shape)}, "
                f"expected {nbytes} bytes in a row"
            )
    return allocations[0].device


def _host_bytes(slab: Slab) -> torch.Tensor:
    """Return the slab as uint8 [num_slots, slot_nbytes], the same memory."""
    raw = (ctypes.c_uint8 * (slab.num_slots * slab.slot_nbytes)).from_address(slab.address)
    return torch.frombuffer(raw, dtype=torch.uint8).view(slab.num_slots, slab.slot_nbytes)


def _group(group: GroupLayout, allocations: Sequence[torch.Tensor]) -> _Group:
    """View each run of a group as one strided matrix.

    Offsets in torch are 64 bits wide. Its CUDA kernels compute with 32 bits where the whole
    extent of an operand fits, and with 64 otherwise: views of any size are safe.
    """
    itemsize = 8
    for run in group.runs:
        flat = allocations[run.allocation]
        places = (flat.data_ptr(), flat.storage_offset(), run.offset, run.block_stride, run.nbytes)
        itemsize = math.gcd(itemsize, *places)
    dtype = _DTYPES[itemsize]
    runs = []
    start = 0
    for run in group.runs:
        flat = allocations[run.allocation]
        wide = flat[: len(flat) // itemsize * itemsize].view(dtype)
        view = wide.as_strided(
            (group.num_blocks, run.nbytes // itemsize),
            (run.block_stride // itemsize, 1),
            wide.storage_offset() + run.offset // itemsize,
        )
        stop = start + run.nbytes // itemsize
        runs.append((view, slice(start, stop)))
        start = stop
    return _Group(tuple(runs), dtype, FrameFormat.of(group).header_nbytes, group.payload_nbytes)
