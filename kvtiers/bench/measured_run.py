"""A whole measured comparison: measuring, resuming, calibrating, judging, cleaning up."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvtiers.bench.judge import (
    Calibrated,
    Verdict,
    best_split,
    comparable_lengths,
    judge,
    split_tier,
)
from kvtiers.bench.measure import (
    SPLIT,
    Measured,
    Splits,
    Watch,
    balancing_throttle,
    measure_splits,
    measure_ways,
    num_measurements,
    splits_left,
)
from kvtiers.bench.plan import MeasuredPlan
from kvtiers.bench.scratch import scratch_beside
from kvtiers.model.errors import ConfigError

POINTS_FILE: Final = "points.json"


@dataclass(frozen=True, slots=True)
class MeasuredResult:
    """A run.

    Attributes:
        device: what it ran on, as people name it.
        verdict: None while too little is measured to fit a model.
        notes: what the reader should know.
    """

    plan: MeasuredPlan
    device: str
    points: tuple[Measured, ...]
    verdict: Verdict | None
    notes: tuple[str, ...]

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "plan": self.plan.to_plain(),
            "device": self.device,
            "notes": list(self.notes),
            "verdict": None if self.verdict is None else self.verdict.to_plain(),
            "points": [asdict(point) for point in self.points],
        }


def run_measured(
    plan: MeasuredPlan,
    folder: Path | None,
    output: Path | None,
    resume: bool,
    progress: Callable[[str, int], None],
) -> MeasuredResult:
    """Measure, calibrate and judge.

    Args:
        folder: on the disk to be measured; stores are made below it and removed. None: where
            temporary files lie.
        output: where finished points are written, one after another; None: nowhere.
        resume: go on from the points there.
        progress: called with what happens next, and how many measurements are done.

    Raises:
        ConfigError: a folder cannot be used, or holds points of another plan.
        BenchError: a measurement went wrong.
    """
    _check_device(plan.device)
    plan, points = _read_points(plan, output) if resume else (plan, [])
    if plan.balanced and plan.throttle is None and plan.stores:
        progress("finding a throttle", 0)
        plan = replace(plan, throttle=balancing_throttle(plan))
    taken = list(points)

    def keep(point: Measured) -> None:
        taken.append(point)
        if output is not None:
            _write_points(plan, taken, output)

    def tell(what: str) -> None:
        progress(what, len(taken))

    watch = Watch(keep, tell, time.monotonic() + plan.max_seconds)
    notes = [*_notes(plan)]
    with _scratch(folder) as scratch:
        points = measure_ways(plan, scratch / "ways", points, watch)
    done = sum(point.way != SPLIT for point in points)
    complete = done == num_measurements(plan)
    if not complete:
        notes.append(
            f"Time was over after {plan.max_seconds:g} s: {done} of {num_measurements(plan)} "
            "measurements were made; run again with --resume."
        )
    if complete and plan.stores and plan.num_stages > 1:
        points, complete = _with_splits(plan, folder, points, watch, notes)
    verdict = None
    try:
        verdict = judge(plan, points, complete)
    except ValueError as error:
        notes.append(f"No model was fitted: {error}.")
    return MeasuredResult(plan, device_name(plan.device), tuple(points), verdict, tuple(notes))


def _with_splits(
    plan: MeasuredPlan, folder: Path | None, points: list[Measured], watch: Watch, notes: list[str]
) -> tuple[list[Measured], bool]:
    """Return the measurements and those of splits, and whether all were made; adds notes."""
    wanted = _wanted_splits(plan, points)
    if not wanted.lengths:
        notes.append(
            f"No split was measured: on {wanted.store}, load and computation are not within a "
            "factor of 2 of each other at any length; --throttle auto can make them so."
        )
    with _scratch(folder) as scratch:
        points = measure_splits(plan, scratch / "splits", wanted, points, watch)
    complete = not splits_left(plan, wanted, points)
    if not complete:
        notes.append("Time was over before every split was measured; run again with --resume.")
    return points, complete


def _wanted_splits(plan: MeasuredPlan, points: list[Measured]) -> Splits:
    store = split_tier(plan)
    lengths = comparable_lengths(Calibrated(plan, points), store)

    def choose(so_far: Sequence[Measured], num_tokens: int) -> int:
        return best_split(plan, so_far, num_tokens)

    return Splits(store, lengths, choose)


def _check_device(device: str) -> None:
    import torch  # noqa: PLC0415 - slow to import

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA device; measure with --device cpu")


def device_name(device: str) -> str:
    """Return what a torch device is called."""
    import torch  # noqa: PLC0415 - slow to import

    if device == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "CPU"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(os.sched_getaffinity(0))} cores" if names else "CPU"


def _notes(plan: MeasuredPlan) -> list[str]:
    notes = [
        f"A random model of the shape of {plan.model_name}; weights do not change the speed.",
        "Every second length was fitted to; the others judge the model.",
    ]
    if plan.throttle is not None:
        notes.append(
            f"Reads of {', '.join(plan.stores)} were slowed down to {plan.throttle / 1e6:g} MB/s "
            "on purpose, so that recompute and reload cross: this says nothing about the disk."
        )
    return notes


@contextlib.contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    """Make an empty folder that is gone afterwards; also removes those of runs that were killed."""
    above = Path(tempfile.gettempdir()) if folder is None else folder
    try:
        above.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{above}: no stores can be made there: {error.strerror}") from error
    with scratch_beside(above / "stores", inside_mount=False) as scratch:
        yield scratch


def _read_points(plan: MeasuredPlan, output: Path | None) -> tuple[MeasuredPlan, list[Measured]]:
    """Return the plan, with the throttle that was found for it, and the points that are done."""
    if output is None:
        raise ConfigError("--resume needs the folder of the run that it goes on with: --output")
    path = output / POINTS_FILE
    if not path.is_file():
        return plan, []
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        points = [Measured(**point) for point in held["points"]]
        other = {**held["plan"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path}: is no file of points ({error}); remove it") from error
    if plan.balanced and plan.throttle is None:
        plan = replace(plan, throttle=other.get("throttle"))
    mine = plan.to_plain()
    ignored = ("max_seconds", "max_disk_nbytes")
    differing = [n for n in mine if n not in ignored and other.get(n) != mine[n]]
    if differing:
        shown = "; ".join(f"{n} {other.get(n)}, now {mine[n]}" for n in differing)
        raise ConfigError(f"{path}: holds points of another run ({shown}); give the same options")
    return plan, points


def _write_points(plan: MeasuredPlan, points: list[Measured], output: Path) -> None:
    """Write all points; whoever reads sees the old ones or the new ones."""
    content = json.dumps({"plan": plan.to_plain(), "points": [asdict(p) for p in points]})
    try:
        output.mkdir(parents=True, exist_ok=True)
        partial = output / f"{POINTS_FILE}.partial"
        partial.write_text(content, encoding="utf-8")
        partial.replace(output / POINTS_FILE)
    except OSError as error:
        raise ConfigError(f"{output}: cannot write there: {error.strerror}") from error
