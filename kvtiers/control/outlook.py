"""What a plan has to know beside the blocks: who else is served, and how long a load may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvtiers.control.jobs import Job, JobTable, Watch
from kvtiers.control.match import Match
from kvtiers.control.settings import ControlSettings
from kvtiers.cost.links import read_link, reload_link
from kvtiers.cost.loads import WindowKV
from kvtiers.cost.model import CostModel
from kvtiers.cost.planner import Prompt, ReloadPlan
from kvtiers.cost.preempt import PreemptMode, PreemptPlan, Surroundings, Victim
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.messages import JobId, TransferKind, UInt8s
from kvtiers.model.outcome import Outcome

# Steps until the engine's speed is no longer a seed, which may be off by orders of magnitude.
_NUM_STEPS_KNOWN: Final = 5
# A busy host may not run a thread for so long: a shorter delay says nothing about a link.
_PATIENCE_SECONDS: Final = 0.25
# Share of the time that a store's answer may save for which a request waits; docs/decisions/0027.
LOOKUP_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine does at a moment.

    Attributes:
        busy_seconds: for how long the device has work with prompts that were admitted already.
        computes: whether it runs steps, of prompts or of those that generate.
        num_waiting: requests that were not admitted yet, with the one that is asked about.
    """

    busy_seconds: float = 0.0
    computes: bool = False
    num_waiting: int = 0


