"""Runs one request at a time on the reference model, with kvtiers below its KV blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtiers.connector.rank import WrapStore
from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.step import Reload, Step
from kvtiers.connector.worker import Loaded, WorkerConnector
from kvtiers.engines.reference.connect import EngineFacts, connect, disconnect
from kvtiers.engines.reference.model import Chunk, ReferenceModel
from kvtiers.engines.reference.paged_kv import PagedKV
from kvtiers.model.config import Config
from kvtiers.model.errors import CapacityError, ConfigError, ProtocolError
from kvtiers.model.keys import prefix_hash_chain
from kvtiers.model.layer_ranges import layer_ranges
from kvtiers.model.messages import Link, StepOrders
from kvtiers.observe.decisions import Decision

_POLL_SECONDS: Final = 0.0005


@dataclass(frozen=True, slots=True)
class OneRequestSettings:
    """The engine around the model.

    Attributes:
        num_blocks: of the KV. block_size: tokens per block.
        max_tokens_per_step: budget of a step; a longer prompt is computed in chunks.
        instance: folder in private stores, where the configuration names none.
    """

    num_blocks: int
    block_size: int = 32
    max_tokens_per_step: int = 2048
    instance: str = "0"


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One forward pass.

    Attributes:
        num_tokens: computed. num_context_tokens: before them, whose KV was there.
        seconds: including what it waited for a load.
    """

    num_tokens: int
    num_context_tokens: int
    seconds: float


@dataclass(slots=True)
class Generated:
    """What one request has generated, and what was measured of it.

    Attributes:
        token_ids: generated, greedily. ttft_seconds: from its arrival to the first of them.
        load_seconds: of that, until the reload was settled; 0 without one between steps.
        num_reloaded_tokens: of the prompt, whose KV came from kvtiers.
        decision: what kvtiers predicted and chose, and why; None without kvtiers.
        num_failed_blocks: that were to be reloaded and had to be computed.
        steps: forward passes, in their order. links: what each link did meanwhile.
    """

    token_ids: list[int] = field(default_factory=list)
    ttft_seconds: float = 0.0
    load_seconds: float = 0.0
    num_reloaded_tokens: int = 0
    decision: Decision | None = None
    num_failed_blocks: int = 0
    steps: list[MeasuredStep] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)


@dataclass(slots=True)
class _Request:
    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    hashes: list[bytes]
    result: Generated
    arrived_at: float
    num_computed: int = 0


