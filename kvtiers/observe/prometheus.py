"""The table of metrics on a Prometheus page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import prometheus_client

from kvtiers.observe.metrics import METRICS, Metric, MetricKind, Snapshot

logger = logging.getLogger(__name__)

MetricClass = Callable[..., Any]
"""Like `prometheus_client.Counter`: called with ``name``, ``documentation``, ``labelnames``."""


class PrometheusExporter:
    """Registers the table of metrics and adds what was counted to it.

    Two exporters in one process share their collectors: the second finds the names taken and
    uses what is there.

    Args:
        counter_class, gauge_class: `prometheus_client.Counter` and ``Gauge``, or an engine's
            wrappers of them. To use another registry than the default one, pass
            ``functools.partial(Counter, registry=registry)`` and the registry.
        labelnames: labels that every metric carries before its own, such as ``model_name``
            and ``engine``.
        registry: where ``counter_class`` and ``gauge_class`` register.
    """

    def __init__(
        self,
        counter_class: MetricClass = prometheus_client.Counter,
        gauge_class: MetricClass = prometheus_client.Gauge,
        labelnames: Sequence[str] = (),
        registry: prometheus_client.CollectorRegistry = prometheus_client.REGISTRY,
    ) -> None:
        self._labelnames = tuple(labelnames)
        self._registry = registry
        classes = {MetricKind.COUNTER: counter_class, MetricKind.GAUGE: gauge_class}
        self._collectors: dict[str, Any] = {}
        for metric in METRICS.values():
            collector = self._collector(classes[metric.kind], metric)
            if collector is not None:
                self._collectors[metric.name] = collector

    def apply(self, delta: Snapshot, labelvalues: Sequence[object] = ()) -> None:
        """Add a drained snapshot.

        Args:
            delta: counters since the last call; gauges as they are now.
            labelvalues: one for each of ``labelnames``.

        Raises:
            ValueError: another number of label values than of label names.
        """
        if len(labelvalues) != len(self._labelnames):
            raise ValueError(f"{len(labelvalues)} values for the labels {self._labelnames}")
        for key, value in delta.counters.items():
            if value > 0 and (child := self._child(key, labelvalues)) is not None:
                child.inc(value)
        for key, value in delta.gauges.items():
            if (child := self._child(key, labelvalues)) is not None:
                child.set(value)

    def _child(self, key: tuple[str, tuple[str, ...]], labelvalues: Sequence[object]) -> Any | None:
        """Return the time series of a metric; None for one that is not exported."""
        name, labels = key
        collector = self._collectors.get(name)
        if collector is None or len(labels) != len(METRICS[name].labels):
            return None
        values = (*labelvalues, *labels)
        return collector.labels(*values) if values else collector

    def _collector(self, metric_class: MetricClass, metric: Metric) -> Any | None:
        """Return a new collector, or the one that has the name; None if that one is another's."""
        labelnames = [*self._labelnames, *metric.labels]
        arguments = {"name": metric.name, "documentation": metric.help, "labelnames": labelnames}
        if metric.kind is MetricKind.GAUGE:
            arguments["multiprocess_mode"] = "mostrecent"
        try:
            return metric_class(**arguments)
        except ValueError as error:  # the name is taken
            found = _registered(self._registry).get(metric.name)
            if found is None:
                raise
            if list(getattr(found, "_labelnames", labelnames)) == labelnames:
                return found
            logger.warning("metric %s is not exported: %s", metric.name, error)
            return None


def _registered(registry: prometheus_client.CollectorRegistry) -> Mapping[str, Any]:
    """Return a registry's collectors by name. Its public interface cannot ask for one."""
    names: Mapping[str, Any] = getattr(registry, "_names_to_collectors", {})
    return names