class Outlook:
    """Plans for a request with what else device and links have to do, and learns from its load.

    Args:
        loading: the jobs of requests whose reload is under way; kept by the owner.
        engine: tells what the engine does at the moment.

    Attributes:
        running: requests in the engine's last step that have not left since.
    """

    def __init__(
        self,
        settings: ControlSettings,
        cost: CostModel,
        jobs: JobTable,
        loading: Mapping[str, JobId],
        engine: Callable[[], EngineLoad],
    ) -> None:
        self._settings = settings
        self._cost = cost
        self._jobs = jobs
        self._loading = loading
        self._engine = engine
        self.running: set[str] = set()
        self._must_return: set[str] = set()
        self._windows = tuple(
            WindowKV.of(settings.group_nbytes(idx), group.window, settings.block_size)
            for idx, group in enumerate(settings.groups)
            if group.window is not None
        )

    def must_return(self, request_id: str) -> None:
        """Note a swapped request: when it returns all of it is reloaded, whatever that costs."""
        self._must_return.add(request_id)

    def returned(self, request_id: str) -> None:
        """Note that a request was admitted again, or is over."""
        self._must_return.discard(request_id)

    def plan(self, request_id: str, match: Match, prompt: Prompt) -> ReloadPlan:
        """Choose how much of what was found to reload."""
        sources = match.slowest_sources
        if request_id in self._must_return:
            return self._cost.plan_all(sources, match.valid, prompt)
        return self._cost.plan(sources, match.valid, prompt)

    def patience_seconds(self, request_id: str, match: Match, num_tokens: int, now: float) -> float:
        """Return how long a request may wait for stores to say what they hold.

        A share of what the best answer would save it, by the same predictions that choose what to
        reload; at least the configured time, and never longer than for a load.
        """
        prompt = self.prompt(num_tokens, match.start, now)
        known, possible = match.num_blocks, match.num_possible
        names = [store.name for store in self._settings.stores]
        sources = np.full((1, possible), 1 + min(map(names.index, match.unknown)), np.uint8)
        sources[0, :known] = match.slowest_sources[:known]
        hoped = replace(match, sources=sources, valid=np.ones(possible + 1, np.bool_))
        best = self.plan(request_id, hoped, prompt)
        without = best.recompute_seconds
        if known:
            without = self.plan(request_id, match, prompt).chosen_seconds
        worth = LOOKUP_SHARE * (without - best.chosen_seconds)
        return max(self._settings.lookup_deadline, min(worth, self._settings.reload_deadline))

    def prompt(
        self,
        num_tokens: int,
        num_local_blocks: int,
        now: float,
        at_hand: Callable[[], bool] = lambda: False,
    ) -> Prompt:
        """Return the request as a plan needs it, with what it meets now.

        Args:
            at_hand: tells whether a load could begin at once.
        """
        overlaps = self._cost.policy.num_load_stages > 1 and (self._knows_speed or not self._auto)
        jobs = (self._jobs.get(job_id) for job_id in self._loading.values())
        ready = (max(0.0, j.started + j.predicted_seconds - now) for j in jobs if j is not None)
        engine = self._engine()
        return Prompt(
            num_tokens,
            num_local_blocks,
            self._settings.block_size,
            self._settings.block_nbytes,
            wait_seconds=engine.busy_seconds,
            notice_seconds=self._cost.noticing.seconds(computes=engine.computes),
            in_step_seconds=self._settings.in_step_seconds,
            others_ready_seconds=tuple(ready),
            windows=self._windows,
            frames=self._settings.frames,
            overlaps=overlaps and at_hand(),
            num_waiting=max(0, engine.num_waiting - 1),
            num_running=len(self.running),
        )

    def expect(self, job: Job, plan: ReloadPlan | None, *, in_step: bool = False) -> None:
        """Note how long a reload is going to take, and how long it may.

        A load that takes as long as computing its blocks would have taken is given up, and the
        rest of it computed: whatever a link does, a request waits at most twice as long as
        without kvtiers. Until the engine's speed is known, and where the user wants every reload,
        only the configured deadline holds; for a reload that a step waits for the former only,
        since others wait with it.
        """
        if plan is None:
            return
        job.predicted_seconds = plan.load_seconds
        engine = self._engine()
        job.watch = Watch(
            self._cost.links.moved_seconds, engine.busy_seconds, computes=engine.computes
        )
        if self._knows_speed and (self._auto or in_step):
            worth = max(plan.recompute_seconds - plan.compute_seconds, plan.load_seconds)
            allowed = (1.0 + self._cost.policy.margin) * worth + _PATIENCE_SECONDS
            job.deadline_seconds = min(self._settings.reload_deadline, allowed)

    def preemption(
        self,
        match: Match,
        num_tokens: int,
        num_sequences: int,
        mode: PreemptMode,
        around: Surroundings,
    ) -> PreemptPlan:
        """Compare swapping a victim, of whose blocks some are stored, with computing it again."""
        sources = match.slowest_sources[: match.num_blocks]
        size, nbytes = self._settings.block_size, self._settings.block_nbytes
        victim = Victim(num_tokens, size, nbytes, sources.tolist(), num_sequences, around)
        return self._cost.preempt(victim, mode)

    def in_step(self, job_ids: Iterable[JobId]) -> None:
        """Note reloads within a step: they are answered at its end, so that nothing is learnt of
        how long they waited to be noticed."""
        for job in filter(None, map(self._jobs.get, job_ids)):
            job.watch = None

    def learn(self, job: Job, outcomes: UInt8s, now: float) -> None:
        """Learn from a load that is over.

        If all came: how long it waited to be noticed. If not: on which link it hung, which is that
        of the first block that did not come in time.
        """
        if job.kind is TransferKind.RELOAD and (outcomes == Outcome.OK).all():
            self._learn_noticing(job, now)
        late = np.flatnonzero(outcomes == Outcome.TIMED_OUT)
        if not len(late) or job.probes or job.lacked_slots:
            return
        source = job.rows[int(late[0])].source
        stores = self._settings.stores
        name = read_link(stores[source - 1].name) if source else reload_link()
        self._cost.links.stalled(name, now)

    def _learn_noticing(self, job: Job, now: float) -> None:
        """Compare the time from order to answer with what the links' meters counted meanwhile.

        If they counted more they served several jobs at once, and say nothing of this one. Time
        in which the device had other work in any case does not count as waiting.
        """
        watch = job.watch
        if watch is None:
            return
        moved = self._cost.links.moved_seconds

        def worked(name: str) -> float:
            before = watch.moved_seconds.get(name, 0.0)
            return (moved.get(name, 0.0) - before) / self._jobs.num_ranks

        to_hbm = worked(reload_link())
        sources = {row.source for row in job.rows if row.source}
        from_stores = sum(worked(read_link(self._settings.stores[s - 1].name)) for s in sources)
        last = to_hbm * min(1.0, self._settings.frames.num_together / max(len(job.rows), 1))
        done = max(to_hbm, from_stores + last if sources else 0.0)
        lived = now - job.ordered
        if done <= lived:
            waited = lived - max(done, watch.device_seconds)
            self._cost.noticing.observe(max(0.0, waited), computes=watch.computes)

    @property
    def _knows_speed(self) -> bool:
        return self._cost.prefill.num_observed >= _NUM_STEPS_KNOWN

    @property
    def _auto(self) -> bool:
        return self._cost.policy.mode is CostMode.AUTO
