"""The metrics of kvtiers: one table of what there is, and plain counters that fill it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

logger = logging.getLogger(__name__)

Labels = tuple[str, ...]
Number = int | float
Series = dict[tuple[str, Labels], Number]


class MetricKind(StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"  # only grows
    GAUGE = "gauge"  # the last value counts


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        name: as Prometheus shows it. labels: names of its labels, in the order of their values.
        help: one sentence for operators.
    """

    name: str
    kind: MetricKind
    help: str
    labels: Labels = ()


BLOCKS_OFFLOADED: Final = "kvtiers_blocks_offloaded_total"
OFFLOADS_DROPPED: Final = "kvtiers_offloads_dropped_total"
BLOCKS_DEMOTED: Final = "kvtiers_blocks_demoted_total"
BLOCKS_PROMOTED: Final = "kvtiers_blocks_promoted_total"
BLOCKS_PREFETCHED: Final = "kvtiers_blocks_prefetched_total"
BLOCKS_RELOADED: Final = "kvtiers_blocks_reloaded_total"
TOKENS_RELOADED: Final = "kvtiers_tokens_reloaded_total"
BLOCKS_EVICTED: Final = "kvtiers_blocks_evicted_total"
BLOCKS_FAILED: Final = "kvtiers_blocks_failed_total"
BYTES_COPIED: Final = "kvtiers_bytes_copied_total"
COPY_SECONDS: Final = "kvtiers_copy_seconds_total"
PREDICTIONS: Final = "kvtiers_predictions_total"
PREDICTION_ERROR: Final = "kvtiers_prediction_error_total"
REQUESTS: Final = "kvtiers_requests_total"
LOOKUP_TOKENS: Final = "kvtiers_lookup_tokens_total"
HIT_TOKENS: Final = "kvtiers_hit_tokens_total"
WORKER_EVENTS: Final = "kvtiers_worker_events_total"
METRIC_ERRORS: Final = "kvtiers_metric_errors_total"
TIER_BLOCKS: Final = "kvtiers_tier_blocks"
TIER_CAPACITY_BLOCKS: Final = "kvtiers_tier_capacity_blocks"
PINNED_BLOCKS: Final = "kvtiers_pinned_blocks"
STORE_OFF: Final = "kvtiers_store_off"

_COUNTERS: Final = (
    (BLOCKS_OFFLOADED, "Blocks that arrived in a tier from HBM.", ("tier",)),
    (OFFLOADS_DROPPED, "Blocks that were not offloaded or demoted, by reason.", ("reason",)),
    (
        BLOCKS_DEMOTED,
        "Blocks that were given from DRAM to a lower tier, which may have held them already.",
        ("tier",),
    ),
    (
        BLOCKS_PROMOTED,
        "Blocks that came to DRAM from a lower tier and were kept there.",
        (),
    ),
    (BLOCKS_PREFETCHED, "Blocks that were ordered to DRAM for requests that wait.", ()),
    (BLOCKS_RELOADED, "Blocks that arrived in HBM, by the tier they came from.", ("tier",)),
    (TOKENS_RELOADED, "Tokens of the blocks that arrived in HBM, by tier.", ("tier",)),
    (BLOCKS_EVICTED, "Blocks that a tier dropped to make room.", ("tier",)),
    (BLOCKS_FAILED, "Blocks that a transfer did not deliver, by outcome.", ("outcome",)),
    (
        BYTES_COPIED,
        "Bytes that a link copied; a block that a store held already is not copied to it.",
        ("link",),
    ),
    (COPY_SECONDS, "Seconds that a link was copying.", ("link",)),
    (REQUESTS, "Requests that a reload was planned for, by decision.", ("decision",)),
    (
        PREDICTIONS,
        "Decisions whose prediction was compared with what happened: of the time of the `load`, "
        "or of the time to the first token (`ttft`).",
        ("of", "decision"),
    ),
    (
        PREDICTION_ERROR,
        "Sum of |predicted - measured| / measured of those; over their number it is the mean.",
        ("of", "decision"),
    ),
    (LOOKUP_TOKENS, "Prompt tokens that were looked up; only of requests that may use it.", ()),
    (HIT_TOKENS, "Tokens of the leading blocks that were found, by the tier found in.", ("tier",)),
    (
        WORKER_EVENTS,
        "What ranks had to give up on: fences_missed (offloads dropped because the engine would "
        "have waited too long), orders_refused (malformed orders).",
        ("event",),
    ),
    (
        METRIC_ERRORS,
        "Updates of metrics that were refused or clamped: a defect in kvtiers, by reason.",
        ("reason",),
    ),
)
_GAUGES: Final = (
    (TIER_BLOCKS, "Blocks that a tier holds.", ("tier",)),
    (TIER_CAPACITY_BLOCKS, "Blocks that a tier can hold.", ("tier",)),
    (PINNED_BLOCKS, "Blocks that may not be evicted now.", ()),
    (
        STORE_OFF,
        "1 while a store is switched off because it kept failing (`direction`: read or write); it "
        "is tried again after 1 s, and after twice as long each time that fails, up to 60 s.",
        ("tier", "direction"),
    ),
)
METRICS: Final[Mapping[str, Metric]] = {
    name: Metric(name, kind, text, labels)
    for kind, rows in ((MetricKind.COUNTER, _COUNTERS), (MetricKind.GAUGE, _GAUGES))
    for name, text, labels in rows
}
"""The one table of metrics: name to row."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Values of metrics at one time, or what was counted between two times.

    Attributes:
        counters, gauges: (name, label values) to value.
    """

    counters: Series = field(default_factory=dict)
    gauges: Series = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self.counters or self.gauges)

    def merged(self, later: Snapshot) -> Snapshot:
        """Return both as one: counters add up, of a gauge the later value stays."""
        counters = dict(self.counters)
        for key, value in later.counters.items():
            counters[key] = counters.get(key, 0) + value
        return Snapshot(counters, {**self.gauges, **later.gauges})

    def to_plain(self) -> dict[str, list[list[Any]]]:
        """Return lists and strings only, for wires that know no tuples as keys."""
        return {"counters": _rows(self.counters), "gauges": _rows(self.gauges)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Sequence[Sequence[Any]]]) -> Snapshot:
        """Return what `to_plain` was made of."""
        return cls(_series(plain.get("counters", ())), _series(plain.get("gauges", ())))


