"""Which engine blocks running offloads still have to read."""

from __future__ import annotations

from collections.abc import Iterable

from kvtiers.model.messages import NO_BLOCK, JobId


class Fences:
    """Engine block to the offload that reads it, until every rank has read it."""

    def __init__(self) -> None:
        self._readers: dict[int, JobId] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def reading(self, block_id: int, job_id: JobId) -> None:
        """Note that a job will read a block. A later reader replaces an earlier one, since
        the block cannot have been refilled before the earlier one was waited for."""
        self._readers[block_id] = job_id

    def read(self, block_ids: Iterable[int], job_id: JobId) -> None:
        """Note that every rank has read some blocks."""
        for block_id in block_ids:
            if self._readers.get(block_id) == job_id:
                del self._readers[block_id]

    def guarding(self, block_ids: Iterable[int]) -> set[JobId]:
        """Return the jobs that must finish reading before any of the blocks is overwritten."""
        if not self._readers:
            return set()
        readers = (self._readers.get(block_id) for block_id in block_ids if block_id != NO_BLOCK)
        return {job_id for job_id in readers if job_id is not None}
