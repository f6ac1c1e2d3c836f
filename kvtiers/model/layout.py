"""How one KV block lies in the engine's tensors, and in a frame's payload."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvtiers.model.errors import LayoutError

_MAX_RUNS_PER_PAGE: Final = 65_536  # a layout finer than this is a mistake, not a layout


class Axis(StrEnum):
    """The meaning of one tensor dimension; never guessed from its size."""

    BLOCK = "block"  # block ids; every tensor has exactly one
    LAYER = "layer"  # packed cross-layer pages
    KV = "kv"  # K and V kept apart in one tensor
    HEAD = "head"
    TOKEN = "token"  # noqa: S105
    CONTENT = "content"  # what one head holds for one token: K, V, or both; the MLA latent


@dataclass(frozen=True, slots=True)
class TensorView:
    """One KV tensor of the engine, or the part of it that is one layer.

    Attributes:
        layer: the layer's name; K and V apart share it.
        allocation: index of the backing allocation in `KVLayout.allocations`.
        offset: bytes from the allocation's start to element 0.
        axes: the meaning of each dimension, outermost first.
        shape: elements per dimension. strides: bytes per step, same order.
        itemsize: bytes of one element.
    """

    layer: str
    allocation: int
    offset: int
    axes: tuple[Axis, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of bytes that every block of a group has, at a constant stride.

    Block ``b``'s bytes are ``[offset + b * block_stride, ... + nbytes)`` of the allocation.
    """

    allocation: int
    offset: int
    block_stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Page:
    """One layer's share of a frame's payload; it has its own checksum.

    Attributes:
        layer: its name. nbytes: its bytes.
        order: the meaning of those bytes: axes with sizes, outermost first, then the bytes of
            an element. Equal sizes in another order (HND, NHD) are other KV.
    """

    layer: str
    nbytes: int
    order: str = ""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group: layers that share a block table.

    Attributes:
        group: the group's index, as in `BlockKey`.
        num_blocks: valid block ids are 0 .. num_blocks - 1.
        block_size: tokens per block.
        window: tokens that attention looks back; None for full attention.
        pages: in payload order. runs: in payload order, merged where bytes are neighbours.
        dtype: the resolved element type, as the engine names it; never "auto".
        order: sizes and nesting of the axes within a page, as the strides tell it; it fixes
            the meaning of the payload's bytes.
    """

    group: int
    num_blocks: int
    block_size: int
    window: int | None
    dtype: str
    pages: tuple[Page, ...]
    runs: tuple[Run, ...]
    order: str = ""

    @property
    def payload_nbytes(self) -> int:
        """Bytes of one block of this group over all its layers."""
        return sum(page.nbytes for page in self.pages)

    @classmethod
    def from_views(
        cls,
        views: Sequence[TensorView],
        *,
        group: int,
        num_blocks: int,
        block_size: int,
        dtype: str,
        window: int | None = None,
    ) -> GroupLayout:
        """Describe a group from its tensors; layers keep their order of first appearance.

        Args:
            views: one per tensor; K and V apart are two views of one layer.
            num_blocks: the engine's blocks. A block dimension ``k`` times as long holds
                ``k`` kernel blocks per engine block.

        Raises:
            LayoutError: no or two block axes, lengths that disagree, aliasing strides.
        """
        if not views:
            raise LayoutError(f"KV group {group} has no tensors")
        if num_blocks < 1:
            raise LayoutError(f"KV group {group} has {num_blocks} blocks")
        by_layer: dict[str, list[Run]] = {}
        orders: dict[str, list[str]] = {}
        for view in views:
            for name, runs in _runs_by_layer(view, num_blocks):
                by_layer.setdefault(name, []).extend(runs)
                orders.setdefault(name, []).append(_payload_order(view, num_blocks))
        pages = tuple(
            Page(name, sum(run.nbytes for run in runs), "+".join(orders[name]))
            for name, runs in by_layer.items()
        )
        merged = _merge(list(itertools.chain.from_iterable(by_layer.values())))
        order = ",".join(dict.fromkeys(_order(view) for view in views))
        return cls(group, num_blocks, block_size, window, dtype, pages, tuple(merged), order)

    def describe_payload(self) -> str:
        """Return what fixes the meaning of payload bytes; unlike `describe`, where they lie in
        memory does not matter, so that a pool of another size still matches."""
        pages = ",".join(f"{page.layer}:{page.nbytes}:{page.order}" for page in self.pages)
        return f"{self.dtype};{self.block_size};{self.window};{pages}"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All KV tensors of one worker rank.

    Attributes:
        allocations: bytes of each backing allocation; runs name them by index.
        groups: in order of their index.
    """

    allocations: tuple[int, ...]
    groups: tuple[GroupLayout, ...]

    def __post_init__(self) -> None:
        for position, group in enumerate(self.groups):
            if group.group != position:
                raise LayoutError(f"KV group {group.group} stands at position {position}")
            if group.num_blocks < 1:
                raise LayoutError(f"KV group {position} has {group.num_blocks} blocks")
            nbytes = sum(run.nbytes for run in group.runs)
            if nbytes != group.payload_nbytes:
                raise LayoutError(
                    f"KV group {position}: runs of {nbytes} bytes, pages of {group.payload_nbytes}"
                )
            for run in group.runs:
                self._check(group, run)

    def _check(self, group: GroupLayout, run: Run) -> None:
        """Refuse a run that leaves its allocation for any valid block id."""
        if not 0 <= run.allocation < len(self.allocations):
            raise LayoutError(f"group {group.group}: no allocation {run.allocation}")
        end = run.offset + (group.num_blocks - 1) * run.block_stride + run.nbytes
        nbytes = self.allocations[run.allocation]
        if run.offset < 0 or run.nbytes <= 0 or end > nbytes:
            raise LayoutError(
                f"group {group.group}: run at offset {run.offset}, stride {run.block_stride}, "
                f"{run.nbytes} bytes ends at {end}, beyond the allocation's {nbytes} bytes"
            )
        if run.block_stride < run.nbytes and group.num_blocks > 1:
            raise LayoutError(
                f"group {group.group}: blocks overlap, stride {run.block_stride} is shorter "
                f"than the {run.nbytes} bytes of a run"
            )

    @property
    def max_payload_nbytes(self) -> int:
        """Bytes of the largest group's payload: what every slot must have room for."""
        return max(group.payload_nbytes for group in self.groups)


