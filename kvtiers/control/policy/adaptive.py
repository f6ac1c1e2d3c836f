"""Follows whichever rule would do best, as small shadows of the tier show."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Final, Protocol

from kvtiers.control.policy.arc import ARC
from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.control.policy.cost import Cost, Memory, Value
from kvtiers.control.policy.guessed_chains import GuessedChains, Predecessors
from kvtiers.control.policy.lines import fingerprint
from kvtiers.control.policy.lru import LRU
from kvtiers.control.policy.reuse_ages import PRIOR_KEYS
from kvtiers.control.policy.s3_fifo import S3FIFO
from kvtiers.control.policy.shadow import MIX, Contest, name_of, stand_in
from kvtiers.control.policy.w_tinylfu import WTinyLFU
from kvtiers.model.keys import BlockKey

FIRST: Final = "cost"  # it wins on most that was measured
_MOVED_AT_ONCE: Final = 8  # blocks, per admission or hit, that a new leader is told of
# While chains are guessed: the blocks of a prompt come back at once, so that many keys tell as
# little as one, and a class that is taken for better than it is costs the prompt that comes in.
_PRIOR_KEYS_GUESSING: Final = 512.0
_MOST_GUESSED: Final = 1 << 18  # blocks of a tier whose chains are guessed; some 300 bytes each

_Nearest = tuple[BlockKey, BlockKey | None] | None
_Blocks = OrderedDict[BlockKey, _Nearest]


class Rule(EvictionPolicy, Protocol):
    """A rule that can be followed, and given up."""

    def shrink(self, num: int) -> bool:
        """Forget so many blocks, whichever; False if there are none left.

        A large rule is not forgotten at once, while the engine waits.
        """
        ...


RULES: Final[dict[str, Callable[[int], Rule]]] = {
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

    As long as nobody tells what a block follows, it is guessed from the order in which blocks are
    asked for: see `GuessedChains`. An owner that tells says who may leave, too. Nothing is
    guessed in tiers of more than 262,144 blocks.

    Args:
        value: see `Cost`.
    """

    def __init__(self, capacity: int, value: Value | None = None) -> None:
        self._capacity = capacity
        self._value = value
        self._memory = Memory(capacity)
        guesses = capacity <= _MOST_GUESSED
        if guesses:
            self._memory.ages.prior_keys = _PRIOR_KEYS_GUESSING
        self._contest = self._new_contest(FIRST, guesses)
        self._one_in = self._contest.one_in
        self._predecessors = Predecessors(capacity) if guesses else None
        self._chains: GuessedChains | None = None  # until all that it held back is released
        if guesses:
            self._chains = GuessedChains(self._expose, self._shield)
        self._exposed: set[BlockKey] = set()
        # The blocks that are here, in the order of their use: `_older`, `_untold`, `_used`; each
        # with the nearest of the sample up to it, and the one before that.
        self._older: _Blocks = OrderedDict()  # of which the heir knows
        self._untold: list[_Blocks] = []
        self._used: _Blocks = OrderedDict()
        self._num_blocks = 0
        self._policy = self._make(FIRST)
        self._heir: Rule | None = None
        self._retired: list[Rule] = []  # which forget what they know
        self._moving = False  # from one leader to another

    @property
    def leader(self) -> str:
        """The name of the rule that it follows."""
        return self._contest.leader

    def admitted(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        """Tell the leader, and let the rules compete for the key."""
        name = fingerprint(key)
        self._memory.note(name)
        self._num_blocks += 1
        nearest = None
        if parent is not None:
            if self._predecessors is not None:
                self._stop_guessing()
            nearest = self._used.get(parent) or self._find(parent)
        sampled = not (name * MIX >> 5 & 0xFFFFFFFF) % self._one_in
        if sampled:
            nearest = stand_in(name), nearest and nearest[0]
        self._used[key] = nearest
        self._policy.admitted(key)
        if self._chains is not None:
            predecessors = self._predecessors
            self._chains.came(key, predecessors is not None and predecessors.asked(name))
        if sampled:
            self._compete(nearest)
        if self._moving:
            self._move()

    def touched(self, key: BlockKey) -> None:
        """Tell the leader, and let the rules compete for the key."""
        name = fingerprint(key)
        self._memory.note(name)
        try:
            self._used.move_to_end(key)
        except KeyError:
            if self._heir is not None and key in self._older:
                self._older.move_to_end(key)
                self._heir.touched(key)
            else:
                self._used[key] = self._forget(key)
        self._policy.touched(key)
        if self._chains is not None and self._predecessors is not None:
            self._chains.asked(key, self._predecessors.asked(name))
        if not (name * MIX >> 5 & 0xFFFFFFFF) % self._one_in:
            self._compete(self._find(key))
        if self._moving:
            self._move()

    def exposed(self, key: BlockKey) -> None:
        """Tell the leader, unless something is guessed to follow the block."""
        if self._chains is not None:
            self._chains.exposed(key)
        else:
            self._expose(key)

    def shielded(self, key: BlockKey) -> None:
        """Tell the leader."""
        if self._chains is not None:
            self._chains.shielded(key)
        else:
            self._shield(key)

    def removed(self, key: BlockKey) -> None:
        """Tell the leader."""
        self._exposed.discard(key)
        self._policy.removed(key)
        if self._heir is not None and key in self._older:
            self._heir.removed(key)
        self._num_blocks -= 1
        self._forget(key)
        if self._chains is not None:
            self._chains.left(key)

    def next_victim(self) -> BlockKey | None:
        """Return whom the leader names."""
        if self._chains is not None:
            return self._chains.next_victim(self._policy)
        return self._policy.next_victim()

    def _expose(self, key: BlockKey) -> None:
        self._exposed.add(key)
        self._policy.exposed(key)
        if self._heir is not None and key in self._older:
            self._heir.exposed(key)

    def _shield(self, key: BlockKey) -> None:
        self._exposed.discard(key)
        self._policy.shielded(key)
        if self._heir is not None and key in self._older:
            self._heir.shielded(key)

    def _new_contest(self, leader: str, guesses: bool) -> Contest:
        rules = {**RULES, "cost": lambda size: Cost(size, None, self._memory, name_of)}
        return Contest(self._capacity, rules, leader, guesses)

    def _stop_guessing(self) -> None:
        """Go by what the owner tells; what was held back is released bit by bit."""
        self._predecessors = None
        self._memory.ages.prior_keys = PRIOR_KEYS
        self._moving = True
        self._contest = self._new_contest(self._contest.leader, guesses=False)
        for nearest in islice(self._used.values(), _MOVED_AT_ONCE):  # a first block, in a tier
            if nearest is not None:
                self._contest.asked(*nearest, tied=True)

    def _make(self, name: str) -> Rule:
        if name == "cost":
            return Cost(self._capacity, self._value, self._memory)
        return RULES[name](self._capacity)

    def _forget(self, key: BlockKey) -> _Nearest:
        """Take a block out of the order of use."""
        for blocks in (self._used, self._older, *self._untold):
            if key in blocks:
                return blocks.pop(key)
        return None

    def _find(self, key: BlockKey) -> _Nearest:
        for blocks in (self._used, self._older, *self._untold):
            if key in blocks:
                return blocks[key]
        return None

    def _compete(self, nearest: _Nearest) -> None:
        """Let the rules compete for a key of the sample."""
        if nearest is None:
            return
        tied = 2 * len(self._exposed) < self._num_blocks
        if self._contest.asked(*nearest, tied):
            if self._heir is not None:
                self._retired.append(self._heir)
            self._heir = self._make(self._contest.leader)
            self._untold = [self._older, *self._untold, self._used]
            self._older, self._used = OrderedDict(), OrderedDict()
            self._moving = True

    def _move(self) -> None:
        """Go on with a change of leader, and with the end of guessing."""
        releases = self._predecessors is None and self._chains is not None
        if releases and self._chains is not None and not self._chains.release(_MOVED_AT_ONCE):
            self._chains, releases = None, False
        if self._heir is not None:
            self._tell(self._heir)
        if self._retired and not self._retired[-1].shrink(_MOVED_AT_ONCE):
            self._retired.pop()
        self._moving = self._heir is not None or bool(self._retired) or releases

    def _tell(self, heir: Rule) -> None:
        """Tell the heir of the next blocks, in the order of their use; once it knows all, it
        leads."""
        for _ in range(_MOVED_AT_ONCE):
            while self._untold and not self._untold[0]:
                del self._untold[0]
            blocks = self._untold[0] if self._untold else self._used
            if not blocks:
                self._retired.append(self._policy)
                self._policy, self._heir = heir, None
                return
            key, nearest = blocks.popitem(last=False)
            self._older[key] = nearest
            heir.admitted(key)
            if key in self._exposed:
                heir.exposed(key)
