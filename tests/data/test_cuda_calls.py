"""Which calls of the driver `CudaCopier` makes, and that they are declared as NVIDIA does."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import fake_driver
import numpy as np
import pytest
from copy_layouts import sparse
from fake_driver import FakeDriver

from kvtiers.data.copier import CopyBatch, Direction, Marker, Ticket
from kvtiers.data.copier_cuda import CudaCopier, CudaTuning
from kvtiers.data.copier_cuda_routes import Route
from kvtiers.data.slab import Slab
from kvtiers.model.frame import FrameFormat, slot_nbytes_for
from kvtiers.model.messages import int64s
from kvtiers.testing.fake_device import make_layout

if fake_driver.missing:
    pytest.skip(fake_driver.missing, allow_module_level=True)

GATHER, SCATTER = Direction.GATHER, Direction.SCATTER
LAYOUT = make_layout(600, [[96, 640]])
SMALL = CudaTuning(num_thread_blocks=2, staging_nbytes=0, tile_nbytes=64, num_markers=4)
each_route = pytest.mark.parametrize("route", Route)
each_direction = pytest.mark.parametrize("direction", Direction)

HOT = {
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuLaunchKernel",
    "cuMemcpyBatchAsync 13.0",
}


class Scene:
    """A copier by one route over blocks of zeros."""

    def __init__(self, route: Route, *, manual: bool = False, tuning: CudaTuning = SMALL) -> None:
        self.fake = FakeDriver(manual=manual)
        self.memory = [np.zeros(n, np.uint8) for n in LAYOUT.allocations]
        self.slab = Slab(600, slot_nbytes_for(LAYOUT.groups), pin="off")
        self.copier: CudaCopier = self.fake.copier(
            LAYOUT, [array.ctypes.data for array in self.memory], self.slab, route, tuning=tuning
        )

    def submit(self, direction: Direction, num: int, after: Marker | None) -> Ticket:
        ids = int64s(np.arange(num))
        return self.copier.submit(direction, CopyBatch(0, ids, ids), after)

    def new_calls(self, before: dict[str, int]) -> set[str]:
        return {n for n, count in self.fake.all_calls().items() if count != before.get(n, 0)}


@each_route
@each_direction
def test_the_hot_path_makes_nothing_and_waits_for_nothing(
    route: Route, direction: Direction
) -> None:
    """No call that allocates, creates, registers, loads or synchronises; small batches and large
    ones, with markers old and new."""
    scene = Scene(route)
    before = scene.fake.all_calls()
    old = scene.copier.mark()
    for num in (1, 3, 600) * 30:
        for marker in (scene.copier.mark(), old, None):
            assert scene.copier.done(scene.submit(direction, num, marker))
    called = scene.new_calls(before)
    assert called <= HOT, called - HOT
    assert {"cuEventQuery", "cuEventRecord", "cuStreamWaitEvent"} <= called
    assert scene.fake.lib.fake_depth() == 0


def test_events_for_many_batches_in_flight_are_made_once() -> None:
    scene = Scene(Route.DMA, manual=True)
    for again in (False, True):
        before = scene.fake.all_calls()
        tickets = [scene.submit(GATHER, 1, None) for _ in range(200)]
        assert ("cuEventCreate" in scene.new_calls(before)) != again
        scene.fake.lib.fake_run()
        assert all(scene.copier.done(ticket) for ticket in tickets)


@each_route
@each_direction
def test_an_empty_batch_behind_a_marker_is_over_when_it_is_reached(
    route: Route, direction: Direction
) -> None:
    """Its end is asked for on the stream that waits: else the time between its ends is none."""
    scene = Scene(route, manual=True)
    scene.fake.lib.fake_fill(scene.fake.engine, scene.memory[0].ctypes.data, 1, 1)
    ticket = scene.submit(direction, 0, scene.copier.mark())
    for stream in range(1, 5):
        while scene.fake.lib.fake_step(stream):
            pass
    assert not scene.copier.done(ticket)
    scene.fake.lib.fake_run()
    assert scene.copier.done(ticket)
    assert scene.copier.seconds(ticket) == 0


@each_route
@each_direction
def test_a_large_batch_is_several_launches_and_calls(route: Route, direction: Direction) -> None:
    """More rows than a launch takes, more copies than a call; every block has bytes of its own."""
    num, num_runs = 1200, 20
    layout = make_layout(num, [[16] * num_runs])
    group = layout.groups[0]
    fake = FakeDriver()
    random = np.random.default_rng(1)
    memory = [random.integers(0, 256, n, np.uint8) for n in layout.allocations]
    slab = Slab(num, slot_nbytes_for(layout.groups), pin="off")
    tuning = CudaTuning(num_thread_blocks=2, staging_nbytes=2**20, tile_nbytes=64, num_markers=4)
    copier = fake.copier(layout, [m.ctypes.data for m in memory], slab, route, tuning=tuning)
    blocks, slots = (int64s(random.permutation(num)) for _ in range(2))
    header = FrameFormat.of(group).header_nbytes
    payloads = np.concatenate([
        memory[run.allocation][run.offset + np.arange(num)[:, None] * run.block_stride
                               + np.arange(run.nbytes)]
        for run in group.runs
    ], axis=1)  # fmt: skip
    if direction is SCATTER:
        payloads = random.integers(0, 256, payloads.shape, np.uint8)
        for block, slot in zip(blocks, slots, strict=True):
            slab.view(int(slot))[header : header + group.payload_nbytes] = payloads[block].tobytes()
    before = fake.all_calls()
    ticket = copier.submit(direction, CopyBatch(0, blocks, slots), None)
    assert copier.done(ticket)
    calls = {n: count - before.get(n, 0) for n, count in fake.all_calls().items()}
    if route is Route.DMA:
        assert calls["cuMemcpyBatchAsync 13.0"] == -(-num * len(group.runs) // 16384)
    else:
        assert calls["cuLaunchKernel"] >= -(-num // 480)
    for block, slot in zip(blocks, slots, strict=True):
        parts = [memory[run.allocation][run.offset + block * run.block_stride :][: run.nbytes]
                 for run in group.runs]  # fmt: skip
        np.testing.assert_array_equal(np.concatenate(parts), payloads[block])
        frame = np.frombuffer(slab.view(int(slot)), np.uint8)
        np.testing.assert_array_equal(frame[header:][: group.payload_nbytes], payloads[block])
        assert not frame[header + group.payload_nbytes :].any()
    copier.close()


@pytest.mark.parametrize("route", [Route.DIRECT, Route.STAGED])
def test_a_kernel_takes_few_thread_blocks_whatever_the_batch(route: Route) -> None:
    scene = Scene(route, tuning=replace(SMALL, staging_nbytes=2**20))
    for num in (1, 600):
        scene.submit(GATHER, num, None)
        scene.submit(SCATTER, num, None)
    assert scene.fake.lib.fake_max_grid() == SMALL.num_thread_blocks


class FarSlab:
    """Slots far apart: only those that are touched cost memory."""

    num_slots, slot_nbytes = 6, 2**30

    def __init__(self) -> None:
        self.mapping, self.address = sparse(self.num_slots * self.slot_nbytes)

    def payload(self, slot: int, nbytes: int) -> memoryview:
        start = slot * self.slot_nbytes + FrameFormat.of(LAYOUT.groups[0]).header_nbytes
        return memoryview(self.mapping)[start : start + nbytes]


@each_route
def test_slots_beyond_4_gib_are_exact(route: Route) -> None:
    slab, fake = FarSlab(), FakeDriver()
    memory = [np.zeros(n, np.uint8) for n in LAYOUT.allocations]
    copier = fake.copier(LAYOUT, [m.ctypes.data for m in memory], slab, route)  # type: ignore[arg-type]
    nbytes = LAYOUT.groups[0].payload_nbytes
    blocks, slots = int64s([1, 2, 3]), int64s([1, 4, 5])
    for slot in slots.tolist():
        slab.payload(slot, nbytes)[:] = bytes([slot]) * nbytes
    assert copier.done(copier.submit(SCATTER, CopyBatch(0, blocks, slots), None))
    for run in LAYOUT.groups[0].runs:
        for block, slot in zip(blocks, slots, strict=True):
            part = memory[run.allocation][run.offset + block * run.block_stride :][: run.nbytes]
            assert (part == slot).all()
    assert copier.done(copier.submit(GATHER, CopyBatch(0, blocks, int64s([5, 1, 0])), None))
    assert [slab.payload(slot, 1)[0] for slot in (5, 1, 0)] == [1, 4, 5]
    copier.close()


@each_route
@each_direction
def test_a_capture_by_another_thread_forbids_nothing(route: Route, direction: Direction) -> None:
    """A capture in global mode refuses what may synchronise, from any thread that is not relaxed;
    and such a refusal would break the capture."""
    scene = Scene(route)
    marker = scene.copier.mark()
    scene.fake.lib.fake_capturing(1)
    first, second = (scene.submit(direction, 2, marker) for _ in range(2))
    scene.copier.wait(first)
    assert scene.copier.done(first)
    assert scene.copier.done(second)
    registrar = scene.fake.registrar()
    registrar.register(scene.slab.address, scene.slab.nbytes)
    registrar.unregister(scene.slab.address)
    scene.copier.close()
    assert scene.fake.lib.fake_live() == 0
    assert scene.fake.lib.fake_capture_mode() == 0  # this thread has its own mode back
    assert scene.fake.lib.fake_depth() == 0


def test_a_device_with_addresses_of_its_own_for_page_locked_memory_is_refused() -> None:
    """Kernels and copies take the host's addresses."""
    fake = FakeDriver()
    fake.lib.fake_other_addresses()
    slab = Slab(4, slot_nbytes_for(LAYOUT.groups), pin="off")
    memory = [np.zeros(n, np.uint8) for n in LAYOUT.allocations]
    with pytest.raises(RuntimeError, match="other addresses for page-locked memory"):
        fake.copier(LAYOUT, [array.ctypes.data for array in memory], slab)
    assert fake.lib.fake_live() == 0


