"""What a request needs to be admitted, and what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtiers.connector.step import Reload
from kvtiers.engines.reference.block_pool import BlockPool
from kvtiers.engines.reference.lower_tiers import NOTHING, LowerTiers
from kvtiers.engines.reference.requests import Request, TokenSequence
from kvtiers.engines.reference.settings import EngineSettings


@dataclass(slots=True)
class Claim:
    """What one sequence needs in order to be admitted.

    Attributes:
        shared: ids of leading blocks that it need not take: of the first sequence those in the
            prefix cache, of a group's others those of the prompt, once the first has them.
        num_local: leading tokens whose KV is in shared blocks. num_new: blocks to take.
        load: what kvtiers would bring into new blocks.
    """

    sequence: TokenSequence
    shared: list[int]
    num_local: int
    num_new: int
    load: Reload = NOTHING


def fits(claims: Sequence[Claim], pool: BlockPool, watermark_blocks: int) -> bool:
    """Whether there is room above the watermark."""
    num = sum(claim.num_new for claim in claims) + pool.num_free_among(claims[0].shared)
    return pool.num_free - num >= watermark_blocks


class Admission:
    """Works out what a request needs, and gives it that; it does not choose between requests."""

    def __init__(self, settings: EngineSettings, pool: BlockPool, tiers: LowerTiers) -> None:
        self._settings = settings
        self._pool = pool
        self._tiers = tiers

    def within_share(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a request's tenant may have more; one that holds nothing always may."""
        share = self._settings.tenant_share
        if share >= 1.0:
            return True
        held = sum(r.num_blocks for r in running if r.new.tenant == request.new.tenant)
        wanted = sum(self._settings.blocks_for(s.num_known) for s in request.live)
        return held == 0 or held + wanted <= share * self._settings.num_blocks

    def claims(self, request: Request) -> list[Claim]:
        """Return what each of a request's sequences needs.

        The first one shares what the prefix cache has of it, but never its last token, whose
        output is wanted. The others share the full blocks of the prompt with the first.
        """
        settings, claims = self._settings, []
        head, *others = request.live
        size = settings.hash_tokens
        shared = self.local_blocks(head)
        first = settings.blocks_for(head.num_known) - len(shared)
        first += self.num_spare(request)
        claims.append(Claim(head, shared, len(shared) * settings.block_size, first))
        prompt = request.new.num_prompt_tokens // size * settings.blocks_per_hash
        for sequence in others:
            num_new = settings.blocks_for(sequence.num_known) - prompt
            claims.append(Claim(sequence, [], 0, num_new))
        return claims

    def local_blocks(self, sequence: TokenSequence) -> list[int]:
        """Return the leading blocks of a sequence that the prefix cache has."""
        if not self._settings.prefix_caching:
            return []
        limit = (sequence.num_known - 1) // self._settings.hash_tokens
        return self._pool.hit(sequence.hashes, limit)

    def num_spare(self, request: Request) -> int:
        """Return how many blocks a group has to keep in reserve until its sequences fork.

        Each but the first then needs its own copy of the prompt's last blocks, which are not full
        and cannot be shared. 0 for a single sequence, and once the group has forked.
        """
        if len(request.sequences) > 1:
            return 0
        settings, num = self._settings, request.new.num_prompt_tokens
        whole = num // settings.hash_tokens * settings.blocks_per_hash
        return (request.new.num_sequences - 1) * (settings.blocks_for(num) - whole)

    def find_loads(self, request: Request, claims: Sequence[Claim]) -> bool:
        """Ask kvtiers what it would bring, and note it in the claims.

        Returns:
            False where a store has yet to say what it holds: ask again in a later step.
        """
        size = self._settings.hash_tokens
        head = claims[0]
        for claim in claims:
            if claim is not head:  # computed as far as the head's load reaches, at least
                reached = head.num_local + (head.load.num_tokens or 0)
                claim.num_local = min(reached, request.new.num_prompt_tokens) // size * size
            load = self._tiers.reloadable(request, claim.sequence, claim.num_local)
            if load.num_tokens is None:
                return False
            claim.load = load
        return True

    def allocate(self, request: Request, claims: Sequence[Claim]) -> None:
        """Give a request its blocks, and start its loads."""
        pool, head = self._pool, claims[0]
        num_spare = self.num_spare(request)
        prompt = request.new.num_prompt_tokens // self._settings.hash_tokens
        prompt *= self._settings.blocks_per_hash
        pool.hold(head.shared)
        for claim in claims:
            sequence = claim.sequence
            if claim is not head:
                claim.shared = head.sequence.block_ids[:prompt]
                pool.hold(claim.shared)
            num_new = claim.num_new - (num_spare if claim is head else 0)
            sequence.block_ids = claim.shared + pool.take(num_new)
            num_loaded = claim.load.num_tokens or 0
            sequence.num_computed = claim.num_local + num_loaded
            sequence.num_hashed = claim.num_local // self._settings.hash_tokens
            self._tiers.allocated(sequence, claim.num_local, claim.load)
            request.num_reloaded_tokens += num_loaded
            if request.admitted_at is None and claim is head:
                request.reloaded_by_tier = dict(claim.load.by_tier)
            if num_loaded and claim.load.asynchronous:
                request.loading.add(sequence.sequence_id)
        request.spare_block_ids = pool.take(num_spare)
        self._tiers.will_write(request.spare_block_ids)
