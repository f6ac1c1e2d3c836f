"""The copier for CUDA devices, through the driver and kernels of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtiers import native
from kvtiers.data.batch_check import check_columns, check_places
from kvtiers.data.copier import CopyBatch, Direction, Marker, Ticket
from kvtiers.data.copier_cuda_routes import Route, RouteTable, expected_routes, measured_routes
from kvtiers.data.copier_host import native_group
from kvtiers.data.cuda_device import CudaDevice
from kvtiers.data.slab import Slab
from kvtiers.model.errors import LayoutError, ProtocolError, TransferError
from kvtiers.model.layout import KVLayout
from kvtiers.model.messages import int64s

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CudaTuning:
    """What a copier takes of its device.

    Attributes:
        num_thread_blocks: of a kernel; it keeps about as many SMs busy, of 100 or more.
        staging_nbytes: device memory of a direction, or four blocks where those are larger.
        tile_nbytes: what a warp copies at a time, a multiple of 16.
        num_markers: markers that keep an event of their own: some 100 steps.
    """

    num_thread_blocks: int = 12
    staging_nbytes: int = 32 * 2**20
    tile_nbytes: int = 4096
    num_markers: int = 256


DEFAULT_TUNING: Final = CudaTuning()


class CudaCopier:
    """Copies by batched DMA or by kernels, whichever a table says for the batch.

    Each direction has streams of its own; a batch waits there for its marker's event, and is done
    when the event behind its last piece is. Nothing synchronises the device, and nothing is
    allocated once the copier stands. `submit`, `done`, `wait` and `close` belong to one thread;
    `mark` and `hold_engine` may be called from another.

    Args:
        layout: the engine's tensors. bases: address of each of its allocations, all on `device`;
            the engine owns them and keeps them until `close`.
        slab: where the slots are; page-locked by `DriverRegistrar`. It must outlive the copier.
        device: where the tensors are; `mark` asks it for the engine's current stream.
        kernels: a fatbin; empty where there is none, which leaves DMA alone.
        routes: which route for which batch; None for what the sizes suggest. `measure` replaces
            it.

    Raises:
        NativeModuleError: the compiled module cannot be loaded.
        LayoutError: layout and addresses do not fit. CapacityError: a slot holds no frame.
        RuntimeError: the driver refused.
    """

    def __init__(
        self,
        layout: KVLayout,
        bases: Sequence[int],
        slab: Slab,
        device: CudaDevice,
        *,
        kernels: bytes,
        tuning: CudaTuning = DEFAULT_TUNING,
        routes: RouteTable | None = None,
    ) -> None:
        check_places(layout, bases, slab.slot_nbytes)
        module = native.load()
        self._layout = layout
        self._num_slots = slab.num_slots
        self._current_stream = device.current_stream
        self._native_routes = {route: module.Route[route.name] for route in Route}
        try:
            self._native = module.DeviceCopier(
                device.driver,
                device.number,
                list(zip(bases, layout.allocations, strict=True)),
                [native_group(group) for group in layout.groups],
                (slab.address, slab.num_slots),
                slab.slot_nbytes,
                kernels,
                tuning.num_thread_blocks,
                tuning.staging_nbytes,
                tuning.tile_nbytes,
                tuning.num_markers,
            )
        except ValueError as error:
            raise LayoutError(str(error)) from error
        self.routes = expected_routes(layout) if routes is None else routes
        self._seconds: dict[Ticket, float] = {}
        self._closed = False

    @property
    def has_kernels(self) -> bool:
        """Whether there is any route besides DMA."""
        return bool(self._native.has_kernels)

    def mark(self) -> Marker:
        """Record an event on the engine's current stream; called on the engine's thread.

        Raises:
            RuntimeError: that stream is being captured into a graph, or the device is lost.
        """
        return Marker(self._native.mark(self._current_stream()))

    def submit(self, direction: Direction, batch: CopyBatch, after: Marker | None) -> Ticket:
        """Queue a batch by the route that the table names; see `Copier.submit`.

        Raises:
            RuntimeError: the device refused; whatever was queued is over.
            ProtocolError: the copier is closed, or the marker was never issued.
        """
        route = self.routes.route(batch.group, direction, len(batch.slots))
        return self.submit_by(route, direction, batch, after)

    def submit_by(
        self, route: Route, direction: Direction, batch: CopyBatch, after: Marker | None
    ) -> Ticket:
        """Queue a batch by a given route, for measurements; raises as `submit` does."""
        if self._closed:
            raise ProtocolError("the copier is closed")
        check_columns(batch)
        if after is not None and after < 1:
            raise ProtocolError(f"marker {after} was never issued")
        try:
            ticket = self._native.submit(
                direction is Direction.GATHER,
                batch.group,
                int64s(batch.block_ids),
                int64s(batch.slots),
                after or 0,
                self._native_routes[route],
            )
        except ValueError as error:
            raise TransferError(str(error)) from error
        except IndexError as error:
            raise ProtocolError(str(error)) from error
        return Ticket(ticket)

    def done(self, ticket: Ticket) -> bool:
        """Whether the batch has been copied; see `Copier.done`.

        Raises:
            ProtocolError: the ticket was never issued, or is consumed.
        """
        try:
            seconds = self._native.done(ticket)
        except IndexError as error:
            raise ProtocolError(str(error)) from error
        if seconds is None:
            return False
        self._seconds = {ticket: float(seconds)}
        return True

    def seconds(self, ticket: Ticket) -> float | None:
        """Return what the batch took behind its marker, by the device's clock."""
        return self._seconds.get(ticket)

    def hold_engine(self, ticket: Ticket) -> bool:
        """Let the engine's current stream wait for a batch; see `Copier.hold_engine`.

        False while that stream is captured: a graph cannot hold the wait.

        Raises:
            ProtocolError: the ticket was never issued.
        """
        try:
            return bool(self._native.hold(ticket, self._current_stream()))
        except IndexError as error:
            raise ProtocolError(str(error)) from error

    def wait(self, ticket: Ticket) -> None:
        """Block until the batch has been copied; does not consume the ticket.

        Raises:
            ProtocolError: the ticket was never issued.
        """
        try:
            self._native.wait(ticket)
        except IndexError as error:
            raise ProtocolError(str(error)) from error

    def measure(self) -> None:
        """Time every route on the engine's blocks and the slab's slots; fill the table.

        Blocks keep their bytes: they are copied out and the same bytes back in. Slots do not.
        Nobody else may use either meanwhile: call it before the first step. It takes
        `copier_cuda_routes.MAX_MEASURE_SECONDS` at most, and one batch.
        """
        if self.has_kernels:
            self.routes = measured_routes(self, self._layout, self._num_slots)

    def close(self) -> None:
        """Wait for what is queued, then release streams, events and staging; idempotent."""
        self._closed = True
        failed = self._native.close()
        if failed:
            logger.error("waiting for the last copies failed: %s", failed)
