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
_WARM_UP: Final = 8  # keys asked for, per block of a shadow, before rules that learn are judged
_MIX: Final = 0xC2B2AE35  # of MurmurHash3
_LEAST_GAIN: Final = 0.03  # what a change of leader must bring
_DEVIATIONS: Final = 4.0  # and by how many standard deviations: hits come in runs, of a prompt


def name_of(stand_in: BlockKey) -> int:
    """Return the fingerprint of the key that a shadow knows as this one."""
    return int.from_bytes(stand_in, "big")


class Shadow:
    """One rule over a tier of sampled keys, all of which may leave.

    Attributes:
        num_hits: of late. num_better, num_worse: times of late that it hit what the leader
            missed, and missed what the leader hit.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self._capacity = capacity
        self._policy = policy
        self._resident: set[BlockKey] = set()
        self.num_hits = self.num_better = self.num_worse = 0.0

    def asked(self, key: BlockKey) -> bool:
        """Hit a block, or let it in; whether it was a hit."""
        policy, resident = self._policy, self._resident
        if key in resident:
            self.num_hits += 1
            policy.touched(key)
            return True
        if len(resident) >= self._capacity:
            victim = policy.next_victim()
            if victim is not None:
                policy.removed(victim)
                resident.remove(victim)
        policy.admitted(key)
        policy.exposed(key)
        resident.add(key)
        return False

    def compared(self, better: bool) -> None:
        """Note that it hit and the leader did not, or the other way round."""
        self.num_better += better
        self.num_worse += not better

    def fade(self, share: float) -> None:
        """Let what was counted so far count less."""
        self.num_hits *= share
        self.num_better *= share
        self.num_worse *= share


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
        self._num_asked = 0

    def asked(self, name: int) -> bool:
        """Note that a key of this fingerprint was asked for; whether the leader has changed."""
        if (name * _MIX >> 5 & 0xFFFFFFFF) % self._one_in:
            return False
        stand_in = BlockKey(name.to_bytes(4, "big"))  # nothing here refers to the key
        led = self._shadows[self.leader].asked(stand_in)
        for rule, shadow in self._shadows.items():
            if rule != self.leader and shadow.asked(stand_in) != led:
                shadow.compared(better=not led)
        self._num_asked += 1
        self._until_judged -= 1
        if self._until_judged:
            return False
        self._until_judged = self._size
        return self._judge()

    def _judge(self) -> bool:
        """Change the leader if another has clearly more hits; whether it has."""
        shadows = self._shadows
        held = shadows[self.leader].num_hits
        best = max(shadows, key=lambda name: shadows[name].num_hits)
        better, worse = shadows[best].num_better, shadows[best].num_worse
        if better - worse > max(_LEAST_GAIN * held, _DEVIATIONS * (better + worse) ** 0.5):
            self.leader = best
            for shadow in shadows.values():
                shadow.num_better = shadow.num_worse = 0.0
            return True
        if self._num_asked >= _HALF_LIFE * self._size and shadows[best].num_hits >= _TELLING_HITS:
            for shadow in shadows.values():
                shadow.fade(0.5)
            self._num_asked //= 2
        return False
