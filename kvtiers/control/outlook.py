"""What a plan has to know of the moment: who else is served, and how long a load may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from kvtiers.control.answers import slowest
from kvtiers.control.jobs import Job, JobTable
from kvtiers.control.reload import Match
from kvtiers.control.settings import ControlSettings
from kvtiers.cost.links import read_link, reload_link
from kvtiers.cost.loads import WindowKV
from kvtiers.cost.model import CostModel
from kvtiers.cost.planner import Prompt, ReloadPlan
from kvtiers.cost.preempt import PreemptMode, PreemptPlan, Victim
from kvtiers.model.cost_mode import CostMode
from kvtiers.model.messages import JobId, UInt8s
from kvtiers.model.outcome import Outcome

# Steps until the engine's speed is no longer a seed, which may be off by orders of magnitude.
_NUM_STEPS_KNOWN: Final = 5
# For which a busy host may leave a thread out: less says nothing about a link.
_PATIENCE_SECONDS: Final = 0.25


class Outlook:
    """Sees what else the device and the links have to do, and which link hangs.

    Args:
        loading: the jobs of requests whose reload is under way; kept by the owner.
        busy_seconds: tells for how long the device has work that was admitted already.
    """

    def __init__(
        self,
        settings: ControlSettings,
        cost: CostModel,
        jobs: JobTable,
        loading: Mapping[str, JobId],
        busy_seconds: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._cost = cost
        self._jobs = jobs
        self._loading = loading
        self._busy_seconds = busy_seconds
        self._must_return: set[str] = set()
        self._windows = tuple(
            WindowKV.of(settings.group_nbytes(idx), group.window, settings.block_size)
            for idx, group in enumerate(settings.groups)
            if group.window is not None
        )

    def must_return(self, request_id: str) -> None:
        """Note a request that was swapped out by force: it is reloaded whatever that costs."""
        self._must_return.add(request_id)

    def returned(self, request_id: str) -> None:
        """Note that a request was admitted again, or is over."""
        self._must_return.discard(request_id)

    def plan(self, request_id: str, match: Match, num_tokens: int, now: float) -> ReloadPlan:
        """Choose how much of what was found to reload."""
        sources, prompt = slowest(match.sources), self.prompt(num_tokens, match.start, now)
        if request_id in self._must_return:
            return self._cost.plan_all(sources, match.valid, prompt)
        return self._cost.plan(sources, match.valid, prompt)

    def prompt(self, num_tokens: int, num_local_blocks: int, now: float) -> Prompt:
        """Return the request as a plan needs it, with what it meets now."""
        jobs = (self._jobs.get(job_id) for job_id in self._loading.values())
        ready = (max(0.0, j.started + j.predicted_seconds - now) for j in jobs if j is not None)
        return Prompt(
            num_tokens,
            num_local_blocks,
            self._settings.block_size,
            self._settings.block_nbytes,
            wait_seconds=self._busy_seconds(),
            others_ready_seconds=tuple(ready),
            windows=self._windows,
            frames=self._settings.frames,
        )

    def expect(self, job: Job, plan: ReloadPlan | None) -> None:
        """Note how long a reload is going to take, and how long it may.

        A load that takes as long as computing its blocks would have taken is given up, and the
        rest of it computed: whatever a link does, a request waits at most twice as long as
        without kvtiers. Until the engine's speed is known, and where the user wants every reload,
        only the configured deadline holds.
        """
        if plan is None:
            return
        job.predicted_seconds = plan.load_seconds
        policy = self._cost.policy
        known = self._cost.prefill.num_observed >= _NUM_STEPS_KNOWN
        if policy.mode is CostMode.AUTO and known:
            worth = max(plan.recompute_seconds - plan.compute_seconds, plan.load_seconds)
            allowed = (1.0 + policy.margin) * worth + _PATIENCE_SECONDS
            job.deadline_seconds = min(self._settings.reload_deadline, allowed)

    def preemption(
        self, match: Match, num_tokens: int, num_sequences: int, mode: PreemptMode
    ) -> PreemptPlan:
        """Compare swapping a victim, of whose blocks some are stored, with computing it again."""
        sources = slowest(match.sources[:, : match.num_blocks])
        stored = np.bincount(sources, minlength=1).tolist()
        size, nbytes = self._settings.block_size, self._settings.block_nbytes
        victim = Victim(num_tokens, size, nbytes, stored, num_sequences)
        return self._cost.preempt(victim, mode)

    def learn(self, job: Job, outcomes: UInt8s, now: float) -> None:
        """Note the link that a load hung on: that of its first block that did not come in time."""
        late = np.flatnonzero(outcomes == Outcome.TIMED_OUT)
        if not len(late) or job.probes or job.lacked_slots:
            return
        source = job.rows[int(late[0])].source
        stores = self._settings.stores
        name = read_link(stores[source - 1].name) if source else reload_link()
        self._cost.links.stalled(name, now)
