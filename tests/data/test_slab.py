"""Promises of the slab."""

from __future__ import annotations

import logging
import mmap
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtiers.data import slab as slab_module
from kvtiers.data.slab import PinMode, Registrar, Slab
from kvtiers.model.errors import CapacityError, ProtocolError, TransferError

PAGE = mmap.PAGESIZE
MIB = 2**20


class FakeRegistrar:
    """A device driver that refuses ranges above a size, or the n-th range."""

    def __init__(self, *, max_nbytes: int = 2**60, fail_on: int = 0) -> None:
        self.held: dict[int, int] = {}
        self.calls = 0
        self.max_nbytes = max_nbytes
        self.fail_on = fail_on

    def register(self, address: int, nbytes: int) -> None:
        self.calls += 1
        if nbytes > self.max_nbytes or self.calls == self.fail_on:
            raise OSError(12, "out of memory")
        assert address not in self.held
        self.held[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.held[address]


def make(registrar: Registrar | None, pin: PinMode, num_chunks: int = 4) -> Slab:
    return Slab(4 * num_chunks, PAGE, pin=pin, registrar=registrar, pin_chunk_nbytes=4 * PAGE)


def num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def mapped_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


@pytest.mark.parametrize("slot_nbytes", [PAGE, 5 * PAGE, 5000])
def test_slots_are_writable_and_apart(slot_nbytes: int) -> None:
    slab = Slab(7, slot_nbytes, pin="off")
    for slot in range(7):
        view = slab.view(slot)
        assert len(view) == slot_nbytes
        assert bytes(view) == bytes(slot_nbytes)
        view[:] = bytes([slot + 1]) * slot_nbytes
    assert [set(slab.view(slot)) for slot in range(7)] == [{slot + 1} for slot in range(7)]
    slab.close()


def test_address_is_that_of_slot_zero_and_page_aligned() -> None:
    slab = Slab(3, 2 * PAGE, pin="off")
    assert slab.address % PAGE == 0
    for slot in range(3):
        here = np.frombuffer(slab.view(slot), np.uint8).ctypes.data
        assert here == slab.address + slot * 2 * PAGE
    slab.close()


@pytest.mark.parametrize(
    ("num_slots", "slot_nbytes"), [(10, PAGE), (40, 1_002_240), (24, 3 * MIB + PAGE), (1, 1)]
)
def test_mapped_bytes_are_the_asked_ones_to_the_page(num_slots: int, slot_nbytes: int) -> None:
    """R72: no rounding to a power of two."""
    before = mapped_nbytes()
    slab = Slab(num_slots, slot_nbytes, pin="off")
    asked = num_slots * slot_nbytes
    assert asked <= slab.nbytes < asked + PAGE
    assert mapped_nbytes() - before <= slab.nbytes + 256 * 1024  # the interpreter's own growth
    slab.close()


def test_many_slots_are_one_mapping() -> None:
    """R75: 10,000 mappings would meet vm.max_map_count."""
    before = num_mappings()
    slab = Slab(10_000, PAGE, pin="off")
    for slot in range(10_000):
        slab.view(slot)[0] = 1
    assert num_mappings() <= before + 2
    slab.close()


@pytest.mark.parametrize("slot", [-1, 3, 2**40])
def test_there_is_no_view_of_a_slot_that_is_not_there(slot: int) -> None:
    slab = Slab(3, PAGE, pin="off")
    with pytest.raises(TransferError, match=rf"slot {slot} is not in 0\.\.2"):
        slab.view(slot)
    slab.close()


def test_close_gives_the_memory_back_and_is_idempotent() -> None:
    before = mapped_nbytes()
    slab = Slab(64, MIB, pin="off")
    slab.close()
    slab.close()
    assert mapped_nbytes() - before < MIB
    with pytest.raises(ProtocolError, match="closed"):
        slab.view(0)


def test_a_view_outlives_the_slab() -> None:
    slab = Slab(2, PAGE, pin="off")
    view = slab.view(1)
    view[0] = 7
    slab.close()
    assert view[0] == 7


@pytest.mark.parametrize(("num_slots", "slot_nbytes"), [(0, PAGE), (-1, PAGE), (1, 0)])
def test_a_slab_without_room_is_refused_with_numbers(num_slots: int, slot_nbytes: int) -> None:
    with pytest.raises(CapacityError, match=f"{num_slots} slots of {slot_nbytes} bytes"):
        Slab(num_slots, slot_nbytes, pin="off")


def test_no_slots_says_what_would_fit() -> None:
    with pytest.raises(CapacityError, match=r"one slot of 4096 bytes; \d+ slots would fit"):
        Slab(0, 4096, pin="off")


def test_more_than_the_machine_has_is_refused_before_it_is_mapped() -> None:
    before = mapped_nbytes()
    with pytest.raises(CapacityError, match=r"takes \d+ bytes, but .* leaves \d+ bytes: \d+ slots"):
        Slab(2**40, PAGE, pin="off")
    assert mapped_nbytes() - before < MIB


@pytest.mark.parametrize("pin", ["auto", "on"])
def test_all_of_the_slab_is_registered_in_chunks(pin: PinMode) -> None:
    """R69: one registration of all of it would be refused."""
    registrar = FakeRegistrar(max_nbytes=4 * PAGE)
    slab = Slab(17, PAGE, pin=pin, registrar=registrar, pin_chunk_nbytes=5 * PAGE - 1)
    assert slab.pinned
    assert sum(registrar.held.values()) == slab.nbytes
    expected = [slab.address + start * PAGE for start in range(0, 17, 4)]
    assert list(registrar.held) == expected
    slab.close()
    slab.close()
    assert registrar.held == {}


def test_chunks_are_far_below_what_drivers_refuse() -> None:
    """R69: 512 GiB."""
    assert slab_module.PIN_CHUNK_NBYTES <= 256 * 2**30


def test_no_slot_lies_in_two_registrations() -> None:
    registrar = FakeRegistrar()
    slab = Slab(7, 3 * PAGE, pin="on", registrar=registrar, pin_chunk_nbytes=7 * PAGE)
    assert list(registrar.held.values()) == [6 * PAGE, 6 * PAGE, 6 * PAGE, 3 * PAGE]
    slab.close()


def test_partial_failure_unregisters_all_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """R70: no rank is left half page-locked."""
    registrar = FakeRegistrar(fail_on=3)
    with caplog.at_level(logging.WARNING):
        slab = make(registrar, "auto")
    assert not slab.pinned
    assert registrar.held == {}
    assert registrar.calls == 3
    assert len(caplog.records) == 1
    assert f"the slab's {slab.nbytes} bytes" in caplog.text
    slab.view(0)[:] = bytes(PAGE)  # pageable, and in use
    slab.close()


def test_on_fails_with_bytes_and_limit_and_leaves_nothing() -> None:
    registrar = FakeRegistrar(fail_on=3)
    before = mapped_nbytes()
    with pytest.raises(CapacityError, match=rf"{16 * PAGE} bytes: .*out of memory.*limit: ") as e:
        make(registrar, "on")
    assert registrar.held == {}
    assert f"{4 * PAGE} bytes at offset {8 * PAGE} were refused" in str(e.value)
    assert mapped_nbytes() - before < MIB


def test_ranks_that_cannot_pin_say_so_before_the_first_transfer() -> None:
    """R70: 8 ranks, of which the fourth is refused: `pinned` tells them apart."""
    slabs = [make(FakeRegistrar(fail_on=2 * (rank == 3)), "auto") for rank in range(8)]
    assert [slab.pinned for slab in slabs] == [rank != 3 for rank in range(8)]
    for slab in slabs:
        slab.close()


def test_a_chunk_that_cannot_be_released_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stubborn(FakeRegistrar):
        def unregister(self, address: int) -> None:
            super().unregister(address)
            if len(self.held) == 2:
                raise OSError(22, "invalid argument")

    registrar = Stubborn()
    slab = make(registrar, "on")
    slab.close()
    assert registrar.held == {}
    assert "cannot unlock" in caplog.text


def test_without_a_device_auto_is_pageable_and_silent(caplog: pytest.LogCaptureFixture) -> None:
    slab = make(None, "auto")
    assert not slab.pinned
    assert not caplog.records
    slab.close()


def test_without_a_device_on_fails_with_the_remedy() -> None:
    with pytest.raises(CapacityError, match=rf"{16 * PAGE} bytes: no device driver.*pin: auto"):
        make(None, "on")


def test_off_registers_nothing() -> None:
    registrar = FakeRegistrar()
    slab = make(registrar, "off")
    assert registrar.calls == 0
    slab.close()


def test_unknown_pin_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'maybe'"):
        make(None, "maybe")  # type: ignore[arg-type]


def test_pages_are_asked_for_in_the_devices_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are page-locked, which brings them into being where they then stay."""
    order: list[object] = []
    monkeypatch.setattr(slab_module, "prefer_node", lambda *range_: order.append(range_))
    registrar = FakeRegistrar()
    monkeypatch.setattr(registrar, "register", lambda *range_: order.append("locked"))
    monkeypatch.setattr(registrar, "unregister", lambda address: None)
    slab = Slab(4, PAGE, pin="on", registrar=registrar, numa_node=1)
    assert order == [(slab.address, slab.nbytes, 1), "locked"]
    slab.close()


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(address: int) -> list[str]:
    """The kernel's flags of a mapping; "dc": a forked child does not get it."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:x}-"))
    return next(line for line in lines if line.startswith("VmFlags:")).split()


@pytest.mark.skipif(not THP.exists(), reason="a kernel without transparent huge pages")
def test_huge_pages_are_asked_for() -> None:
    slab = Slab(64, MIB, pin="off")
    assert "hg" in flags_of(slab.address)
    slab.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="a kernel without smaps")
