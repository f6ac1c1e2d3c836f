"""From which prefix length on a measured tier beats computing, for one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtiers.cost.break_even import break_even_tokens
from kvtiers.cost.calibration import Calibration
from kvtiers.cost.catalogue import hardware_of_driver, known_hardware
from kvtiers.cost.hardware import WEIGHT_NBYTES, Hardware
from kvtiers.cost.links import Links, StoreKind
from kvtiers.cost.loads import WindowKV
from kvtiers.cost.model_source import load_shape
from kvtiers.cost.prefill import ModelShape, PrefillModel
from kvtiers.model.errors import ConfigError
from kvtiers.model.messages import DRAM

LONGEST_TOKENS: Final = 131_072
NO_SPEED: Final = (
    "No break-even lengths: the device that computes is not known. Give --hardware NAME, or a "
    "measured speed with --flops."
)


@dataclass(frozen=True, slots=True)
class EvenPlan:
    """The engine to compare with.

    Attributes:
        model: as `load_shape` takes it.
        hardware: a name that `known_hardware` knows; None: the GPU found here, if it is known.
        flops_per_second: a measured prefill speed instead, all its overhead included.
        dtype: of the weights. kv_dtype: of the KV cache.
        block_size: tokens of a block. max_tokens_per_step: the engine's budget.
    """

    model: str = "llama-3.1-8b"
    hardware: str | None = None
    flops_per_second: float | None = None
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    block_size: int = 16
    max_tokens_per_step: int = 8192

    def __post_init__(self) -> None:
        if self.hardware is not None and self.flops_per_second is not None:
            raise ConfigError("--hardware and --flops exclude each other; give one")
        if self.flops_per_second is not None and not 0 < self.flops_per_second < float("inf"):
            raise ConfigError(f"--flops {self.flops_per_second}: give operations a second, 4e14")
        if self.kv_dtype not in WEIGHT_NBYTES:
            raise ConfigError(f"no data type {self.kv_dtype!r}; known: {', '.join(WEIGHT_NBYTES)}")
        if self.hardware is not None:
            known_hardware(self.hardware)

    @property
    def shape(self) -> ModelShape:
        """The model's; raises ConfigError."""
        return load_shape(self.model)[0]


@dataclass(frozen=True, slots=True)
class Even:
    """Break-even lengths of one model.

    Attributes:
        computes: whose speed computing has. block_nbytes: of a block on the one rank.
        tokens: tier to the shortest prefix from which on a reload is always faster, up to
            `LONGEST_TOKENS`; None: there is none.
    """

    model: str
    computes: str
    block_nbytes: int
    tokens: Mapping[str, int | None]


def break_even(plan: EvenPlan, found: Calibration) -> Even | None:
    """Return the lengths for all tiers that were measured; None where no speed is known."""
    shape = plan.shape
    prefill, computes = _prefill(plan, shape, found)
    if prefill is None:
        return None
    kinds = {name: StoreKind(facts.kind) for name, facts in found.tiers.items()}
    seeds = {name: fit.seed for name, fit in found.fits.items()}
    links = Links.seeded(kinds, measured=seeds)
    nbytes = shape.kv_nbytes_per_token(WEIGHT_NBYTES[plan.kv_dtype]) * plan.block_size
    windows: tuple[WindowKV, ...] = ()
    if shape.num_window_layers:
        share = nbytes * shape.num_window_layers // shape.num_layers
        windows = (WindowKV.of(share, shape.window, plan.block_size),)
    tokens = {
        name: break_even_tokens(
            source, plan.block_size, nbytes, LONGEST_TOKENS, links, prefill, windows
        )
        for source, name in enumerate((DRAM, *kinds))
    }
    return Even(plan.model, computes, nbytes, tokens)


def _prefill(
    plan: EvenPlan, shape: ModelShape, found: Calibration
) -> tuple[PrefillModel | None, str]:
    if plan.flops_per_second is not None:
        speed = plan.flops_per_second
        return (
            PrefillModel(0.0, speed, shape, plan.max_tokens_per_step),
            f"{speed:.3g} operations a second, as given",
        )
    hardware: Hardware | None = None
    if plan.hardware is not None:
        hardware = known_hardware(plan.hardware)
    elif found.device == "cuda" and found.machine.gpus:
        hardware = hardware_of_driver(found.machine.gpus[0])
    if hardware is None:
        return None, ""
    prefill = hardware.prefill(shape, plan.max_tokens_per_step, plan.dtype)
    return prefill, f"{hardware.title}, from the catalogue"
