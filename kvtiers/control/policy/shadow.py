"""Small copies of a tier that hold no bytes, to see how replacement rules would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """One rule over a tier of sampled keys.

    Attributes:
        num_hits: leading keys of prompts that it had, of late.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self._capacity = capacity
        self._policy = policy
        self._parents: dict[BlockKey, BlockKey | None] = {}  # of those here, if here and tied
        self._num_children: dict[BlockKey, int] = {}
        self.num_hits = 0.0

    def ask(
        self, keys: Sequence[BlockKey], parent: BlockKey | None, tied: bool, tail_first: bool
    ) -> None:
        """Let a prompt, or a part of one, hit what is here, and let in what is not.

        Args:
            parent: the key before them.
            tied: whether a key that another one here follows may not leave.
            tail_first: in which order hits are noted.
        """
        policy, here = self._policy, self._parents
        num = 0
        if parent is None or parent in here:
            for key in keys:
                if key not in here:
                    break
                num += 1
            self.num_hits += num
        for key in reversed(keys[:num]) if tail_first else keys[:num]:
            policy.touched(key)
        if num:
            parent = keys[num - 1]
        for key in keys[num:]:
            if key in here:
                policy.touched(key)
            else:
                self._let_in(key, parent if tied and parent in here else None)
            parent = key

    def _let_in(self, key: BlockKey, parent: BlockKey | None) -> None:
        policy, here = self._policy, self._parents
        if len(here) >= self._capacity and not self._evict(parent):
            return
        policy.admitted(key)
        policy.exposed(key)
        here[key] = parent
        if parent is not None:
            num = self._num_children.get(parent, 0)
            self._num_children[parent] = num + 1
            if not num:
                policy.shielded(parent)

    def _evict(self, protected: BlockKey | None) -> bool:
        """Make room for a child of this one; whether there is any."""
        policy = self._policy
        victim = policy.next_victim()
        if protected is not None and victim == protected:
            policy.shielded(protected)
            victim = policy.next_victim()
            policy.exposed(protected)
        if victim is None:
            return False
        policy.removed(victim)
        parent = self._parents.pop(victim)
        if parent is not None:
            num = self._num_children[parent] - 1
            if num:
                self._num_children[parent] = num
            else:
                del self._num_children[parent]
                policy.exposed(parent)
        return True


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
        self._run: list[BlockKey] = []  # asked for one after another, as they follow each other
        self._parent: BlockKey | None = None  # of the first
        self._tied = True
        self._tail_first = False

    def stand_in(self, name: int) -> BlockKey | None:
        """Return what stands for a key of this fingerprint; None if it is not in the sample."""
        if (name * _MIX >> 5 & 0xFFFFFFFF) % self._one_in:
            return None
        return BlockKey(name.to_bytes(4, "big"))  # nothing here refers to the key

    def asked(self, key: BlockKey, parent: BlockKey | None, tied: bool) -> bool:
        """Note that a key was asked for; whether the leader has changed.

        Args:
            key: what stands for it. parent: for the nearest of the sample before it.
            tied: see `Shadow`.
        """
        run = self._run
        self._tied = tied
        if run:
            if parent == run[-1]:
                run.append(key)
                return False
            if key == self._parent:
                run.insert(0, key)
                self._parent = parent
                self._tail_first = True
                return False
        changed = self._ask()
        self._run = [key]
        self._parent = parent
        return changed

    def _ask(self) -> bool:
        run = self._run
        for shadow in self._shadows.values():
            shadow.ask(run, self._parent, self._tied, self._tail_first)
        self._num_asked += len(run)
        self._until_judged -= len(run)
        if self._until_judged > 0:
            return False
        self._until_judged += self._size
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
