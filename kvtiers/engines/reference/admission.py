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
    """What one sequence of a request would hold.

    Attributes:
        shared: leading blocks that are in HBM, or that the sequence before it brings there.
        num_local: tokens whose KV is in them already. num_new: blocks beside the shared ones.
        load: what kvtiers would bring.
    """

    sequence: TokenSequence
    shared: list[int]
    num_local: int
    num_new: int
    load: Reload = NOTHING


def fits(claims: Sequence[Claim], pool: BlockPool, watermark_blocks: int) -> bool:
    """Whether there is room above the watermark."""
    num = sum(claim.num_new for claim in claims) + pool.num_held_by_none(claims[0].shared)
    return pool.num_free - num >= watermark_blocks


class Admission:
    """Works out claims, and grants them; who comes first is not its business."""

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
        """Return what each of a request's sequences would hold.

        The first one finds in HBM what the prefix cache has, but never its last token, whose
        output is wanted. The others share the blocks of the prompt with it.
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
        """Return the blocks that a group will need once its sequences part: what of the prompt
        they cannot share."""
        if len(request.sequences) > 1:
            return 0
        settings, num = self._settings, request.new.num_prompt_tokens
        whole = num // settings.hash_tokens * settings.blocks_per_hash
        return (request.new.num_sequences - 1) * (settings.blocks_for(num) - whole)

    def find_loads(self, request: Request, claims: Sequence[Claim], *, reloads: bool) -> bool:
        """Ask what kvtiers would bring; False where it has yet to find out.

        Args:
            reloads: otherwise nothing is brought, whatever there is.
        """
        if not reloads:
            return True
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
