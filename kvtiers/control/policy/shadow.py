"""Small copies of a tier that hold no bytes, to see how replacement rules would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.control.policy.guessed_chains import GuessedChains, Predecessors
from kvtiers.model.keys import BlockKey

_BLOCKS: Final = 512  # of a shadow; those of a tier of no more see all keys
_MOST_SHARE: Final = 4  # one of a larger tier has one block in so many of it
_LEAST_BLOCKS: Final = 256  # but so many
# A hit counts half after so many keys asked for, per block of a shadow, and hits of the best rule:
# where hits are rare, fewer tell nothing.
_HALF_LIFE: Final = 4
_TELLING_HITS: Final = 512
# Keys asked for, per block of a shadow, before hits count: the span that `cost` learns from.
_WARM_UP: Final = 16
_LONGEST_RUN: Final = 32  # keys of a prompt that the shadows are asked for at once
MIX: Final = 0xC2B2AE35  # of MurmurHash3
_LEAST_GAIN: Final = 0.03  # what a change of leader must bring
_DEVIATIONS: Final = 3.0  # and by how many standard deviations of the difference


def stand_in(name: int) -> BlockKey:
    """Return what stands for a key of this fingerprint; nothing in a shadow refers to the key."""
    return BlockKey(name.to_bytes(4, "big"))


def name_of(stand_in: BlockKey) -> int:
    """Return the fingerprint of the key that a shadow knows as this one."""
    return int.from_bytes(stand_in, "big")


class Shadow:
    """One rule over a tier of sampled keys.

    Args:
        guesses: all keys may leave; what follows what is guessed, see `GuessedChains`.

    Attributes:
        num_hits: leading keys of prompts that it had, of late. num_leading: of the last prompt.
        variance: of the hits, by prompt, that it had more or less than the leader.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy, guesses: bool = False) -> None:
        self._capacity = capacity
        self._policy = policy
        self._chains = GuessedChains(policy.exposed, policy.shielded) if guesses else None
        self._parents: dict[BlockKey, BlockKey | None] = {}  # of those here, if here and tied
        self._num_children: dict[BlockKey, int] = {}
        self._whole = True  # it had all of the prompt's keys before
        self._has_room = True  # for the rest of the prompt
        self.num_hits = 0.0
        self.num_leading = 0
        self.variance = 0.0

    def ask(
        self, keys: Sequence[BlockKey], parent: BlockKey | None, tied: bool, goes_on: bool
    ) -> None:
        """Let a prompt, or a part of one, hit what is here, and let in what is not.

        Args:
            parent: the key before them.
            tied: whether a key that another one here follows may not leave.
            goes_on: with the prompt of the last call.
        """
        policy, here = self._policy, self._parents
        if self._chains is not None:
            self._ask_in_order(self._chains, keys, parent is not None)
            return
        if not goes_on:
            self.num_leading = 0
            self._whole = parent is None or parent in here
            self._has_room = True
        num = self._hit(keys) if self._whole else 0
        if num:
            parent = keys[num - 1]
        new: BlockKey | None = None  # was let in just now, and may not leave yet
        for key in keys[num:] if self._has_room else ():
            if key not in here:
                new = self._let_in(key, parent if tied and parent in here else None, new)
                if new is None:
                    self._has_room = False
                    return
                if not tied:
                    policy.exposed(new)
                    new = None
            else:
                if new is not None:
                    policy.exposed(new)
                    new = None
                policy.touched(key)
            parent = key
        if new is not None:
            policy.exposed(new)

    def _ask_in_order(self, chains: GuessedChains, keys: Sequence[BlockKey], goes_on: bool) -> None:
        policy, here = self._policy, self._parents
        if not goes_on:
            self.num_leading, self._whole = 0, True
        for key in keys:
            if key in here:
                policy.touched(key)
                chains.asked(key, goes_on)
                self.num_leading += self._whole
                self.num_hits += self._whole
            else:
                self._whole = False
                victim = chains.next_victim(policy) if len(here) >= self._capacity else None
                if victim is not None:
                    policy.removed(victim)
                    chains.left(victim)
                    del here[victim]
                policy.admitted(key)
                here[key] = None
                chains.came(key, goes_on)
                chains.exposed(key)
            goes_on = True

    def _hit(self, keys: Sequence[BlockKey]) -> int:
        """Hit the leading keys that are here; returns how many."""
        here = self._parents
        num = 0
        for key in keys:
            if key not in here:
                self._whole = False
                break
            num += 1
        self.num_leading += num
        self.num_hits += num
        for key in reversed(keys[:num]):  # as a tier does
            self._policy.touched(key)
        return num

    def _let_in(
        self, key: BlockKey, parent: BlockKey | None, new: BlockKey | None
    ) -> BlockKey | None:
        """Let a key in, which may not leave yet; returns it, None if there is no room.

        Args:
            parent: stays here. new: what may not leave anyway: the parent, or none.
        """
        policy, here = self._policy, self._parents
        if parent is not None:
            num = self._num_children.get(parent, 0)
            self._num_children[parent] = num + 1
            if not num and new is None:
                policy.shielded(parent)
        if len(here) >= self._capacity:
            victim = policy.next_victim()
            if victim is None:
                self._lose_child(parent)
                return None
            policy.removed(victim)
            self._lose_child(here.pop(victim))
        policy.admitted(key)
        here[key] = parent
        return key

    def _lose_child(self, parent: BlockKey | None) -> None:
        if parent is None:
            return
        num = self._num_children[parent] - 1
        if num:
            self._num_children[parent] = num
        else:
            del self._num_children[parent]
            self._policy.exposed(parent)


