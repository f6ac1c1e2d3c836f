"""An engine on paper: the reference scheduler and the real control of kvtiers, on modelled time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtiers.cost.links import LinkSeed
from kvtiers.cost.prefill import ModelShape, PrefillSpeed
from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.config import Config


@dataclass(frozen=True, slots=True)
class ModelledMachine:
    """What an engine on paper runs on.

    Attributes:
        model: what a token costs to compute. speed: of all ranks together.
        kv_nbytes_per_token: of one rank, over all layers.
        links: by name, "dram>hbm", "hbm>dram", "STORE>dram" and "dram>STORE"; those that are
            missing have the seeds of the cost model.
        num_ranks: workers that each hold a share of every block; they are taken to be alike.
        acceptance: chance that a speculative token is right. seed: of those chances.
    """

    model: ModelShape
    speed: PrefillSpeed
    kv_nbytes_per_token: int
    links: Mapping[str, LinkSeed] = field(default_factory=dict)
    num_ranks: int = 1
    acceptance: float = 0.7
    seed: int = 0


def modelled_engine(
    settings: EngineSettings, machine: ModelledMachine, config: Config | None = None
) -> Engine:
    """Return an engine on a virtual clock that starts at 0.

    Tier capacities are those of the configuration, in bytes; paths in it are never touched.

    Args:
        config: the tiers below; None runs without kvtiers.

    Raises:
        CapacityError: a tier does not hold one block.
    """
    raise NotImplementedError
