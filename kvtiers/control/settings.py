"""What control needs to know of the configuration, in blocks and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvtiers.cost.loads import PIPED, Frames

# Share of the slots: room for a burst of requests; the policy keeps the other three quarters.
PREFETCH_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """One store below DRAM.

    Attributes:
        name: as in messages. capacity_blocks: frames it may hold; None for a shared store,
            whose own process evicts and whose contents are known through presence only.
        write: "through" writes with every offload, "back" when DRAM runs full.
        admit: name of the admission rule.
        inherits: whether an earlier life has left frames in a private store. They are known
            through presence, like those of a shared one, until control takes them over.
        write_budget_nbytes: that one rank may write in any 24 hours; None for any number.
        frame_nbytes: that one block takes of it, at most.
    """

    name: str
    capacity_blocks: int | None
    write: Literal["through", "back"] = "through"
    admit: str = "always"
    inherits: bool = False
    write_budget_nbytes: float | None = None
    frame_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """One KV cache group.

    Attributes:
        window: tokens that attention looks back; None for full attention.
        block_nbytes: payload bytes of one block; 0: an equal share of all groups'.
    """

    window: int | None = None
    block_nbytes: int = 0

    def first_needed(self, num_blocks: int, block_size: int) -> int:
        """Return the first block that a token after `num_blocks` full blocks can attend to."""
        if self.window is None:
            return 0
        return max(0, (num_blocks * block_size - self.window + 1) // block_size)


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """What control needs to know of configuration and engine.

    Attributes:
        num_slots: slab slots, equal on every rank. block_size: tokens per block.
        block_nbytes: payload bytes of one block of each group, summed over groups.
        high_watermark, low_watermark: shares of the slots between which write-back demotes.
        reload_deadline: seconds after which what has not been loaded is recomputed.
        offload_deadline: seconds after which a block that has not been offloaded is dropped.
        lookup_deadline: seconds that a request waits for a shared store's answer.
        max_window: most slots that one job stages through.
        in_step_seconds: loads from DRAM that are predicted to take less run within the step that
            computes the rest; 0 where the engine cannot wait for them.
        prefetch_share: share of the slots that may hold blocks brought for requests that wait.
        num_layer_ranges: ranges of layers that the engine's blocks are cut into, each a KV group;
            1: the KV groups are the engine's own.
        frames: how ranks get blocks from stores. evict: name of the replacement rule.
    """

    num_slots: int
    block_size: int
    block_nbytes: int
    groups: tuple[GroupSettings, ...] = (GroupSettings(),)
    stores: tuple[StoreSettings, ...] = ()
    evict: str = "lru"
    high_watermark: float = 0.95
    low_watermark: float = 0.90
    reload_deadline: float = 10.0
    offload_deadline: float = 30.0
    lookup_deadline: float = 0.05
    max_window: int = 64
    in_step_seconds: float = 0.0
    prefetch_share: float = PREFETCH_SHARE
    frames: Frames = PIPED
    num_layer_ranges: int = 1

    def group_nbytes(self, group: int) -> int:
        """Return the payload bytes of one block of a KV group."""
        return self.groups[group].block_nbytes or self.block_nbytes // len(self.groups)
