"""Which blocks of a request are offered to DRAM, and when."""

from __future__ import annotations

from kvtiers.connector.requests import RequestState
from kvtiers.control.controller import Controller
from kvtiers.model.messages import JobId
from kvtiers.observe.metrics import OFFLOADS_DROPPED, Counters


class Offers:
    """Offers what requests have computed, and of those that ended only what is known to be true.

    A reload within a step is confirmed at the step's end: until then nobody knows whether what the
    step computes on it is worth keeping.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._ended: list[RequestState] = []
        self._unconfirmed: set[JobId] = set()  # reloads in a step that ranks have not answered

    def offer(self, controller: Controller, state: RequestState) -> None:
        """Offer what is full and was not taken yet."""
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
        """Offer a request's blocks for the last time, from the first that was lost since."""
        for group, keys in enumerate(state.keys):
            taken = state.num_offered[group]
            if taken and not controller.holds(keys[taken - 1]):
                state.num_offered[group] = 0
        self.offer(controller, state)

    def ended(self, controller: Controller, state: RequestState) -> None:
        """Take in a request that has ended, whose blocks are known."""
        self._ended.append(state)
        self.confirmed(controller)

    def confirmed(self, controller: Controller) -> None:
        """Offer the blocks of requests that ended, unless a load is unconfirmed."""
        if not self._unconfirmed:
            self.scheduled(controller)

    def scheduled(self, controller: Controller) -> None:
        """Offer them before another step writes into their blocks, or else leave them: some hold
        blocks of a load that nobody has confirmed."""
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
        """Leave the blocks of requests that ended: what they hold may not be true."""
        self._ended.clear()
