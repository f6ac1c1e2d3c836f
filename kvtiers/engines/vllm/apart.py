"""Which engine blocks asynchronous reloads fill: nobody computes on them before they are there."""

from __future__ import annotations

from collections.abc import Iterable, Set

from kvtiers.control.answers import LoadDone


class LoadsApart:
    """The blocks of asynchronous reloads, until the engine has been told what became of them."""

    def __init__(self) -> None:
        self._blocks: dict[str, set[int]] = {}
        self._over: set[str] = set()

    def begun(self, request_id: str, block_ids: Iterable[int]) -> None:
        """Note a reload."""
        self._over.discard(request_id)
        self._blocks[request_id] = set(block_ids)

    def told(self, loads: Iterable[LoadDone]) -> None:
        """Note which reloads are over with this step's output; those of the last one are history:
        their blocks are the engine's to fill again."""
        for request_id in self._over:
            self._blocks.pop(request_id, None)
        self._over = {load.request_id for load in loads} & self._blocks.keys()

    def explain(self, failed_blocks: Set[int]) -> bool:
        """Whether blocks are invalid for no other reason than that such a reload has failed."""
        return failed_blocks <= set().union(*self._blocks.values())
