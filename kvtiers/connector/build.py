"""Turns the configuration and an engine's facts into control's settings and a cost model."""

from __future__ import annotations

from collections.abc import Sequence

from kvtiers.connector.calibrated import measured_seeds
from kvtiers.connector.in_step import in_step_seconds
from kvtiers.connector.shape import EngineShape
from kvtiers.control.settings import PREFETCH_SHARE, ControlSettings, GroupSettings, StoreSettings
from kvtiers.cost.links import HBM_SEED, Links, StoreKind
from kvtiers.cost.loads import Frames
from kvtiers.cost.model import CostModel
from kvtiers.cost.planner import Objective, PlanPolicy
from kvtiers.cost.prefill import FALLBACK_SHAPE, PrefillModel
from kvtiers.data.portions import PORTIONS
from kvtiers.model.config import Config
from kvtiers.model.config_tiers import NvmeTier, StoreTier
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.errors import CapacityError, ProtocolError
from kvtiers.model.frame import ALIGNMENT
from kvtiers.model.keys import Rank
from kvtiers.model.messages import Hello
from kvtiers.model.units import format_size, whole_mib


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


def check_hellos(hellos: Sequence[Hello], num_ranks: int) -> list[Rank]:
    """Return the ranks that said hello.

    Raises:
        ProtocolError: a rank is missing, or ranks disagree on what must be equal.
    """
    if len(hellos) != num_ranks:
        raise ProtocolError(f"{len(hellos)} ranks said hello, expected {num_ranks}")
    ranks = [hello.rank for hello in hellos]
    if len(set(ranks)) < len(ranks):
        raise ProtocolError(f"a rank said hello twice: {ranks}")
    if len({hello.fingerprint for hello in hellos}) > 1:
        raise ProtocolError("ranks have different fingerprints: not the same model or layout")
    return ranks


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
    num_together = PORTIONS.num_frames(max(hello.slot_nbytes for hello in hellos))
    return ControlSettings(
        num_slots=min(hello.num_slots for hello in hellos),
        block_size=shape.block_size,
        block_nbytes=max(sum(hello.payload_nbytes) for hello in hellos),
        groups=tuple(
            GroupSettings(window, max(hello.payload_nbytes[idx] for hello in hellos))
            for idx, window in enumerate(shape.windows)
        ),
        stores=tuple(stores),
        evict=config.policy.evict,
        high_watermark=config.dram.high_watermark,
        low_watermark=config.dram.low_watermark,
        reload_deadline=config.reload.deadline,
        lookup_deadline=config.reload.lookup_deadline,
        in_step_seconds=in_step_seconds(config, shape),
        prefetch_share=PREFETCH_SHARE if config.reload.prefetch == "auto" else 0.0,
        frames=Frames(num_together, ALIGNMENT, shape.num_layer_ranges),
        num_layer_ranges=shape.num_layer_ranges,
    )


def _store_settings(tier: StoreTier, hellos: Sequence[Hello]) -> StoreSettings:
    said = [hello.stores.get(tier.name) for hello in hellos]
    of_ranks = [found for found in said if found is not None]
    shared = {found.num_frames is None for found in of_ranks}
    if len(of_ranks) < len(said) or len(shared) != 1:
        raise ProtocolError(f"ranks disagree on store {tier.name!r}: {said}")
    budget = tier.write_budget if isinstance(tier, NvmeTier) else None
    frames = [found.num_frames for found in of_ranks if found.num_frames is not None]
    return StoreSettings(
        tier.name,
        min(frames, default=None),
        tier.write,
        tier.admit,
        inherits=all(found.inventory for found in of_ranks),
        write_budget_nbytes=None if budget is None else budget / len(hellos),
        frame_nbytes=max(hello.slot_nbytes for hello in hellos),
    )


def cost_model(config: Config, shape: EngineShape) -> CostModel:
    """Return the cost model, seeded; measurements correct it.

    Raises:
        ConfigError: the configured calibration cannot be read.
    """
    model = shape.model or FALLBACK_SHAPE
    prefill = PrefillModel.of(shape.seed_speed, model, shape.max_tokens_per_step)
    stores = {store.name: StoreKind(store.kind) for store in config.stores}
    hbm = shape.seed_link or HBM_SEED
    links = Links.seeded(stores, hbm=hbm, measured=measured_seeds(config, shape.device))
    policy = PlanPolicy(
        CostMode(config.cost.mode),
        config.cost.margin,
        Objective(config.cost.objective),
        config.reload.deadline,
        shape.num_layer_ranges if shape.loads_in_step else 1,
    )
    return CostModel(prefill, links, policy)
