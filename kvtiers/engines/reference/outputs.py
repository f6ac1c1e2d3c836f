"""Turns a schedule into work for the runner, and what the runner returns into output tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvtiers.engines.reference.block_pool import BlockPool
from kvtiers.engines.reference.lower_tiers import LowerTiers
from kvtiers.engines.reference.report import FinishReason, Served
from kvtiers.engines.reference.requests import Request, TokenSequence
from kvtiers.engines.reference.runners import SequenceWork, StepResult, StepWork
from kvtiers.engines.reference.scheduler import Schedule
from kvtiers.engines.reference.settings import EngineSettings

_sequence_work: Final = partial(tuple.__new__, SequenceWork)  # its constructor takes twice as long


@dataclass(slots=True)
class Taken:
    """What requests got in a step; see `StepReport`.

    Attributes:
        num_again: of the tokens computed, those that had been computed before a preemption.
    """

    num_tokens: dict[str, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    num_again: int = 0
    itl_seconds: list[float] = field(default_factory=list)
    first_tokens: list[str] = field(default_factory=list)
    finished: list[Served] = field(default_factory=list)


class Outputs:
    """Appends tokens, forks groups, fills the prefix cache, and ends requests."""

    def __init__(self, settings: EngineSettings, pool: BlockPool, tiers: LowerTiers) -> None:
        self._settings = settings
        self._pool = pool
        self._tiers = tiers
        self._copies: list[tuple[int, int]] = []

    # -- before the step --------------------------------------------------------------

    def prepare(
        self, schedule: Schedule, idle_until: float | None = None
    ) -> tuple[StepWork, dict[str, int]]:
        """Return what a step computes, and what kvtiers has to know of it.

        Returns:
            the runner's work; sequence id to the tokens that will certainly be computed after the
            step, for prompts and for sequences that fill a block.
        """
        size, work, known = self._settings.hash_tokens, [], {}
        for name, (request, sequence, num) in schedule.work.items():
            before, num_known = sequence.num_computed, sequence.num_known
            after = before + num
            new = request.new
            num_samples = 0 if after < num_known else 1
            if num_samples and num_known == new.num_prompt_tokens:
                num_samples = new.num_sequences  # here the sequences of a group part
            after = min(after, num_known)
            # Not those that this step fills only: guesses that were right may have filled some.
            if after // size > sequence.num_told or before < new.num_prompt_tokens:
                sequence.num_told = after // size
                known[name] = after
            ids, block_ids = sequence.token_ids, sequence.block_ids
            row = (name, ids, before, num, num_known, block_ids, num_samples)
            work.append(_sequence_work(row))
        copies, self._copies = self._copies, []
        return StepWork(work, copies, idle_until), known

    # -- after it ---------------------------------------------------------------------

    def lose(
        self,
        request: Request,
        sequence: TokenSequence,
        failed_blocks: Collection[int],
        schedule: Schedule,
    ) -> None:
        """Undo what a sequence has from its first failed block on, its part of the step too."""
        table = sequence.block_ids[:: self._settings.blocks_per_hash]
        bad = next((idx for idx, block_id in enumerate(table) if block_id in failed_blocks), None)
        if bad is None or bad * self._settings.hash_tokens >= sequence.num_computed:
            return
        self._rewind(request, sequence, bad * self._settings.hash_tokens)
        schedule.work.pop(sequence.sequence_id, None)

    def void(self, request: Request) -> None:
        """Undo all that a request has found or loaded: it was computed before a reset."""
        for sequence in request.sequences:
            self._rewind(request, sequence, 0)
        if self._at_first_admission(request):
            request.num_local_tokens = 0

    def take(self, schedule: Schedule, result: StepResult, now: float) -> Taken:
        """Apply the runner's result to the sequences that `lose` has left in the schedule."""
        taken = Taken()
        for name, (request, sequence, num) in schedule.work.items():
            tokens = result.tokens.get(name, ())
            if sequence.num_known > request.new.num_prompt_tokens and num == 1 == len(tokens):
                self._decoded(taken, request, sequence, tokens[0], now)
                continue
            self._count(taken, request, sequence, num)
            if not tokens:
                sequence.num_computed += num
                self._cache(sequence)
            elif sequence.num_known == request.new.num_prompt_tokens:
                self._begin(taken, request, sequence, tokens, now)
            else:
                self._append(taken, request, sequence, tokens, now)
        return taken

    def served(self, request: Request, reason: FinishReason, now: float) -> Served:
        """Return what is reported of a request that is over."""
        prompt = request.new.num_prompt_tokens
        return Served(
            request_id=request.request_id,
            tenant=request.new.tenant,
            reason=reason,
            arrived_at=request.new.arrived_at,
            admitted_at=request.admitted_at,
            first_token_at=request.first_token_at,
            finished_at=now,
            num_prompt_tokens=prompt,
            num_output_tokens=request.num_output_tokens,
            token_ids=[s.token_ids[prompt:] for s in request.sequences if s.token_ids is not None],
            num_local_tokens=request.num_local_tokens,
            num_reloaded_tokens=request.num_reloaded_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_recomputed_tokens=request.num_recomputed_tokens,
            num_recomputes=request.num_recomputes,
            num_swaps=request.num_swaps,
            reloaded_by_tier=request.reloaded_by_tier,
        )

    # -- internals --------------------------------------------------------------------

    def _rewind(self, request: Request, sequence: TokenSequence, num_kept: int) -> None:
        """Keep `num_kept` leading tokens; the others count as never reloaded."""
        lost = min(sequence.num_computed - num_kept, request.num_reloaded_tokens)
        request.num_reloaded_tokens -= lost
        if self._at_first_admission(request):
            self._lose_by_tier(request, lost)
        sequence.rewind(num_kept)

    @staticmethod
    def _at_first_admission(request: Request) -> bool:
        return request.first_token_at is None and not request.num_recomputes + request.num_swaps

    @staticmethod
    def _lose_by_tier(request: Request, num_tokens: int) -> None:
        """Take lost tokens off the tiers' counts, the last tier's first: whose blocks failed is not
        known."""
        for tier in reversed(list(request.reloaded_by_tier)):
            taken = min(num_tokens, request.reloaded_by_tier[tier])
            request.reloaded_by_tier[tier] -= taken
            num_tokens -= taken

    @staticmethod
    def _count(taken: Taken, request: Request, sequence: TokenSequence, num: int) -> None:
        known = min(num, sequence.num_missing)
        again = max(0, min(sequence.num_computed + known, sequence.num_ever_computed))
        again = max(0, again - sequence.num_computed)
        taken.num_tokens[request.request_id] = taken.num_tokens.get(request.request_id, 0) + num
        taken.num_again += again
        request.num_computed_tokens += num
        request.num_recomputed_tokens += again
        sequence.num_ever_computed = max(sequence.num_ever_computed, sequence.num_computed + known)

    def _decoded(
        self, taken: Taken, request: Request, sequence: TokenSequence, token: int, now: float
    ) -> None:
        """Give a sequence the token of a plain decode: `_append`, made fast for most tokens."""
        name, num_computed = request.new.request_id, sequence.num_known
        request.num_computed_tokens += 1
        taken.num_tokens[name] = taken.num_tokens.get(name, 0) + 1
        taken.num_output_tokens += 1
        taken.itl_seconds.append(now - sequence.last_token_at)
        sequence.last_token_at = now
        sequence.num_computed = sequence.num_ever_computed = num_computed
        sequence.num_known = num_computed + 1
        if sequence.token_ids is not None:
            sequence.token_ids.append(token)
        size = self._settings.hash_tokens
        if not num_computed % size or not (num_computed + 1) % size:
            sequence.extend_hashes()
            self._cache(sequence)
        if sequence.num_known == sequence.num_most or token in request.new.stop_token_ids:
            sequence.over = True
            self._end(taken, request, now)

    def _begin(
        self,
        taken: Taken,
        request: Request,
        sequence: TokenSequence,
        tokens: Sequence[int],
        now: float,
    ) -> None:
        """Give a request its first token, or each sequence of a group its own."""
        request.first_token_at = now
        taken.first_tokens.append(request.request_id)
        others = [self._fork(request, sequence, idx) for idx in range(1, request.new.num_sequences)]
        for each, token in zip((sequence, *others), tokens, strict=True):
            self._append(taken, request, each, [token], now)

    def _append(
        self,
        taken: Taken,
        request: Request,
        sequence: TokenSequence,
        tokens: Sequence[int],
        now: float,
    ) -> None:
        """Give a sequence its tokens, up to and including one that stops it."""
        kept = list(tokens)
        stop_ids = request.new.stop_token_ids
        stop = next((i for i, token in enumerate(kept) if token in stop_ids), None)
        if stop is not None:
            del kept[stop + 1 :]
        first = sequence.num_known == request.new.num_prompt_tokens
        sequence.append(kept)
        # Of several tokens all but the last were guessed, and their KV is there.
        sequence.num_computed = sequence.num_known - 1
        sequence.num_ever_computed = max(sequence.num_ever_computed, sequence.num_computed)
        taken.num_output_tokens += len(kept)
        if not first:
            taken.itl_seconds += [(now - sequence.last_token_at) / len(kept)] * len(kept)
        sequence.last_token_at = now
        self._cache(sequence)
        sequence.over = stop is not None or sequence.num_known == sequence.num_most
        if sequence.over:
            self._end(taken, request, now)

    def _cache(self, sequence: TokenSequence) -> None:
        num = min(sequence.num_computed // self._settings.hash_tokens, len(sequence.hashes))
        if num > sequence.num_hashed and self._settings.prefix_caching:
            self._pool.cache(sequence.block_ids, sequence.hashes, sequence.num_hashed, num)
            sequence.num_hashed = num

    def _fork(self, request: Request, first: TokenSequence, idx: int) -> TokenSequence:
        """Begin another sequence of a group; the full blocks of the prompt are shared."""
        settings, prompt = self._settings, request.new.num_prompt_tokens
        num_shared = prompt // settings.hash_tokens * settings.blocks_per_hash
        num_all = settings.blocks_for(prompt)
        other = first.fork(idx, prompt)
        shared, rest = first.block_ids[:num_shared], first.block_ids[num_shared:num_all]
        own = request.spare_block_ids[: len(rest)]
        del request.spare_block_ids[: len(rest)]
        self._pool.hold(shared)
        other.block_ids = shared + own
        self._copies += zip(rest, own, strict=True)
        request.sequences.append(other)
        self._tiers.forked(other)
        return other

    def _end(self, taken: Taken, request: Request, now: float) -> None:
        """End the sequences that are over, and the request with its last one."""
        for sequence in request.sequences:
            if sequence.over and sequence.block_ids:
                self._tiers.finished(sequence)
                self._pool.free(sequence.block_ids)
                sequence.lose_blocks()
        if all(sequence.over for sequence in request.sequences):
            stopped = any(s.num_known < s.num_most for s in request.sequences)
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            taken.finished.append(self.served(request, reason, now))
