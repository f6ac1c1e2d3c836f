"""The reference engine: one scheduler around a runner, step by step."""

from __future__ import annotations

import time
from typing import Final

from kvtiers.engines.reference.block_pool import BlockPool
from kvtiers.engines.reference.lower_tiers import LowerTiers
from kvtiers.engines.reference.outputs import Outputs, Taken
from kvtiers.engines.reference.report import FinishReason, Gauges, Served, StepReport
from kvtiers.engines.reference.requests import NewRequest, Request, State, TokenSequence
from kvtiers.engines.reference.runners import Runner, StepResult, StepWork
from kvtiers.engines.reference.scheduler import Schedule, Scheduler
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.engines.reference.thrash import ThrashDetector
from kvtiers.model.errors import CapacityError, ConfigError, ProtocolError

_DECODES_PER_LESSON: Final = 8


class Engine:
    """Requests in, tokens out. Not thread-safe; the runner's clock is the only one.

    Driving it is a loop: `add` what has arrived by `now`, `step` while there are unfinished
    requests, `wait_until` the next arrival otherwise; see `kvtiers.engines.reference.serving`.
    After an exception from any method but `add`, only `close` may be called: the step was left in
    the middle.
    """

    def __init__(self, settings: EngineSettings, runner: Runner) -> None:
        self.settings = settings
        self.runner = runner
        self.pool = BlockPool(settings.num_blocks, settings.blocks_per_hash)
        self._tiers = LowerTiers(settings, runner.connector)
        self.scheduler = Scheduler(settings, self.pool, self._tiers)
        self._outputs = Outputs(settings, self.pool, self._tiers)
        self._thrash = ThrashDetector(has_tiers=self._tiers.connected)
        self._requests: dict[str, Request] = {}
        self._loads: dict[str, Request] = {}  # by the sequence whose load is under way
        self._over: list[Served] = []  # finished since the last report
        self._num_steps = 0

    @property
    def now(self) -> float:
        """Seconds on the runner's clock: virtual ones where it models."""
        return self.runner.now

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting, running or swapped."""
        return len(self._requests)

    @property
    def gauges(self) -> Gauges:
        """How the engine stands."""
        scheduler, queue = self.scheduler, self.scheduler.queue
        return Gauges(
            kv_use=self.pool.use,
            num_waiting=len(queue) - queue.num_swapped,
            num_running=len(scheduler.running),
            num_loading=len([it for it in scheduler.running if it.loading]) if self._loads else 0,
            num_swapped=queue.num_swapped,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.num_swaps,
        )

    def state(self, request_id: str) -> State:
        """Return a request's state; FINISHED for an id that is not known (any more)."""
        request = self._requests.get(request_id)
        return State.FINISHED if request is None else request.state

    def holders(self) -> list[Request]:
        """Return the requests that hold blocks: running ones, and aborted ones being loaded."""
        loading = {id(request): request for request in self._loads.values()}
        running = {id(request): request for request in self.scheduler.running}
        return list((running | loading).values())

    # -- what users do ----------------------------------------------------------------

    def add(self, request: NewRequest) -> None:
        """Queue a request.

        Raises:
            CapacityError: it could never run, however empty the engine is.
            ConfigError: its id is taken, or it is a group and there is no kvtiers to swap it to.
        """
        self._check(request)
        first = TokenSequence.of(request, self.settings.hash_tokens)
        mine = Request(request, [first])
        self._requests[request.request_id] = mine
        self.scheduler.queue.append(mine)
        num_local = len(self.scheduler.local_blocks(first)) * self.settings.block_size
        self._tiers.arrived(first, num_local)

    def abort(self, request_id: str) -> None:
        """End a request in any state; the next step reports it. Unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.scheduler.leave(request)
        for sequence in request.live:
            self._tiers.finished(sequence)
        if not request.loading:  # else a load still writes its blocks
            self.scheduler.release(request)
        self._over.append(self._outputs.served(request, FinishReason.ABORTED, self.now))

    def step(self, idle_until: float | None = None) -> StepReport:
        """Schedule, run and take in one step.

        Args:
            idle_until: on the engine's clock, until when a step that computes nothing (all wait
                for loads) may last; None: until something has happened.
        """
        started = self.now
        schedule = self.scheduler.schedule()
        for request in (*schedule.resumed, *schedule.admitted):
            self._note_admission(request, started)
        work, known = self._outputs.prepare(schedule, idle_until)
        num_tokens = self.settings.max_num_batched_tokens - schedule.budget
        orders = self._tiers.orders(known, schedule.work, num_tokens)
        result = self.runner.run(work, orders)
        self._settle_loads(schedule, result)
        taken = self._outputs.take(schedule, result, self.now)
        self._tell(work, num_tokens, result, told=bool(known))
        for served in taken.finished:
            request = self._requests.pop(served.request_id)
            self.scheduler.leave(request)
            self.scheduler.release(request)
        return self._report(schedule, taken, started)

    def wait_until(self, seconds: float) -> None:
        """Let time pass until `seconds` on the engine's clock; kvtiers' offloads go on meanwhile.

        For an engine without unfinished requests. Requests that were aborted are reported by the
        next step.
        """
        while self.runner.connector is not None and self.runner.connector.busy:
            if self.now >= seconds:
                return
            finished = self.step(idle_until=seconds).finished
            self._over += finished  # the next `step` reports them
        self.runner.wait_until(seconds)

    def settle(self, seconds: float = 60.0) -> None:
        """Run idle steps until kvtiers has nothing left to do; see `wait_until`.

        Args:
            seconds: of real time, for which that may take.

        Raises:
            ProtocolError: it took longer.
        """
        until = time.monotonic() + seconds
        while self.runner.connector is not None and self.runner.connector.busy:
            if time.monotonic() > until:
                raise ProtocolError(f"kvtiers is still busy after {seconds} s without requests")
            finished = self.step().finished
            self._over += finished

    def reset(self) -> bool:
        """Serve nothing from caches that was computed before, as after a change of weights.

        Running requests are computed again.

        Returns:
            whether a later start over the same stores will know of it.
        """
        for request in reversed(list(self.scheduler.running)):
            if request.loading:  # what it loads is void, and it begins anew once that has ended
                self._outputs.void(request)
            else:
                self.scheduler.restart(request)
        self.pool.forget_all()
        connector = self.runner.connector
        return connector is None or connector.reset()

    def close(self) -> None:
        """Release the runner's memory and kvtiers; idempotent."""
        self.runner.close()

    # -- internals --------------------------------------------------------------------

    def _check(self, request: NewRequest) -> None:
        settings, name = self.settings, request.request_id
        if name in self._requests:
            raise ConfigError(f"a request {name!r} is here already; ids must be unique")
        if any(request.request_id == name for request in self._loads.values()):
            raise ConfigError(
                f"a request {name!r} was aborted, and its load still runs; ids must be unique"
            )
        num_tokens = request.num_prompt_tokens + request.max_tokens
        if num_tokens > settings.max_model_len:
            raise CapacityError(
                f"request {name!r} has {request.num_prompt_tokens} + {request.max_tokens} tokens, "
                f"max_model_len is {settings.max_model_len}; shorten it, or raise that"
            )
        if request.num_sequences > 1 and not self._tiers.connected:
            raise ConfigError(
                f"request {name!r} has {request.num_sequences} sequences: such a group can only be "
                "swapped, which needs kvtiers; configure it, or ask for one sequence"
            )
        if request.num_sequences > settings.max_num_seqs:
            raise CapacityError(
                f"request {name!r} has {request.num_sequences} sequences, max_num_seqs is "
                f"{settings.max_num_seqs}; raise that, or ask for fewer"
            )
        shared = request.num_prompt_tokens // settings.hash_tokens * settings.blocks_per_hash
        own = settings.blocks_for(num_tokens) - shared
        needed = shared + request.num_sequences * own
        room = settings.num_blocks - settings.watermark_blocks
        if needed > room:
            raise CapacityError(
                f"request {name!r} needs {needed} KV blocks, the pool has {room} above the "
                "watermark; ask for fewer sequences or tokens, or enlarge the pool"
            )

    def _note_admission(self, request: Request, now: float) -> None:
        if request.admitted_at is None:
            head = request.sequences[0]
            request.admitted_at = now
            request.num_local_tokens = head.num_computed - request.num_reloaded_tokens
        for sequence in request.live:
            if sequence.sequence_id in request.loading:
                self._loads[sequence.sequence_id] = request

    def _settle_loads(self, schedule: Schedule, result: StepResult) -> None:
        """Take in the loads that are over; of one that failed, keep what precedes the failure."""
        failed = result.loaded.failed_blocks
        for name in result.loaded.request_ids:
            request = self._loads.pop(name)
            request.loading.discard(name)
            if request.state is State.FINISHED and not request.loading:
                self.scheduler.release(request)
        for request in self.scheduler.running if failed else ():
            for sequence in request.live:
                self._outputs.lose(request, sequence, failed, schedule)

    def _tell(self, work: StepWork, num_tokens: int, result: StepResult, *, told: bool) -> None:
        """Tell kvtiers how long a step took, what ranks answered, and that it has ended.

        Args:
            told: whether kvtiers was told that the step computes something: only then does it
                wait for the end.
        """
        connector = self.runner.connector
        if connector is None:
            return
        # Steps of decodes only are much like those before them: some of them teach enough.
        decodes = num_tokens == len(work.sequences)
        teaches = not decodes or self._num_steps % _DECODES_PER_LESSON == 0
        if result.pure and num_tokens and teaches:
            num_new = [it.num_tokens for it in work.sequences]
            contexts = [it.start for it in work.sequences]
            connector.step_took(num_new, contexts, result.compute_seconds)
        if result.report is not None:
            connector.reported(result.report)
        if told:
            connector.step_ended()

    def _report(self, schedule: Schedule, taken: Taken, started: float) -> StepReport:
        self._num_steps += 1
        over, self._over = self._over, []
        gauges = self.gauges
        self._thrash.see(
            gauges.kv_use,
            len(schedule.preempted),
            gauges.num_waiting + gauges.num_swapped,
            self.settings.max_num_batched_tokens - schedule.budget,
            taken.num_again,
        )
        return StepReport(
            number=self._num_steps,
            started_at=started,
            seconds=self.now - started,
            num_tokens=taken.num_tokens,
            num_output_tokens=taken.num_output_tokens,
            itl_seconds=taken.itl_seconds,
            admitted=[request.request_id for request in schedule.admitted],
            resumed=[request.request_id for request in schedule.resumed],
            preempted=[request.request_id for request in schedule.preempted],
            swapped=[request.request_id for request in schedule.swapped],
            first_tokens=taken.first_tokens,
            finished=[*over, *taken.finished],
            gauges=gauges,
            advice=self._thrash.advice,
        )
