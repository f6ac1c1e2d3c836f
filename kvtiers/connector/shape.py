"""What an engine tells kvtiers about itself, before the first step."""

from __future__ import annotations

from dataclasses import dataclass

from kvtiers.cost.links import LinkSeed
from kvtiers.cost.prefill import ModelShape, PrefillSpeed


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What an engine tells kvtiers about itself.

    Attributes:
        block_size: tokens per block. hashes_per_block: the engine's hashes per block; the
            last of them names the block.
        windows: per KV group, tokens that attention looks back, None for full attention.
        num_ranks: workers that hold a share of every block.
        model: what a token costs to compute; None where it cannot be told.
        max_tokens_per_step: the engine's token budget.
        seed_speed: the engine's speed, until steps have been measured.
        device: where its KV lies, "cpu" or "cuda"; "" if it does not say.
        seed_link: the way between slab and HBM, until it is measured; None: of PCIe 5 x16.
        loads_in_step: whether the engine may be given loads within the step that reads them. When
            one fails it must drop that step's output and keep the blocks before the failed one,
            and must not have scheduled another step on top of it.
        num_layer_ranges: KV groups that are ranges of layers over one table of blocks, in the order
            in which a step reads them (`kvtiers.model.layer_ranges`), where it waits for one after
            the other; 1: the groups are the engine's own, and a step waits for all of them.
        instance: folder of this engine in private stores, where the configuration names none.
        why_not_lasting: why its block keys mean nothing to another process; "" where they do.
    """

    block_size: int
    windows: tuple[int | None, ...]
    num_ranks: int
    model: ModelShape | None
    max_tokens_per_step: int
    seed_speed: PrefillSpeed
    hashes_per_block: int = 1
    loads_in_step: bool = True
    num_layer_ranges: int = 1
    instance: str = "0"
    why_not_lasting: str = ""
    seed_link: LinkSeed | None = None
    device: str = ""
