"""Measuring the links of this machine, for a calibration file."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvtiers import __version__
from kvtiers.bench.others import Others
from kvtiers.bench.probe_copies import (
    HBM_LINKS,
    HOST_LINKS,
    CopySide,
    HostSide,
    TorchSide,
    measure_copies,
)
from kvtiers.bench.probe_pace import Pace
from kvtiers.bench.probe_plan import ProbePlan, Shape
from kvtiers.bench.probe_tiers import measure_tier, tier_probe
from kvtiers.connector.machine import machine_facts
from kvtiers.cost.calibration import Calibration, Cell, TierFacts, fit_links
from kvtiers.cost.links import (
    HBM_SEED,
    STORE_READ_SEEDS,
    STORE_WRITE_SEEDS,
    LinkSeed,
    StoreKind,
    read_link,
    write_link,
)
from kvtiers.model.config import Config
from kvtiers.model.errors import ConfigError, KVTiersError

_COPY_SHARE: Final = 0.2  # of the time, for all copies; they take little each

_QUIET_SHARE: Final = 0.05  # of all CPU time, that others may use without being mentioned


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What was measured.

    Attributes:
        missing: what of the configuration was not measured, and why.
        notes: what else the reader should know.
    """

    calibration: Calibration
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def num_shapes(plan: ProbePlan) -> int:
    """Return how many shapes a probe reports at most, for a progress bar."""
    num_sides = len(plan.config.stores) + (2 if plan.device != "cpu" else 1)
    return num_sides * len(list(plan.shapes()))


def run_probe(plan: ProbePlan, on_shape: Callable[[str, Shape], None]) -> ProbeResult:
    """Measure all links that a configuration has here, and fit them.

    What a store needs lies beside its path while it is measured, and is removed at the end,
    also if that is an exception.

    Args:
        on_shape: told link or tier name of every shape that was measured.

    Raises:
        ConfigError: a device was asked for that is not there.
    """
    others = Others()
    device, note = _device(plan)
    missing: list[str] = []
    tiers: dict[str, TierFacts] = {}
    cells = list(_copies(plan, device, on_shape))
    for tier in plan.config.stores:
        share = (1.0 - _COPY_SHARE) * plan.seconds / len(plan.config.stores)
        pace = Pace(share, len(list(plan.shapes())), plan.max_repeats)
        found: list[Cell] = []
        try:
            with tier_probe(tier, plan) as probe:
                tiers[tier.name] = probe.facts
                found.extend(measure_tier(probe, plan, pace, on_shape))
        except (KVTiersError, OSError) as error:
            missing.append(f"{tier.name}: {error}")
            tiers.pop(tier.name, None)
            continue
        if pace.exhausted:
            note = (*note, f"{tier.name}: too slow for all shapes in {share:.0f} s; some are left")
        cells += found
    note = (*note, *_disturbance(others.share()))
    calibration = Calibration(
        date=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        kvtiers=__version__,
        device=device,
        machine=machine_facts(),
        tiers=tiers,
        fits=fit_links(cells, _seeds(plan.config)),
        cells=tuple(cells),
    )
    return ProbeResult(calibration, tuple(missing), note)


def _copies(plan: ProbePlan, device: str, on_shape: Callable[[str, Shape], None]) -> Iterator[Cell]:
    """Measure the way to an engine's memory, and where that is a GPU's the host copier too."""
    sides: list[CopySide] = [HostSide(plan, HBM_LINKS)]
    if device != "cpu":
        sides = [TorchSide(plan, device), HostSide(plan, HOST_LINKS)]
    for side in sides:
        seconds = _COPY_SHARE * plan.seconds / len(sides)
        pace = Pace(seconds, len(list(plan.shapes())), plan.max_repeats)
        yield from measure_copies(side, plan, pace, on_shape)


def _device(plan: ProbePlan) -> tuple[str, tuple[str, ...]]:
    """Return the device to measure, and what there is to say of that choice."""
    if plan.device == "cpu":
        return "cpu", ()
    why = _why_no_gpu()
    if not why:
        return "cuda", ()
    if plan.device == "cuda":
        raise ConfigError(f"no GPU to measure: {why}; give --device cpu, or auto")
    return "cpu", (f"No GPU was measured ({why}): the way to HBM is that of an engine on the CPU.",)


def _disturbance(share: float | None) -> tuple[str, ...]:
    if share is None or share <= _QUIET_SHARE:
        return ()
    return (
        f"Disturbed: other programs used {share:.0%} of all CPU time meanwhile. Measure again when "
        "the machine is idle.",
    )


def _why_no_gpu() -> str:
    try:
        import torch  # noqa: PLC0415 - slow, and an optional package
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def _seeds(config: Config) -> dict[str, LinkSeed]:
    seeds = dict.fromkeys((*HBM_LINKS.values(), *HOST_LINKS.values()), HBM_SEED)
    for tier in config.stores:
        kind = StoreKind(tier.kind)
        seeds[read_link(tier.name)] = STORE_READ_SEEDS[kind]
        seeds[write_link(tier.name)] = STORE_WRITE_SEEDS[kind]
    return seeds
