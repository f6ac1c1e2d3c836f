"""Replays a trace through the modelled engine and the real control plane, on a virtual clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtiers.cost.links import write_link
from kvtiers.cost.prefill import PrefillModel
from kvtiers.engines.reference.engine import Engine
from kvtiers.engines.reference.modelled_runner import ModelledRunner
from kvtiers.engines.reference.report import Served, StepReport
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.serving import drive
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.config import Config
from kvtiers.model.config_tiers import NvmeTier, StoreTier
from kvtiers.model.errors import ConfigError
from kvtiers.model.messages import DRAM
from kvtiers.observe.metrics import BLOCKS_FAILED, BYTES_COPIED, OFFLOADS_DROPPED, Series
from kvtiers.simulate.arrivals import ArrivalPlan, ArrivalProcess
from kvtiers.simulate.machine import MachinePlan, not_modelled
from kvtiers.simulate.measures import HBM, Percentiles, RunLengths, Timeline, TokenSums
from kvtiers.simulate.replay_result import Replay
from kvtiers.simulate.share import servable
from kvtiers.simulate.trace import Trace, TraceRequest, infinite_hits

DAY_SECONDS: Final = 86_400.0

Progress = Callable[[int, int], None]
"""Called with how many requests have ended, and how many there are."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What is replayed, on what.

    Attributes:
        label: of the report. config: the tiers below HBM; None: there are none.
        warmup: share of the requests, the first ones to come, that only fill the caches.
        max_seconds: of real time, after which it stops with what it has; None: no bound.
    """

    trace: Trace
    machine: MachinePlan
    config: Config | None = None
    label: str = "replay"
    arrivals: ArrivalPlan = field(default_factory=ArrivalPlan)
    warmup: float = 0.0
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"a warm-up of {self.warmup} must be in [0, 1): a share of requests")
        if self.max_seconds is not None and not self.max_seconds >= 0:
            raise ConfigError(f"a replay of {self.max_seconds} seconds at most; must be at least 0")


def replay(plan: ReplayPlan, progress: Progress | None = None) -> Replay:
    """Replay a trace; a KeyboardInterrupt ends it, and what was served until then counts.

    Args:
        progress: called as requests end.

    Raises:
        CapacityError: the engine would not start, or a tier does not hold one block.
        ConfigError: a name is not known, or no request is short enough.
    """
    settings = plan.machine.settings(plan.trace)
    requests = servable(plan.trace, settings.max_model_len).requests
    engine = plan.machine.engine(settings, plan.config)
    try:
        run = _Run(plan, engine, requests)
        run.run(progress or (lambda _ended, _num: None))
        return run.result(settings)
    finally:
        engine.close()


class _Run:
    """One replay, while it runs: the arrivals of its requests, and what is measured of them."""

    def __init__(self, plan: ReplayPlan, engine: Engine, requests: Sequence[TraceRequest]) -> None:
        self._plan = plan
        self._engine = engine
        self._requests = requests
        self._arrivals: ArrivalProcess = plan.arrivals.of(requests)
        self._num_warmup = int(plan.warmup * len(requests))
        self._turn: dict[int, int] = {}  # position to rank in the order of arrival
        self._served: list[Served] = []
        self._num_ended = self._num_steps = 0
        self._last_arrival = 0.0
        self._interrupted = False
        self._itl = RunLengths()
        self._timeline = Timeline()
        self._advice: dict[str, None] = {}
        self._began: float | None = None
        self._counters_then: Series = {}
        self._preempted_then = (0, 0)
        self._cpu_seconds = 0.0

    def run(self, progress: Progress) -> None:
        """Serve all requests, or as many as there is time for."""
        started, cpu, left = time.monotonic(), time.process_time(), self._plan.max_seconds
        try:
            for report in drive(self._engine, self):
                self._note(report, progress)
                if left is not None and time.monotonic() - started > left:
                    break
        except KeyboardInterrupt:
            self._interrupted = True  # what was served until now is the answer
        self._cpu_seconds = time.process_time() - cpu
        progress(self._num_ended, len(self._requests))

    @property
    def next_at(self) -> float | None:
        """See `kvtiers.engines.reference.serving.Arrivals`."""
        return self._arrivals.next_at

    def take(self, now: float) -> list[NewRequest]:
        """See `kvtiers.engines.reference.serving.Arrivals`."""
        return [self._request(position, at) for position, at in self._arrivals.take(now)]

    def _request(self, position: int, at: float) -> NewRequest:
        if len(self._turn) == self._num_warmup:
            self._begin(at)
        self._turn[position] = len(self._turn)
        request = self._requests[position]
        self._last_arrival = max(self._last_arrival, at)
        size = self._engine.settings.hash_tokens
        whole = request.block_ids[: request.num_prompt_tokens // size].tolist()
        return NewRequest(
            request_id=str(position),
            arrived_at=at,
            max_tokens=max(1, request.num_output_tokens),
            num_prompt_tokens=request.num_prompt_tokens,
            block_hashes=[number.to_bytes(16, "little") for number in whole],
        )

    def _begin(self, at: float) -> None:
        """Begin to measure: the warm-up is over."""
        self._began = at
        self._counters_then = self._counters()
        gauges = self._engine.gauges
        self._preempted_then = (gauges.num_preemptions, gauges.num_swaps)

    def _note(self, report: StepReport, progress: Progress) -> None:
        """Take in a step."""
        self._num_steps += 1
        if self._began is not None and report.itl_seconds:
            self._itl.extend(report.itl_seconds)
        for served in report.finished:
            position = int(served.request_id)
            self._arrivals.ended(position, served.finished_at)
            self._num_ended += 1
            if self._turn[position] >= self._num_warmup:
                self._served.append(served)
        if report.finished:
            progress(self._num_ended, len(self._requests))
        for advice in report.advice:
            self._advice.setdefault(advice)
        if self._timeline.due(self._engine.now):
            self._sample(report)

    def _sample(self, report: StepReport) -> None:
        """Add a point to the timeline."""
        gauges, connector = report.gauges, self._engine.runner.connector
        usage = {} if connector is None else connector.controller.usage()
        if isinstance(self._engine.runner, ModelledRunner):
            usage |= self._engine.runner.shared_usage
        self._timeline.add(
            self._engine.now,
            gauges.kv_use,
            (gauges.num_running, gauges.num_waiting, gauges.num_swapped),
            {name: blocks / capacity for name, (blocks, capacity) in usage.items()},
        )

    def _counters(self) -> Series:
        connector = self._engine.runner.connector
        return {} if connector is None else connector.counters.snapshot().counters

    def result(self, settings: EngineSettings) -> Replay:
        """Return what was measured."""
        served, plan, counted = self._served, self._plan, self._counted()
        seconds = max(self._engine.now - (self._began or 0.0), 1e-9)
        prompts = [it.num_prompt_tokens for it in served]
        short = [num for num in prompts if num <= settings.hash_tokens]
        written, gauges = self._written(counted), self._engine.gauges
        tokens = self._tokens()
        return Replay(
            label=plan.label,
            title=plan.machine.title,
            complete=self._num_ended == len(self._requests),
            interrupted=self._interrupted,
            num_requests=len(served),
            num_warmup=self._num_warmup,
            num_skipped=len(plan.trace.requests) - len(self._requests),
            longest=settings.max_model_len,
            config=None if plan.config is None else _dumped(plan.config),
            concurrency=plan.arrivals.concurrency,
            began_seconds=self._began or 0.0,
            seconds=seconds,
            arrival_seconds=max(0.0, self._last_arrival - (self._began or 0.0)),
            block_size=settings.hash_tokens,
            num_short=len(short),
            num_short_tokens=sum(short),
            num_late=sum((it.admitted_at or 0.0) > self._last_arrival for it in served),
            output_tokens_per_second=tokens.output / seconds,
            prompt_tokens_per_second=tokens.prompt / seconds,
            requests_per_second=len(served) / seconds,
            tokens=tokens,
            infinite_hit_rate=self._infinite(),
            num_computed_tokens=sum(it.num_computed_tokens for it in served),
            num_reloaded_tokens=sum(it.num_reloaded_tokens for it in served),
            num_recomputed_tokens=sum(it.num_recomputed_tokens for it in served),
            saved_seconds=self._saved_seconds(settings),
            num_preemptions=gauges.num_preemptions - self._preempted_then[0],
            num_swaps=gauges.num_swaps - self._preempted_then[1],
            written_nbytes=written,
            written_nbytes_per_device_day=self._each_day(written, seconds),
            dropped=_labelled(counted, OFFLOADS_DROPPED),
            failed=_labelled(counted, BLOCKS_FAILED),
            advice=tuple(self._advice),
            ignored=not_modelled(plan.config),
            timeline=self._timeline,
            cpu_seconds=self._cpu_seconds,
            num_steps=self._num_steps,
            **self._latencies(),
        )

    def _latencies(self) -> dict[str, Percentiles]:
        """Return how long requests took, by name."""
        served, named = self._served, dict[str, Iterable[float | None]]()
        named["wait"] = (
            None if it.admitted_at is None else it.admitted_at - it.arrived_at for it in served
        )
        named["ttft"] = (it.ttft_seconds for it in served)
        named["tpot"] = (it.tpot_seconds for it in served)
        named["e2e"] = (it.e2e_seconds for it in served)
        found = {
            name: Percentiles.of([value for value in values if value is not None])
            for name, values in named.items()
        }
        return found | {"itl": self._itl.percentiles()}

    @property
    def _stores(self) -> Sequence[StoreTier]:
        """The configured tiers below DRAM."""
        return self._plan.config.stores if self._plan.config else ()

    def _written(self, counted: Series) -> dict[str, int]:
        """Return the bytes that went to each store, of all ranks."""
        ranks = self._plan.machine.tensor_parallel_size
        return {
            tier.name: int(counted.get((BYTES_COPIED, (write_link(tier.name),)), 0)) * ranks
            for tier in self._stores
        }

    def _each_day(self, written: Mapping[str, int], seconds: float) -> dict[str, float]:
        """Return what each device of a store would be written in a day, at this rate."""
        return {
            tier.name: written[tier.name] / seconds * DAY_SECONDS / _num_devices(tier)
            for tier in self._stores
        }

    def _counted(self) -> Series:
        """Return what kvtiers counted since the warm-up."""
        then = self._counters_then
        return {key: value - then.get(key, 0) for key, value in self._counters().items()}

    def _tokens(self) -> TokenSums:
        config = self._plan.config
        below = [] if config is None else [DRAM, *(tier.name for tier in config.stores)]
        names = [HBM, *below]
        hits = Counter(dict.fromkeys(names, 0))
        for it in self._served:
            hits[HBM] += it.num_local_tokens
            hits.update(it.reloaded_by_tier)
        prompt = sum(it.num_prompt_tokens for it in self._served)
        output = sum(it.num_output_tokens for it in self._served)
        return TokenSums(prompt, output, dict(hits), prompt - hits.total())

    def _infinite(self) -> float:
        """Return the infinite cache's hit rate on what is measured; the warm-up fills it too."""
        measured = {int(it.request_id) for it in self._served}
        came = [self._requests[position] for position in self._turn]
        hits = zip(self._turn, infinite_hits(came, self._plan.trace.block_size), strict=True)
        hit = sum(num for position, num in hits if position in measured)
        prompt = sum(it.num_prompt_tokens for it in self._served)
        return hit / prompt if prompt else 0.0

    def _saved_seconds(self, settings: EngineSettings) -> float:
        machine = self._plan.machine.machine(None)
        most = settings.max_num_batched_tokens
        prefill = PrefillModel.of(machine.speed, machine.model, most)
        prompt = [it.num_prompt_tokens for it in self._served]
        hit = [it.num_local_tokens + sum(it.reloaded_by_tier.values()) for it in self._served]
        rest = [num - had for num, had in zip(prompt, hit, strict=True)]
        if not prompt:
            return 0.0
        return float((prefill.seconds(prompt) - prefill.seconds(rest, hit)).sum())


def _dumped(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def _num_devices(tier: StoreTier) -> int:
    """Return over how many disks a store is spread: one a path."""
    return len(tier.paths) if isinstance(tier, NvmeTier) else 1


def _labelled(counted: Series, metric: str) -> dict[str, int]:
    """Return a metric's values by its one label, without zeros."""
    return {
        labels[0]: int(value)
        for (name, labels), value in counted.items()
        if name == metric and value
    }