class OneRequestEngine:
    """Prefills in chunks and decodes greedily; HBM keeps nothing of a request that has ended.

    Args:
        config: the tiers below; None runs without kvtiers. What its `reload.layer_ranges` says is
            done here too: a step waits for one range of layers after the other.
        wrap_store: see `build_host_rank`.

    Raises:
        CapacityError, StoreError: a tier cannot be had.
        ConfigError: there are more ranges than layers.
    """

    def __init__(
        self,
        model: ReferenceModel,
        settings: OneRequestSettings,
        config: Config | None = None,
        wrap_store: WrapStore | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        device = model.device
        self.kv = PagedKV(model.shape, settings.num_blocks, settings.block_size, str(device))
        self.scheduler: SchedulerConnector | None = None
        self.worker: WorkerConnector | None = None
        self._free = deque(range(settings.num_blocks))
        self._num_requests = 0
        self._num_groups = 1 if config is None else config.reload.layer_ranges
        self._group_of_layer: dict[int, int] = {}
        if config is not None:
            self._connect(config, wrap_store)

    def _connect(self, config: Config, wrap_store: WrapStore | None) -> None:
        settings, num_layers = self.settings, self.model.shape.num_layers
        if self._num_groups > num_layers:
            raise ConfigError(
                f"reload.layer_ranges: {self._num_groups} ranges of {num_layers} layers; write "
                f"{num_layers} at most"
            )
        ranges = layer_ranges(num_layers, self._num_groups)
        self._group_of_layer = {layer: i for i, layers in enumerate(ranges) for layer in layers}
        facts = EngineFacts(
            settings.max_tokens_per_step, self._num_groups, settings.instance, wrap_store
        )
        self.scheduler, self.worker = connect(self.model, self.kv, config, facts)

    def generate(
        self, prompt: Sequence[int], num_tokens: int = 1, max_reloaded_blocks: int | None = None
    ) -> Generated:
        """Run one request to its end.

        Args:
            num_tokens: to generate; at least 1.
            max_reloaded_blocks: what lies behind them is computed, whatever is stored of it.

        Raises:
            CapacityError: it does not fit the KV.
            ConfigError: there is no prompt, or nothing to generate.
        """
        request = self._admit(prompt, num_tokens)
        try:
            load = self._look_up(request, max_reloaded_blocks)
            if self.scheduler is not None:
                tables = [request.block_ids] * self._num_groups
                self.scheduler.allocated(request.request_id, tables, 0, load)
                request.result.decision = self._decision(request.request_id)
            request.num_computed = load.num_tokens or 0
            request.result.num_reloaded_tokens = request.num_computed
            if request.num_computed and load.asynchronous:
                self._wait_for_load(request)
            while len(request.tokens) < request.num_prompt_tokens + num_tokens:
                self._compute(request)
        finally:
            self._end(request)
        request.result.token_ids = request.tokens[request.num_prompt_tokens :]
        return request.result

    def settle(self, seconds: float = 60.0) -> None:
        """Run idle steps until kvtiers has nothing left to do.

        Args:
            seconds: that it may take.

        Raises:
            ProtocolError: it took longer.
        """
        until = time.monotonic() + seconds
        while self.scheduler is not None and self.scheduler.busy:
            if time.monotonic() > until:
                raise ProtocolError(f"kvtiers is still busy after {seconds} s without requests")
            self._idle_step()

    def close(self) -> None:
        """Release kvtiers' memory and stores; idempotent."""
        scheduler, worker = self.scheduler, self.worker
        self.scheduler = self.worker = None
        disconnect(scheduler, worker)

    # -- the life of a request ----------------------------------------------------------

    def _admit(self, prompt: Sequence[int], num_tokens: int) -> _Request:
        size = self.settings.block_size
        # The last token is returned, not computed.
        num_blocks = -(-(len(prompt) + num_tokens - 1) // size)
        if not prompt or num_tokens < 1:
            raise ConfigError(
                f"{len(prompt)} prompt tokens, {num_tokens} to generate; each must be at least 1"
            )
        if num_blocks > len(self._free):
            raise CapacityError(
                f"{len(prompt)} + {num_tokens} tokens need {num_blocks} blocks, the KV has "
                f"{len(self._free)}; make it larger, or the prompt shorter"
            )
        self._num_requests += 1
        block_ids = [self._free.popleft() for _ in range(num_blocks)]
        return _Request(
            f"r{self._num_requests}",
            list(prompt),
            len(prompt),
            block_ids,
            prefix_hash_chain(prompt, size),
            Generated(),
            time.perf_counter(),
        )

    def _look_up(self, request: _Request, max_blocks: int | None) -> Reload:
        if self.scheduler is None:
            return Reload(0, asynchronous=False)
        hashes = request.hashes if max_blocks is None else request.hashes[:max_blocks]
        self.scheduler.arrived(request.request_id, hashes)
        while True:
            load = self.scheduler.reloadable(
                request.request_id, hashes, request.num_prompt_tokens, 0
            )
            if load.num_tokens is not None:
                return load
            time.sleep(_POLL_SECONDS)

    def _decision(self, request_id: str) -> Decision | None:
        assert self.scheduler is not None
        decisions = self.scheduler.decisions
        still_open = decisions.open_decision(request_id)
        closed = (d for d in reversed(decisions.finished()) if d.request_id == request_id)
        return still_open or next(closed, None)

    def _wait_for_load(self, request: _Request) -> None:
        while True:
            loaded = self._idle_step(request.result)
            if request.request_id in loaded.request_ids:
                self._lose(request, loaded.failed_blocks)
                request.result.load_seconds = time.perf_counter() - request.arrived_at
                return

    def _lose(self, request: _Request, failed_blocks: frozenset[int]) -> bool:
        """Keep what lies before the first failed block; returns whether there was one."""
        failed = [i for i, block in enumerate(request.block_ids) if block in failed_blocks]
        if not failed:
            return False
        request.result.num_failed_blocks += len(failed)
        request.num_computed = min(request.num_computed, failed[0] * self.settings.block_size)
        request.result.num_reloaded_tokens = min(
            request.result.num_reloaded_tokens, request.num_computed
        )
        return True

    def _compute(self, request: _Request) -> None:
        """Run one step of the request, and take its token if all known ones are computed."""
        start = request.num_computed
        end = min(len(request.tokens), start + self.settings.max_tokens_per_step)
        num_known = len(request.tokens)
        chunk = Chunk(request.tokens[start:end], start, request.block_ids)
        waits = self._begin_step({request.request_id: end}, end - start, request.block_ids)
        began = time.perf_counter()
        logits = self.model.forward([chunk], self.kv, self._before_layer)
        token = int(logits[0].argmax())
        seconds = time.perf_counter() - began
        loaded = self._end_step(request.result)
        if self.scheduler is not None:
            self.scheduler.step_ended()
        if self._lose(request, loaded.failed_blocks):
            return  # computed on top of blocks that never came
        request.result.steps.append(MeasuredStep(end - start, start, seconds))
        if self.scheduler is not None and not waits:
            self.scheduler.step_took([end - start], [start], seconds)
        request.num_computed = end
        if end == num_known:
            if num_known == request.num_prompt_tokens:
                request.result.ttft_seconds = time.perf_counter() - request.arrived_at
            self._append(request, token)

    def _before_layer(self, layer: int) -> None:
        if self.worker is not None:
            self.worker.load_in_step(self._group_of_layer[layer])

    def _append(self, request: _Request, token: int) -> None:
        request.tokens.append(token)
        size = self.settings.block_size
        num_full = len(request.tokens) // size
        if num_full > len(request.hashes):
            parent = request.hashes[-1] if request.hashes else None
            last = request.tokens[(num_full - 1) * size : num_full * size]
            request.hashes.extend(prefix_hash_chain(last, size, parent=parent))

    def _end(self, request: _Request) -> None:
        if self.scheduler is not None:
            tables = [request.block_ids] * self._num_groups
            self.scheduler.finished(request.request_id, tables)
        self._free.extend(request.block_ids)

    # -- steps ------------------------------------------------------------------------

    def _idle_step(self, result: Generated | None = None) -> Loaded:
        self._begin_step({}, 0, ())
        return self._end_step(result)

    def _begin_step(
        self, num_computed: dict[str, int], num_tokens: int, block_ids: Sequence[int]
    ) -> bool:
        """Begin a step; returns whether its forward pass waits for a load."""
        if self.scheduler is None or self.worker is None:
            return False
        orders: StepOrders = self.scheduler.schedule(
            Step(
                num_computed_tokens=num_computed,
                overwritten=(),  # `allocated` has named every block of the request
                preempted=(),
                block_ids=lambda _: [block_ids] * self._num_groups,
                num_scheduled_tokens=num_tokens,
            )
        )
        self.worker.begin_step(orders)
        return bool(orders.sync_loads)

    def _end_step(self, result: Generated | None) -> Loaded:
        if self.scheduler is None or self.worker is None:
            return Loaded()
        self.worker.end_step()
        loaded = self.worker.take_loaded()
        report = self.worker.take_report()
        if report is not None:
            if result is not None:
                result.links.extend(report.links)
            self.scheduler.reported(report)
        return loaded
