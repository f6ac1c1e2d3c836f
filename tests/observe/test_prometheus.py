"""Promises of `kvtiers.observe.prometheus`."""

from __future__ import annotations

import logging
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvtiers.observe import metrics
from kvtiers.observe.metrics import METRICS, Counters, MetricKind
from kvtiers.observe.prometheus import PrometheusExporter


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def exporter(registry: CollectorRegistry, labelnames: tuple[str, ...] = ()) -> PrometheusExporter:
    return PrometheusExporter(
        partial(Counter, registry=registry), partial(Gauge, registry=registry), labelnames, registry
    )


def filled() -> Counters:
    """Return counters in which every metric of the table has a value."""
    counters = Counters()
    for value, metric in enumerate(METRICS.values(), start=1):
        update = counters.add if metric.kind is MetricKind.COUNTER else counters.set
        update(metric.name, tuple(f"a {label}" for label in metric.labels), value)
    return counters


def test_whole_table_is_on_the_page(registry):
    exporter(registry).apply(filled().drain())
    for value, metric in enumerate(METRICS.values(), start=1):
        labels = {label: f"a {label}" for label in metric.labels}
        assert registry.get_sample_value(metric.name, labels) == value
    page = generate_latest(registry).decode()
    assert all(metric.help in page for metric in METRICS.values())


def test_deltas_add_up_and_gauges_are_set(registry):
    found, counters = exporter(registry), Counters()
    for pinned in (7, 4):
        counters.add(metrics.BLOCKS_PROMOTED, (), 3)
        counters.set(metrics.PINNED_BLOCKS, (), pinned)
        found.apply(counters.drain())
    assert registry.get_sample_value(metrics.BLOCKS_PROMOTED) == 6
    assert registry.get_sample_value(metrics.PINNED_BLOCKS) == 4


def test_engine_labels_come_first(registry):
    found = exporter(registry, ("model_name", "engine"))
    counters = Counters()
    counters.add(metrics.BLOCKS_EVICTED, ("dram",), 3)
    found.apply(counters.drain(), ("llama", 1))
    labels = {"model_name": "llama", "engine": "1", "tier": "dram"}
    assert registry.get_sample_value(metrics.BLOCKS_EVICTED, labels) == 3
    with pytest.raises(ValueError, match="1 values"):
        found.apply(counters.drain(), ("llama",))


def test_two_exporters_in_one_process_share_the_page(registry):
    """R91: two connectors register the same names."""
    first, second = exporter(registry, ("engine",)), exporter(registry, ("engine",))
    for found, engine in ((first, "0"), (second, "1"), (second, "0")):
        found.apply(filled().drain(), (engine,))
    name = metrics.BLOCKS_OFFLOADED
    one = filled().value(name, ("a tier",))
    assert registry.get_sample_value(name, {"engine": "0", "tier": "a tier"}) == 2 * one
    assert registry.get_sample_value(name, {"engine": "1", "tier": "a tier"}) == one


def test_two_exporters_on_the_default_registry_work():
    first, second = PrometheusExporter(), PrometheusExporter()
    first.apply(filled().drain())
    second.apply(filled().drain())


def test_names_taken_with_other_labels_are_left_out_with_a_warning(registry, caplog):
    exporter(registry, ("engine",)).apply(filled().drain(), ("0",))
    with caplog.at_level(logging.WARNING):
        other = exporter(registry, ("model_name",))
    assert len(caplog.records) == len(METRICS)
    other.apply(filled().drain(), ("llama",))
    labels = {"engine": "0", "tier": "a tier"}
    one = filled().value(metrics.BLOCKS_OFFLOADED, ("a tier",))
    assert registry.get_sample_value(metrics.BLOCKS_OFFLOADED, labels) == one


def test_unknown_series_from_a_newer_rank_are_left_out(registry):
    delta = metrics.Snapshot(
        {("kvtiers_future_total", ()): 1, (metrics.BLOCKS_EVICTED, ()): 1, ("x", ("y",)): -1},
        {("kvtiers_future", ()): 1},
    )
    known = exporter(registry)
    before = samples(registry)
    known.apply(delta)
    assert samples(registry) == before


def samples(registry):
    return [sample for metric in registry.collect() for sample in metric.samples]


def test_a_counter_never_shrinks(registry):
    """R90: Prometheus would raise, and end the loop that serves."""
    found = exporter(registry)
    for value in (3, -2, 0):
        found.apply(metrics.Snapshot({(metrics.BLOCKS_EVICTED, ("dram",)): value}))
    assert registry.get_sample_value(metrics.BLOCKS_EVICTED, {"tier": "dram"}) == 3


class Wrapper:
    """Like an engine's own metric classes: no registry, never complains about a name."""

    def __init__(self, name, documentation="", labelnames=None):
        self.name, self.labelnames, self.total = name, labelnames, 0

    def labels(self, *values):
        assert len(values) == len(self.labelnames)
        return self

    def inc(self, value):
        self.total += value


class GaugeWrapper(Wrapper):
    def __init__(self, name, documentation="", labelnames=None, multiprocess_mode=""):
        super().__init__(name, documentation, labelnames)

    def set(self, value):
        self.total = value


def test_an_engine_s_wrappers_do():
    made = []

    def counter(**arguments):
        made.append(Wrapper(**arguments))
        return made[-1]

    found = PrometheusExporter(counter, GaugeWrapper, ["model_name", "engine"])
    found.apply(filled().drain(), ["llama", 0])
    assert [wrapper.total for wrapper in made] == list(range(1, len(made) + 1))
