"""Which block follows which, guessed from the order in which they are asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvtiers.control.policy.base import EvictionPolicy
from kvtiers.model.keys import BlockKey

_SLOTS: Final = 8  # per block of the tier, for what came before a key; 9 bytes each
_RUN_SHARE: Final = 16  # new blocks that are taken for one prompt: one in so many of the tier's
_LEAST_RUN: Final = 4  # but so many
_FIRST: Final = 0  # stands for the predecessor of what begins a prompt


class Predecessors:
    """Guesses which of the keys that are asked for go on with a prompt.

    Prompts are asked for one after another, each from its first key on. A key always comes behind
    the same one, unless a prompt begins with it: one that comes behind another than before begins
    a prompt. A new key is taken to go on with the prompt before it, for so long that one prompt
    may be as new: if in truth it begins one, nothing of that can be here. Of two keys that share
    a slot, the one that was asked for again is kept: a popular first key must not be forgotten.
    """

    def __init__(self, capacity: int) -> None:
        self._size = _SLOTS * capacity
        self._names = memoryview(bytearray(4 * self._size)).cast("I")
        self._before = memoryview(bytearray(4 * self._size)).cast("I")
        self._again = bytearray(self._size)  # whether the key was asked for since another came
        self._longest_run = max(_LEAST_RUN, capacity // _RUN_SHARE)
        self._num_new = 0  # since one was known, or the last cut
        self._last = _FIRST
        self._goes_on = False

    def asked(self, name: int) -> bool:
        """Note that the key of a fingerprint is asked for; whether it goes on with a prompt."""
        last = self._last
        if name == last:
            return self._goes_on
        self._last = name
        slot = name % self._size
        if self._names[slot] != name:
            if self._again[slot]:
                self._again[slot] = 0
            else:
                self._names[slot], self._before[slot] = name, last
            self._num_new += 1
            self._goes_on = self._num_new <= self._longest_run and last != _FIRST
            if not self._goes_on:
                self._num_new = 0
            return self._goes_on
        self._num_new = 0
        self._again[slot] = 1
        before = self._before[slot]
        self._goes_on = before == last and last != _FIRST
        if before != last:
            self._before[slot] = _FIRST
        return self._goes_on


class _Link:
    """A block that is here, or was when another came behind it.

    Attributes:
        key: None once the block has left. number: in the order of arrival. parent: the block
            before it, whose children are counted. orphaned: that block was not here.
    """

    __slots__ = ("exposed", "key", "num_children", "number", "orphaned", "parent")

    def __init__(self, key: BlockKey, number: int) -> None:
        self.key: BlockKey | None = key
        self.number = number
        self.parent: _Link | None = None
        self.num_children = 0
        self.exposed = False
        self.orphaned = False


class GuessedChains:
    """Lets no block leave before what follows it, and first of all what nothing can hit.

    Only the leading blocks of a prompt are hits. One behind which others are kept, and may leave
    by its owner, is shielded from the rule that ranks; one that came behind a block that was not
    here leaves before all that the rule ranks.

    Args:
        expose, shield: tell the rule who may leave.
    """

    def __init__(
        self, expose: Callable[[BlockKey], None], shield: Callable[[BlockKey], None]
    ) -> None:
        self._expose, self._shield = expose, shield
        self._links: dict[BlockKey, _Link] = {}
        self._last: _Link | None = None
        self._num_came = 0
        # Those that may leave by their owner: behind what was not here; before what is.
        self._orphans: OrderedDict[BlockKey, None] = OrderedDict()
        self._held: OrderedDict[BlockKey, None] = OrderedDict()

    def came(self, key: BlockKey, goes_on: bool) -> None:
        """Note a new block, which may not leave yet."""
        self._num_came += 1
        link = self._links[key] = _Link(key, self._num_came)
        self._follow(link, goes_on)

    def asked(self, key: BlockKey, goes_on: bool) -> None:
        """Note a hit.

        Args:
            goes_on: with the prompt of which a block came, or was asked for, just now.
        """
        self._follow(self._links[key], goes_on)

    def exposed(self, key: BlockKey) -> None:
        """Let the rule name the block once nothing follows it."""
        link = self._links[key]
        link.exposed = True
        if link.orphaned:
            self._orphans[key] = None
        if link.num_children:
            self._held[key] = None
        else:
            self._expose(key)

    def shielded(self, key: BlockKey) -> None:
        """Let the block stay."""
        link = self._links[key]
        link.exposed = False
        self._orphans.pop(key, None)
        if link.num_children:
            del self._held[key]
        else:
            self._shield(key)

    def left(self, key: BlockKey) -> None:
        """Forget a block that is gone; the rule has forgotten it."""
        link = self._links.pop(key)
        link.key, link.exposed = None, False
        self._orphans.pop(key, None)
        self._held.pop(key, None)
        self._untie(link)

    def next_victim(self, rule: EvictionPolicy) -> BlockKey | None:
        """Return what nothing can hit, else whom the rule names, else the first that is held."""
        if self._orphans:
            return next(iter(self._orphans))
        victim = rule.next_victim()
        if victim is None and self._held:
            return next(iter(self._held))
        return victim

    def release(self, num: int) -> bool:
        """Let the rule name so many of those that are held; False if there are none left."""
        self._orphans.clear()
        for _ in range(min(num, len(self._held))):
            key, _ = self._held.popitem(last=False)
            self._links[key].num_children = 0
            self._expose(key)
        return bool(self._held)

    def _follow(self, link: _Link, goes_on: bool) -> None:
        last, self._last = self._last, link
        if last is link:
            return
        parent = last if goes_on and last is not None and last.key is not None else None
        orphaned = goes_on and (parent is None or parent.orphaned)
        if parent is not link.parent:
            self._untie(link)
            if parent is not None and parent.number < link.number:  # so that no circle can be
                self._tie(link, parent)
        if orphaned != link.orphaned and link.key is not None:
            link.orphaned = orphaned
            if not orphaned:
                self._orphans.pop(link.key, None)
            elif link.exposed:
                self._orphans[link.key] = None

    def _tie(self, link: _Link, parent: _Link) -> None:
        link.parent = parent
        parent.num_children += 1
        if parent.num_children == 1 and parent.exposed and parent.key is not None:
            self._shield(parent.key)
            self._held[parent.key] = None

    def _untie(self, link: _Link) -> None:
        parent, link.parent = link.parent, None
        if parent is None or not parent.num_children:
            return
        parent.num_children -= 1
        if not parent.num_children and parent.exposed and parent.key is not None:
            del self._held[parent.key]
            self._expose(parent.key)
