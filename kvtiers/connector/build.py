"""From the configuration and the engine's facts to what each plane is made of."""

from __future__ import annotations

from collections.abc import Sequence

from kvtiers.connector.calibrated import measured_seeds
from kvtiers.connector.shape import EngineShape
from kvtiers.control.settings import PREFETCH_SHARE, ControlSettings, GroupSettings, StoreSettings
from kvtiers.cost.links import Links, StoreKind
from kvtiers.cost.model import CostModel
from kvtiers.cost.planner import PlanPolicy
from kvtiers.cost.prefill import ModelShape, PrefillModel
from kvtiers.model.config import Config
from kvtiers.model.config_tiers import StoreTier
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.errors import CapacityError, ProtocolError
from kvtiers.model.messages import Hello
from kvtiers.model.units import format_size, whole_mib

_SEED_STEP_SECONDS = 0.005  # launch and sampling of one step; corrected by the first steps
# Where the engine's model cannot be read: a linear cost only, learnt as seconds per token.
_UNKNOWN_MODEL = ModelShape(
    num_layers=1, num_query_heads=1, head_size=1, linear_params=1_000_000_000
)


def slots_for(config: Config, num_ranks: int, slot_nbytes: int) -> int:
    """Return the slab slots of one rank.

    Raises:
        CapacityError: the tier cannot hold a single block.
    """
    num_slots = config.dram.capacity // num_ranks // slot_nbytes
    if num_slots < 1:
        raise CapacityError(
            f"{format_size(config.dram.capacity)} over {num_ranks} rank(s) does not hold one block "
            f"of {slot_nbytes} bytes; write at least {whole_mib(num_ranks * slot_nbytes)}",
            ("tiers", 0, "capacity"),
        )
    return num_slots


def control_settings(
    config: Config, shape: EngineShape, hellos: Sequence[Hello]
) -> ControlSettings:
    """Return what control works with: capacities are those of the smallest rank.

    Raises:
        ProtocolError: ranks have different KV groups or stores.
    """
    groups = {len(hello.payload_nbytes) for hello in hellos}
    if groups != {len(shape.windows)}:
        raise ProtocolError(f"ranks have {sorted(groups)} KV groups, expected {len(shape.windows)}")
    stores = [_store_settings(tier, hellos) for tier in config.stores]
    return ControlSettings(
        num_slots=min(hello.num_slots for hello in hellos),
        block_size=shape.block_size,
        block_nbytes=max(sum(hello.payload_nbytes) for hello in hellos),
        groups=tuple(GroupSettings(window) for window in shape.windows),
        stores=tuple(stores),
        evict=config.policy.evict,
        high_watermark=config.dram.high_watermark,
        low_watermark=config.dram.low_watermark,
        reload_deadline=config.reload.deadline,
        lookup_deadline=config.reload.lookup_deadline,
        prefetch_share=PREFETCH_SHARE if config.reload.prefetch == "auto" else 0.0,
    )


def _store_settings(tier: StoreTier, hellos: Sequence[Hello]) -> StoreSettings:
    said = [hello.stores.get(tier.name) for hello in hellos]
    of_ranks = [found for found in said if found is not None]
    shared = {found.num_frames is None for found in of_ranks}
    if len(of_ranks) < len(said) or len(shared) != 1:
        raise ProtocolError(f"ranks disagree on store {tier.name!r}: {said}")
    frames = [found.num_frames for found in of_ranks if found.num_frames is not None]
    return StoreSettings(
        tier.name,
        min(frames, default=None),
        tier.write,
        tier.admit,
        inherits=all(found.inventory for found in of_ranks),
    )


def cost_model(config: Config, shape: EngineShape) -> CostModel:
    """Return the cost model, seeded; measurements correct it.

    Raises:
        ConfigError: the configured calibration cannot be read.
    """
    model = _UNKNOWN_MODEL if shape.model is None else shape.model
    prefill = PrefillModel(
        _SEED_STEP_SECONDS, shape.seed_flops_per_second, model, shape.max_tokens_per_step
    )
    kinds = {store.name: StoreKind(store.kind) for store in config.stores}
    links = Links.seeded(kinds, measured=measured_seeds(config))
    policy = PlanPolicy(CostMode(config.cost.mode), config.cost.margin)
    return CostModel(prefill, links, policy)
