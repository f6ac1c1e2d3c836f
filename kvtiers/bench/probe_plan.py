"""What a probe measures, and within which bounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from kvtiers.model.config import Config
from kvtiers.model.errors import ConfigError
from kvtiers.model.frame import FrameFormat
from kvtiers.model.layout import GroupLayout, KVLayout, Page, Run
from kvtiers.model.units import format_size

KIB, MIB = 2**10, 2**20
SIZES: Final = (128 * KIB, 512 * KIB, 2 * MIB)  # a block of a rank: 16 tokens of 8B have 2 MiB
DEPTHS: Final = (1, 4, 16, 64)  # the executor keeps up to 64 frames of a store under way
BATCHES_ON_DISK: Final = 4  # what is deleted leaves a file store's room only behind
MIN_SCRATCH_NBYTES: Final = 16 * MIB  # four blocks of the largest size, or an LMDB file's least
_LEAST_PAGE_NBYTES: Final = 64

DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Jobs that are alike.

    Attributes:
        block_nbytes: of the payload of each block. depth: blocks that are ordered at once.
    """

    block_nbytes: int
    depth: int


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """What is measured.

    Attributes:
        config: whose tiers.
        num_layers: pieces into which the engine's memory cuts a block.
        sizes: payload bytes of a block. depths: blocks that are ordered at once.
        seconds: of the whole measurement, about; a slow disk may take three times its share.
        scratch_nbytes: that a tier may take at most, on disk or in memory.
        device: the engine's; "auto": a GPU where torch sees one.
        max_repeats: jobs of a shape and direction at most.
        cache_nbytes: more than the processor's caches hold: blocks of a server are cold.
    """

    config: Config
    num_layers: int = 32
    sizes: tuple[int, ...] = SIZES
    depths: tuple[int, ...] = DEPTHS
    seconds: float = 30.0
    scratch_nbytes: int = 640 * MIB
    device: DeviceChoice = "auto"
    max_repeats: int = 9
    cache_nbytes: int = 256 * MIB

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"{self.seconds} seconds measure nothing; give 10 or more")
        if self.scratch_nbytes < MIN_SCRATCH_NBYTES:
            raise ConfigError(
                f"{self.scratch_nbytes} bytes of scratch hold too few blocks; give "
                f"{format_size(MIN_SCRATCH_NBYTES)} or more"
            )
        for size in self.sizes:
            if size < self.num_layers * _LEAST_PAGE_NBYTES:
                raise ConfigError(f"a block of {size} bytes has no {self.num_layers} layers")

    def depths_of(self, block_nbytes: int) -> tuple[int, ...]:
        """Return the depths at which batches of a block size stay in the bound."""
        slot = self.format_of(block_nbytes).slot_nbytes
        return tuple(
            depth
            for depth in self.depths
            if BATCHES_ON_DISK * depth * slot <= self.scratch_nbytes * 15 // 16
        )

    def shapes(self) -> Iterator[Shape]:
        """Yield all shapes, small blocks and few of them first."""
        for size in sorted(self.sizes):
            for depth in sorted(self.depths_of(size)):
                yield Shape(size, depth)

    def by_size(self) -> Iterator[tuple[int, list[Shape]]]:
        """Yield each block size with its shapes."""
        for size, shapes in itertools.groupby(self.shapes(), lambda shape: shape.block_nbytes):
            yield size, list(shapes)

    def num_slots(self, block_nbytes: int) -> int:
        """Return how many slots to choose from, so that few of them are in a cache."""
        deepest = max(self.depths_of(block_nbytes))
        return max(2 * deepest, self.cache_nbytes // self.format_of(block_nbytes).slot_nbytes)

    def format_of(self, block_nbytes: int) -> FrameFormat:
        """Return the frame of a block: a page a layer, in whole cache lines."""
        return FrameFormat((self._page_nbytes(block_nbytes),) * self.num_layers)

    def layout_of(self, block_nbytes: int, num_blocks: int) -> KVLayout:
        """Return engine memory for blocks of a size: an allocation a layer."""
        page = self._page_nbytes(block_nbytes)
        layers = range(self.num_layers)
        group = GroupLayout(
            group=0,
            num_blocks=num_blocks,
            block_size=16,
            window=None,
            dtype="uint8",
            pages=tuple(Page(f"layer{idx}", page) for idx in layers),
            runs=tuple(Run(idx, 0, page, page) for idx in layers),
        )
        return KVLayout((num_blocks * page,) * self.num_layers, (group,))

    def _page_nbytes(self, block_nbytes: int) -> int:
        share = block_nbytes // self.num_layers
        return share // _LEAST_PAGE_NBYTES * _LEAST_PAGE_NBYTES
