"""Random KV layouts over real memory, with an oracle that knows only axes and strides."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvtiers.model.layout import Axis, GroupLayout, KVLayout, TensorView

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

INNER = (Axis.KV, Axis.TOKEN, Axis.HEAD, Axis.CONTENT)


@dataclass(frozen=True)
class Described:
    """A layout with the views that it was made from, per group."""

    layout: KVLayout
    views: tuple[tuple[TensorView, ...], ...]

    def payload_offsets(self, group: int, block: int) -> list[tuple[int, Offsets]]:
        """Return where the payload's bytes lie, in order: (allocation, byte offsets) each.

        The rule: layers in order of first appearance; a layer's tensors in order; the
        elements of the block in one tensor in address order.
        """
        by_layer: dict[str, list[tuple[int, Offsets]]] = {}
        num_blocks = self.layout.groups[group].num_blocks
        for view in self.views[group]:
            for name, offsets in _elements(view, block, num_blocks):
                spread = np.sort(offsets)[:, None] + np.arange(view.itemsize)
                by_layer.setdefault(name, []).append((view.allocation, spread.ravel()))
        return [part for parts in by_layer.values() for part in parts]

    def payload(self, memory: Sequence[Bytes], group: int, block: int) -> Bytes:
        """Return one block's payload."""
        parts = self.payload_offsets(group, block)
        return np.concatenate([memory[allocation][offsets] for allocation, offsets in parts])

    def write(self, memory: Sequence[Bytes], group: int, block: int, payload: Bytes) -> None:
        """Put a payload where a block lies."""
        start = 0
        for allocation, offsets in self.payload_offsets(group, block):
            memory[allocation][offsets] = payload[start : start + len(offsets)]
            start += len(offsets)


def _elements(view: TensorView, block: int, num_blocks: int) -> list[tuple[str, Offsets]]:
    """Return per layer the byte offsets of one block's elements, by index arithmetic alone."""
    layers: list[tuple[str, int]] = [(view.layer, 0)]
    offsets = np.array([view.offset], np.int64)
    for axis, size, stride in zip(view.axes, view.shape, view.strides, strict=True):
        indices = np.arange(size, dtype=np.int64)
        if axis is Axis.LAYER:
            layers = [(f"{view.layer}.{i}", int(i) * stride) for i in indices]
            continue
        if axis is Axis.BLOCK:
            kernel_blocks = size // num_blocks
            indices = indices[block * kernel_blocks : (block + 1) * kernel_blocks]
        offsets = np.add.outer(offsets, indices * stride).ravel()
    return [(name, offsets + at) for name, at in layers]


def strided(
    layer: str,
    allocation: int,
    offset: int,
    dims: Sequence[tuple[Axis, int, int]],
    itemsize: int,
    order: Sequence[int],
) -> tuple[TensorView, int]:
    """Lay out a tensor; return it and where it ends.

    Args:
        dims: axis, size and padding bytes behind each step's extent, in the order of memory,
            outermost first.
        order: the order in which the view names its dimensions.
    """
    strides: list[int] = []
    extent = itemsize
    for _, size, padding in reversed(dims):
        stride = extent + padding
        strides.insert(0, stride)
        extent = stride * (size - 1) + extent
    view = TensorView(
        layer,
        allocation,
        offset,
        tuple(dims[i][0] for i in order),
        tuple(dims[i][1] for i in order),
        tuple(strides[i] for i in order),
        itemsize,
    )
    return view, offset + extent


@st.composite
def layouts(draw: st.DrawFn) -> Described:
    """Draw groups of layers: K and V apart or together, in any order of axes, padded or not."""
    allocations: list[int] = []
    groups: list[GroupLayout] = []
    views: list[tuple[TensorView, ...]] = []
    shared = draw(st.booleans())  # one allocation for all tensors, or one each
    num_blocks = draw(st.integers(1, 6))
    grain = draw(st.sampled_from([1, 1, 4, 16]))  # what offsets and paddings are multiples of
    for index in range(draw(st.integers(1, 3))):
        mine: list[TensorView] = []
        kernel_blocks = draw(st.sampled_from([1, 1, 2, 4]))
        for layer in range(draw(st.integers(1, 3))):
            apart = draw(st.booleans())
            for _ in range(1 + apart):
                if not (shared and allocations):
                    allocations.append(draw(st.integers(0, 7)) * grain)
                view, end = strided(
                    f"g{index}.l{layer}",
                    len(allocations) - 1,
                    allocations[-1],
                    *draw(_dims(num_blocks * kernel_blocks, grain, apart=apart)),
                )
                allocations[-1] = -(-end // grain) * grain + draw(st.integers(0, 9)) * grain
                mine.append(view)
        views.append(tuple(mine))
        groups.append(
            GroupLayout.from_views(
                mine, group=index, num_blocks=num_blocks, block_size=16, dtype="x"
            )
        )
    return Described(KVLayout(tuple(allocations), tuple(groups)), tuple(views))


@st.composite
def _dims(
    draw: st.DrawFn, blocks: int, grain: int, *, apart: bool
) -> tuple[list[tuple[Axis, int, int]], int, list[int]]:
    """Draw the dimensions of one tensor, in memory order, its itemsize and order of naming."""
    # Long pieces are several tiles, and several turns of a kernel's loop.
    long = draw(st.sampled_from([0, 0, 24, 160, 640]))
    sizes = {axis: draw(st.integers(1, 2 if long else 4)) for axis in INNER}
    sizes[Axis.KV] = 2
    sizes[Axis.CONTENT] = long or sizes[Axis.CONTENT] * grain
    # No head axis is latent attention; no KV axis is K or V alone, or both in the content.
    kept = [axis for axis in INNER if axis is Axis.CONTENT or draw(st.booleans())]
    if apart and Axis.KV in kept:
        kept.remove(Axis.KV)
    if not apart and draw(st.booleans()):
        kept.append(Axis.LAYER)
        sizes[Axis.LAYER] = draw(st.integers(1, 3))
    inner = draw(st.permutations(kept))
    position = draw(st.integers(0, len(inner)))
    dims = [(axis, sizes[axis], draw(st.sampled_from([0, 0, 0, 3, 8])) * grain) for axis in inner]
    dims.insert(position, (Axis.BLOCK, blocks, draw(st.sampled_from([0, 0, 8, 13])) * grain))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    return dims, itemsize, draw(st.permutations(range(len(dims))))


def filled(layout: KVLayout, seed: int) -> list[Bytes]:
    """Return memory for each allocation, full of random bytes: padding serves as canary."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, nbytes, np.uint8) for nbytes in layout.allocations]


def addresses(memory: Sequence[Bytes]) -> list[int]:
    """Return the base address of each allocation."""
    return [array.ctypes.data for array in memory]


def sparse(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map memory that costs nothing until it is touched; return it and its address."""
    map_noreserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_noreserve
    mapping = mmap.mmap(-1, nbytes, flags=flags)
    return mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping))
