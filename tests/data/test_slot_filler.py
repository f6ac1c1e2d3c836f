"""Bytes come into their slots and nowhere else, with and without the compiled module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtiers import native
from kvtiers.data.slab import Slab
from kvtiers.data.slot_filler import SlotFiller
from kvtiers.model.errors import TransferError

SLOT_NBYTES = 8192


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab(4, SLOT_NBYTES, pin="off")
    yield slab
    slab.close()


@pytest.fixture(params=["compiled", "portable"])
def filler(
    slab: Slab, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> SlotFiller:
    if request.param == "portable":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("compiled module not built")
    return SlotFiller(slab, 2)


def test_pieces_come_where_they_belong(slab: Slab, filler: SlotFiller) -> None:
    body = bytes(range(256)) * 16
    filler.fill([(1, 0, b"head"), (1, 4, memoryview(body)), (3, SLOT_NBYTES - 5, body[:5])])
    assert bytes(slab.view(1)) == b"head" + body + bytes(SLOT_NBYTES - 4 - len(body))
    assert bytes(slab.view(3)) == bytes(SLOT_NBYTES - 5) + body[:5]
    assert not any(slab.view(0))
    assert not any(slab.view(2))


def test_every_method_copies_every_length(slab: Slab, filler: SlotFiller) -> None:
    body = memoryview(bytes(n * 7 % 251 for n in range(SLOT_NBYTES)))
    methods = native.load().build_info()["methods"] if native.available() else ["memcpy"]
    for method in methods:
        for nbytes in (0, 1, 63, 64, 65, 129, 4096, 8111):
            slab.view(2)[:] = b"\xee" * SLOT_NBYTES
            filler.fill([(2, 16, body[3 : 3 + nbytes])], method=method)
            expected = b"\xee" * 16 + bytes(body[3 : 3 + nbytes])
            assert bytes(slab.view(2)) == expected.ljust(SLOT_NBYTES, b"\xee")


def test_nothing_is_no_error(filler: SlotFiller) -> None:
    filler.fill([])


@pytest.mark.parametrize(("slot", "start"), [(-1, 0), (4, 0), (0, -1), (0, SLOT_NBYTES - 3)])
def test_piece_that_leaves_its_slot_moves_nothing(
    slab: Slab, filler: SlotFiller, slot: int, start: int
) -> None:
    with pytest.raises(TransferError, match=f"slot {slot}"):
        filler.fill([(1, 0, b"good"), (slot, start, b"evil")])
    assert not any(slab.view(1))
