"""The one object of the deciding plane that an engine's scheduler side talks to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtiers.control.answers import Answer, Asked, LoadDone, load_done
from kvtiers.control.departures import Departures
from kvtiers.control.fences import Fences
from kvtiers.control.gates import Gates
from kvtiers.control.jobs import Job, JobTable
from kvtiers.control.lookups import LookupDesk
from kvtiers.control.match import Match
from kvtiers.control.offload import OffloadDesk
from kvtiers.control.outlook import EngineLoad, Outlook
from kvtiers.control.places import Places
from kvtiers.control.prefetch import Arrival, PrefetchDesk
from kvtiers.control.presence import PresenceTable
from kvtiers.control.probes import ProbeDesk
from kvtiers.control.reload import LoadRequest, ReloadDesk
from kvtiers.control.settings import ControlSettings
from kvtiers.control.suspects import Suspects
from kvtiers.control.tier import Tier
from kvtiers.control.traffic import Traffic
from kvtiers.control.values import make_tier
from kvtiers.cost.model import CostModel
from kvtiers.cost.planner import Prompt
from kvtiers.cost.preempt import PreemptMode, PreemptPlan, Surroundings
from kvtiers.model.keys import BlockKey, Rank
from kvtiers.model.messages import (
    DRAM,
    HBM,
    RELEASED,
    Completion,
    JobId,
    Lookup,
    Presence,
    StepOrders,
    Transfer,
    TransferKind,
    UInt8s,
)
from kvtiers.observe.metrics import Counters


class Controller:
    """Owns tiers, presence and planner; single-threaded, and time is a parameter.

    Questions (`match`, `plan`) change no tier. Commands are the things that happen to a
    request. What they lead to is collected in `take_orders`, once per engine step.

    Args:
        engine: tells what the engine does at the moment.
    """

    def __init__(
        self,
        settings: ControlSettings,
        ranks: Sequence[Rank],
        cost: CostModel,
        counters: Counters,
        engine: Callable[[], EngineLoad] = EngineLoad,
    ) -> None:
        self.settings = settings
        self.counters = counters
        self.cost = cost
        self.epoch = 0
        self.dram = make_tier(DRAM, settings.num_slots, settings, cost, 0)
        self.stores: list[Tier | None] = [
            None
            if s.capacity_blocks is None
            else make_tier(s.name, s.capacity_blocks, settings, cost, 1 + idx)
            for idx, s in enumerate(settings.stores)
        ]
        private = {s.name for s in settings.stores if s.capacity_blocks is not None}
        self.presence = PresenceTable(private=private)
        self.jobs = JobTable(tuple(ranks))
        self.fences = Fences()
        self.gates = Gates(settings, counters)
        inherited = {idx for idx, store in enumerate(settings.stores) if store.inherits}
        self._places = Places(
            self.dram, self.stores, self.presence, settings.stores, self.gates, inherited
        )
        places = self._places
        self._probes = ProbeDesk(settings, places, self.jobs)
        self._prefetches = PrefetchDesk(settings, places, self.jobs, counters)
        self._offloads = OffloadDesk(settings, places, self.jobs, self.fences, counters, cost)
        self._reloads = ReloadDesk(settings, places, self.jobs, counters)
        self._traffic = Traffic(settings, cost.links)
        self._asked: dict[str, Asked] = {}
        self._barred: set[str] = set()
        self._loading: dict[str, JobId] = {}
        self.outlook = Outlook(settings, cost, self.jobs, self._loading, engine)
        self._lookups = LookupDesk(settings.lookup_deadline)
        self._before: list[Transfer] = []
        self._late: list[Transfer | None] = []  # of epochs that a reset has ended
        self._step = 0
        self._departures = Departures(places, counters)
        self._suspects = Suspects(places, self.jobs)
        self._unproven: set[JobId] = set()

    # -- questions --------------------------------------------------------------------

    def match(self, keys: Sequence[Sequence[BlockKey]], start: int, limit: int) -> Match:
        """Find which of the blocks ``start .. limit - 1`` exist; see `ReloadDesk.match`."""
        return self._reloads.match(keys, start, limit)

    def plan(
        self,
        request_id: str,
        keys: Sequence[Sequence[BlockKey]],
        start: int,
        num_tokens: int,
        now: float,
    ) -> Answer:
        """Decide how many blocks beyond `start` to reload for a request.

        The last token is always left to compute. The answer is remembered, and stays the same
        while the same blocks are there. `Answer.num_blocks` is None while a store has yet to say
        what it holds: ask again.

        Args:
            keys: per KV group, from block 0. start: blocks that the engine has itself.
            num_tokens: of the request, generated ones included.
        """
        self.presence.tick(now)
        limit = min((num_tokens - 1) // self.settings.block_size, *map(len, keys))
        asked = self._asked.get(request_id)
        version, standings = self._version(), self.cost.links.standings
        if asked is not None and asked.standings != standings:
            asked.answer = Answer(None, None, asked.answer.match)  # planned for other links
        if (
            asked is not None
            and asked.version == version
            and asked.answer.match.start == start
            and asked.limit == limit
            and asked.answer.num_blocks is not None
        ):
            return asked.answer
        match = self._reloads.match(keys, start, limit)
        since, patience = (now, None) if asked is None else (asked.since, asked.patience)
        if match.unknown and patience is None:
            patience = self.outlook.patience_seconds(request_id, match, num_tokens, now)
        if patience and self._lookups.worth_waiting(match.unknown, now - since, patience, now):
            answer = Answer(None, None, match)
            self._lookups.ask(match.unknown, now)
        elif asked is not None and asked.answer.plan and match.same_hits(asked.answer.match):
            answer = asked.answer
        else:
            prompt = self.outlook.prompt(num_tokens, start, now, lambda: self.at_hand(keys, match))
            answer = self._compare(request_id, match, prompt)
        self._asked[request_id] = Asked(version, limit, answer, since, standings, patience)
        return answer

    def preemption(
        self,
        keys: Sequence[Sequence[BlockKey]],
        num_tokens: int,
        num_sequences: int = 1,
        mode: PreemptMode = PreemptMode.COST,
        around: Surroundings = Surroundings(),  # noqa: B008
    ) -> PreemptPlan:
        """Answer an engine that asks whether to swap a victim or to compute it again."""
        match = self.match(keys, 0, min(num_tokens // self.settings.block_size, *map(len, keys)))
        return self.outlook.preemption(match, num_tokens, num_sequences, mode, around)

    def at_hand(self, keys: Sequence[Sequence[BlockKey]], match: Match) -> bool:
        """Whether a load of all that was found could run now, without waiting for another job."""
        return self._reloads.at_hand(match, keys)

    def usage(self) -> dict[str, tuple[int, int]]:
        """Return (blocks served, capacity in blocks) by tier name, private tiers only."""
        tiers = [self.dram, *(tier for tier in self.stores if tier is not None)]
        return {tier.name: (tier.num_entries, tier.capacity_blocks) for tier in tiers}

    @property
    def busy(self) -> bool:
        """Whether jobs run, or blocks are held back that have yet to be written."""
        return len(self.jobs) > 0 or self._offloads.holds_back

    # -- commands: what happens to a request ------------------------------------------

    def arrived(self, keys: Sequence[Sequence[BlockKey]], now: float) -> None:
        """Ask stores for what is not known of a request, before its turn comes."""
        if self._places.need_lookups:
            self.presence.tick(now)
            match = self._reloads.match(keys, 0, min(map(len, keys)))
            self._lookups.ask(match.unknown, now)

    def prefetch(self, arrival: Arrival) -> None:
        """Bring what a request would reload from stores to DRAM while it waits."""
        self._prefetches.arrived(arrival)

    def admitted(self, request_id: str) -> None:
        """Note that a request waits no more: nothing is prefetched for it any longer."""
        self._prefetches.left(request_id)
        self.outlook.returned(request_id)

    def allocated(self, load: LoadRequest, now: float) -> JobId:
        """Start the reload of blocks that the engine has made room for."""
        asked = self._asked.pop(load.request_id, None)
        self._prefetches.left(load.request_id)
        job = self._reloads.start(load, self.epoch, now)
        self.outlook.expect(job, asked.answer.plan if asked else None, in_step=load.in_step)
        self._loading[load.request_id] = job.job_id
        self._traffic.ordered(job)
        self._offloads.asked_for(row.key for row in job.rows)
        if load.in_step:  # what the step computes on it goes to DRAM only, until it is good
            self._unproven.add(job.job_id)
            self._offloads.hold_back()
        return job.job_id

    def overwritten(self, block_ids: Iterable[int]) -> None:
        """Note that the engine will fill blocks in this step: running offloads read them first."""
        self.fences.overwritten(block_ids)

    def computed(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], first: int, end: int
    ) -> int:
        """Offer the full blocks ``first .. end - 1`` of one KV group to DRAM.

        Returns:
            the first block that was refused, for want of room or of the blocks before it;
            `end` when none was.
        """
        parent = keys[first - 1] if first and block_ids[first - 1] >= 0 else None
        for position in range(first, end):
            key, block_id = keys[position], block_ids[position]
            if block_id < 0:
                parent = None  # outside the window: the engine has no such block any more
                continue
            if not self._offloads.offer(key, parent, position, block_id, self.epoch):
                return position
            parent = key
        return end

    def holds(self, key: BlockKey) -> bool:
        """Whether DRAM has a block, or is about to."""
        return self.dram.get(key) is not None

    def hold_before(self) -> None:
        """Order what was offered so far ahead of this step's forward pass.

        For blocks that are full already, and that the forward pass may overwrite.
        """
        transfer = self._offloads.seal()
        if transfer is not None:
            self._submitted(transfer)
            self._before.append(transfer)

    def finished(self, request_id: str) -> None:
        """Forget a request that finished, was aborted, or left the queue."""
        self.outlook.running.discard(request_id)
        self.outlook.returned(request_id)
        self._prefetches.left(request_id)
        self._asked.pop(request_id, None)
        self._barred.discard(request_id)
        self._loading.pop(request_id, None)

    def preempted(self, request_id: str) -> None:
        """Note a preemption: the request will be asked about again, from nothing."""
        self.outlook.running.discard(request_id)
        self._asked.pop(request_id, None)
        self._barred.discard(request_id)

    def swapped(self, request_id: str) -> None:
        """Note a victim that is swapped out: it is reloaded whatever that costs."""
        self.outlook.must_return(request_id)

    def answered(self, answer: Presence) -> None:
        """Take in what a shared store holds; an answer of an earlier epoch says nothing."""
        if answer.epoch == self.epoch:
            self.presence.answered(answer)
            self._lookups.answered(answer)

    def completed(self, completion: Completion, now: float) -> LoadDone | None:
        """Apply one rank's answer; returns a reload that is now complete.

        Answers of an epoch before a `reset` only give back what their job held.
        """
        job, outcomes, done = self.jobs.answer(completion)
        reads = job.kind in (TransferKind.RELOAD, TransferKind.PROMOTE)
        loaded = None
        if outcomes is not None:
            self.gates.answered(job, completion.hop, outcomes, now)
            if reads and completion.hop != RELEASED:
                self.outlook.learn(job, outcomes, now)
            if completion.hop == HBM:
                loaded = self._reloaded(job, outcomes, now)
            elif completion.hop != RELEASED and reads:
                self._promoted(job, outcomes)
            elif completion.hop != RELEASED:
                self._offloads.settle(job, completion.hop, outcomes, self.epoch)
                if completion.hop == DRAM:
                    self._traffic.answered(job)
        if done:
            (self._reloads if reads else self._offloads).closed(job)
        return loaded

    def distrust(self) -> None:
        """Serve nothing of what the last steps offloaded: the engine has taken their tokens back.

        A load has failed, ours or another connector's, and what was computed on top of it is wrong.
        """
        self._suspects.doom()

    def reset(self) -> None:
        """Start a new epoch: nothing that was stored before is served again."""
        self.hold_before()  # a job's blocks are of one epoch
        self._late.append(self._offloads.late_writes())
        self.epoch += 1
        self._places.reset()
        self._lookups.reset()
        self._prefetches.reset()
        self._asked.clear()

    def take_orders(
        self, num_scheduled_tokens: int, sync_jobs: Sequence[JobId], now: float, generation: int = 0
    ) -> StepOrders:
        """Return all that the ranks have to do in this step, and start the next."""
        after = self._offloads.seal()
        if after is not None:
            self._submitted(after)
        self.gates.tick(now)
        self._offloads.tick(now)
        if not self._unproven:
            self._offloads.release(self.epoch)
        self.cost.links.revisit(now)
        demotes = self._offloads.demotes(self.epoch)
        probes = self._probes.orders(self.epoch, now)
        promotes = self._prefetch(now)
        reloads = self._reloads.orders(now, sync_jobs)
        self.outlook.in_step(sync_jobs)
        before = [*self._before, *probes, *promotes, *reloads]
        before += filter(None, [*self._late, self._offloads.late_writes(), *demotes])
        self._late = []
        self._step += 1
        orders = StepOrders(
            step=self._step,
            epoch=self.epoch,
            before=tuple(before),
            after=() if after is None else (after,),
            fences=self.fences.take(),
            sync_loads=tuple(sync_jobs),
            forgets=tuple(self._departures.forgets()),
            num_scheduled_tokens=num_scheduled_tokens,
            generation=generation,
        )
        self._suspects.remember([*self._before, *orders.after])
        self._before = []
        return orders

    def take_lookups(self) -> list[Lookup]:
        """Return the questions to shared stores that arose since the last call."""
        return self._lookups.take(self.epoch)

    # -- internals --------------------------------------------------------------------

    def _version(self) -> tuple[int, ...]:
        tiers = (tier.version for tier in self.stores if tier is not None)
        return (self.epoch, self.dram.version, self.presence.version, self.gates.version, *tiers)

    def _compare(self, request_id: str, match: Match, prompt: Prompt) -> Answer:
        if request_id in self._barred or match.num_blocks == 0:
            return Answer(0, None, match)
        plan = self.outlook.plan(request_id, match, prompt)
        return Answer(plan.num_blocks, plan, match)

    def _prefetch(self, now: float) -> list[Transfer]:
        def ask(it: Arrival) -> Answer:
            return self.plan(it.request_id, it.keys, it.start, it.num_tokens, now)

        jobs, orders = self._prefetches.orders(ask, self.epoch, now)
        for job in jobs:
            self._traffic.ordered(job)
        return orders

    def _promoted(self, job: Job, outcomes: UInt8s) -> None:
        self._reloads.settle(job, outcomes, self.epoch)
        if not job.probes:
            self._traffic.answered(job)

    def _submitted(self, transfer: Transfer) -> None:
        job = self.jobs.get(transfer.job_id)
        if job is not None:
            self._traffic.ordered(job)

    def _reloaded(self, job: Job, outcomes: UInt8s, now: float) -> LoadDone:
        counts = self._reloads.settle(job, outcomes, self.epoch)
        self._unproven.discard(job.job_id)
        alive = self._loading.get(job.request_id) == job.job_id
        if alive:
            del self._loading[job.request_id]
        done = load_done(job, outcomes, counts, self.settings, now - job.started)
        if done.num_failed and alive:
            self._barred.add(job.request_id)  # until it is preempted or ends: it must not loop
        self._traffic.answered(job)
        return done
