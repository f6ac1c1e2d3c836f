"""Which blocks of a request are offered to DRAM, and when."""

from __future__ import annotations

from kvtiers.connector.requests import RequestState
from kvtiers.control.controller import Controller
from kvtiers.observe.metrics import OFFLOADS_DROPPED, Counters


def offer(controller: Controller, counters: Counters, state: RequestState) -> None:
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
            counters.add(OFFLOADS_DROPPED, ("no_room",), end - tried)
            state.num_tried[group] = end


def offer_all(controller: Controller, counters: Counters, state: RequestState) -> None:
    """Offer a request's blocks for the last time, from the first that was lost since."""
    for group, keys in enumerate(state.keys):
        taken = state.num_offered[group]
        if taken and not controller.holds(keys[taken - 1]):
            state.num_offered[group] = 0
    offer(controller, counters, state)
