"""The copiers on a real CUDA device: their bytes, their order, and a page-locked slab."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

if not importlib.util.find_spec("torch"):
    pytest.skip("no torch", allow_module_level=True)

import torch

from kvtiers import native
from kvtiers.data.copier import Copier, CopyBatch, Direction
from kvtiers.data.copier_cuda import CudaCopier
from kvtiers.data.copier_cuda_routes import Route, RouteTable, expected_routes
from kvtiers.data.copier_device import DeviceMedia
from kvtiers.data.copier_torch import TorchCopier
from kvtiers.data.copier_torch_pin import TorchRegistrar
from kvtiers.data.cuda_device import CudaDevice, find_device
from kvtiers.data.slab import PinMode, Slab
from kvtiers.model.frame import FrameFormat, slot_nbytes_for
from kvtiers.model.layout import Axis, GroupLayout, KVLayout, TensorView
from kvtiers.model.messages import int64s
from kvtiers.testing.fake_device import make_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GATHER, SCATTER = Direction.GATHER, Direction.SCATTER
LAYOUTS = {
    "bytes": make_layout(16, [[98, 642], [14]]),
    "shorts": make_layout(16, [[100, 644]]),
    "wide": make_layout(16, [[4096, 65536], [8192]]),
    "beyond one staging buffer": make_layout(40, [[2**20, 2**20]]),
}


KINDS = ["torch", *(route.value for route in Route)]
each_kind = pytest.mark.parametrize("kind", KINDS)


def device() -> CudaDevice:
    torch.zeros(1, device="cuda")
    found = find_device(0, lambda: int(torch.cuda.current_stream().cuda_stream))
    assert isinstance(found, CudaDevice), found
    return found


def make_copier(kind: str, layout: KVLayout, memory: list[torch.Tensor], slab: Slab) -> Copier:
    if kind == "torch":
        return TorchCopier(layout, memory, slab)
    if not native.kernels():
        pytest.skip("built without kernels")
    table = RouteTable(dict.fromkeys(expected_routes(layout).rows, ((1, Route(kind)),)))
    bases = [flat.data_ptr() for flat in memory]
    torch.cuda.synchronize()
    return CudaCopier(layout, bases, slab, device(), kernels=native.kernels(), routes=table)


def gathered(slab: Slab, slot: int, group: GroupLayout) -> np.ndarray:
    start = FrameFormat.of(group).header_nbytes
    return np.frombuffer(slab.view(slot), np.uint8)[start : start + group.payload_nbytes]


def payload(memory: list[torch.Tensor], group: GroupLayout, block: int) -> np.ndarray:
    """The oracle: a block's bytes by slicing."""
    parts = []
    for run in group.runs:
        start = run.offset + block * run.block_stride
        parts.append(memory[run.allocation][start : start + run.nbytes].cpu().numpy())
    return np.concatenate(parts)


def random_memory(layout: KVLayout) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 256, (n,), dtype=torch.uint8).cuda() for n in layout.allocations]


def make_slab(layout: KVLayout, num_slots: int, pin: PinMode = "on") -> Slab:
    registrar = None if pin == "off" else TorchRegistrar(torch.device("cuda", 0))
    return Slab(num_slots, slot_nbytes_for(layout.groups), pin=pin, registrar=registrar)


def copy(copier: Copier, direction: Direction, group: int, blocks: object, slots: object):
    ticket = copier.submit(
        direction, CopyBatch(group, int64s(blocks), int64s(slots)), copier.mark()
    )
    while not copier.done(ticket):
        time.sleep(0.0001)


