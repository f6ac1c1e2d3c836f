"""Host memory cut into equal slots, one frame each: the landing area of every copy."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import resource
from typing import Final, Literal, Protocol

from kvtiers.data.host_memory import available_memory
from kvtiers.data.numa import prefer_node
from kvtiers.model.errors import CapacityError, ProtocolError, TransferError

_logger = logging.getLogger(__name__)

PIN_CHUNK_NBYTES: Final = 64 * 2**30  # one registration of 512 GiB or more fails on real drivers

_WIPE_ON_FORK: Final = 18  # of Linux since 4.14; the module mmap does not name them
_KEEP_ON_FORK: Final = 19

PinMode = Literal["auto", "on", "off"]


class Registrar(Protocol):
    """Page-locks host memory for a device.

    An implementation consumes its runtime's error state before it raises, so that no
    later, unrelated call reports it.
    """

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock a range.

        Raises:
            OSError: the system or the driver refused; the range is as it was before.
        """
        ...

    def unregister(self, address: int) -> None:
        """Release a range by the address it was registered with.

        Raises:
            OSError: the driver refused.
        """
        ...


class Slab:
    """One page-aligned anonymous mapping of ``num_slots`` slots of ``slot_nbytes`` bytes.

    Slot ``s`` is ``[address + s * slot_nbytes, ... + slot_nbytes)``. The slab owns the memory;
    a view keeps it mapped even after `close`, but a copier's raw address does not. While it is
    page-locked, a forked child has zeros there.

    Args:
        num_slots: slots, >= 1. slot_nbytes: bytes of each, >= 1.
        pin: "off" never page-locks; "on" fails where it cannot; "auto" does without,
            with one warning if a registrar refused.
        registrar: how to page-lock; None where there is no device.
        numa_node: of the host's memory that its pages should be in; None for any. It is a wish:
            pages that do not fit there lie elsewhere.
        pin_chunk_nbytes: bytes of one registration at most.

    Raises:
        CapacityError: no slots, more than the machine provides, or "on" and not page-locked.
        ValueError: `pin` is no known mode.
    """

    def __init__(
        self,
        num_slots: int,
        slot_nbytes: int,
        *,
        pin: PinMode = "auto",
        registrar: Registrar | None = None,
        numa_node: int | None = None,
        pin_chunk_nbytes: int = PIN_CHUNK_NBYTES,
    ) -> None:
        if pin not in ("auto", "on", "off"):
            raise ValueError(f"pin is {pin!r}, expected 'auto', 'on' or 'off'")
        _check_capacity(num_slots, slot_nbytes)
        self.num_slots = num_slots
        self.slot_nbytes = slot_nbytes
        self._mapping: mmap.mmap | None = _map(num_slots * slot_nbytes)
        self._bytes = memoryview(self._mapping)
        self._nbytes = len(self._mapping)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        if numa_node is not None:  # before a page is touched: registering touches all
            prefer_node(self._address, self._nbytes, numa_node)
        self._registrar = registrar
        self._registered: list[int] = []
        try:
            self._pin(pin, pin_chunk_nbytes)
        except CapacityError:
            self.close()
            raise

    @property
    def address(self) -> int:
        """Address of slot 0, a multiple of the page size."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Mapped bytes: the slots, rounded up to whole pages."""
        return self._nbytes

    @property
    def pinned(self) -> bool:
        """Whether all of the slab is page-locked for DMA."""
        return bool(self._registered)

    def view(self, slot: int) -> memoryview:
        """Return one slot's bytes, writable.

        Raises:
            TransferError: there is no such slot. ProtocolError: the slab is closed.
        """
        if self._mapping is None:
            raise ProtocolError("the slab is closed")
        if not 0 <= slot < self.num_slots:
            raise TransferError(f"slot {slot} is not in 0..{self.num_slots - 1}")
        start = slot * self.slot_nbytes
        return self._bytes[start : start + self.slot_nbytes]

    def close(self) -> None:
        """Unlock and unmap; idempotent. Memory that a view still shows goes with that view."""
        self._unpin()
        mapping, self._mapping = self._mapping, None
        self._bytes.release()
        if mapping is not None:
            with contextlib.suppress(BufferError):  # unmapped by the last view's end instead
                mapping.close()

    def _pin(self, pin: PinMode, chunk_nbytes: int) -> None:
        if pin == "off" or (pin == "auto" and self._registrar is None):
            return
        if self._registrar is None:
            raise CapacityError(
                f"cannot page-lock the slab's {self._nbytes} bytes: no device driver to "
                "register them with; use `pin: auto` or `pin: off` for pageable memory"
            )
        reason = self._register(self._registrar, chunk_nbytes)
        if reason is None:
            return
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        message = (
            f"cannot page-lock the slab's {self._nbytes} bytes: {reason} "
            f"(locked memory limit: {shown})"
        )
        if pin == "on":
            raise CapacityError(f"{message}; raise the limit, shrink the tier, or use `pin: auto`")
        _logger.warning("%s; the slab stays pageable and copies are slower", message)

    def _register(self, registrar: Registrar, chunk_nbytes: int) -> str | None:
        """Register the slab chunk by chunk; on failure undo all and return the reason.

        A chunk ends where a slot does, if slots are whole pages: no driver promises that one
        copy may cross from one registered range into the next.
        """
        whole = self.slot_nbytes if self.slot_nbytes % mmap.PAGESIZE == 0 else mmap.PAGESIZE
        chunk_nbytes = max(whole, chunk_nbytes // whole * whole)
        self._inherit(False)
        for start in range(0, self._nbytes, chunk_nbytes):
            nbytes = min(chunk_nbytes, self._nbytes - start)
            try:
                registrar.register(self._address + start, nbytes)
            except OSError as error:
                self._unpin()
                return f"{nbytes} bytes at offset {start} were refused: {error}"
            self._registered.append(self._address + start)
        return None

    def _unpin(self) -> None:
        while self._registered and self._registrar is not None:
            address = self._registered.pop()
            try:
                self._registrar.unregister(address)
            except OSError as error:
                _logger.warning("cannot unlock the slab's chunk at %#x: %s", address, error)
        self._inherit(True)

    def _inherit(self, inherit: bool) -> None:
        """Say whether a forked child gets the bytes; if not, it has zeros there.

        A fork makes pages of both sides copy-on-write: one that the parent writes may then be
        another than the one that the device writes. Or the kernel copies locked pages at once, all
        of the slab, for a child that only wants to execute something. A child without the mapping
        (MADV_DONTFORK) would unmap, with the slab, what it has mapped there since.
        """
        if self._mapping is not None:
            self._mapping.madvise(_KEEP_ON_FORK if inherit else _WIPE_ON_FORK)


def _check_capacity(num_slots: int, slot_nbytes: int) -> None:
    """Refuse what cannot be held, before anything is allocated."""
    available = available_memory()
    nbytes = num_slots * slot_nbytes
    room = available.nbytes if available is not None else None
    fits = room // slot_nbytes if room is not None and slot_nbytes > 0 else None
    if num_slots < 1 or slot_nbytes < 1:
        raise CapacityError(
            f"a slab of {num_slots} slots of {slot_nbytes} bytes holds nothing: the capacity must "
            f"be at least one slot of {slot_nbytes} bytes"
            + (f"; {fits} slots would fit in {room} free bytes" if fits is not None else "")
        )
    if available is not None and nbytes > available.nbytes:
        raise CapacityError(
            f"a slab of {num_slots} slots of {slot_nbytes} bytes takes {nbytes} bytes, but "
            f"{available.bound} leaves {available.nbytes} bytes: {fits} slots would fit; "
            "lower the capacity of the dram tier or free memory"
        )


def _map(nbytes: int) -> mmap.mmap:
    """Map zeroed private pages, huge ones where the kernel gives them."""
    mapped = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        mapping = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(f"cannot map {mapped} bytes for the slab: {error}") from error
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        _logger.debug("no huge pages for the slab: %s", error)
    return mapping
