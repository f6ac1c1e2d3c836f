"""What a replacement rule costs: ``python bench/policy_calls.py [options]``.

A full tier of N blocks, all of which may leave. *Hit* is one `touched` of a random block,
*replacement* what one block in place of another takes: `next_victim`, `removed`, `admitted`,
`exposed`. One of four new blocks was here before. In the end seven of ten blocks may leave no
longer, one after another: *shield*. Every block saves the same by a call of Python, as in a tier of
the controller. Microseconds of this process, without the garbage collector: the mean, what one of
a thousand exceeds, as some calls look at a whole sample, and the longest.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Sequence

from kvtiers.control.policy import POLICIES, make_policy
from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.model.keys import BlockKey, block_key

CAPACITIES = (1_000, 20_000, 1_000_000)
NUM_CALLS = 60_000


class Tier:
    """The blocks of one tier, in no order."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.keys = [key_of(number) for number in range(capacity)]
        self._places = {key: place for place, key in enumerate(self.keys)}
        for key in self.keys:
            policy.admitted(key)
            policy.exposed(key)

    def replace(self, key: BlockKey) -> float:
        """Let a block in for another; returns the seconds that the rule took."""
        if key in self._places:
            return 0.0
        policy = self.policy
        started = time.perf_counter()
        victim = policy.next_victim()
        assert victim is not None
        policy.removed(victim)
        policy.admitted(key)
        policy.exposed(key)
        seconds = time.perf_counter() - started
        place = self._places[key] = self._places.pop(victim)
        self.keys[place] = key
        return seconds

    def hit(self, place: int) -> float:
        """Hit the block at a place; returns the seconds that the rule took."""
        key = self.keys[place]
        started = time.perf_counter()
        self.policy.touched(key)
        return time.perf_counter() - started

    def shield(self, place: int) -> float:
        """Let the block at a place stay; returns the seconds that the rule took."""
        key = self.keys[place]
        started = time.perf_counter()
        self.policy.shielded(key)
        return time.perf_counter() - started


def key_of(number: int) -> BlockKey:
    """Return a key as the engine has them."""
    return block_key((number * 0x9E3779B97F4A7C15 % 2**128).to_bytes(16, "little"), 0)


def same_for_all(_: BlockKey) -> float:
    """Return what a block saves."""
    return 1.0


def measure(name: str, capacity: int) -> str:
    """Return a row of the table."""
    rng = random.Random(0)
    tier = Tier(make_policy(name, capacity, same_for_all), capacity)
    hits, replacements = [], []
    for number in range(capacity, capacity + NUM_CALLS):
        hits.append(tier.hit(rng.randrange(capacity)))
        again = number % 4 == 0
        replacements.append(tier.replace(key_of(rng.randrange(number) if again else number)))
    shields = [tier.shield(place) for place in rng.sample(range(capacity), capacity * 7 // 10)]
    return f"| {name} | {capacity} | {shown(hits)} | {shown(replacements)} | {shown(shields)} |"


def shown(seconds: Sequence[float]) -> str:
    """Return the mean, the 99.9th percentile and the most in microseconds, of calls made."""
    made = sorted(value * 1e6 for value in seconds if value)
    return f"{sum(made) / len(made):.1f} | {made[int(0.999 * len(made))]:.0f} | {made[-1]:.0f}"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="*", default=CAPACITIES)
    parser.add_argument("--policy", nargs="*", default=POLICIES, choices=POLICIES)
    arguments = parser.parse_args()
    columns = [f"{what} | p99.9 | worst" for what in ("hit", "replacement", "shield")]
    print(f"| rule | blocks | {' | '.join(columns)} |\n" + "|---" * 11 + "|")
    gc.disable()
    for capacity in arguments.blocks:
        for name in arguments.policy:
            print(measure(name, capacity), flush=True)


if __name__ == "__main__":
    main()