@pytest.mark.parametrize(("kind", "pin"), [("torch", "off"), *((kind, "on") for kind in KINDS)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_round_trips_are_bit_exact(layout: KVLayout, kind: str, pin: PinMode) -> None:
    memory = random_memory(layout)
    slab = make_slab(layout, 64, pin)
    assert slab.pinned == (pin == "on")
    copier = make_copier(kind, layout, memory, slab)
    random = np.random.default_rng(2)
    for group in layout.groups:
        blocks = random.permutation(group.num_blocks)
        slots = random.permutation(slab.num_slots)[: len(blocks)]
        expected = [payload(memory, group, int(block)) for block in blocks]
        copy(copier, GATHER, group.group, blocks, slots)
        for slot, wanted in zip(slots, expected, strict=True):
            np.testing.assert_array_equal(gathered(slab, int(slot), group), wanted)
        targets = random.permutation(group.num_blocks)
        copy(copier, SCATTER, group.group, targets, slots)
        for target, wanted in zip(targets, expected, strict=True):
            np.testing.assert_array_equal(payload(memory, group, int(target)), wanted)
    copier.close()
    slab.close()


@pytest.fixture
def engine_stream() -> Iterator[torch.cuda.Stream]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream


@each_kind
def test_copies_wait_for_the_engines_stream(engine_stream: torch.cuda.Stream, kind: str) -> None:
    """Marked here, submitted and asked on another thread, as the executor does."""
    layout = make_layout(8, [[2**20]])
    memory = [torch.zeros(n, dtype=torch.uint8, device="cuda") for n in layout.allocations]
    slab = make_slab(layout, 8)
    copier = make_copier(kind, layout, memory, slab)
    copy(copier, GATHER, 0, [0], [0])  # what is slow for the first time is behind us
    copy(copier, SCATTER, 0, [0], [0])
    batch = CopyBatch(0, int64s(range(8)), int64s(range(8)))

    def run(direction: Direction) -> None:
        ticket = pool.submit(copier.submit, direction, batch, copier.mark()).result()
        assert not pool.submit(copier.done, ticket).result(), "it did not wait for the engine"
        pool.submit(copier.wait, ticket).result()
        assert pool.submit(copier.done, ticket).result()

    with ThreadPoolExecutor(1) as pool:
        for value in range(1, 6):
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            memory[0].fill_(value)
            run(GATHER)
            for slot in range(8):
                assert set(gathered(slab, slot, layout.groups[0]).tolist()) == {value}
        for slot in range(8):
            slab.view(slot)[4096 : 4096 + 2**20] = bytes([77]) * 2**20
        torch.cuda._sleep(200_000_000)
        read = memory[0].clone()
        run(SCATTER)
        assert (read == 5).all()
        assert (memory[0] == 77).all()
    copier.close()
    slab.close()


@each_kind
def test_the_engines_stream_waits_for_a_copy_and_the_host_does_not(
    engine_stream: torch.cuda.Stream, kind: str
) -> None:
    """The copy is kept back by a marker on a stream that is busy; another one is held behind it."""
    layout = make_layout(8, [[2**20]])
    memory = [torch.zeros(n, dtype=torch.uint8, device="cuda") for n in layout.allocations]
    slab = make_slab(layout, 8)
    copier = make_copier(kind, layout, memory, slab)
    copy(copier, SCATTER, 0, [0], [0])  # what is slow for the first time is behind us
    batch = CopyBatch(0, int64s(range(8)), int64s(range(8)))
    busy = torch.cuda.Stream()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        for value in range(1, 6):
            for slot in range(8):
                slab.view(slot)[4096 : 4096 + 2**20] = bytes([value]) * 2**20
            with torch.cuda.stream(busy):
                torch.cuda._sleep(200_000_000)  # about 0.1 s
                marker = copier.mark()
            ticket = pool.submit(copier.submit, SCATTER, batch, marker).result()
            assert copier.hold_engine(ticket)
            read = memory[0].clone()
            assert not pool.submit(copier.done, ticket).result(), "nothing was kept back"
            engine_stream.synchronize()
            assert (read == value).all()
            assert pool.submit(copier.done, ticket).result()
            assert copier.hold_engine(ticket), "it is over"
    copier.close()
    slab.close()


@each_kind
def test_offsets_beyond_4_gib_are_exact(kind: str) -> None:
    stride, num_blocks, nbytes = 1_002_240, 6200, 3 * 4096
    view = TensorView("l", 0, 0, (Axis.BLOCK, Axis.CONTENT), (num_blocks, nbytes), (stride, 1), 1)
    group = GroupLayout.from_views([view], group=0, num_blocks=num_blocks, block_size=16, dtype="x")
    end = (num_blocks - 1) * stride + nbytes
    layout = KVLayout((end,), (group,))
    memory = [torch.zeros(end, dtype=torch.uint8, device="cuda")]
    slab = make_slab(layout, 3)
    copier = make_copier(kind, layout, memory, slab)
    blocks = (2143, 4290, 6199)
    for block in blocks:
        memory[0][block * stride : block * stride + nbytes] = block % 251
    torch.cuda.synchronize()
    copy(copier, GATHER, 0, blocks, [0, 1, 2])
    for slot, block in enumerate(blocks):
        assert set(gathered(slab, slot, group).tolist()) == {block % 251}
    copy(copier, SCATTER, 0, (6199, 2143, 4290), [0, 1, 2])
    for target, block in zip((6199, 2143, 4290), blocks, strict=True):
        assert set(payload(memory, group, target).tolist()) == {block % 251}
    assert int((memory[0] != 0).sum()) == 3 * nbytes
    copier.close()
    slab.close()


def test_a_refused_registration_leaves_no_error_behind() -> None:
    slab = Slab(4, 4096, pin="off")
    registrar = TorchRegistrar(torch.device("cuda", 0))
    registrar.register(slab.address, slab.nbytes)
    with pytest.raises(OSError, match=r"cudaHostRegister: .*already"):
        registrar.register(slab.address, slab.nbytes)
    torch.ones(4, device="cuda").add_(1)  # would raise the error of the call before
    registrar.unregister(slab.address)
    with pytest.raises(OSError, match="cudaHostUnregister: "):
        registrar.unregister(slab.address)
    torch.ones(4, device="cuda").add_(1)
    slab.close()


def test_memory_locked_by_the_driver_leaves_no_error_to_torch() -> None:
    slab = Slab(4, 4096, pin="on", registrar=device().registrar(), pin_chunk_nbytes=8192)
    assert slab.pinned
    with pytest.raises(OSError, match=r"cuMemHostRegister: .*ALREADY_REGISTERED"):
        device().registrar().register(slab.address, 4096)
    torch.ones(4, device="cuda").add_(1)  # would raise what the driver kept
    slab.close()
    with pytest.raises(OSError, match=r"cuMemHostUnregister: "):
        device().registrar().unregister(slab.address)
    torch.ones(4, device="cuda").add_(1)


@pytest.mark.skipif(not native.available() or not native.kernels(), reason="built without kernels")
def test_copies_and_capture_leave_each_other_alone() -> None:
    """Another thread copies while the engine captures a graph; a captured stream has no marker."""
    layout = make_layout(8, [[2**20]])
    memory = random_memory(layout)
    slab = make_slab(layout, 8)
    copier = make_copier("staged", layout, memory, slab)
    batch = CopyBatch(0, int64s(range(8)), int64s(range(8)))
    graph, static = torch.cuda.CUDAGraph(), torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()

    def run() -> None:
        ticket = copier.submit(GATHER, batch, None)
        while not copier.done(ticket):
            time.sleep(0.0001)

    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
        static.add_(1)
        pool.submit(run).result()
        with pytest.raises(RuntimeError, match="captured"):
            copier.mark()
        static.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert static[0] == 2
    expected = payload(memory, layout.groups[0], 3)
    np.testing.assert_array_equal(gathered(slab, 3, layout.groups[0]), expected)
    copier.close()
    slab.close()


@pytest.mark.skipif(not native.available() or not native.kernels(), reason="built without kernels")
def test_an_engines_tensors_get_the_cuda_copier_once_it_is_checked() -> None:
    layout = LAYOUTS["wide"]
    memory = random_memory(layout)
    before = [flat.clone() for flat in memory]
    media = DeviceMedia(layout, memory, "on")
    slab = media.make_slab(64, slot_nbytes_for(layout.groups), "on")
    copier = media.make_copier(slab)
    assert isinstance(copier, CudaCopier)
    print(copier.routes.describe())
    torch.cuda.synchronize()
    for flat, old in zip(memory, before, strict=True):
        assert torch.equal(flat, old)
    copier.close()
    slab.close()


@each_kind
def test_a_copys_time_is_its_own_and_not_its_wait_for_the_engine(kind: str) -> None:
    layout = make_layout(8, [[2**20]])
    memory = random_memory(layout)
    slab = make_slab(layout, 8)
    copier = make_copier(kind, layout, memory, slab)
    batch = CopyBatch(0, int64s(range(8)), int64s(range(8)))
    for direction in Direction:
        copy(copier, direction, 0, range(8), range(8))  # what is slow for the first time
        torch.cuda.synchronize()
        started = time.perf_counter()
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        ticket = copier.submit(direction, batch, copier.mark())
        copier.wait(ticket)
        waited = time.perf_counter() - started
        assert copier.done(ticket)
        seconds = copier.seconds(ticket)
        assert seconds is not None
        assert 0 < seconds < waited / 2
    copier.close()
    slab.close()


@pytest.mark.parametrize("pin", ["on", "off"])
def test_bandwidth(pin: PinMode) -> None:
    """Prints, asserts nothing: 32 layers with K and V apart, 64 KiB each, 2 MiB a block of both."""
    layout = make_layout(512, [[65536] * 32])
    memory = random_memory(layout)
    slab = make_slab(layout, 512, pin)
    copier = TorchCopier(layout, memory, slab)
    ids = np.random.default_rng(3).permutation(512)
    ceiling = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    for direction in (*Direction, *Direction):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy(copier, direction, 0, ids, ids)
        seconds = time.perf_counter() - start
        print(f"{direction.value} pin={pin}: {2**30 / seconds / 1e9:.1f} GB/s of 1 GiB")
    device = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    for source, target in ((device, ceiling), (ceiling, device)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        print(f"one pinned copy: {2**30 / (time.perf_counter() - start) / 1e9:.1f} GB/s")
    copier.close()
    slab.close()