class Contest:
    """Lets rules compete on a sample of the keys, by the hits of late.

    Sampled by fingerprint, a key is always in or always out, and a shadow of a share of the
    tier's blocks that sees the same share of the keys has about the tier's hit rate (Waldspurger
    and others, ATC 2017). Bounded: 512 blocks for each rule.

    Args:
        rules: by name; they rank stand-ins for keys, see `stand_in`.
        guesses: nobody tells what follows what.

    Attributes:
        one_in: so many keys is one in the sample: those whose fingerprint times `MIX`, of which
            the bits from the fifth on count, is divisible by it.
    """

    def __init__(
        self,
        capacity: int,
        rules: Mapping[str, Callable[[int], EvictionPolicy]],
        leader: str,
        guesses: bool = False,
    ) -> None:
        self.leader = leader
        size = capacity
        if capacity > _BLOCKS:
            size = min(_BLOCKS, max(capacity // _MOST_SHARE, _LEAST_BLOCKS))
        self.one_in = max(1, round(capacity / size))
        size = max(1, round(capacity / self.one_in))
        self._shadows = {name: Shadow(size, make(size), guesses) for name, make in rules.items()}
        self._predecessors = Predecessors(size) if guesses else None
        self._size = size
        self._until_judged = _WARM_UP * size
        self._warm = False
        self._num_asked = 0
        self._run: list[BlockKey] = []  # asked for one after another, as they follow each other
        self._parent: BlockKey | None = None  # of the first
        self._goes_on = False  # the run, with the prompt of the one before
        self._tied = True

    def asked(self, key: BlockKey, parent: BlockKey | None, tied: bool) -> bool:
        """Note that a key was asked for; whether the leader has changed.

        Args:
            key: of the sample: what stands for it. parent: for the nearest of the sample before it.
            tied: see `Shadow`.
        """
        run = self._run
        self._tied = tied
        if self._predecessors is not None:
            before = run[-1] if run else None
            parent = before if self._predecessors.asked(name_of(key)) else None
        goes_on = False
        if run:
            goes_on = parent == run[-1]
            if goes_on and len(run) < _LONGEST_RUN:
                run.append(key)
                return False
            if key == self._parent and len(run) < _LONGEST_RUN:  # hits are noted tail first
                run.insert(0, key)
                self._parent = parent
                return False
        changed = self._ask()
        self._run, self._parent, self._goes_on = [key], parent, goes_on
        return changed

    def _ask(self) -> bool:
        run, shadows = self._run, self._shadows
        if not self._goes_on:
            led = shadows[self.leader].num_leading
            for shadow in shadows.values():
                shadow.variance += (shadow.num_leading - led) ** 2
        for shadow in shadows.values():
            shadow.ask(run, self._parent, self._tied, self._goes_on)
        self._num_asked += len(run)
        self._until_judged -= len(run)
        if self._until_judged > 0:
            return False
        self._until_judged += self._size
        if self._warm:
            return self._judge()
        self._warm = True
        self._num_asked = 0
        for shadow in shadows.values():
            shadow.num_hits = shadow.variance = 0.0
        return False

    def _judge(self) -> bool:
        shadows = self._shadows
        best = max(shadows, key=lambda name: shadows[name].num_hits)
        most, held = shadows[best].num_hits, shadows[self.leader].num_hits
        # Hits as independent draws, or as the prompts that brought them, whichever is less sure.
        variance = max(most + held, shadows[best].variance)
        changes = most - held > max(_LEAST_GAIN * held, _DEVIATIONS * math.sqrt(variance))
        if changes:
            self.leader = best
            for shadow in shadows.values():
                shadow.variance = variance  # to the new leader, until more is known
        if self._num_asked >= _HALF_LIFE * self._size and most >= _TELLING_HITS:
            for shadow in shadows.values():
                shadow.num_hits /= 2
                shadow.variance /= 2
            self._num_asked //= 2
        return changes
