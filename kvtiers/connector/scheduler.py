"""The engine-neutral interface, on the scheduler's side."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvtiers.connector.accounts import Accounts
from kvtiers.connector.backlog import Backlog
from kvtiers.connector.build import check_hellos, control_settings, cost_model
from kvtiers.connector.in_step import may_load_in_step
from kvtiers.connector.lasting import Lasting, LastingStores
from kvtiers.connector.offers import Offers
from kvtiers.connector.requests import RequestState
from kvtiers.connector.shape import EngineShape
from kvtiers.connector.step import BlockIds, Reload, Step
from kvtiers.control.answers import LoadDone
from kvtiers.control.controller import Controller
from kvtiers.control.prefetch import Arrival
from kvtiers.control.reload import LoadRequest
from kvtiers.cost.preempt import PreemptMode, PreemptPlan, Surroundings
from kvtiers.model.config import Config
from kvtiers.model.errors import ProtocolError
from kvtiers.model.messages import DRAM, Hello, JobId, StepOrders, WorkerReport
from kvtiers.model.outcome import Outcome
from kvtiers.observe.metrics import Counters, Snapshot

logger = logging.getLogger(__name__)


class SchedulerConnector:
    """One per engine, in the scheduler's process; every method is called on its thread."""

    def __init__(
        self,
        config: Config,
        shape: EngineShape,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.shape = shape
        self.counters = Counters()
        self._accounts = Accounts(config, shape, self.counters, clock)
        self.decisions = self._accounts.decisions
        self._block_size = shape.block_size
        self._windowed = any(window is not None for window in shape.windows)
        self._eager = config.policy.offload == "eager"
        self._clock = clock
        self._controller: Controller | None = None
        self._lasting: Lasting | None = None
        self._requests: dict[str, RequestState] = {}
        self._backlog = Backlog()
        self._offers = Offers(self.counters)
        self._sync: list[JobId] = []
        self._filled: list[int] = []

    # -- start ------------------------------------------------------------------------

    def connect(self, hellos: Sequence[Hello], lasting: Lasting | None = None) -> None:
        """Take in what the ranks said, and build the controller, over real stores by default.

        Raises:
            ProtocolError: a rank is missing, or ranks disagree on what must be equal.
            StoreError: what is recorded beside a store cannot be read.
        """
        ranks = check_hellos(hellos, self.shape.num_ranks)
        settings = control_settings(self.config, self.shape, hellos)
        cost = cost_model(self.config, self.shape)
        self._lasting = lasting or LastingStores(self.config, self.shape, hellos)
        self._controller = Controller(
            settings, ranks, cost, self.counters, lambda: self._backlog.now(cost.prefill)
        )
        logger.info(
            "DRAM tier: %d blocks of %d tokens on %d rank(s), %.2f GiB in all",
            settings.num_slots // settings.num_layer_ranges,
            settings.block_size,
            len(hellos),
            sum(hello.num_slots * hello.slot_nbytes for hello in hellos) / 2**30,
        )

    @property
    def controller(self) -> Controller:
        """The controller.

        Raises:
            ProtocolError: `connect` was not called.
        """
        if self._controller is None:
            raise ProtocolError("the ranks have not said hello yet")
        return self._controller

    @property
    def lasting(self) -> Lasting:
        """What outlives this process; raises as `controller` does."""
        if self._lasting is None:
            raise ProtocolError("the ranks have not said hello yet")
        return self._lasting

    # -- what happens to a request ----------------------------------------------------

    def arrived(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Note a new request, so that stores are asked what they hold of it while it waits."""
        state = self._state(request_id, hashes)
        state.derive_keys(self.shape.hashes_per_block)
        self._backlog.arrived(request_id)
        self.controller.arrived(state.keys, self._clock())
        self.lasting.ask(self.controller)

    def prefetch(self, request_id: str, num_tokens: int, num_local_tokens: int) -> None:
        """Bring what a request that has arrived would reload from stores to DRAM while it waits.

        Args:
            num_tokens: of the request. num_local_tokens: those that the engine has in HBM now, as
                far as it can tell; what they cover is not read.
        """
        state = self._requests.get(request_id)
        if state is not None and self.config.stores:
            start = num_local_tokens // self._block_size
            self.controller.prefetch(Arrival(request_id, state.keys, start, num_tokens))

    def reloadable(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, num_local_tokens: int
    ) -> Reload:
        """Answer how many tokens beyond the engine's own are to be reloaded; a question.

        Args:
            hashes: of all full blocks whose tokens are known.
            num_tokens: known ones: prompt and output.
            num_local_tokens: tokens that the engine has in HBM, a multiple of the block size.
        """
        state = self._state(request_id, hashes)
        state.derive_keys(self.shape.hashes_per_block)
        start = num_local_tokens // self._block_size
        self.lasting.tell(self.controller)
        answer = self.controller.plan(request_id, state.keys, start, num_tokens, self._clock())
        if answer.num_blocks is None:
            self.lasting.ask(self.controller)
            return Reload(None, asynchronous=False)
        state.answer = answer
        state.num_asked = num_tokens - num_local_tokens
        state.sources = self._accounts.tokens_by_tier(answer, answer.num_blocks)
        if answer.num_blocks == 0:
            return Reload(0, asynchronous=False)
        in_step = may_load_in_step(self.controller, self.config, self.shape, state.keys, answer)
        return Reload(answer.num_blocks * self._block_size, not in_step, state.sources)

    def allocated(
        self, request_id: str, block_ids: BlockIds, num_local_tokens: int, load: Reload
    ) -> None:
        """Note an admission; start the reload of blocks that the engine has made room for.

        Args:
            block_ids: per KV group, from token 0; -1 where the engine keeps no block.
            num_local_tokens: as in `reloadable`.
            load: what the engine took of the answer; 0 tokens start nothing.

        Raises:
            ProtocolError: the engine took what was never offered.
        """
        state = self._requests.get(request_id)
        if state is None:
            raise ProtocolError(f"request {request_id!r} was allocated blocks but never looked up")
        answer, state.answer = state.answer, None
        state.admitted = True
        self.controller.admitted(request_id)
        if answer is not None:
            self._accounts.admitted(state, answer, self.controller.epoch, load)
            self._backlog.admitted(
                request_id,
                num_local_tokens + state.num_asked,
                num_local_tokens + (load.num_tokens or 0),
                loading=bool(load.num_tokens) and load.asynchronous,
            )
        block_size = self._block_size
        start = num_local_tokens // block_size
        self.will_fill([group[start:] for group in block_ids])
        if not load.num_tokens:
            return
        num_blocks, rest = divmod(load.num_tokens, block_size)
        if answer is None or rest or num_blocks > (answer.num_blocks or 0):
            raise ProtocolError(
                f"request {request_id!r} takes {load.num_tokens} tokens, which were not offered"
            )
        in_step = not load.asynchronous
        asked = LoadRequest(request_id, state.keys, block_ids, start, num_blocks, in_step)
        job_id = self.controller.allocated(asked, self._clock())
        if in_step:
            self._sync.append(job_id)
            self._offers.loads_in_step(job_id)

    def will_fill(self, block_ids: BlockIds) -> None:
        """Note engine blocks that will be overwritten, by whomever: the next step's orders make
        running offloads read them first."""
        for group in block_ids:
            self._filled += group

    def finished(self, request_id: str, block_ids: BlockIds) -> None:
        """Note the end of a request, before its blocks are freed; lazy offload happens here.

        Args:
            block_ids: per KV group; empty after a preemption.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        self.controller.finished(request_id)
        self._left(request_id)
        if any(block_ids):
            state.block_ids = [list(group) for group in block_ids]
            self._offers.ended(self.controller, state)

    def preemption(
        self,
        request_id: str,
        num_tokens: int,
        num_sequences: int = 1,
        mode: PreemptMode = PreemptMode.COST,
        around: Surroundings = Surroundings(),  # noqa: B008
    ) -> PreemptPlan:
        """Answer whether to swap a request that must give way, or to compute it again; a question.

        Args:
            num_tokens: computed ones. num_sequences: of its group.
            around: what the engine does beside it.

        Raises:
            ProtocolError: nothing is known of the request.
        """
        state = self._requests.get(request_id)
        if state is None:
            raise ProtocolError(f"request {request_id!r} has not arrived, or has ended")
        state.derive_keys(self.shape.hashes_per_block)
        return self.controller.preemption(state.keys, num_tokens, num_sequences, mode, around)

    def swapped(self, request_id: str) -> None:
        """Note that a request is swapped, ahead of the step that names it preempted: all of it
        will be reloaded, whatever that costs."""
        self.controller.swapped(request_id)

    # -- once per step ----------------------------------------------------------------

    def schedule(self, step: Step) -> StepOrders:
        """Return what the ranks have to do around the engine's next step."""
        controller = self.controller
        for state in filter(None, map(self._requests.get, step.preempted)):
            state.leave_windows(self.shape.windows, self._block_size)
            state.leave_behind(step.num_copied_blocks.get(state.request_id, state.num_full))
            self._offers.offer_all(controller, state)
            state.lose_blocks()
            controller.preempted(state.request_id)
            self._left(state.request_id, again=True)
        self._offers.scheduled(controller)
        controller.hold_before()
        controller.overwritten(step.overwritten)
        controller.overwritten(self._filled)
        self._filled = []
        for request_id, num_computed in step.num_computed_tokens.items():
            self._computed(request_id, num_computed, step.block_ids)
        self._backlog.scheduled(step.num_computed_tokens)
        self.lasting.tell(controller)  # for waiting requests, about which the engine has not asked
        controller.outlook.running = {*step.num_computed_tokens, *step.running}
        now, generation = self._clock(), self.lasting.generation
        orders = controller.take_orders(step.num_scheduled_tokens, self._sync, now, generation)
        self._sync = []
        self.lasting.ask(controller)
        return orders

    def reported(self, report: WorkerReport) -> list[LoadDone]:
        """Take in what the ranks answered; returns the reloads that are complete."""
        done = []
        now = self._clock()
        self.controller.cost.links.moved(report.links)
        for completion in report.completions:
            if completion.hop == DRAM and (completion.outcomes != Outcome.OK).any():
                self._offer_again()
            load = self.controller.completed(completion, now)
            if load is not None:
                self._loaded(load, completion.job_id)
                done.append(load)
        self._offers.confirmed(self.controller)
        self.controller.cost.observe_links(report.links)
        self._accounts.reported(report)
        return done

    def step_took(
        self, num_new_tokens: Sequence[int], num_context_tokens: Sequence[int], seconds: float
    ) -> None:
        """Learn the engine's speed from one of its steps.

        Args:
            num_new_tokens, num_context_tokens: per request in the step.
        """
        if num_new_tokens:
            self.controller.cost.observe_batch(num_new_tokens, num_context_tokens, seconds)

    def step_ended(self) -> None:
        """Note the end of the oldest running step with tokens, after its answers were reported."""
        for request_id in self._backlog.step_ended():
            self._accounts.first_token(request_id)

    def distrust(self) -> None:
        """Serve nothing of what the last steps offloaded: the engine took their tokens back."""
        self.controller.distrust()
        self._offers.distrust()
        for state in self._requests.values():
            state.rewind()

    def reset(self) -> bool:
        """Serve nothing that was stored before; reloads under way come back as failed.

        Blocks that live requests have computed so far are not stored any more either.

        Returns:
            whether the reset was recorded, so that a later start serves nothing old.
        """
        self._offers.distrust()
        self.controller.reset()
        recorded = self.lasting.renew()
        for state in self._requests.values():
            state.rewind()
            state.tainted = state.admitted
        return recorded

    @property
    def busy(self) -> bool:
        """Whether kvtiers has something to do: jobs run, or blocks are held back."""
        return self._controller is not None and self._controller.busy

    def drain_counters(self) -> Snapshot:
        """Return what was counted since the last call, gauges as they are now."""
        if self._controller is not None:
            self._accounts.set_gauges(self._controller)
        return self.counters.drain()

    def close(self) -> None:
        """Close the decision log, and let go of the stores' indexes."""
        self._accounts.close()
        if self._lasting is not None:
            self._lasting.close()

    # -- internals --------------------------------------------------------------------

    def _state(self, request_id: str, hashes: Sequence[bytes]) -> RequestState:
        state = self._requests.get(request_id)
        if state is None:
            state = RequestState.new(request_id, hashes, len(self.shape.windows))
            self._requests[request_id] = state
        state.hashes = hashes
        return state

    def _computed(
        self, request_id: str, num_computed: int, block_ids: Callable[[str], BlockIds]
    ) -> None:
        """Offer the blocks that this step completes, and those refused before."""
        state = self._requests.get(request_id)
        if state is None:
            return
        state.derive_keys(self.shape.hashes_per_block)
        state.num_computed = num_computed
        state.num_full = num_full = min(num_computed // self._block_size, len(state.keys[0]))
        if not state.admitted:
            self.controller.admitted(request_id)
            state.admitted = True
        if state.tainted or min(state.num_offered) >= num_full:
            return
        if self._windowed:
            # Never from memory: blocks leave a sliding window while the request runs, and what
            # was seen before may hold another request's tokens by now.
            state.block_ids = [list(group) for group in block_ids(request_id)]
        elif len(state.block_ids[0]) < num_full:
            state.see_blocks(block_ids(request_id))
        if self._eager:
            self._offers.offer(self.controller, state)

    def _offer_again(self) -> None:
        """Offer all blocks of requests that run again: what DRAM has is not copied twice."""
        for state in filter(lambda it: it.admitted, self._requests.values()):
            state.offer_again()

    def _left(self, request_id: str, *, again: bool = False) -> None:
        """Note that a request's prefill is over, or begins anew."""
        self._backlog.left(request_id, waits_again=again)
        if not self._backlog.awaits(request_id):
            self._accounts.ended(request_id)

    def _loaded(self, load: LoadDone, job_id: JobId) -> None:
        self._backlog.loaded(load.request_id, load.num_failed * self._block_size)
        in_step = self._offers.loaded(job_id)
        self._accounts.loaded(load, self._requests.get(load.request_id), in_step=in_step)
        if not load.num_failed:
            return
        self._offer_again()
        if in_step:  # the engine takes computed tokens back, also of requests that share blocks
            self._offers.distrust()
            for state in self._requests.values():
                state.num_full = 0