def test_a_device_is_asked_by_the_drivers_name_for_it() -> None:
    driver = FakeDriver().driver
    assert driver.compute_capability(0) == 90
    assert driver.pci_address(0) == "0000:3B:00.0"
    for number in (-1, 1):
        with pytest.raises(RuntimeError, match=f"there is no CUDA device {number}, only 1"):
            driver.compute_capability(number)
        with pytest.raises(RuntimeError, match=f"there is no CUDA device {number}, only 1"):
            driver.pci_address(number)


CUDA_CSRC = Path(__file__).parents[2] / "csrc" / "cuda"


def cuda_header() -> Path | None:
    """Where nvcc's toolkit has the driver's own declarations."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    asked = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True,
                           check=False, cwd=CUDA_CSRC)  # fmt: skip
    for folder in re.findall(r'"-I([^"]+)"', asked.stderr):
        if (Path(folder) / "cuda.h").is_file():
            return Path(folder)
    return None


CHECKS = """
#include <cuda.h>
#include <cstddef>
#include "driver.hpp"
using namespace kvtiers::cuda;
template <class A> struct shape;
template <class R, class... A> struct shape<R (*)(A...)> {
    template <class> struct same;
    template <class S, class... B> struct same<S (*)(B...)> {
        template <std::size_t... n> struct sizes {};
        static constexpr bool value =
            std::is_same_v<sizes<sizeof(A)...>, sizes<sizeof(B)...>> && sizeof(R) == sizeof(S);
    };
};
#define CHECK(call, theirs) \\
    static_assert(shape<decltype(Calls::call)>::same<decltype(&theirs)>::value, #theirs)
@checks@
using Theirs = CUmemcpyAttributes;
static_assert(sizeof(CopyAttributes) == sizeof(Theirs));
static_assert(offsetof(CopyAttributes, source_access_order) == offsetof(Theirs, srcAccessOrder));
static_assert(offsetof(CopyAttributes, source_hint) == offsetof(Theirs, srcLocHint));
static_assert(offsetof(CopyAttributes, target_hint) == offsetof(Theirs, dstLocHint));
static_assert(offsetof(CopyAttributes, flags) == offsetof(Theirs, flags));
static_assert(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM == 1);
static_assert((CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) == 3);
static_assert(CU_STREAM_NON_BLOCKING == 1 && CU_EVENT_DISABLE_TIMING == 2 && !CU_EVENT_DEFAULT);
static_assert(CU_STREAM_CAPTURE_MODE_RELAXED == 2 && CU_GET_PROC_ADDRESS_LEGACY_STREAM == 1);
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == 75);
static_assert(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == 76);
static_assert(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM == 91);
static_assert(CUDA_ERROR_NOT_READY == kNotReady);
"""


def declarations() -> dict[str, str]:
    """Members of `Calls` and the calls of the driver that they are bound to."""
    text = (CUDA_CSRC / "driver.cpp").read_text()
    return dict(re.findall(r'bind\(calls_\.(\w+), "(\w+)"\)', text))


@pytest.mark.skipif(cuda_header() is None, reason="no toolkit with cuda.h")
def test_calls_are_declared_as_in_nvidias_header(tmp_path: Path) -> None:
    """The header is not used to build: that would ask for a toolkit."""
    found = declarations()
    members = re.findall(
        r"Result \(\*(\w+)\)\(", (CUDA_CSRC / "driver.hpp").read_text().split("struct Calls")[1]
    )
    assert set(found) == set(members) - {"get_proc_address_"}
    checks = "\n".join(f"CHECK({member}, {name});" for member, name in found.items())
    source = tmp_path / "checks.cpp"
    source.write_text("#include <type_traits>\n" + CHECKS.replace("@checks@", checks))
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{cuda_header()}", f"-I{CUDA_CSRC}"]
    ran = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
