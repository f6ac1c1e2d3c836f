"""Follows whichever rule would do best, as small shadows of the tier show."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvtiers.control.policy.arc import ARC
from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.control.policy.cost import Cost, Memory, Value
from kvtiers.control.policy.lines import fingerprint
from kvtiers.control.policy.lru import LRU
from kvtiers.control.policy.s3_fifo import S3FIFO
from kvtiers.control.policy.shadow import Contest, name_of
from kvtiers.control.policy.w_tinylfu import WTinyLFU
from kvtiers.model.keys import BlockKey

FIRST: Final = "cost"  # it wins on most that was measured
_MOVED_AT_ONCE: Final = 8  # blocks, per admission or hit, that a new leader is told of

RULES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "lru": lambda _: LRU(),
    "arc": ARC,
    "s3-fifo": S3FIFO,
    "w-tinylfu": WTinyLFU,
    "cost": Cost,
}


class Adaptive:
    """Ranks by one rule, and changes to another that has clearly had more hits of late.

    The rules compete in `Contest`. A new leader is told of the blocks that are here bit by bit,
    the least recently used first, while the old one still names who leaves. What is known of
    keys outlives the changes.

    Args:
        value: see `Cost`.
    """

    def __init__(self, capacity: int, value: Value | None = None) -> None:
        self._capacity = capacity
        self._value = value
        self._memory = Memory(capacity)
        rules = {**RULES, "cost": lambda size: Cost(size, None, self._memory, name_of)}
        self._contest = Contest(capacity, rules, FIRST)
        self._used: OrderedDict[BlockKey, None] = OrderedDict()  # blocks that are here, in order
        self._exposed: set[BlockKey] = set()
        self._policy = self._make(FIRST)
        self._heir: EvictionPolicy | None = None
        self._told: set[BlockKey] = set()  # the blocks that the heir knows
        self._untold: list[BlockKey] = []

    @property
    def leader(self) -> str:
        """The name of the rule that it follows."""
        return self._contest.leader

    def admitted(self, key: BlockKey) -> None:
        """Tell the leader, and let the rules compete for the key."""
        name = fingerprint(key)
        self._memory.note(name)
        self._used[key] = None
        self._policy.admitted(key)
        if self._heir is not None:
            self._heir.admitted(key)
            self._told.add(key)
        if self._contest.asked(name, hit=False):
            self._crown()
        if self._heir is not None:
            self._tell(self._heir)

    def touched(self, key: BlockKey) -> None:
        """Tell the leader, and let the rules compete for the key."""
        name = fingerprint(key)
        self._memory.note(name)
        self._used.move_to_end(key)
        self._policy.touched(key)
        if self._heir is not None and key in self._told:
            self._heir.touched(key)
        if self._contest.asked(name, hit=True):
            self._crown()
        if self._heir is not None:
            self._tell(self._heir)

    def exposed(self, key: BlockKey) -> None:
        """Tell the leader."""
        self._exposed.add(key)
        self._policy.exposed(key)
        if self._heir is not None and key in self._told:
            self._heir.exposed(key)

    def shielded(self, key: BlockKey) -> None:
        """Tell the leader."""
        self._exposed.discard(key)
        self._policy.shielded(key)
        if self._heir is not None and key in self._told:
            self._heir.shielded(key)

    def removed(self, key: BlockKey) -> None:
        """Tell the leader."""
        del self._used[key]
        self._exposed.discard(key)
        self._policy.removed(key)
        if self._heir is not None and key in self._told:
            self._heir.removed(key)
            self._told.remove(key)

    def next_victim(self) -> BlockKey | None:
        """Return whom the leader names."""
        return self._policy.next_victim()

    def _make(self, name: str) -> EvictionPolicy:
        if name == "cost":
            return Cost(self._capacity, self._value, self._memory)
        return RULES[name](self._capacity)

    def _crown(self) -> None:
        """Begin to make the winner of the contest the leader."""
        self._heir = self._make(self._contest.leader)
        self._told = set()
        self._untold = list(reversed(self._used))

    def _tell(self, heir: EvictionPolicy) -> None:
        """Tell the heir of the next blocks; once it knows all, it leads."""
        for _ in range(min(_MOVED_AT_ONCE, len(self._untold))):
            key = self._untold.pop()
            if key in self._used and key not in self._told:
                heir.admitted(key)
                if key in self._exposed:
                    heir.exposed(key)
                self._told.add(key)
        if not self._untold:
            self._policy, self._heir, self._told = heir, None, set()
