"""Small copies of a tier that hold no bytes, to see how replacement rules would do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.model.keys import BlockKey

_BLOCKS: Final = 512  # of a shadow
_MOST_SHARE: Final = 4  # a shadow of a small tier has one block in so many of it
_LEAST_BLOCKS: Final = 128  # but so many, if the tier has them
# A period is as many keys asked for as a shadow has blocks. The first ones are not judged: it is
# the span that `cost` learns from.
_WARM_UP: Final = 16
_PERIODS: Final = 32  # that are judged together
_LEAST_PERIODS: Final = 4
_MIX: Final = 0xC2B2AE35  # of MurmurHash3
_LEAST_GAIN: Final = 0.015  # what a change of leader must bring
_DEVIATIONS: Final = 3.0  # and by how many standard errors
_SETTLING: Final = 2  # periods in which a new leader's tier is still as the old one left it
# What a period counts in the next, where a shadow is compared to its tier, of the leader and of
# those that led before, which are tried again after a while.
_FADING, _FADING_LATER = 31 / 32, 127 / 128
_UNSURE_HITS: Final = 64.0  # with so few, a shadow is half believed to be like any other


def name_of(stand_in: BlockKey) -> int:
    """Return the fingerprint of the key that a shadow knows as this one."""
    return int.from_bytes(stand_in, "big")


class Shadow:
    """One rule over a tier of sampled keys, all of which may leave."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self._capacity = capacity
        self._policy = policy
        self._resident: set[BlockKey] = set()
        self._num_hits = 0

    def take_hits(self) -> int:
        """Return the hits since the last call."""
        num_hits, self._num_hits = self._num_hits, 0
        return num_hits

    def asked(self, key: BlockKey) -> None:
        """Hit a block, or let it in."""
        policy, resident = self._policy, self._resident
        if key in resident:
            self._num_hits += 1
            policy.touched(key)
            return
        if len(resident) == self._capacity:
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

    Two rules are compared period by period: the keys of a prompt come and go together, so that
    hits are no independent draws. What a shadow cannot see, that only tails of chains leave the
    tier, shows once its rule leads: its hits then count by the ratio of the tier's to its own.

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
        self._each = tuple(self._shadows.values())
        self._size = size
        self._left_of_period = size
        self._num_tier_hits = 0
        self._num_periods = 0  # since the warm-up began, or the leader changed
        self._warm = False
        self._periods: deque[dict[str, int]] = deque(maxlen=_PERIODS)
        self._led: dict[str, tuple[float, float]] = {}  # hits of the tier, and of the shadow

    def asked(self, name: int, *, hit: bool) -> bool:
        """Note that a key of this fingerprint was asked for; whether the leader has changed.

        Args:
            hit: whether the tier has it.
        """
        if (name * _MIX >> 5 & 0xFFFFFFFF) % self._one_in:
            return False
        stand_in = BlockKey(name.to_bytes(4, "big"))  # nothing here refers to the key
        for shadow in self._each:
            shadow.asked(stand_in)
        self._num_tier_hits += hit
        self._left_of_period -= 1
        if self._left_of_period:
            return False
        self._left_of_period = self._size
        return self._end_period()

    def _end_period(self) -> bool:
        hits = {name: shadow.take_hits() for name, shadow in self._shadows.items()}
        num_tier_hits, self._num_tier_hits = self._num_tier_hits, 0
        self._num_periods += 1
        if not self._warm:
            self._warm = self._num_periods >= _WARM_UP
            return False
        for name, (of_tier, of_shadow) in self._led.items():
            fading = _FADING if name == self.leader else _FADING_LATER
            self._led[name] = fading * of_tier, fading * of_shadow
        if self._num_periods > _SETTLING:
            of_tier, of_shadow = self._led.get(self.leader, (0.0, 0.0))
            self._led[self.leader] = of_tier + num_tier_hits, of_shadow + hits[self.leader]
        self._periods.append(hits)
        if len(self._periods) < _LEAST_PERIODS:
            return False
        best = self._best()
        if best == self.leader:
            return False
        self.leader = best
        self._num_periods = 0
        return True

    def _best(self) -> str:
        """Return the rule that has clearly more hits than the leader, the leader if none has."""
        num = len(self._periods)
        weights = self._weights()
        best, most = self.leader, 0.0
        held = [weights[best] * hits[best] for hits in self._periods]
        least = _LEAST_GAIN * sum(held) / num
        for name in self._shadows:
            gains = [
                weights[name] * hits[name] - own
                for hits, own in zip(self._periods, held, strict=True)
            ]
            gain = sum(gains) / num
            variance = sum((it - gain) ** 2 for it in gains) / (num - 1)
            if gain > max(most, least, _DEVIATIONS * (variance / num) ** 0.5):
                best, most = name, gain
        return best

    def _weights(self) -> dict[str, float]:
        """Return what hits of each shadow count; one whose rule never led is like the leader's."""

        def ratio(name: str, usual: float) -> float:
            of_tier, of_shadow = self._led.get(name, (0.0, 0.0))
            return (of_tier + _UNSURE_HITS * usual) / (of_shadow + _UNSURE_HITS)

        usual = ratio(self.leader, 1.0)
        return {
            name: usual if name == self.leader else ratio(name, usual) for name in self._shadows
        }
