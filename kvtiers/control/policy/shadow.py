"""Small copies of a tier that hold no bytes, to see how replacement rules would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.model.keys import BlockKey

_BLOCKS: Final = 512  # of a shadow
_MOST_SHARE: Final = 4  # a shadow of a small tier has one block in so many of it
_LEAST_BLOCKS: Final = 128  # but so many, if the tier has them
# A hit counts half after so many keys asked for, per block of a shadow, and hits of the best rule:
# where hits are rare, fewer tell nothing.
_HALF_LIFE: Final = 4
_TELLING_HITS: Final = 512
# Keys asked for, per block of a shadow, before hits count: the span that `cost` learns from.
_WARM_UP: Final = 16
_MIX: Final = 0xC2B2AE35  # of MurmurHash3
_LEAST_GAIN: Final = 0.03  # what a change of leader must bring
_DEVIATIONS: Final = 3.0  # and by how many standard deviations, were the shadows independent


def name_of(stand_in: BlockKey) -> int:
    """Return the fingerprint of the key that a shadow knows as this one."""
    return int.from_bytes(stand_in, "big")


class Shadow:
    """One rule over a tier of sampled keys, all of which may leave."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self._capacity = capacity
        self._policy = policy
        self._resident: set[BlockKey] = set()
        self.num_hits = 0.0

    def asked(self, key: BlockKey) -> None:
        """Hit a block, or let it in."""
        policy, resident = self._policy, self._resident
        if key in resident:
            self.num_hits += 1
            policy.touched(key)
            return
        if len(resident) >= self._capacity:
            victim = policy.next_victim()
            if victim is not None:
                policy.removed(victim)
                resident.remove(victim)
        policy.admitted(key)
        policy.exposed(key)
        resident.add(key)


class Contest:
    """Lets rules compete on a sample of the keys, by the hits of late.

    Sampled by fingerprint, a key is always in or always out, and a shadow of a share of the
    tier's blocks that sees the same share of the keys has about the tier's hit rate (Waldspurger
    and others, ATC 2017). Bounded: 512 blocks for each rule.

    Args:
        rules: by name; they rank stand-ins for keys, see `name_of`.
    """

    def __init__(
        self, capacity: int, rules: Mapping[str, Callable[[int], EvictionPolicy]], leader: str
    ) -> None:
        self.leader = leader
        size = min(_BLOCKS, max(capacity // _MOST_SHARE, min(capacity, _LEAST_BLOCKS)))
        self._one_in = max(1, round(capacity / size))
        size = max(1, round(capacity / self._one_in))
        self._shadows = {name: Shadow(size, make(size)) for name, make in rules.items()}
        self._size = size
        self._until_judged = _WARM_UP * size
        self._warm = False
        self._num_asked = 0

    def asked(self, name: int) -> bool:
        """Note that a key of this fingerprint was asked for; whether the leader has changed."""
        if (name * _MIX >> 5 & 0xFFFFFFFF) % self._one_in:
            return False
        stand_in = BlockKey(name.to_bytes(4, "big"))  # nothing here refers to the key
        for shadow in self._shadows.values():
            shadow.asked(stand_in)
        self._num_asked += 1
        self._until_judged -= 1
        if self._until_judged:
            return False
        self._until_judged = self._size
        if self._warm:
            return self._judge()
        self._warm = True
        self._num_asked = 0
        for shadow in self._shadows.values():
            shadow.num_hits = 0.0
        return False

    def _judge(self) -> bool:
        shadows = self._shadows
        best = max(shadows, key=lambda name: shadows[name].num_hits)
        most, held = shadows[best].num_hits, shadows[self.leader].num_hits
        if self._num_asked >= _HALF_LIFE * self._size and most >= _TELLING_HITS:
            for shadow in shadows.values():
                shadow.num_hits /= 2
            self._num_asked //= 2
        sure = _DEVIATIONS * (most + held) ** 0.5
        if most - held <= max(_LEAST_GAIN * held, sure):
            return False
        self.leader = best
        return True
