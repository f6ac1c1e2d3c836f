"""The conformance suite that every eviction policy must pass."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.model.keys import BlockKey, block_key

NUM_KEYS = 8
OPERATIONS = ("admitted", "touched", "exposed", "shielded", "removed")
MAX_REFERENCES = 1000  # to one key, however often it was touched: bookkeeping is bounded

operations = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, NUM_KEYS - 1)), max_size=80
)


def keys(*numbers: int) -> list[BlockKey]:
    """Return new key objects, the same for the same numbers."""
    return [block_key(number.to_bytes(32, "big"), 0) for number in numbers]


class Conductor:
    """Calls a policy as a tier does: only what its interface allows, whatever is asked for.

    Attributes:
        resident, exposed: what the policy has been told.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.resident: set[BlockKey] = set()
        self.exposed: set[BlockKey] = set()

    def apply(self, operation: str, key: BlockKey) -> bool:
        """Make one call, unless a tier could not make it now; returns whether it was made."""
        allowed = {
            "admitted": key not in self.resident,
            "touched": key in self.resident,
            "exposed": key in self.resident - self.exposed,
            "shielded": key in self.exposed,
            "removed": key in self.resident,
        }[operation]
        if not allowed:
            return False
        getattr(self.policy, operation)(key)
        if operation == "admitted":
            self.resident.add(key)
        elif operation == "exposed":
            self.exposed.add(key)
        elif operation in ("shielded", "removed"):
            self.exposed.discard(key)
        if operation == "removed":
            self.resident.discard(key)
        return True


class PolicyMachine(RuleBasedStateMachine):
    """A tier of few blocks that calls a policy in any order it may, and believes what it says."""

    ROOM = 6  # blocks; the keys are twice as many

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__()
        self.conductor = Conductor(policy)
        self.names = keys(*range(2 * self.ROOM))

    @rule(number=st.integers(0, 2 * ROOM - 1))
    def ask(self, number: int) -> None:
        """Hit a block, or let it in, as the tail of a chain that is done."""
        conductor, key = self.conductor, self.names[number]
        if conductor.apply("touched", key):
            return
        if len(conductor.resident) == self.ROOM and not self._evict():
            return
        conductor.apply("admitted", key)
        conductor.apply("exposed", key)

    @rule(number=st.integers(0, 2 * ROOM - 1))
    def shield_or_expose(self, number: int) -> None:
        """Pin a block or let go of it."""
        key = self.names[number]
        if not self.conductor.apply("shielded", key):
            self.conductor.apply("exposed", key)

    @rule(number=st.integers(0, 2 * ROOM - 1))
    def lose(self, number: int) -> None:
        """Drop a block, whether it may leave or not."""
        self.conductor.apply("removed", self.names[number])

    @precondition(lambda self: self.conductor.exposed)
    @rule()
    def leave(self) -> None:
        """Drop whom the policy names."""
        self._evict()

    @invariant()
    def names_one_that_may_leave(self) -> None:
        """One of the exposed is named, the same when asked twice."""
        victim = self.conductor.policy.next_victim()
        exposed = self.conductor.exposed
        assert (victim in exposed) if exposed else (victim is None)
        assert self.conductor.policy.next_victim() == victim

    def teardown(self) -> None:
        """Every exposed block leaves once."""
        left = len(self.conductor.exposed)
        while self._evict():
            left -= 1
        assert left == 0

    def _evict(self) -> bool:
        victim = self.conductor.policy.next_victim()
        return victim is not None and self.conductor.apply("removed", victim)


class PolicySuite(ABC):
    """Subclass it as ``Test...`` and say how to make the policy.

    Nothing here fixes the order in which blocks leave: that is what policies differ in.
    """

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """Return a new policy that knows no block."""

    def test_new_policy_names_nobody(self) -> None:
        """Without blocks there is no victim."""
        assert self.make_policy().next_victim() is None

    def test_resident_block_is_not_named_before_it_is_exposed(self) -> None:
        """Admission and hits alone let nobody leave."""
        conductor = Conductor(self.make_policy())
        (key,) = keys(1)
        conductor.apply("admitted", key)
        conductor.apply("touched", key)
        assert conductor.policy.next_victim() is None

    def test_shielded_block_comes_back_when_exposed_again(self) -> None:
        """A block that was pinned for a while is not forgotten."""
        conductor = Conductor(self.make_policy())
        (key,) = keys(1)
        for operation in ("admitted", "exposed", "shielded"):
            conductor.apply(operation, key)
        assert conductor.policy.next_victim() is None
        conductor.apply("exposed", key)
        assert conductor.policy.next_victim() == key

    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(operations)
    def test_names_exposed_blocks_only_and_always_one(self, steps: list[tuple[str, int]]) -> None:
        """In any order of calls, some exposed block is named if there is one, twice the same."""
        conductor = Conductor(self.make_policy())
        names = keys(*range(NUM_KEYS))
        for operation, number in steps:
            conductor.apply(operation, names[number])
            victim = conductor.policy.next_victim()
            assert conductor.policy.next_victim() == victim
            assert (victim in conductor.exposed) if conductor.exposed else (victim is None)

    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(operations)
    def test_removing_victims_empties_it(self, steps: list[tuple[str, int]]) -> None:
        """Every exposed block is named exactly once on the way to an empty tier."""
        conductor = Conductor(self.make_policy())
        names = keys(*range(NUM_KEYS))
        for operation, number in steps:
            conductor.apply(operation, names[number])
        left = set(conductor.exposed)
        while (victim := conductor.policy.next_victim()) is not None:
            left.remove(victim)
            conductor.apply("removed", victim)
        assert not left

    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(operations)
    def test_removed_block_is_forgotten(self, steps: list[tuple[str, int]]) -> None:
        """Nothing refers to a key once its block is gone: memory comes back."""
        names = keys(*range(NUM_KEYS))
        before = [sys.getrefcount(name) for name in names]
        conductor = Conductor(self.make_policy())
        for operation, number in steps:
            conductor.apply(operation, names[number])
        for number in range(NUM_KEYS):
            conductor.apply("removed", names[number])
        assert conductor.policy.next_victim() is None
        assert [sys.getrefcount(name) for name in names] == before

    def test_serves_a_tier_through_any_life(self) -> None:
        """See `PolicyMachine`."""
        make = self.make_policy

        class Machine(PolicyMachine):
            def __init__(self) -> None:
                super().__init__(make())

        steps = settings(max_examples=50, stateful_step_count=60, deadline=None)
        run_state_machine_as_test(Machine, settings=steps)

    def test_bookkeeping_is_bounded(self) -> None:
        """A block that is hit, pinned and released for ever costs no more memory than another."""
        conductor = Conductor(self.make_policy())
        (key,) = keys(1)
        conductor.apply("admitted", key)
        for _ in range(10 * MAX_REFERENCES):
            for operation in ("exposed", "touched", "shielded"):
                assert conductor.apply(operation, key)
        assert sys.getrefcount(key) < MAX_REFERENCES
