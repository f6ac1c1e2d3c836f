"""How long reloads take whose blocks lie on several tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtiers.cost.links import Links, read_link, reload_link
from kvtiers.model.messages import UInt8s

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WindowKV:
    """A KV group of which a request needs only the last blocks of its prefix.

    Attributes:
        block_nbytes: of one block of this group, on one rank.
        num_blocks: that the next token can attend to.
    """

    block_nbytes: int
    num_blocks: int

    @classmethod
    def of(cls, block_nbytes: int, window: int, block_size: int) -> WindowKV:
        """Return the group of layers whose tokens see `window` tokens, themselves included."""
        return cls(block_nbytes, -(-(window - 1) // block_size))


@dataclass(frozen=True, slots=True)
class Frames:
    """How a rank gets blocks from stores.

    Attributes:
        num_together: frames that it asks a store for at once, and that come together.
        header_nbytes: of a frame, beside what it holds of a block; does not go to HBM.
        num_per_block: frames of a block, each a piece of its own on every link.
    """

    num_together: int = 1
    header_nbytes: int = 0
    num_per_block: int = 1


PIPED: Final = Frames()  # one block after another, nothing beside them


@dataclass(frozen=True, slots=True)
class Batch:
    """What one link moves, for one reload or, entry by entry, for several.

    Attributes:
        num_blocks: pieces; of a block that is stored in several frames, each frame.
    """

    num_blocks: Int64s
    nbytes: Float64s

    @classmethod
    def of(cls, num_blocks: npt.ArrayLike, block_nbytes: int) -> Batch:
        """Return a batch of equal blocks."""
        counts = np.atleast_1d(np.asarray(num_blocks, dtype=np.int64))
        return cls(counts, counts.astype(np.float64) * block_nbytes)

    def at_most(self, num_blocks: int) -> Batch:
        """Return `num_blocks` of these blocks, or all if they are fewer."""
        share = np.minimum(1.0, num_blocks / np.maximum(self.num_blocks, 1))
        return Batch(np.minimum(self.num_blocks, num_blocks), self.nbytes * share)


@dataclass(frozen=True, slots=True)
class Loads:
    """Reloads, entry by entry: all they bring to HBM, and what of it comes from each store.

    Attributes:
        last: the blocks that go to HBM when everything else is there.
    """

    to_hbm: Batch
    from_stores: Mapping[str, Batch]
    last: Batch

    @classmethod
    def of_prefixes(
        cls,
        sources: UInt8s,
        block_nbytes: int,
        links: Links,
        windows: Sequence[WindowKV] = (),
        frames: Frames = PIPED,
    ) -> Loads:
        """Return the reloads of the first m blocks, for every m from 0 to ``len(sources)``.

        Args:
            sources: one per block: 0 for DRAM, else 1 + store index.
            block_nbytes: of a block on one rank, over all KV groups, `windows` among them.
        """
        prefix = _Prefix(len(sources), block_nbytes, windows, frames.num_per_block)
        from_stores = {
            links.stores[source - 1]: prefix.batch(sources == source, frames.header_nbytes)
            for source in np.flatnonzero(np.bincount(sources))
            if source > 0
        }
        everything = prefix.batch(np.ones(len(sources), dtype=np.bool_))
        return cls(everything, from_stores, prefix.batch(sources > 0).at_most(frames.num_together))

    @classmethod
    def of_counts(
        cls, num_blocks_by_source: Sequence[npt.ArrayLike], block_nbytes: int, links: Links
    ) -> Loads:
        """Return reloads of which only the numbers of blocks are known.

        Args:
            num_blocks_by_source: index 0 for DRAM, 1 + store index for stores; may be shorter
                than there are stores.
        """
        counts = [np.atleast_1d(np.asarray(num, np.int64)) for num in num_blocks_by_source]
        stores = zip(links.stores, counts[1:], strict=False)
        total = np.sum(counts, axis=0) if counts else np.zeros(1, np.int64)
        from_stores = {store: Batch.of(num, block_nbytes) for store, num in stores}
        last = np.minimum(total - counts[0], 1) if counts else np.zeros(1, np.int64)
        return cls(Batch.of(total, block_nbytes), from_stores, Batch.of(last, block_nbytes))

    def seconds(self, links: Links) -> Float64s:
        """Return the seconds of ``store -> slot -> HBM``, some blocks at a time.

        The slower stage rules; where stores rule, the last blocks still have to go from their
        slots to HBM. Stores are added up: two of them are commonly files on the same disk.
        """
        way = links[reload_link()]
        to_hbm = _seconds(self.to_hbm, reload_link(), links)
        from_stores = np.zeros(len(to_hbm))
        for store, batch in self.from_stores.items():
            from_stores += _seconds(batch, read_link(store), links)
        last = way.seconds(self.last.num_blocks, self.last.nbytes)
        by_stores = np.where(from_stores > 0, from_stores + last, 0.0)
        return np.asarray(np.maximum(to_hbm, by_stores), dtype=np.float64)

    def busiest_link_seconds(self, links: Links) -> Float64s:
        """Return how long each reload keeps the link that it needs longest; queues do not count."""
        batches = {reload_link(): self.to_hbm}
        batches |= {read_link(store): batch for store, batch in self.from_stores.items()}
        idle = [links[name].seconds(b.num_blocks, b.nbytes) for name, b in batches.items()]
        return np.asarray(np.max(idle, axis=0), dtype=np.float64)


class _Prefix:
    """Counts, for every m, what of the first m blocks a request needs."""

    def __init__(
        self, num_blocks: int, block_nbytes: int, windows: Sequence[WindowKV], num_per_block: int
    ) -> None:
        self._whole_nbytes = block_nbytes - sum(group.block_nbytes for group in windows)
        if self._whole_nbytes < 0:
            raise ValueError(
                f"KV groups with windows have more than the {block_nbytes} bytes of all"
            )
        self._windows = windows
        self._num_per_block = num_per_block
        self._m = np.arange(num_blocks + 1)

    def batch(self, chosen: npt.NDArray[np.bool_], header_nbytes: int = 0) -> Batch:
        """Return the needed blocks among those chosen."""
        counts = np.zeros(len(self._m), dtype=np.int64)
        np.cumsum(chosen, out=counts[1:])
        nbytes = counts.astype(np.float64) * self._whole_nbytes
        needed = counts if self._whole_nbytes else np.zeros_like(counts)
        for group in self._windows:
            # Of the first m, those that are not among the first m - window.
            within = counts - counts[np.maximum(self._m - group.num_blocks, 0)]
            nbytes += within.astype(np.float64) * group.block_nbytes
            needed = np.maximum(needed, within)
        num_frames = needed * self._num_per_block
        return Batch(num_frames, nbytes + num_frames.astype(np.float64) * header_nbytes)


def _seconds(batch: Batch, name: str, links: Links) -> Float64s:
    return links[name].seconds(batch.num_blocks, batch.nbytes, links.queued_nbytes(name))