def _runs_by_layer(view: TensorView, num_blocks: int) -> list[tuple[str, list[Run]]]:
    """Cut one view into the runs of each layer that it holds."""
    if not len(view.axes) == len(view.shape) == len(view.strides):
        raise LayoutError(
            f"{view.layer}: {len(view.axes)} axes, {len(view.shape)} sizes and "
            f"{len(view.strides)} strides; one of each per dimension is needed"
        )
    if view.axes.count(Axis.BLOCK) != 1:
        raise LayoutError(f"{view.layer}: {view.axes.count(Axis.BLOCK)} block axes, expected 1")
    if view.axes.count(Axis.LAYER) > 1:
        raise LayoutError(f"{view.layer}: more than one layer axis")
    if min(view.shape) < 1 or min(view.strides) < 0:
        raise LayoutError(f"{view.layer}: shape {view.shape}, strides {view.strides}")
    block_axis = view.axes.index(Axis.BLOCK)
    length, stride = view.shape[block_axis], view.strides[block_axis]
    if length % num_blocks:
        raise LayoutError(
            f"{view.layer}: block dimension of {length} is no multiple of {num_blocks} blocks"
        )
    _check_aliasing(view)
    kernel_blocks = length // num_blocks
    inner = [(kernel_blocks, stride)]
    layers = [(view.layer, 0)]
    for axis, size, step in zip(view.axes, view.shape, view.strides, strict=True):
        if axis is Axis.LAYER:
            layers = [(f"{view.layer}.{i}", i * step) for i in range(size)]
        elif axis is not Axis.BLOCK:
            inner.append((size, step))
    pieces, nbytes = _contiguous_pieces(view, inner)
    block_stride = kernel_blocks * stride
    return [
        (
            name,
            [
                Run(view.allocation, view.offset + at + piece, block_stride, nbytes)
                for piece in pieces
            ],
        )
        for name, at in layers
    ]


def _check_aliasing(view: TensorView) -> None:
    """Refuse strides by which two elements, of one block or of two, may share an address."""
    extent = view.itemsize
    for step, size in sorted(zip(view.strides, view.shape, strict=True)):
        if size > 1 and step < extent:
            raise LayoutError(
                f"{view.layer}: strides {view.strides} of shape {view.shape} alias one another"
            )
        extent += step * (size - 1)


def _payload_order(view: TensorView, num_blocks: int) -> str:
    """Return the axes of one block of one layer in payload order, which is address order."""
    dims = []
    for axis, size, step in zip(view.axes, view.shape, view.strides, strict=True):
        count = size // num_blocks if axis is Axis.BLOCK else size
        if axis is not Axis.LAYER and count > 1:
            dims.append((step, f"{axis}{count}"))
    names = [name for _, name in sorted(dims, reverse=True)]
    return ".".join([*names, f"x{view.itemsize}"])


def _contiguous_pieces(view: TensorView, dims: list[tuple[int, int]]) -> tuple[list[int], int]:
    """Return the contiguous pieces of one block, as offsets in address order, and their size."""
    by_stride = sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1])
    nbytes = view.itemsize
    while by_stride and by_stride[0][1] == nbytes:
        nbytes *= by_stride.pop(0)[0]
    num_pieces = 1
    for size, _ in by_stride:
        num_pieces *= size
    if num_pieces > _MAX_RUNS_PER_PAGE:
        raise LayoutError(f"{view.layer}: a block lies in {num_pieces} pieces of {nbytes} bytes")
    outermost_first = [[i * step for i in range(size)] for size, step in reversed(by_stride)]
    return [sum(steps) for steps in itertools.product(*outermost_first)], nbytes


def _order(view: TensorView) -> str:
    """Name the axes of a block from the outermost in memory to the innermost, with sizes."""
    dims = zip(view.strides, view.axes, view.shape, strict=True)
    inner = [dim for dim in dims if dim[1] not in (Axis.BLOCK, Axis.LAYER) and dim[2] > 1]
    inner.sort(key=lambda dim: -dim[0])
    return ">".join(f"{axis.value}{size}" for _, axis, size in inner) + f"*{view.itemsize}"


def _merge(runs: list[Run]) -> list[Run]:
    """Join runs that are neighbours in memory as well as in the payload."""
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.allocation == run.allocation
            and last.block_stride == run.block_stride
            and last.offset + last.nbytes == run.offset
            and last.nbytes + run.nbytes <= run.block_stride
        ):
            merged[-1] = Run(
                last.allocation, last.offset, last.block_stride, last.nbytes + run.nbytes
            )
        else:
            merged.append(run)
    return merged
