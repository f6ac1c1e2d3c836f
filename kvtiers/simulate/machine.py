"""The modelled engine that a trace is replayed through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvtiers.cost.catalogue import known_hardware, known_storage
from kvtiers.cost.hardware import WEIGHT_NBYTES, Storage
from kvtiers.cost.model_source import load_shape
from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.modelled import ModelledMachine, check_tiers, modelled_engine
from kvtiers.engines.reference.settings import EngineSettings, Policy
from kvtiers.model.config import Config
from kvtiers.model.errors import ConfigError
from kvtiers.simulate.on_device import OnDevice
from kvtiers.simulate.trace import Trace

MEDIA: Final[Mapping[str, str]] = MappingProxyType({"nvme": "nvme-gen4", "lmdb": "lmdb"})
"""Kind of a store to the medium of the catalogue that it is taken for."""

_WATERMARK: Final = 0.01  # share of the blocks that an admission leaves free; vLLM's default is 0


@dataclass(frozen=True, slots=True)
class MachinePlan(OnDevice):
    """The engine that a trace is replayed on.

    Attributes:
        media: name or kind of a store to a name that `known_storage` knows; `MEDIA` for others.
    """

    preemption: PreemptMode = PreemptMode.COST
    policy: Policy = Policy.FCFS
    media: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Model, devices and KV cache in words."""
        ranks = f"{self.tensor_parallel_size} x " if self.tensor_parallel_size > 1 else ""
        cache = "" if self.kv_dtype == "bf16" else f", {self.kv_dtype} KV"
        return f"{self.model} on {ranks}{known_hardware(self.hardware).title}{cache}"

    def settings(self, trace: Trace) -> EngineSettings:
        """Return the engine's settings for a trace; `max_model_len`, if not given, is as it needs.

        Raises:
            CapacityError: the weights leave no room for KV, or the longest sequence does not fit.
            ConfigError: the trace's blocks do not consist of whole engine blocks.
        """
        memory = self.memory()
        memory.check(self.max_model_len)
        if trace.block_size % self.block_size:
            raise ConfigError(
                f"the trace's blocks of {trace.block_size} tokens do not consist of blocks of "
                f"{self.block_size}; choose a block size that divides {trace.block_size}"
            )
        num_blocks = memory.pool.num_blocks
        room = (num_blocks - int(_WATERMARK * num_blocks)) * self.block_size
        longest = max(request.num_tokens for request in trace.requests)
        return EngineSettings(
            num_blocks=num_blocks,
            max_model_len=self.max_model_len or min(longest, room),
            block_size=self.block_size,
            blocks_per_hash=trace.block_size // self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            watermark=_WATERMARK,
            policy=self.policy,
            preemption=self.preemption,
        )

    def engine(self, settings: EngineSettings, config: Config | None) -> Engine:
        """Return the engine on its virtual clock; `config`: the tiers below, None without any.

        Raises:
            CapacityError: a tier does not hold one block.
            ConfigError: a medium is not known.
        """
        self._check_media(config)
        return modelled_engine(settings, self.machine(config), config and _without_files(config))

    def check(self, trace: Trace, config: Config | None) -> None:
        """Check that such an engine would start and serve the trace.

        Raises:
            CapacityError, ConfigError: as `settings` and `engine`.
        """
        settings = self.settings(trace)
        self._check_media(config)
        if config is not None:
            check_tiers(settings, self.machine(config), config)

    def machine(self, config: Config | None) -> ModelledMachine:
        """Return what the engine runs on."""
        return ModelledMachine.of(
            load_shape(self.model)[0],
            known_hardware(self.hardware),
            {} if config is None else self._stores(config),
            self.dtype,
            WEIGHT_NBYTES[self.kv_dtype],
            self.tensor_parallel_size,
        )

    def _check_media(self, config: Config | None) -> None:
        stores = {} if config is None else {tier.name: tier.kind for tier in config.stores}
        for name, medium in self.media.items():
            if name not in MEDIA and name not in stores and name not in stores.values():
                known = ", ".join(sorted({*MEDIA, *stores}))
                raise ConfigError(f"no tier {name!r} has a medium to choose; known: {known}")
            known_storage(medium)

    def _stores(self, config: Config) -> dict[str, Storage]:
        media = {
            tier.name: self.media.get(tier.name)
            or self.media.get(tier.kind)
            or MEDIA.get(tier.kind)
            for tier in config.stores
        }
        return {name: known_storage(medium) for name, medium in media.items() if medium}


def not_modelled(config: Config | None) -> tuple[str, ...]:
    """Return the options that are set in a configuration and that a replay does not model."""
    if config is None:
        return ()
    found = {
        "reload.layer_ranges": config.reload.layer_ranges > 1,
        "cost.calibration": config.cost.calibration is not None,
        "cost.decision_log": config.cost.decision_log is not None,
    }
    return tuple(name for name, there in found.items() if there)


def _without_files(config: Config) -> Config:
    """Return a configuration without the files of the machine that it is meant for.

    A replay must not write into that machine's decision log, and its calibration says nothing
    about the devices of the catalogue.
    """
    cost = config.cost.model_copy(update={"decision_log": None, "calibration": None})
    return config.model_copy(update={"cost": cost})