class Counters:
    """Plain counters and gauges by name and label values; one thread's.

    Nothing here raises: a metric must not stop a server. A wrong update changes no other value
    and is counted in `METRIC_ERRORS` instead:

    ===============  ==============================================================
    reason           update
    ===============  ==============================================================
    negative         a counter was to shrink: it stays (counters only grow)
    not_finite       NaN or infinity
    unknown_metric   a name that the table lacks, or lists as the other kind
    wrong_labels     more or fewer label values than the table says
    ===============  ==============================================================
    """

    def __init__(self) -> None:
        self._counters: Series = {}
        self._gauges: Series = {}
        self._drained: Series = {}

    def add(self, name: str, labels: Labels = (), value: Number = 1) -> None:
        """Add to a counter.

        Args:
            name: one of the constants of this module. labels: values of its labels, in order.
            value: >= 0.
        """
        key = (name, labels)
        if key in self._counters and 0 <= value < math.inf:  # most: its name and labels are right
            self._counters[key] += value
            return
        if not self._accepts(MetricKind.COUNTER, name, labels, value):
            return
        if value < 0:
            self._refuse("negative", name, labels, value)
            return
        self._counters[key] = self._counters.get(key, 0) + value

    def set(self, name: str, labels: Labels = (), value: Number = 0) -> None:
        """Set a gauge; arguments as for `add`, of any sign."""
        if self._accepts(MetricKind.GAUGE, name, labels, value):
            self._gauges[name, labels] = value

    def value(self, name: str, labels: Labels = ()) -> Number:
        """Return what was counted since the start, or a gauge's last value; 0 if never set."""
        key = (name, labels)
        return self._counters.get(key, self._gauges.get(key, 0))

    def snapshot(self) -> Snapshot:
        """Return everything since the start."""
        return Snapshot(dict(self._counters), dict(self._gauges))

    def drain(self) -> Snapshot:
        """Return what was counted since the last drain, without zeros, and the gauges as now."""
        delta = {
            key: value - self._drained.get(key, 0)
            for key, value in self._counters.items()
            if value != self._drained.get(key)
        }
        self._drained = dict(self._counters)
        return Snapshot({key: value for key, value in delta.items() if value}, dict(self._gauges))

    def _accepts(self, kind: MetricKind, name: str, labels: Labels, value: Number) -> bool:
        metric = METRICS.get(name)
        if metric is None or metric.kind is not kind:
            self._refuse("unknown_metric", name, labels, value)
        elif len(labels) != len(metric.labels):
            self._refuse("wrong_labels", name, labels, value)
        elif not math.isfinite(value):
            self._refuse("not_finite", name, labels, value)
        else:
            return True
        return False

    def _refuse(self, reason: str, name: str, labels: Labels, value: Number) -> None:
        key = (METRIC_ERRORS, (reason,))
        if key not in self._counters:
            logger.warning("metric %s%s with value %s refused: %s", name, labels, value, reason)
        self._counters[key] = self._counters.get(key, 0) + 1


def _rows(series: Series) -> list[list[Any]]:
    return [[name, list(labels), value] for (name, labels), value in series.items()]


def _series(rows: Iterable[Sequence[Any]]) -> Series:
    return {(str(name), tuple(map(str, labels))): value for name, labels, value in rows}


def reference_page() -> str:
    """Return ``docs/reference/metrics.md``, made from the table."""
    lines = [
        "# Metrics",
        "",
        "Written from the table in `kvtiers/observe/metrics.py` by",
        "`python -m kvtiers.observe.metrics > docs/reference/metrics.md`. Inside an engine every",
        "metric carries the engine's own labels before these.",
        "",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    lines += [
        "",
        "`link` is one of `hbm>dram`, `dram>hbm`, `STORE>dram` and `dram>STORE`; `tier` is `dram`",
        "or a store's name.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(reference_page())
