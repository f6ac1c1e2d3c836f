"""The modelled engine: the reference scheduler and kvtiers' real control, on a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kvtiers.connector.build import slots_for
from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.shape import EngineShape
from kvtiers.cost.hardware import Hardware, Storage, catalogued_seeds
from kvtiers.cost.links import HBM_SEED, LinkSeed, StoreKind, built_in_seeds, reload_link
from kvtiers.cost.prefill import ModelShape, PrefillSpeed
from kvtiers.cost.steps import StepModel
from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.modelled_media import (
    NO_HAND_OVER,
    HandOver,
    ModelledLasting,
    ModelledLink,
    SharedStore,
)
from kvtiers.engines.reference.modelled_rank import ModelledRank
from kvtiers.engines.reference.modelled_runner import ModelledRunner
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.config import Config
from kvtiers.model.config_tiers import LmdbTier, StoreTier
from kvtiers.model.errors import CapacityError
from kvtiers.model.frame import slot_nbytes_of
from kvtiers.model.keys import Rank
from kvtiers.model.messages import Hello, StoreHello
from kvtiers.model.units import format_size, whole_mib

_FINGERPRINT: Final = b"kvtiers modelled engine".ljust(32, b"\0")


@dataclass(frozen=True, slots=True)
class ModelledMachine:
    """What a modelled engine runs on. All its ranks are alike, so that one stands for all.

    Attributes:
        model: what a token costs to compute. speed: of all ranks together.
        kv_nbytes_per_token: of one rank, over all layers.
        links: by name, "dram>hbm", "hbm>dram", "STORE>dram" and "dram>STORE", of one rank; a
            piece is one engine block. Those that are missing have the cost model's seeds.
        num_ranks: workers that share capacities. sequence_seconds: see `StepModel`.
        acceptance: chance that a speculative token is accepted. seed: of the random numbers.
        steps: a measured model, in place of `speed`.
        hand_over: measured; nothing where it is not known.
    """

    model: ModelShape
    speed: PrefillSpeed
    kv_nbytes_per_token: int
    links: Mapping[str, LinkSeed] = field(default_factory=dict)
    num_ranks: int = 1
    sequence_seconds: float = 0.0
    acceptance: float = 0.7
    seed: int = 0
    steps: StepModel | None = None
    hand_over: HandOver = NO_HAND_OVER

    @classmethod
    def of(
        cls,
        model: ModelShape,
        hardware: Hardware,
        stores: Mapping[str, Storage],
        dtype: str = "bf16",
        kv_element_nbytes: float = 2,
        num_ranks: int = 1,
    ) -> ModelledMachine:
        """Return a machine of the catalogue.

        Args:
            stores: by the tier's name.
        """
        speed = hardware.speed(model, dtype, num_ranks)
        return cls(
            model=model,
            speed=replace(speed, kv_element_nbytes=kv_element_nbytes),
            kv_nbytes_per_token=model.kv_nbytes_per_token(kv_element_nbytes, num_ranks),
            links=catalogued_seeds(hardware, stores, num_ranks=num_ranks),
            num_ranks=num_ranks,
        )

    def step_model(self) -> StepModel:
        """Return the model of its steps' times."""
        return self.steps or StepModel(self.speed, self.model, self.sequence_seconds)


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
    steps, guesses = machine.step_model(), (machine.acceptance, machine.seed)
    if config is None:
        return Engine(settings, ModelledRunner(steps, None, None, *guesses))
    block_nbytes = settings.hash_tokens * machine.kv_nbytes_per_token
    hello = _hello(settings, machine, config)
    shared = {
        tier.name: SharedStore(_num_frames(config, tier, machine, hello.slot_nbytes))
        for tier in config.stores
        if isinstance(tier, LmdbTier)
    }
    pieces = settings.blocks_per_hash
    links = {
        name: ModelledLink(seed, block_nbytes, pieces)
        for name, seed in _link_seeds(machine, config).items()
    }
    notice_seconds = machine.hand_over.notice_seconds
    rank = ModelledRank(links, block_nbytes, pieces, shared, hello.num_slots, notice_seconds)
    lasting = ModelledLasting(shared)
    runner = ModelledRunner(steps, rank, lasting, *guesses, machine.hand_over)
    connector = SchedulerConnector(config, _shape(settings, machine), lambda: runner.now)
    connector.connect([hello], lasting)
    runner.connect(connector)
    return Engine(settings, runner)


def check_tiers(settings: EngineSettings, machine: ModelledMachine, config: Config) -> None:
    """Check that each tier holds a block, before anything is built.

    Raises:
        CapacityError: one does not; the error's `path` is the key of the configuration.
    """
    _hello(settings, machine, config)


def _shape(settings: EngineSettings, machine: ModelledMachine) -> EngineShape:
    seed = machine.links.get(reload_link(), HBM_SEED)
    per_block = seed.seconds_per_piece * settings.blocks_per_hash
    return EngineShape(
        block_size=settings.hash_tokens,
        windows=(None,),
        num_ranks=1,
        model=machine.model,
        max_tokens_per_step=settings.max_num_batched_tokens,
        seed_speed=machine.speed,
        seed_link=LinkSeed(seed.latency_seconds, per_block, seed.bandwidth_bytes_per_second),
    )


def _hello(settings: EngineSettings, machine: ModelledMachine, config: Config) -> Hello:
    """Return the hello of one of the ranks.

    Raises:
        CapacityError: a tier does not hold one block.
    """
    payload = settings.block_size * machine.kv_nbytes_per_token
    slot_nbytes = slot_nbytes_of(payload) * settings.blocks_per_hash
    num_slots = slots_for(config, machine.num_ranks, slot_nbytes)
    frames = {it.name: _num_frames(config, it, machine, slot_nbytes) for it in config.stores}
    shared = {it.name for it in config.stores if isinstance(it, LmdbTier)}
    return Hello(
        rank=Rank(),
        fingerprint=_FINGERPRINT,
        num_slots=num_slots,
        slot_nbytes=slot_nbytes,
        payload_nbytes=(payload * settings.blocks_per_hash,),
        pinned=True,
        stores={name: StoreHello(None if name in shared else num) for name, num in frames.items()},
    )


def _num_frames(config: Config, tier: StoreTier, machine: ModelledMachine, slot_nbytes: int) -> int:
    """Return the frames of one rank that a store holds.

    Raises:
        CapacityError: none.
    """
    num_frames = tier.capacity // machine.num_ranks // slot_nbytes
    if num_frames < 1:
        least = whole_mib(machine.num_ranks * slot_nbytes)
        raise CapacityError(
            f"{format_size(tier.capacity)} over {machine.num_ranks} rank(s) does not hold one "
            f"frame of {slot_nbytes} bytes; write at least {least}",
            ("tiers", config.tiers.index(tier), "capacity"),
        )
    return num_frames


def _link_seeds(machine: ModelledMachine, config: Config) -> dict[str, LinkSeed]:
    seeds = built_in_seeds({tier.name: StoreKind(tier.kind) for tier in config.stores})
    return seeds | dict(machine.links)
