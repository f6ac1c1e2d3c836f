"""Where blocks can be, below HBM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtiers.control.gates import Gates
from kvtiers.control.presence import PresenceTable
from kvtiers.control.tier import Tier


@dataclass(frozen=True, slots=True)
class Places:
    """The tiers of one engine.

    Attributes:
        dram: the slab. stores: in the order of the settings; None for a shared store, whose
            contents are known through `presence` only.
        gates: which stores are in use.
    """

    dram: Tier
    stores: Sequence[Tier | None]
    presence: PresenceTable
    gates: Gates