def test_a_forked_child_does_not_get_what_a_device_writes() -> None:
    """The parent's next write would go to a page that the device does not know."""
    seen: list[bool] = []

    class Looking(FakeRegistrar):
        def register(self, address: int, nbytes: int) -> None:
            seen.append("wf" in flags_of(address))
            super().register(address, nbytes)

    for registrar, locked in ((None, False), (Looking(), True), (FakeRegistrar(fail_on=1), False)):
        slab = make(registrar, "auto", 1)
        assert slab.pinned == locked
        assert ("wf" in flags_of(slab.address)) == locked
        slab.close()
    assert seen == [True]  # before the device could write


FORKING = """
import mmap, os, sys
from kvtiers.data.slab import Slab

class Registrar:
    def register(self, address, nbytes): pass
    def unregister(self, address): pass

slab = Slab(64, 2**20, pin="on", registrar=Registrar())
slab.view(0)[:4] = b"mine"
child = os.fork()
if child == 0:
    others = [mmap.mmap(-1, 2**20) for _ in range(8)]  # where the kernel finds room
    assert bytes(slab.view(0)[:4]) == bytes(4)
    slab.close()
    for other in others:
        other[:4] = b"mine"
    os._exit(0)
_, status = os.waitpid(child, 0)
assert bytes(slab.view(0)[:4]) == b"mine"
slab.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_that_drops_a_locked_slab_loses_nothing_of_its_own() -> None:
    assert subprocess.run([sys.executable, "-c", FORKING], check=False).returncode == 0


def policy_of(address: int) -> str:
    """The line that the kernel has on a mapping."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line for line in lines if int(line.split()[0], 16) == address)


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without nodes")
def test_the_kernel_takes_the_wish_for_a_node() -> None:
    slab = Slab(64, MIB, pin="off", numa_node=0)
    assert re.search(r"prefer[^ ]*:0", policy_of(slab.address))
    slab.view(0)[0] = 1
    slab.close()


def test_a_node_that_is_not_there_costs_a_warning_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for node in (700, 5000, -1):
        slab = Slab(4, PAGE, pin="off", numa_node=node)
        slab.view(3)[:] = bytes(PAGE)
        slab.close()
    assert "memory of node 700" in caplog.text
