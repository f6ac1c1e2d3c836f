"""Which engine blocks running offloads still have to read."""

from __future__ import annotations

from collections.abc import Iterable

from kvtiers.model.messages import NO_BLOCK, Int64s, JobId, int64s


class Fences:
    """Engine block to the offloads that read it, until every rank has read it.

    Usually one. Several where a block has rows of several KV groups (ranges of layers) that were
    not all taken in one step.
    """

    def __init__(self) -> None:
        self._readers: dict[int, tuple[JobId, ...]] = {}
        self._needed: dict[JobId, set[int]] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def reading(self, block_id: int, job_id: JobId) -> None:
        """Note that a job will read a block."""
        readers = self._readers.get(block_id)
        if readers is None:
            self._readers[block_id] = (job_id,)
        elif job_id not in readers:
            self._readers[block_id] = (*readers, job_id)

    def read(self, block_ids: Iterable[int], job_id: JobId) -> None:
        """Note that every rank has read some blocks."""
        for block_id in block_ids:
            readers = self._readers.get(block_id, ())
            if job_id in readers:
                left = tuple(reader for reader in readers if reader != job_id)
                if left:
                    self._readers[block_id] = left
                else:
                    del self._readers[block_id]

    def overwritten(self, block_ids: Iterable[int]) -> None:
        """Note that this step overwrites some blocks."""
        if not self._readers:
            return
        for block_id in block_ids:
            if block_id != NO_BLOCK:
                for job_id in self._readers.get(block_id, ()):
                    self._needed.setdefault(job_id, set()).add(block_id)

    def take(self) -> dict[JobId, Int64s]:
        """Return, by job, which blocks it must have read before this step's forward pass."""
        needed, self._needed = self._needed, {}
        return {job_id: int64s(sorted(blocks)) for job_id, blocks in sorted(needed.items())}
