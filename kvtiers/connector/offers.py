"""Which blocks of a request are offered to DRAM, and when."""

from __future__ import annotations

from kvtiers.connector.requests import RequestState
from kvtiers.control.controller import Controller
from kvtiers.model.messages import JobId
from kvtiers.observe.metrics import OFFLOADS_DROPPED, Counters


class Offers:
    """Offers the full blocks of requests to DRAM, also of requests that have ended.

    Whether a reload within a step has come is known at the step's end. Until then what the step
    computes on top of it may be wrong, and blocks of requests that ended are not offered.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._ended: list[RequestState] = []
        self._unconfirmed: set[JobId] = set()  # reloads in a step that ranks have not answered

    def offer(self, controller: Controller, state: RequestState) -> None:
        """Offer a request's full blocks that DRAM has not taken yet."""
        if state.tainted:
            return
        for group, keys in enumerate(state.keys):
            first, block_ids = state.num_offered[group], state.block_ids[group]
            end = min(state.num_full, len(block_ids), len(keys))
            if first >= end:
                continue
            state.num_offered[group] = taken = controller.computed(keys, block_ids, first, end)
            if taken == end:
                continue
            tried = max(taken, state.num_tried[group])
            if tried < end:  # each block is counted once, however often it is offered
                self._counters.add(OFFLOADS_DROPPED, ("no_room",), end - tried)
                state.num_tried[group] = end

    def offer_all(self, controller: Controller, state: RequestState) -> None:
        """Offer a request's blocks for the last time, again those that DRAM has lost meanwhile."""
        for group, keys in enumerate(state.keys):
            taken = state.num_offered[group]
            if taken and not controller.holds(keys[taken - 1]):
                state.num_offered[group] = 0
        self.offer(controller, state)

    def ended(self, controller: Controller, state: RequestState) -> None:
        """Note a request that has ended, and offer its blocks as soon as that is safe."""
        self._ended.append(state)
        self.confirmed(controller)

    def confirmed(self, controller: Controller) -> None:
        """Offer the blocks of requests that ended, unless a load within a step is unanswered."""
        if not self._unconfirmed:
            self.scheduled(controller)

    def scheduled(self, controller: Controller) -> None:
        """Offer them now, or never: the next step may write into their blocks.

        While a load within a step is unanswered, they are given up: they may hold its blocks.
        """
        ended, self._ended = self._ended, []
        if not self._unconfirmed:
            for state in ended:
                self.offer_all(controller, state)

    def loads_in_step(self, job_id: JobId) -> None:
        """Note a reload within a step."""
        self._unconfirmed.add(job_id)

    def loaded(self, job_id: JobId) -> bool:
        """Note the answer of a reload; returns whether it was one within a step."""
        in_step = job_id in self._unconfirmed
        self._unconfirmed.discard(job_id)
        return in_step

    def distrust(self) -> None:
        """Give up the blocks of requests that ended: what they hold may be wrong."""
        self._ended.clear()
