"""Promises of `kvtiers.observe.metrics`."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.observe import metrics
from kvtiers.observe.metrics import METRICS, Counters, MetricKind, Snapshot, reference_page

BLOCKS = metrics.BLOCKS_OFFLOADED
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def test_reference_page_is_current():
    assert PAGE.read_text() == reference_page(), "run python -m kvtiers.observe.metrics"


def test_table_keeps_the_rules_of_prometheus():
    for name, metric in METRICS.items():
        assert name == metric.name
        assert name.startswith("kvtiers_")
        assert name.endswith("_total") is (metric.kind is MetricKind.COUNTER)
        assert metric.help.endswith(".")


def test_every_constant_names_a_metric():
    constants = {
        value
        for name, value in vars(metrics).items()
        if name.isupper() and isinstance(value, str) and value.startswith("kvtiers_")
    }
    assert constants == set(METRICS)


def test_counts_add_up_by_label():
    counters = Counters()
    counters.add(BLOCKS, ("dram",))
    counters.add(BLOCKS, ("dram",), 5)
    counters.add(BLOCKS, ("nvme0",), 2)
    assert counters.value(BLOCKS, ("dram",)) == 6
    assert counters.value(BLOCKS, ("nvme0",)) == 2
    assert counters.value(BLOCKS, ("lmdb",)) == 0


def test_negative_step_is_clamped_and_counted(caplog):
    """R90: cached 768, external 8448 of 17050; the difference after a preemption is negative."""
    counters = Counters()
    counters.add(metrics.HIT_TOKENS, ("dram",), 8448)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            counters.add(metrics.HIT_TOKENS, ("dram",), 768 - 8448)
    assert counters.value(metrics.HIT_TOKENS, ("dram",)) == 8448
    assert counters.value(metrics.METRIC_ERRORS, ("negative",)) == 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "labels", "value", "reason"),
    [
        ("kvtiers_typo_total", (), 1, "unknown_metric"),
        (metrics.PINNED_BLOCKS, (), 1, "unknown_metric"),
        (BLOCKS, (), 1, "wrong_labels"),
        (BLOCKS, ("dram", "extra"), 1, "wrong_labels"),
        (metrics.COPY_SECONDS, ("hbm>dram",), float("nan"), "not_finite"),
        (metrics.COPY_SECONDS, ("hbm>dram",), float("inf"), "not_finite"),
    ],
)
def test_wrong_updates_are_counted_and_never_raise(name, labels, value, reason):
    counters = Counters()
    counters.add(name, labels, value)
    assert counters.snapshot().counters == {(metrics.METRIC_ERRORS, (reason,)): 1}


def test_gauges_keep_the_last_value_and_may_shrink():
    counters = Counters()
    counters.set(metrics.TIER_BLOCKS, ("dram",), 10)
    counters.set(metrics.TIER_BLOCKS, ("dram",), 3)
    counters.set(BLOCKS, ("dram",), 3)
    assert counters.value(metrics.TIER_BLOCKS, ("dram",)) == 3
    assert counters.value(metrics.METRIC_ERRORS, ("unknown_metric",)) == 1


def test_drain_gives_each_count_once_and_gauges_every_time():
    counters = Counters()
    counters.add(BLOCKS, ("dram",), 3)
    counters.add(metrics.BLOCKS_PROMOTED, (), 0)
    counters.set(metrics.PINNED_BLOCKS, (), 7)
    first, second = counters.drain(), counters.drain()
    assert first.counters == {(BLOCKS, ("dram",)): 3}
    assert second.counters == {}
    assert first.gauges == second.gauges == {(metrics.PINNED_BLOCKS, ()): 7}
    counters.add(BLOCKS, ("dram",), 2)
    assert counters.drain().counters == {(BLOCKS, ("dram",)): 2}
    assert counters.value(BLOCKS, ("dram",)) == 5


updates = st.lists(
    st.tuples(
        st.sampled_from([BLOCKS, metrics.BLOCKS_EVICTED, "kvtiers_typo_total"]),
        st.sampled_from([("dram",), ("nvme0",), ()]),
        st.integers(-5, 100),
    )
)


@given(parts=st.lists(updates, max_size=5))
def test_drained_deltas_sum_to_the_snapshot_and_never_shrink(parts):
    counters, total = Counters(), Snapshot()
    for part in parts:
        for update in part:
            counters.add(*update)
        delta = counters.drain()
        assert all(value > 0 for value in delta.counters.values())
        total = total.merged(delta)
    nonzero = {key: value for key, value in counters.snapshot().counters.items() if value}
    assert total.counters == nonzero


def test_merged_takes_the_later_gauge():
    early = Snapshot(gauges={(metrics.PINNED_BLOCKS, ()): 1})
    late = Snapshot(gauges={(metrics.PINNED_BLOCKS, ()): 2})
    assert early.merged(late) == late
    assert Snapshot().empty
    assert not late.empty


def test_snapshots_survive_the_wire():
    snapshot = Snapshot({(BLOCKS, ("dram",)): 3}, {(metrics.PINNED_BLOCKS, ()): 7})
    assert Snapshot.from_plain(json.loads(json.dumps(snapshot.to_plain()))) == snapshot
    assert Snapshot.from_plain({}) == Snapshot()
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
