"""Recompute against reload on paper: for a model and a machine that one need not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np

from kvtiers.cost.break_even import break_even_tokens
from kvtiers.cost.catalogue import known_hardware, known_storage
from kvtiers.cost.engine_memory import check_ranks
from kvtiers.cost.hardware import WEIGHT_NBYTES, Figure, Hardware, Storage, catalogued_links
from kvtiers.cost.links import Links
from kvtiers.cost.loads import WindowKV
from kvtiers.cost.model_source import load_shape
from kvtiers.cost.planner import PlanPolicy, Prompt, ReloadPlan, plan_reload
from kvtiers.cost.prefill import ModelShape, PrefillModel
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.errors import ConfigError
from kvtiers.model.messages import DRAM

DEFAULT_LENGTHS: Final = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
_MOST_TOKENS: Final = 10_000_000
DEFAULT_STORES: Final = ("nvme-gen5", "nvme-gen4", "sata")


@dataclass(frozen=True, slots=True)
class PaperPlan:
    """What is compared.

    Attributes:
        model: a name that `known_model` knows, or the path of a ``config.json`` or its folder.
        hardware: a name that `known_hardware` knows. stores: names that `known_storage` knows.
        dtype: of the weights. kv_dtype: of the KV cache.
        lengths: tokens of the prompts, of which all but the last token can be reloaded.
        block_size: tokens of a block. max_tokens_per_step: the engine's budget.
        copies_per_block: copy calls that HBM needs for one block.
    """

    model: str
    hardware: str
    stores: tuple[str, ...] = DEFAULT_STORES
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    tensor_parallel_size: int = 1
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    block_size: int = 16
    max_tokens_per_step: int = 8192
    copies_per_block: int = 1

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) <= self.block_size:
            raise ConfigError(
                f"lengths {self.lengths}: each must be more than a block of {self.block_size}"
            )
        if max(self.lengths) > _MOST_TOKENS:
            raise ConfigError(
                f"lengths {self.lengths}: at most {_MOST_TOKENS:,} tokens are compared"
            )
        if min(self.block_size, self.max_tokens_per_step, self.tensor_parallel_size) < 1:
            raise ConfigError("block size, tokens of a step and ranks must be at least 1")
        if self.kv_dtype not in WEIGHT_NBYTES:
            raise ConfigError(f"no data type {self.kv_dtype!r}; known: {', '.join(WEIGHT_NBYTES)}")


@dataclass(frozen=True, slots=True)
class Point:
    """One prompt length on one tier; seconds to the first token, predicted.

    Attributes:
        reload_seconds: with every whole block reloaded, then the rest computed.
        chosen_seconds: with what the planner reloads. num_chosen_tokens: how many it does.
        split_seconds: with what it reloads where loads come layer by layer inside the step.
        num_split_tokens: how many it reloads then.
    """

    num_tokens: int
    recompute_seconds: float
    reload_seconds: float
    chosen_seconds: float
    num_chosen_tokens: int
    split_seconds: float
    num_split_tokens: int

    @property
    def gain(self) -> float:
        """How many times faster a reload is than computing."""
        return self.recompute_seconds / self.reload_seconds

    @property
    def split_gain(self) -> float:
        """How many times faster a split is than the better of computing and reloading."""
        return min(self.recompute_seconds, self.reload_seconds) / self.split_seconds


@dataclass(frozen=True, slots=True)
class TierResult:
    """One tier.

    Attributes:
        break_even_tokens: the shortest prefix from which on a reload is always faster, up to the
            longest length; None: there is none.
    """

    name: str
    title: str
    break_even_tokens: int | None
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class PaperResult:
    """The comparison, and everything it rests on.

    Attributes:
        model_source: where the model's sizes come from.
        notes: what the reader should know, such as weights that do not fit.
        assumptions: name of each figure, its value and its source.
    """

    plan: PaperPlan
    title: str
    model_source: str
    kv_nbytes_per_token: int
    num_params: int
    tiers: tuple[TierResult, ...]
    notes: tuple[str, ...]
    assumptions: Mapping[str, Figure]

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        plain = asdict(self)
        for tier, result in zip(plain["tiers"], self.tiers, strict=True):
            for point, found in zip(tier["points"], result.points, strict=True):
                point.update(gain=found.gain, split_gain=found.split_gain)
        return plain


def run_paper(plan: PaperPlan) -> PaperResult:
    """Predict every length on every tier.

    Raises:
        ConfigError: a name is not known, a field is missing, or there is no figure.
        CapacityError: the model's heads do not divide over the ranks.
    """
    shape, source = load_shape(plan.model)
    hardware = known_hardware(plan.hardware)
    stores = {name: known_storage(name) for name in plan.stores}
    ranks = plan.tensor_parallel_size
    check_ranks(shape, ranks)
    prefill = hardware.prefill(shape, plan.max_tokens_per_step, plan.dtype, ranks)
    links = catalogued_links(hardware, stores, plan.copies_per_block, ranks)
    kv_nbytes = shape.kv_nbytes_per_token(WEIGHT_NBYTES[plan.kv_dtype], ranks)
    bench = _Bench(plan, shape, prefill, links, kv_nbytes * plan.block_size)
    titles = {DRAM: "DRAM", **{name: storage.title for name, storage in stores.items()}}
    tiers = tuple(
        TierResult(name, title, bench.break_even_tokens(idx), bench.points(idx))
        for idx, (name, title) in enumerate(titles.items())
    )
    devices = hardware.title if ranks == 1 else f"{ranks} x {hardware.title}"
    return PaperResult(
        plan=plan,
        title=f"{plan.model} on {devices}",
        model_source=source,
        kv_nbytes_per_token=kv_nbytes,
        num_params=shape.num_params,
        tiers=tiers,
        notes=_notes(plan, shape, hardware),
        assumptions=_assumptions(hardware, stores),
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """The models of one machine, asked for one tier after another (0 is DRAM)."""

    plan: PaperPlan
    shape: ModelShape
    prefill: PrefillModel
    links: Links
    block_nbytes: int

    @property
    def windows(self) -> tuple[WindowKV, ...]:
        """Layers that look back a window are one KV group, of which little is loaded."""
        shape = self.shape
        if not shape.num_window_layers:
            return ()
        nbytes = self.block_nbytes * shape.num_window_layers // shape.num_layers
        return (WindowKV.of(nbytes, shape.window, self.plan.block_size),)

    def points(self, source: int) -> tuple[Point, ...]:
        return tuple(self._point(num_tokens, source) for num_tokens in self.plan.lengths)

    def break_even_tokens(self, source: int) -> int | None:
        longest = max(self.plan.lengths)
        block_size, links = self.plan.block_size, self.links
        nbytes, windows = self.block_nbytes, self.windows
        return break_even_tokens(source, block_size, nbytes, longest, links, self.prefill, windows)

    def _point(self, num_tokens: int, source: int) -> Point:
        serial = self._plan(num_tokens, source, num_stages=1)
        split = self._plan(num_tokens, source, num_stages=self.shape.num_layers)
        return Point(
            num_tokens=num_tokens,
            recompute_seconds=serial.recompute_seconds,
            reload_seconds=serial.reload_seconds,
            chosen_seconds=serial.chosen_seconds,
            num_chosen_tokens=serial.num_blocks * self.plan.block_size,
            split_seconds=split.chosen_seconds,
            num_split_tokens=split.num_blocks * self.plan.block_size,
        )

    def _plan(self, num_tokens: int, source: int, num_stages: int) -> ReloadPlan:
        num_blocks = (num_tokens - 1) // self.plan.block_size
        return plan_reload(
            np.full(num_blocks, source, np.uint8),
            np.ones(num_blocks + 1, np.bool_),
            Prompt(num_tokens, 0, self.plan.block_size, self.block_nbytes, windows=self.windows),
            self.links,
            self.prefill,
            PlanPolicy(CostMode.AUTO, margin=0.0, num_load_stages=num_stages),
        )


def _notes(plan: PaperPlan, shape: ModelShape, hardware: Hardware) -> tuple[str, ...]:
    notes = ["Predicted from published figures; nothing was run."]
    weights = shape.num_params * WEIGHT_NBYTES[plan.dtype] / plan.tensor_parallel_size
    memory = hardware.memory_nbytes.value
    if weights > memory:
        notes.append(
            f"{weights / 1e9:.0f} GB of weights a device do not fit {memory / 1e9:.0f} GB: this "
            "engine would not start; use more ranks"
        )
    return tuple(notes)


def _assumptions(hardware: Hardware, stores: Mapping[str, Storage]) -> dict[str, Figure]:
    """Return every figure that the result rests on, by a name that people read."""
    found: dict[str, Figure] = {}
    entries: Sequence[tuple[str, Hardware | Storage]] = [
        (hardware.title, hardware),
        *((storage.title, storage) for storage in stores.values()),
    ]
    for title, entry in entries:
        for field in fields(entry):
            value = getattr(entry, field.name)
            name = f"{title}, {field.name.replace('_', ' ')}"
            if isinstance(value, Figure):
                found[name] = value
            elif isinstance(value, Mapping):
                found.update({f"{name}, {key}": figure for key, figure in value.items()})
    return found
