"""Keeps track of the engine blocks that asynchronous reloads fill."""

from __future__ import annotations

from collections.abc import Iterable, Set

from kvtiers.control.answers import LoadDone


class AsyncLoads:
    """The blocks of asynchronous reloads, until the engine has been told how they ended.

    No step computes on such blocks before they are there, so that a load of them that fails makes
    nothing wrong that was computed.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, set[int]] = {}
        self._over: set[str] = set()

    def begun(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Note a reload."""
        self._over.discard(request_id)
        self._blocks[request_id] = set(block_ids)

    def told(self, loads: Iterable[LoadDone]) -> None:
        """Note which reloads have ended with this step's output.

        Those that ended with the step before are forgotten: the engine may reuse their blocks.
        """
        for request_id in self._over:
            self._blocks.pop(request_id, None)
        self._over = {load.request_id for load in loads} & self._blocks.keys()

    def explain(self, failed_blocks: Set[int]) -> bool:
        """Whether failed blocks are all of asynchronous reloads."""
        return failed_blocks <= set().union(*self._blocks.values())
