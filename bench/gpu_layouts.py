"""Layouts of engines on a GPU, random memory for them, and what a right copy of it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from gpu_machine import Machine, scramble

from kvtiers.data.copier import CopyBatch, Direction
from kvtiers.data.copier_cuda import DEFAULT_TUNING, CudaCopier, CudaTuning
from kvtiers.data.copier_cuda_routes import Route
from kvtiers.data.slab import Slab
from kvtiers.model.frame import FrameFormat, slot_nbytes_for
from kvtiers.model.layout import Axis, GroupLayout, KVLayout, Page, Run, TensorView
from kvtiers.model.messages import int64s
from kvtiers.testing.fake_device import make_layout

POISON = 0xA5
B, K, T, H, C, L = Axis.BLOCK, Axis.KV, Axis.TOKEN, Axis.HEAD, Axis.CONTENT, Axis.LAYER


def flat_layout(num_blocks: int, piece_nbytes: int, num_runs: int = 1) -> KVLayout:
    """Blocks of equal pieces, each piece in an allocation of its own."""
    nbytes = num_blocks * piece_nbytes
    runs = tuple(Run(i, 0, piece_nbytes, piece_nbytes) for i in range(num_runs))
    pages = tuple(Page(f"l{i}", piece_nbytes) for i in range(num_runs))
    group = GroupLayout(0, num_blocks, 16, None, "uint8", pages, runs)
    return KVLayout((nbytes,) * num_runs, (group,))


def _views(
    dims: list[tuple[Axis, int]], order: list[Axis], itemsize: int, layers: int, padding: int = 0
) -> tuple[list[TensorView], int]:
    """Tensors of one shape, one allocation each, laid out in the given order of axes."""
    sizes = dict(dims)
    strides: dict[Axis, int] = {}
    extent = itemsize
    for axis in reversed(order):
        strides[axis] = extent
        extent = extent * sizes[axis] + (padding if axis is order[-1] else 0)
    axes = tuple(sizes)
    views = [
        TensorView(f"l{i}", i, 0, axes, tuple(sizes.values()), tuple(strides[a] for a in axes),
                   itemsize)
        for i in range(layers)
    ]  # fmt: skip
    return views, extent


def _layout(views: list[TensorView], nbytes: int, num_blocks: int) -> KVLayout:
    group = GroupLayout.from_views(
        views, group=0, num_blocks=num_blocks, block_size=16, dtype="bfloat16"
    )
    return KVLayout((nbytes,) * (1 + max(view.allocation for view in views)), (group,))


def all_layouts() -> dict[str, KVLayout]:
    """Every way that an engine lays blocks out, small; and with nothing aligned."""
    n = 32
    kv = [(K, 2), (B, n), (T, 16), (H, 8), (C, 128)]
    packed = [(B, n), (L, 12), (K, 2), (T, 16), (H, 8), (C, 64)]
    found = {
        "K and V apart, NHD": _layout(*_views(kv, [K, B, T, H, C], 2, 4), n),
        "K and V together, NHD": _layout(*_views(kv, [B, K, T, H, C], 2, 4), n),
        "HND": _layout(*_views(kv, [K, B, H, T, C], 2, 4), n),
        "HND, padded heads": _layout(*_views(kv, [B, K, H, T, C], 2, 3, padding=64), n),
        "MLA": _layout(*_views([(B, n), (T, 16), (C, 576)], [B, T, C], 2, 6), n),
        "packed, all layers in a block": _layout(*_views(packed, [B, L, K, T, H, C], 2, 1), n),
        "layers outermost": _layout(*_views(packed, [L, B, K, T, H, C], 2, 1), n),
        "two groups, mixed pages": make_layout(n, [[36864, 8448], [1152]]),
    }
    for width in (1, 2, 4, 8):
        piece = 4096 + width
        stride = piece + 3 * width
        runs = tuple(Run(i, width * (i + 1), stride, piece) for i in range(3))
        pages = tuple(Page(f"l{i}", piece) for i in range(3))
        group = GroupLayout(0, n, 16, None, "uint8", pages, runs)
        found[f"aligned to {width}"] = KVLayout((n * stride + 64,) * 3, (group,))
    tiny = tuple(Run(0, 48 * i, 1024, 7 + i) for i in range(16))
    pages = tuple(Page(f"l{i}", run.nbytes) for i, run in enumerate(tiny))
    found["pieces of 7 to 22 bytes"] = KVLayout(
        (n * 1024,), (GroupLayout(0, n, 16, None, "uint8", pages, tiny),)
    )
    found["beyond 4 GiB"] = KVLayout(
        (6200 * 1_002_240,),
        (GroupLayout(0, 6200, 16, None, "x", (Page("l", 12288),), (Run(0, 0, 1_002_240, 12288),)),),
    )
    return found


@dataclass
class World:
    """Random device memory, a page-locked slab, and a copier between them."""

    machine: Machine
    layout: KVLayout
    num_slots: int
    tuning: CudaTuning = DEFAULT_TUNING

    def __post_init__(self) -> None:
        self.memory = [self.machine.empty(n) for n in self.layout.allocations]
        for flat in self.memory:
            scramble(flat)
        self.slab = Slab(
            self.num_slots,
            slot_nbytes_for(self.layout.groups),
            pin="on",
            registrar=self.machine.device.registrar(),
            numa_node=self.machine.device.numa_node(),
        )
        self.copier = self.make_copier(self.tuning)
        self.random = np.random.default_rng(1)

    def make_copier(self, tuning: CudaTuning) -> CudaCopier:
        self.machine.cuda.synchronize()
        return CudaCopier(
            self.layout,
            [flat.data_ptr() for flat in self.memory],
            self.slab,
            self.machine.device,
            kernels=self.machine.kernels,
            tuning=tuning,
        )

    def batch(self, num_blocks: int, group: int = 0) -> CopyBatch:
        """Other blocks and slots each time."""
        blocks = self.random.permutation(self.layout.groups[group].num_blocks)[:num_blocks]
        slots = self.random.permutation(self.num_slots)[:num_blocks]
        return CopyBatch(group, int64s(blocks), int64s(slots))

    def copy(self, route: Route, direction: Direction, batch: CopyBatch) -> float:
        """Return the seconds from the call to the last byte."""
        start = time.perf_counter()
        ticket = self.copier.submit_by(route, direction, batch, None)
        self.copier.wait(ticket)
        seconds = time.perf_counter() - start
        assert self.copier.done(ticket)
        return seconds

    def close(self) -> None:
        self.copier.close()
        self.slab.close()
        self.memory = []


def wrong_copies(world: World, route: Route) -> Iterator[str]:
    """Copy every group out and in with poisoned targets; yield what differs from slicing."""
    for group in world.layout.groups:
        num = min(group.num_blocks, world.num_slots)
        batch = world.batch(num, group.group)
        if group.num_blocks > num:  # the far end as well
            batch.block_ids[:3] = (group.num_blocks - 1, 2143, 4290)
            batch = CopyBatch(group.group, int64s(np.unique(batch.block_ids)), batch.slots)
            batch = CopyBatch(group.group, batch.block_ids, batch.slots[: len(batch.block_ids)])
        slots = np.frombuffer(world.slab._mapping, np.uint8).reshape(world.num_slots, -1)
        slots[:] = POISON
        expected = slots.copy()
        header = FrameFormat.of(group).header_nbytes
        payloads = [_payload(world, group, int(block)) for block in batch.block_ids]
        for slot, payload in zip(batch.slots, payloads, strict=True):
            expected[slot, header : header + len(payload)] = payload
        world.copy(route, Direction.GATHER, batch)
        if not np.array_equal(slots, expected):
            yield f"gather, {np.count_nonzero(slots != expected)} bytes"
        world.machine.cuda.synchronize()
        before = [flat.clone() for flat in world.memory]
        targets = world.random.permutation(batch.block_ids)
        for flat in world.memory:
            flat.fill_(POISON)
        for flat in before:
            flat.fill_(POISON)
        for target, payload in zip(targets, payloads, strict=True):
            start = 0
            for run in group.runs:
                at = run.offset + int(target) * run.block_stride
                part = torch.from_numpy(payload[start : start + run.nbytes].copy())
                before[run.allocation][at : at + run.nbytes] = part.to(world.machine.where)
                start += run.nbytes
        world.machine.cuda.synchronize()
        world.copy(route, Direction.SCATTER, CopyBatch(group.group, int64s(targets), batch.slots))
        wrong = sum(int((a != b).sum()) for a, b in zip(world.memory, before, strict=True))
        if wrong:
            yield f"scatter, {wrong} bytes"
        for flat in world.memory:
            scramble(flat)
        world.machine.cuda.synchronize()
        del slots


def _payload(world: World, group: GroupLayout, block: int) -> np.ndarray:
    parts = []
    for run in group.runs:
        start = run.offset + block * run.block_stride
        parts.append(world.memory[run.allocation][start : start + run.nbytes].cpu().numpy())
    return np.concatenate(parts)
