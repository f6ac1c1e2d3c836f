"""What the reference engine asks kvtiers, and tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvtiers.connector.scheduler import SchedulerConnector
from kvtiers.connector.step import Reload, Step
from kvtiers.cost.preempt import PreemptMode, PreemptPlan, Surroundings
from kvtiers.engines.reference.block_pool import NULL_BLOCK
from kvtiers.engines.reference.requests import Request, TokenSequence
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.model.messages import StepOrders

NOTHING: Final = Reload(0, asynchronous=False)


class LowerTiers:
    """kvtiers below one engine; without it, nothing is ever found and victims are recomputed.

    Where several engine blocks travel as one (`EngineSettings.blocks_per_hash`), kvtiers is given
    the id of the first of them.
    """

    def __init__(self, settings: EngineSettings, connector: SchedulerConnector | None) -> None:
        self._settings = settings
        self._connector = connector
        self._per_hash = settings.blocks_per_hash
        # Engine block to the id under which kvtiers last knew the run that it lies in.
        self._run_of = [NULL_BLOCK] * (settings.num_blocks + 1)
        self._written: set[int] = set()
        self._preempted: dict[str, int] = {}  # swapped sequences to leading blocks to copy down

    @property
    def connected(self) -> bool:
        """Whether kvtiers lies below the engine."""
        return self._connector is not None

    # -- questions --------------------------------------------------------------------

    def reloadable(self, request: Request, sequence: TokenSequence, num_local: int) -> Reload:
        """Return how many tokens beyond the `num_local` in HBM can be reloaded.

        Its `num_tokens` is None while a store has yet to answer: ask again in a later step.
        """
        forced = self._settings.preemption is PreemptMode.RECOMPUTE
        if self._connector is None or (forced and request.num_recomputes):
            return NOTHING
        return self._connector.reloadable(
            sequence.sequence_id, sequence.hashes, sequence.num_known, num_local
        )

    def swap(self, request: Request, num_tokens: int, around: Surroundings) -> PreemptPlan | None:
        """Return how to swap a preempted request; None: compute it again.

        Asked when it is preempted, and once more when it returns.

        Args:
            num_tokens: computed ones of its first sequence. around: what the engine does beside it.
        """
        if self._connector is None:
            return None
        name, mode = request.live[0].sequence_id, self._settings.preemption
        plan = self._connector.preemption(name, num_tokens, request.num_places, mode, around)
        return plan if plan.swap else None

    # -- commands ---------------------------------------------------------------------

    def arrived(self, sequence: TokenSequence, num_local: int) -> None:
        """Note a new sequence, and let kvtiers prefetch what it will reload from stores."""
        if self._connector is not None:
            self._connector.arrived(sequence.sequence_id, sequence.hashes)
            self._connector.prefetch(sequence.sequence_id, sequence.num_known, num_local)

    def forked(self, sequence: TokenSequence) -> None:
        """Note a sequence that was forked from a group's first one."""
        if self._connector is not None:
            self._connector.arrived(sequence.sequence_id, sequence.hashes)

    def allocated(self, sequence: TokenSequence, num_local: int, load: Reload) -> None:
        """Note that a sequence was given its blocks, those of its table; its load begins."""
        if self._connector is None:
            return
        connector = self._connector
        self.will_write(sequence.block_ids[num_local // self._settings.block_size :])
        connector.allocated(sequence.sequence_id, [self.table(sequence)], num_local, load)

    def swapped(self, request: Request, num_blocks: int) -> None:
        """Note a swapped request: its leading blocks are copied down, unless they are below.

        kvtiers will offer all of them for a reload, whatever it predicts by then.
        """
        assert self._connector is not None, "nothing can be swapped without kvtiers"
        for sequence in request.live:
            self._preempted[sequence.sequence_id] = num_blocks
            self._connector.swapped(sequence.sequence_id)

    def dropped(self, sequence: TokenSequence) -> None:
        """Note a preempted sequence that is computed again: its blocks are not copied down."""
        if self._connector is not None:
            self._connector.finished(sequence.sequence_id, ())
            self._connector.arrived(sequence.sequence_id, sequence.hashes)

    def finished(self, sequence: TokenSequence) -> None:
        """Note the end of a sequence, before its blocks are freed; kvtiers may offload them."""
        if self._connector is not None:
            self._connector.finished(sequence.sequence_id, [self.table(sequence)])

    def will_write(self, block_ids: Sequence[int]) -> None:
        """Note engine blocks that are going to be overwritten: copies of them come first."""
        if self._connector is None:
            return
        if self._per_hash == 1:
            self._written.update(block_ids)
            return
        self._written.update(map(self._run_of.__getitem__, block_ids))
        self._written.discard(NULL_BLOCK)

    def orders(
        self,
        num_computed_tokens: dict[str, int],
        work: Mapping[str, tuple[Request, TokenSequence, int]],
        num_scheduled_tokens: int,
    ) -> StepOrders | None:
        """Return what ranks have to do around a step; None without kvtiers.

        Args:
            num_computed_tokens: sequence id to the tokens computed once the step is done; see
                `Outputs.prepare`.
            work: sequence id to all that the step computes; see `Schedule.work`.
            num_scheduled_tokens: of the whole step.
        """
        if self._connector is None:
            return None

        def block_ids(sequence_id: str) -> list[list[int]]:
            return [self.table(work[sequence_id][1])]

        written, self._written = self._written, set()
        preempted, self._preempted = self._preempted, {}
        return self._connector.schedule(
            Step(
                num_computed_tokens=num_computed_tokens,
                overwritten=written,
                preempted=preempted,
                block_ids=block_ids,
                num_scheduled_tokens=num_scheduled_tokens,
                running=work,
                num_copied_blocks=preempted,
            )
        )

    def table(self, sequence: TokenSequence) -> list[int]:
        """Return the ids under which kvtiers knows a sequence's blocks."""
        size, block_ids, run_of = self._per_hash, sequence.block_ids, self._run_of
        if size == 1:
            return list(block_ids)
        for first in range(sequence.num_named * size, len(block_ids), size):
            for block_id in block_ids[first : first + size]:
                run_of[block_id] = block_ids[first]
        sequence.num_named = len(block_ids) // size
        return block_ids[::size]
