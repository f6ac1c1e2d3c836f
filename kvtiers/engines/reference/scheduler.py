"""Decides what each step computes, which requests are admitted, and which are preempted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvtiers.cost.preempt import Surroundings
from kvtiers.engines.reference.admission import Admission, Claim, fits
from kvtiers.engines.reference.block_pool import BlockPool
from kvtiers.engines.reference.lower_tiers import LowerTiers
from kvtiers.engines.reference.queues import RequestQueue
from kvtiers.engines.reference.requests import Request, State, TokenSequence
from kvtiers.engines.reference.settings import EngineSettings, Policy
from kvtiers.engines.reference.turnover import Guess, Turnover


@dataclass(slots=True)
class Schedule:
    """What a step is going to do.

    Attributes:
        budget: tokens that the step has left.
        work: sequence id to its request, the sequence, and how many tokens of it to compute.
        admitted, resumed: requests that leave the queue: new or to be computed again; swapped.
        preempted: requests that lose their blocks. swapped: those of them that are swapped.
    """

    budget: int
    work: dict[str, tuple[Request, TokenSequence, int]] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    swapped: list[Request] = field(default_factory=list)

    def compute(self, request: Request, sequence: TokenSequence, num: int) -> None:
        """Schedule tokens of a sequence."""
        self.work[sequence.sequence_id] = (request, sequence, num)
        self.budget -= num

    def chunks(self, num_decode_tokens: int) -> dict[str, int]:
        """Return the tokens of each request that computes more than a decode."""
        chunks: dict[str, int] = {}
        for request, _, num in self.work.values():
            if num > num_decode_tokens:
                chunks[request.request_id] = chunks.get(request.request_id, 0) + num
        return chunks

    def drop(self, request: Request) -> None:
        """Take a request out of the step again."""
        for sequence in request.sequences:
            if sequence.sequence_id in self.work:
                self.budget += self.work.pop(sequence.sequence_id)[2]


class _Verdict(Enum):
    """Whether a request was admitted, or why not."""

    ADMITTED = auto()
    ASK_AGAIN = auto()  # a store has yet to say what it holds; those behind it need not wait
    OVER_SHARE = auto()  # its tenant holds its share; those of other tenants need not wait
    NO_ROOM = auto()  # those behind it wait too


class Scheduler:
    """Schedules decodes first, then prefills, then preempted requests, then new ones.

    Attributes:
        queue: waiting and swapped requests. running: the others, in the order of admission.
        num_preemptions, num_swaps: since the start; swaps are among the preemptions.

    Args:
        pool: whose blocks the requests hold. tiers: kvtiers below.
    """

    def __init__(self, settings: EngineSettings, pool: BlockPool, tiers: LowerTiers) -> None:
        self.settings = settings
        self.pool = pool
        self.queue = RequestQueue(settings.policy)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_swaps = 0
        self._tiers = tiers
        self._admission = Admission(settings, pool, tiers)
        self._num_admitted = 0
        self._turnover = Turnover(pool)

    def schedule(self) -> Schedule:
        """Return the next step; its preemptions and admissions take effect at once."""
        step = Schedule(self.settings.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.preempted:  # else there is no room for anybody
            self._admit(step)
            if self._turnover.has_returned:
                self._turnover.stepped(step.chunks(self.settings.num_decode_tokens))
        return step

    def preempt(self, request: Request) -> None:
        """Preempt a running request: swap it, or have it computed again, as kvtiers answers."""
        num_others = sum(it.num_places for it in self._beside(request))
        around = self._around(request, self._turnover.guesses(request.num_blocks), num_others)
        num_tokens = max(1, request.live[0].num_computed)
        plan = self._tiers.swap(request, num_tokens, around)
        if plan is None:
            self.restart(request)
            return
        self._tiers.swapped(request, plan.num_blocks)
        request.num_swaps += 1
        self.num_swaps += 1
        self._give_way(request, State.SWAPPED)

    def restart(self, request: Request) -> None:
        """Preempt a running request; what its blocks hold is computed again."""
        request.num_recomputes += 1
        for sequence in request.live:
            self._tiers.dropped(sequence)
        self._give_way(request, State.WAITING)

    def release(self, request: Request) -> None:
        """Free all blocks of a request."""
        for sequence in request.sequences:
            self.pool.free(sequence.block_ids)
            sequence.lose_blocks()
        self.pool.free(request.spare_block_ids)
        request.spare_block_ids = []

    def leave(self, request: Request) -> None:
        """Take a request out of the batch or the queue: it is over."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        else:
            self._dequeue(request)
        request.state = State.FINISHED

    def local_blocks(self, sequence: TokenSequence) -> list[int]:
        """Return the leading blocks of a sequence that are in HBM already."""
        return self._admission.local_blocks(sequence)

    # -- who runs ---------------------------------------------------------------------

    def _give_way(self, request: Request, state: State) -> None:
        """Free a victim's blocks, and queue it before others."""
        self.running.remove(request)
        self._turnover.gave_way(request.request_id)
        self.num_preemptions += 1
        self.release(request)
        request.state = state
        self.queue.put_back(request)

    def _schedule_running(self, step: Schedule) -> None:
        """Schedule what runs: all decodes, which the budget always has room for, then prefills."""
        size, guesses = self.settings.block_size, self.settings.num_speculative_tokens
        prefills = []
        for request in self.running.copy():
            for sequence in request.live:
                if request.state is not State.RUNNING or request.loading:
                    break
                num_computed = sequence.num_computed
                if sequence.num_known - num_computed > 1:
                    prefills.append((request, sequence))
                elif guesses or num_computed >= len(sequence.block_ids) * size:
                    self._decode(step, request, sequence)
                else:  # most decodes, and there are many: its block has room
                    step.compute(request, sequence, 1)
        for request, sequence in prefills:
            if step.budget > 0 and request.state is State.RUNNING:
                step.compute(request, sequence, self._chunk(sequence, step.budget))

    def _decode(self, step: Schedule, request: Request, sequence: TokenSequence) -> None:
        """Schedule a decode with its speculative tokens, preempting others for its blocks."""
        pool, table = self.pool, sequence.block_ids
        num = self._num_tried(request, sequence)
        missing = self.settings.blocks_for(sequence.num_computed + num) - len(table)
        if missing > pool.num_free and num > 1:  # nobody is preempted for a speculative token
            num = 1
            missing = self.settings.blocks_for(sequence.num_computed + 1) - len(table)
        while missing > pool.num_free:
            victim = self._victim()
            step.drop(victim)
            self.preempt(victim)
            step.preempted.append(victim)
            if victim.state is State.SWAPPED:
                step.swapped.append(victim)
            if victim is request:
                return
        if missing > 0:
            new = pool.take(missing)
            self._tiers.will_write(new)
            table += new
        step.compute(request, sequence, num)

    def _num_tried(self, request: Request, sequence: TokenSequence) -> int:
        """Return the tokens of a decode, speculative ones included: at most those still wanted."""
        new = request.new
        left = new.num_prompt_tokens + new.max_tokens - sequence.num_known
        begun = sequence.num_known > new.num_prompt_tokens
        guesses = self.settings.num_speculative_tokens if begun else 0
        return max(1, min(1 + guesses, left))

    def _chunk(self, sequence: TokenSequence, budget: int) -> int:
        """Return how many tokens of a prefill a step takes."""
        most = self.settings.long_prefill_threshold or budget
        return min(sequence.num_missing, budget, most)

    def _victim(self) -> Request:
        """Return which request to preempt: the last one admitted, of the least urgent ones.

        Never one whose load still writes its blocks. There is always one: at least the request
        that needs a block.
        """
        candidates: Iterator[Request] = (r for r in reversed(self.running) if not r.loading)
        if self.settings.policy is Policy.PRIORITY:
            return max(candidates, key=lambda r: (r.new.priority, r.order))
        return next(candidates)

    # -- who is admitted --------------------------------------------------------------

    def _admit(self, step: Schedule) -> None:
        """Admit requests in the queue's order, as far as there is room for them.

        Behind a request that waits because its tenant holds its share, all others of that tenant
        wait too.
        """
        over: set[str] = set()
        idx = 0
        while idx < len(self.queue) and step.budget > 0:
            request = self.queue[idx]
            was_swapped = request.state is State.SWAPPED
            verdict = self._try(request, step, over)
            if verdict is _Verdict.NO_ROOM or (verdict is _Verdict.ASK_AGAIN and was_swapped):
                break
            if verdict is _Verdict.ADMITTED:
                (step.resumed if was_swapped else step.admitted).append(request)
                continue
            idx += 1
            if verdict is _Verdict.OVER_SHARE:
                over.add(request.new.tenant)

    def _beside(self, victim: Request) -> list[Request]:
        """Return the other running requests that do not wait for a load."""
        return [it for it in self.running if it is not victim and not it.loading]

    def _around(
        self, victim: Request, guesses: Sequence[Guess], num_step_tokens: int
    ) -> Surroundings:
        """Return what the engine does beside a victim when it leaves, or when it returns."""
        size = self.settings.block_size if self.settings.prefix_caching else 0
        return Surroundings(
            num_running=len(self._beside(victim)),
            num_waiting=len(self.queue) - (victim.state is not State.RUNNING),
            num_step_tokens=num_step_tokens,
            kept_tokens=tuple(it.num_kept * size for it in guesses) or (0,),
            joined_tokens=tuple(it.num_joined for it in guesses),
            admitted_share=self._turnover.admitted_share,
            returning=victim.state is not State.RUNNING,
        )

    def _reload_pays(self, request: Request, claims: Sequence[Claim], step: Schedule) -> bool:
        """Whether a swapped request that returns is still reloaded, and not computed after all.

        By now it is known how much of it HBM has kept. How much its step computes for others is
        guessed: what is scheduled so far, or what the last steps did in which others returned.
        """
        num_kept = claims[0].num_local // self.settings.block_size
        joined = sum(step.chunks(self.settings.num_decode_tokens).values())
        late = [it.num_joined for it in self._turnover.guesses(0)] or [0]
        guesses = [Guess(num_kept, max(joined, num)) for num in late]
        others = self.settings.max_num_batched_tokens - step.budget - joined
        num_copied = request.live[0].num_known - 1  # the last token never was computed
        around = self._around(request, guesses, others)
        return self._tiers.swap(request, max(1, num_copied), around) is not None

    def _dequeue(self, request: Request) -> None:
        self.queue.remove(request)
        self._turnover.forget(request.request_id)

    def _try(self, request: Request, step: Schedule, over: set[str]) -> _Verdict:
        """Admit a request if there is room for it: give it its blocks and its first chunk."""
        if request.new.tenant in over or not self._admission.within_share(request, self.running):
            return _Verdict.OVER_SHARE
        claims = self._admission.claims(request)
        if not fits(claims, self.pool, self.settings.watermark_blocks):
            return _Verdict.NO_ROOM
        num_places = sum(running.num_places for running in self.running)
        if num_places + request.num_places > self.settings.max_num_seqs:
            return _Verdict.NO_ROOM
        reloads = request.state is not State.SWAPPED or self._reload_pays(request, claims, step)
        if reloads and not self._admission.find_loads(request, claims):
            return _Verdict.ASK_AGAIN
        self._turnover.returns(request.request_id)
        num_taken = self.pool.num_taken
        self._admission.allocate(request, claims)
        self._turnover.admitted(self.pool.num_taken - num_taken)
        self._dequeue(request)
        request.state = State.RUNNING
        request.order = self._num_admitted
        self._num_admitted += 1
        self.running.append(request)
        for sequence in request.live:
            if not request.loading and step.budget > 0:
                step.compute(request, sequence, self._chunk(sequence, step.budget))
        return _Verdict.ADMITTED
