"""Which copier the arrays of a device get, from what library, and what their ranks then do."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import SimpleNamespace
from typing import Any

import fake_driver
import numpy as np
import pytest
from fake_driver import FakeDriver

from kvtiers import native
from kvtiers.connector.rank import RankFacts, build_torch_rank
from kvtiers.data import copier_cuda_make, copier_device
from kvtiers.data.copier import CopyBatch, Direction
from kvtiers.data.copier_arrays import flat_tensors, place_of
from kvtiers.data.copier_cuda import CudaCopier
from kvtiers.data.copier_device import DeviceMedia
from kvtiers.data.cuda_device import CudaDevice, find_device
from kvtiers.model.config import parse_mapping
from kvtiers.model.errors import LayoutError
from kvtiers.model.fingerprint import Fingerprint
from kvtiers.model.frame import slot_nbytes_for
from kvtiers.model.keys import Rank
from kvtiers.model.messages import HBM, StepOrders, int64s
from kvtiers.testing.fake_device import make_layout
from kvtiers.testing.fake_rank import FakeRank, keys_of

if fake_driver.missing:
    pytest.skip(fake_driver.missing, allow_module_level=True)
if not importlib.util.find_spec("torch"):
    pytest.skip("no torch", allow_module_level=True)

import torch

from kvtiers.data.copier_torch import TorchCopier

LAYOUT = make_layout(10, [[96, 640]])
SLOT = slot_nbytes_for(LAYOUT.groups)
NOWHERE = "/nowhere/libcuda.so.1"


class OnDevice:
    """An array of some library on CUDA device 0, which is this host's memory here."""

    def __init__(self, array: np.ndarray, number: int = 0) -> None:
        self.array = array
        self._number = number
        interface = {"shape": array.shape, "typestr": array.dtype.str, "version": 3}
        interface["data"] = (array.ctypes.data, False)
        interface["strides"] = None if array.flags.c_contiguous else array.strides
        self.__cuda_array_interface__ = interface

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._number


