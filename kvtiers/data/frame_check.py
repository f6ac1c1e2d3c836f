"""Whether stored frames are whole, found out without the layout that they were made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

from kvtiers.model.frame import FrameHeader, read_header
from kvtiers.model.keys import StoreKey

_STEPS: Final = (64, 8, 1)  # bytes between the ends of a page that are tried, in turn
_START_NBYTES: Final = 128  # of a frame, at least: its header without most checksums


class FrameChecker:
    """Verifies header and pages of frames.

    A header has every page's checksum, but not where the pages end. That is learnt from the
    checksums: a page ends where its checksum holds. So it takes one good frame of each layout,
    and what ends nowhere is damaged for sure. Learning costs about 0.2 us for each byte of the
    payload where a frame is damaged, a 64th of that where it is not (EPYC 9B14, 2026-11).
    """

    def __init__(self) -> None:
        # (pages, payload bytes) -> the sizes of the pages, of each layout that was seen
        self._known: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    def fault(self, key: StoreKey, prefix: bytes, rest: memoryview) -> str | None:
        """Return what is wrong with a frame, None for one that may be served.

        Args:
            key: that it was found under. prefix: its first bytes, rest: all others; less than a
                header is in the prefix.
        """
        try:
            header = self._header(key, prefix, rest)
        except ValueError as error:
            return str(error)
        nbytes = len(prefix) + len(rest)
        if nbytes != header.nbytes + header.payload_nbytes:
            return f"{nbytes} bytes, but its header counts {header.nbytes + header.payload_nbytes}"
        return self._payload_fault(header.digests, rest[header.nbytes - len(prefix) :])

    def _header(self, key: StoreKey, prefix: bytes, rest: memoryview) -> FrameHeader:
        start = prefix + bytes(rest[:_START_NBYTES])
        nbytes = int.from_bytes(start[8:12], "little")  # what it says; `read_header` judges it
        if not _START_NBYTES <= nbytes <= len(prefix) + len(rest):
            read_header(start, key)  # most often says better what is wrong
            raise ValueError(f"{len(prefix) + len(rest)} bytes, and a header of {nbytes}")
        return read_header(prefix + bytes(rest[: nbytes - len(prefix)]), key)

    def _payload_fault(self, digests: tuple[int, ...], payload: memoryview) -> str | None:
        layouts = self._known.setdefault((len(digests), len(payload)), [])
        for sizes in layouts:
            held = list(_checks(sizes, digests, payload))
            if all(held):
                return None
            alone = _between_good_ones(held)
            if alone is not None:
                return _said(alone)
        found = _learn(digests, payload)
        if isinstance(found, int):
            return _said(found)
        layouts.append(found)
        return None


def _said(page: int) -> str:
    return f"page {page} does not have the checksum that the header says"


def _between_good_ones(held: Sequence[bool]) -> int | None:
    """Return a page that is damaged in any layout: where it lies is known by its neighbours."""
    padded = [True, *held, True]
    for page, good in enumerate(held):
        if not good and padded[page] and padded[page + 2]:
            return page
    return None


def _checks(sizes: Sequence[int], digests: Sequence[int], payload: memoryview) -> Iterator[bool]:
    """Yield of each page whether its checksum holds."""
    at = 0
    for size, digest in zip(sizes, digests, strict=True):
        yield xxh3_64_intdigest(payload[at : at + size]) == digest
        at += size


def _learn(digests: tuple[int, ...], payload: memoryview) -> tuple[int, ...] | int:
    """Return the sizes of all pages, or the number of the first that ends nowhere."""
    sizes: list[int] = []
    likely = dict.fromkeys([len(payload) // len(digests)])
    rest = payload
    for idx, digest in enumerate(digests):
        others = len(digests) - idx - 1
        room = len(rest) - others  # every page has a byte at least
        if not others:
            size = room if room > 0 and xxh3_64_intdigest(rest) == digest else None
        else:
            tried = (s for s in likely if 0 < s <= room and xxh3_64_intdigest(rest[:s]) == digest)
            size = next(tried, None) or _end(rest[: max(0, room)], digest)
        if size is None:
            return idx
        sizes.append(size)
        likely[size] = None
        rest = rest[size:]
    return tuple(sizes)


def _end(rest: memoryview, digest: int) -> int | None:
    """Return where the page with a checksum ends, None for nowhere."""
    for step in _STEPS:
        state = xxh3_64()
        for end in range(step, len(rest) + 1, step):
            state.update(rest[end - step : end])
            if state.intdigest() == digest:
                return end
    return None
