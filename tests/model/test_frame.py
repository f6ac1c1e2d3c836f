"""Promises of the frame: what was sealed is served, anything else is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.model.frame import ALIGNMENT, FrameFormat, round_up, slot_nbytes_for
from kvtiers.model.keys import Rank, StoreKey, block_key, store_key
from kvtiers.model.layout import GroupLayout, Page, Run

PAGES = st.lists(st.integers(1, 6000), min_size=1, max_size=5).map(tuple)
CHECKSUM_NBYTES = 8
FIXED_NBYTES = 64


def key(number: int) -> StoreKey:
    return store_key(bytes(32), Rank(), block_key(number.to_bytes(32, "big"), 0))


def sealed(pages: tuple[int, ...], number: int = 1) -> tuple[FrameFormat, bytearray]:
    """A frame with a payload that has no two equal neighbours."""
    frame_format = FrameFormat(pages)
    frame = bytearray(i * 31 % 251 for i in range(frame_format.frame_nbytes))
    frame_format.seal(memoryview(frame), key(number))
    return frame_format, frame


@given(PAGES)
def test_what_was_sealed_is_served_and_its_payload_is_untouched(pages: tuple[int, ...]) -> None:
    frame_format, frame = sealed(pages)
    assert frame_format.fault(memoryview(frame), key(1)) is None
    assert len(frame) == frame_format.header_nbytes + sum(pages)
    start = frame_format.header_nbytes
    assert frame[start:] == bytes(i * 31 % 251 for i in range(start, len(frame)))


@given(PAGES, st.data())
def test_any_changed_bit_is_found(pages: tuple[int, ...], data: st.DataObject) -> None:
    frame_format, frame = sealed(pages)
    table_end = FIXED_NBYTES + CHECKSUM_NBYTES * len(pages)
    covered = [*range(table_end), *range(frame_format.header_nbytes, len(frame))]
    position = data.draw(st.sampled_from(covered))
    frame[position] ^= 1 << data.draw(st.integers(0, 7))
    assert frame_format.fault(memoryview(frame), key(1)) is not None


@given(PAGES, st.data())
def test_any_overwritten_stretch_is_found(pages: tuple[int, ...], data: st.DataObject) -> None:
    """Torn writes: sectors of zeros, or of another frame."""
    frame_format, frame = sealed(pages)
    _, other = sealed(pages, number=2)
    start = data.draw(st.integers(0, len(frame) - 1))
    end = data.draw(st.integers(start + 1, len(frame)))
    source = data.draw(st.sampled_from([bytes(len(frame)), bytes(other), b"\xff" * len(frame)]))
    before = bytes(frame)
    frame[start:end] = source[start:end]
    table_end = FIXED_NBYTES + CHECKSUM_NBYTES * len(pages)
    payload = slice(frame_format.header_nbytes, None)
    same = frame[:table_end] == before[:table_end] and frame[payload] == before[payload]
    assert (frame_format.fault(memoryview(frame), key(1)) is None) == same


@given(PAGES, st.data())
def test_short_frame_is_not_served(pages: tuple[int, ...], data: st.DataObject) -> None:
    frame_format, frame = sealed(pages)
    nbytes = data.draw(st.integers(0, len(frame) - 1))
    fault = frame_format.fault(memoryview(frame)[:nbytes], key(1))
    assert fault == f"frame has {nbytes} bytes, expected {len(frame)}"


def test_frame_of_another_key_is_not_served() -> None:
    frame_format, frame = sealed((100, 200))
    fault = frame_format.fault(memoryview(frame), key(2))
    assert fault == f"store key is {key(1).hex()}, expected {key(2).hex()}"


@given(PAGES, PAGES)
def test_frame_of_another_format_is_not_served(
    pages: tuple[int, ...], others: tuple[int, ...]
) -> None:
    _, frame = sealed(pages)
    frame.extend(bytes(FrameFormat(others).frame_nbytes))
    fault = FrameFormat(others).fault(memoryview(frame), key(1))
    assert (fault is None) == (pages == others)


def test_swapped_pages_are_found() -> None:
    frame_format, frame = sealed((64, 64))
    start = frame_format.header_nbytes
    frame[start : start + 64], frame[start + 64 :] = frame[start + 64 :], frame[start : start + 64]
    fault = frame_format.fault(memoryview(frame), key(1))
    assert fault is not None
    assert fault.startswith("page 0 has checksum")


@pytest.mark.parametrize(
    ("position", "complaint"),
    [(0, "magic"), (4, "version"), (6, "reserved"), (8, "header bytes"), (12, "pages"),
     (16, "payload bytes"), (24, "store key"), (56, "header checksum"), (64, "header checksum")],
)  # fmt: skip
def test_fault_names_the_field(position: int, complaint: str) -> None:
    frame_format, frame = sealed((10, 20))
    frame[position] ^= 1
    fault = frame_format.fault(memoryview(frame), key(1))
    assert fault is not None
    assert fault.startswith(complaint)


def test_sealing_again_replaces_key_and_checksums() -> None:
    frame_format, frame = sealed((10, 20))
    frame[frame_format.header_nbytes] ^= 1
    frame_format.seal(memoryview(frame), key(2))
    assert frame_format.fault(memoryview(frame), key(2)) is None
    assert frame_format.fault(memoryview(frame), key(1)) is not None


def test_padding_of_a_slot_is_not_part_of_the_frame() -> None:
    frame_format, frame = sealed((10, 20))
    slot = bytes(frame).ljust(frame_format.slot_nbytes, b"\xee")
    assert frame_format.fault(memoryview(slot), key(1)) is None


def test_a_frame_is_the_same_bytes_for_ever() -> None:
    frame_format = FrameFormat((3,))
    frame = bytearray(frame_format.header_nbytes) + b"abc"
    frame_format.seal(memoryview(frame), StoreKey(bytes(range(32))))
    assert frame[:FIXED_NBYTES + CHECKSUM_NBYTES].hex() == (
        "4b565446" "0100" "0000" "00100000" "01000000" "0300000000000000"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "03bfa95f1f7a342f50392f89945faf78"
    )  # fmt: skip


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=2000).map(tuple))
def test_header_and_slot_are_aligned_and_large_enough(pages: tuple[int, ...]) -> None:
    frame_format = FrameFormat(pages)
    assert frame_format.header_nbytes % ALIGNMENT == 0
    assert frame_format.header_nbytes >= FIXED_NBYTES + CHECKSUM_NBYTES * len(pages)
    assert frame_format.slot_nbytes % ALIGNMENT == 0
    assert 0 <= frame_format.slot_nbytes - frame_format.frame_nbytes < ALIGNMENT


def test_a_slot_has_room_for_a_frame_of_any_group() -> None:
    groups = [
        GroupLayout(i, 4, 16, None, "x", (Page("l", n),), (Run(0, 0, n, n),))
        for i, n in enumerate((5000, 100, 8192))
    ]
    assert slot_nbytes_for(groups) == ALIGNMENT + round_up(8192)