def on_device() -> list[OnDevice]:
    return [OnDevice(np.zeros((n // 2, 1), np.uint16)) for n in LAYOUT.allocations]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A driver that is found where the real one would be, and kernels for it."""
    fake = FakeDriver()
    library = str(fake_driver.library())
    monkeypatch.setattr(
        copier_device, "find_device", lambda number, stream, _: find_device(number, stream, library)
    )
    kernels = {"of this build": lambda: fake_driver.KERNELS}
    monkeypatch.setattr(copier_cuda_make, "compiled_here", lambda device: kernels)
    return fake


def media(arrays: Any, mode: Any = "auto", **options: Any) -> DeviceMedia:
    return DeviceMedia(LAYOUT, arrays, mode, current_stream=lambda: 0, **options)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_arrays_of_any_library_get_the_kernels(fake: FakeDriver, mode: str) -> None:
    arrays = on_device()
    made = media(arrays, mode)
    slab = made.make_slab(8, SLOT, "auto")
    assert slab.pinned
    assert fake.lib.fake_num_registered() == 1
    copier = made.make_copier(slab)
    assert isinstance(copier, CudaCopier)
    for array in arrays:
        array.array[:] = 0x0707
    ticket = copier.submit(Direction.GATHER, CopyBatch(0, int64s([3]), int64s([2])), copier.mark())
    copier.wait(ticket)
    assert set(slab.view(2)[4096 : 4096 + LAYOUT.groups[0].payload_nbytes]) == {7}
    copier.close()
    slab.close()
    assert fake.lib.fake_num_registered() == 0


def as_if_on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Tensors of the CPU that pass for a GPU's where a copier is chosen."""
    place = SimpleNamespace(cuda=0, current_stream=lambda: 0)
    monkeypatch.setattr(copier_device, "place_of", lambda arrays, stream: place)
    monkeypatch.setattr(copier_device.DeviceMedia, "_registrar", lambda self: None)
    monkeypatch.setattr(
        copier_device, "flat_addresses", lambda layout, arrays: [a.data_ptr() for a in arrays]
    )
    return [torch.zeros(n, dtype=torch.uint8) for n in LAYOUT.allocations]


def test_without_a_driver_torch_copies_and_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = DeviceMedia(LAYOUT, as_if_on_cuda(monkeypatch), library=NOWHERE)
    slab = made.make_slab(8, SLOT, "auto")
    with caplog.at_level(logging.WARNING):
        assert isinstance(made.make_copier(slab), TorchCopier)
    (record,) = caplog.records
    assert "copying without kvtiers' CUDA kernels: no CUDA driver: " in record.getMessage()
    slab.close()


def test_on_without_a_driver_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DeviceMedia(LAYOUT, as_if_on_cuda(monkeypatch), "on", library=NOWHERE)
    slab = made.make_slab(8, SLOT, "auto")
    with pytest.raises(native.NativeModuleError, match="no CUDA driver"):
        made.make_copier(slab)
    slab.close()


def test_off_takes_torch_and_asks_no_driver(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = fake.calls("cuInit")
    made = DeviceMedia(LAYOUT, as_if_on_cuda(monkeypatch), "off")
    slab = made.make_slab(8, SLOT, "auto")
    assert isinstance(made.make_copier(slab), TorchCopier)
    assert fake.calls("cuInit") == before
    assert not caplog.records
    slab.close()


def test_arrays_on_the_cpu_go_through_torch_whatever_library_they_are_of() -> None:
    """numpy speaks DLPack as well: the copier writes into its arrays."""
    arrays = [np.arange(n // 2, dtype=np.uint16).reshape(-1, 2) for n in LAYOUT.allocations]
    made = DeviceMedia(LAYOUT, arrays, "on")
    slab = made.make_slab(8, SLOT, "auto")
    assert not slab.pinned
    copier = made.make_copier(slab)
    assert isinstance(copier, TorchCopier)
    before = [array.copy() for array in arrays]
    for direction in Direction:
        ticket = copier.submit(direction, CopyBatch(0, int64s([3]), int64s([2])), copier.mark())
        assert copier.done(ticket)
        if direction is Direction.GATHER:
            for array in arrays:
                array[:] = 0
    block = [run.nbytes for run in LAYOUT.groups[0].runs]
    assert sum(np.count_nonzero(array) for array in arrays) > sum(block) // 4
    for run in LAYOUT.groups[0].runs:
        start = run.offset + 3 * run.block_stride
        here, there = (
            many[run.allocation].reshape(-1).view(np.uint8)[start : start + run.nbytes]
            for many in (arrays, before)
        )
        np.testing.assert_array_equal(here, there)
    slab.close()


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ([OnDevice(np.zeros(4)), OnDevice(np.zeros(4), 1)], "on 2 devices"),
        ([OnDevice(np.zeros(4)), np.zeros(4)], "on 2 devices"),
        ([], "on 0 devices"),
        ([object()], "object has no __dlpack_device__"),
        ([OnDevice(np.zeros(4))], "nobody but it knows the stream"),
    ],
)
def test_arrays_that_cannot_be_served_are_refused(arrays: list[Any], complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        place_of(arrays)


def test_the_stream_is_the_librarys_current_one_on_the_arrays_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which need not be the device that is current."""
    streams = {0: 100, 3: 103}
    cuda = SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=streams[device]))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=streams[device])
    )
    for library in ("cupy", "torch"):
        kind = type("Array", (OnDevice,), {"__module__": f"{library}.core"})
        place = place_of([kind(np.zeros(4), 3), kind(np.zeros(4), 3)])
        assert place.cuda == 3
        assert place.current_stream() == 103
        streams[3] += 1
        assert place.current_stream() == 104  # asked each time: the engine may change it
        streams[3] -= 1


def test_arrays_of_another_size_are_refused(fake: FakeDriver) -> None:
    arrays = on_device()
    arrays[1] = OnDevice(arrays[1].array[1:])
    made = media(arrays)
    slab = made.make_slab(8, SLOT, "auto")
    with pytest.raises(LayoutError, match=r"allocation 1 has \d+ bytes, expected \d+"):
        made.make_copier(slab)
    with pytest.raises(LayoutError, match="1 arrays for 2"):
        media(arrays[:1]).make_copier(slab)
    slab.close()
    with pytest.raises(LayoutError, match=r"allocation 0 is torch\.uint8"):
        flat_tensors(LAYOUT, [np.zeros((8, 4), np.uint8).T, np.zeros(1, np.uint8)])


def test_a_device_tells_the_memory_node_next_to_it(fake: FakeDriver, tmp_path: Any) -> None:
    device = CudaDevice(fake.driver, 0, lambda: 0)
    folder = tmp_path / "0000:3b:00.0"
    assert device.numa_node(tmp_path) is None
    folder.mkdir()
    for text, node in (("1\n", 1), ("0\n", 0), ("-1\n", None), ("?", None)):
        (folder / "numa_node").write_text(text)
        assert device.numa_node(tmp_path) == node
    fake.fail("cuDeviceGetPCIBusId")
    assert device.numa_node(tmp_path) is None


def test_the_slab_is_asked_for_in_that_node(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaDevice, "numa_node", lambda self: 1)
    asked: list[int | None] = []
    slab = copier_device.Slab

    def remembering(*sizes: int, numa_node: int | None, **options: Any) -> Any:
        asked.append(numa_node)
        return slab(*sizes, **options)

    monkeypatch.setattr(copier_device, "Slab", remembering)
    media(on_device()).make_slab(8, SLOT, "auto").close()
    assert asked == [1]


def config(native_mode: str = "auto") -> Any:
    return parse_mapping(
        {"tiers": [{"kind": "dram", "capacity": "1MiB"}], "copy": {"native": native_mode}}
    )


FACTS = RankFacts(Rank(), 1, Fingerprint.of({"test": "device media"}))


def test_a_rank_on_a_device_offloads_and_reloads_through_the_kernels(fake: FakeDriver) -> None:
    arrays = on_device()
    worker = build_torch_rank(config("on"), LAYOUT, arrays, FACTS, current_stream=lambda: 0)
    assert worker.hello.pinned
    orders = FakeRank(LAYOUT, 4).orders
    keys = keys_of(1, 2)
    for array in arrays:
        array.array[:] = np.random.default_rng(3).integers(0, 2**16, array.array.shape)
    before = [array.array.copy() for array in arrays]
    calls = ("cuLaunchKernel", "cuMemcpyBatchAsync 13.0")  # which one the measured table says
    begun = sum(map(fake.calls, calls))
    for step, order in enumerate(
        [orders.offload(keys, [3, 4], [0, 1]), orders.reload(keys, [5, 6], [0, 1])], start=1
    ):
        worker.begin_step(StepOrders(step=step, epoch=0, before=(order,), num_scheduled_tokens=1))
        if step == 2:
            assert worker._executor.wait_loaded([order.job_id], 30.0)
        worker.end_step()
        assert worker._executor.wait_idle(30.0)
    report = worker.take_report()
    assert report is not None
    assert [c.outcomes.tolist() for c in report.completions if c.hop == HBM] == [[0, 0]]
    assert sum(map(fake.calls, calls)) >= begun + 2
    for run in LAYOUT.groups[0].runs:
        flat = arrays[run.allocation].array.reshape(-1).view(np.uint8)
        old = before[run.allocation].reshape(-1).view(np.uint8)
        for source, target in ((3, 5), (4, 6)):
            here, there = (run.offset + block * run.block_stride for block in (target, source))
            np.testing.assert_array_equal(
                flat[here : here + run.nbytes], old[there : there + run.nbytes]
            )
    worker.close()
    assert fake.lib.fake_num_registered() == 0
    assert fake.lib.fake_live() == 0


def test_a_rank_that_insists_leaves_nothing_where_it_fails(fake: FakeDriver) -> None:
    fake.fail("cuModuleLoadData")
    with pytest.raises(native.NativeModuleError, match="cuModuleLoadData"):
        build_torch_rank(config("on"), LAYOUT, on_device(), FACTS, current_stream=lambda: 0)
    assert fake.lib.fake_num_registered() == 0
    assert fake.lib.fake_live() == 0


@pytest.mark.parametrize("direction", Direction)
def test_a_links_seconds_are_those_of_its_copies(direction: Direction) -> None:
    """The engine's work before a copy takes a second here, a copy a millisecond."""
    fake = FakeDriver(manual=True)
    rank = FakeRank(LAYOUT, 4, make_copier=fake.copier)
    address = rank.device.bases[0]
    keys = keys_of(1)
    order = rank.orders.offload(keys, [3], [0])
    fake.lib.fake_fill(fake.engine, address, 0, 1)
    rank.submit(order, rank.copier.mark())
    while not rank.executor.idle:
        rank.executor.advance()
        fake.lib.fake_run()
    if direction is Direction.SCATTER:
        rank.executor.take_links()
        fake.lib.fake_fill(fake.engine, address, 0, 1)
        rank.submit(rank.orders.reload(keys, [5], [0]), rank.copier.mark())
        while not rank.executor.idle:
            rank.executor.advance()
            fake.lib.fake_run()
    (link,) = rank.executor.take_links()
    assert link.num_blocks == 1
    assert 0 < link.seconds < 0.01
