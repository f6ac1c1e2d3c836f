"""Another simulator of HBM, DRAM and one store: one request at a time, and copies take no time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

TOKENS = 512  # of a block
RUN = 32  # engine blocks of 16 tokens that make one
WATERMARKS = (0.95, 0.90)


class Hbm:
    """Engine blocks: the longest free is taken first; a block of the trace is forgotten with the
    first of its run that is."""

    def __init__(self, num_blocks: int) -> None:
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self.runs: dict[object, list[int]] = {}
        self._of: dict[int, object] = {}

    def take(self, num: int) -> list[int]:
        taken = [self._free.popitem(last=False)[0] for _ in range(num)]
        for key in {self._of[block] for block in taken if block in self._of}:
            for block in self.runs.pop(key):
                del self._of[block]
        return taken

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            del self._free[block]

    def release(self, blocks: list[int]) -> None:
        self._free.update(dict.fromkeys(reversed(blocks)))

    def cache(self, blocks: list[int], keys: list[object]) -> None:
        for idx, key in enumerate(keys):
            run = blocks[idx * RUN : (idx + 1) * RUN]
            if key not in self.runs and self._of.keys().isdisjoint(run):
                self.runs[key] = run
                self._of.update(dict.fromkeys(run, key))


@dataclass(eq=False)
class Held:
    """A block of a tier; `busy`: copies that it is part of."""

    key: object
    parent: object
    busy: int = 0
    ready: bool = False
    backed: bool = False
    children: set[object] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        return self.ready and not self.busy

    @property
    def may_leave(self) -> bool:
        return self.idle and (self.backed or not self.children)


class Lru:
    """Least recently used first, but tails before heads."""

    def __init__(self, num_blocks: int) -> None:
        self.size = num_blocks
        self.held: OrderedDict[object, Held] = OrderedDict()
        self._children: dict[object, set[object]] = {}
        self.left: list[object] = []

    @property
    def num_free(self) -> int:
        return self.size - len(self.held)

    @property
    def num_busy(self) -> int:
        return sum(not it.idle for it in self.held.values())

    def victim(self) -> Held | None:
        return next((it for it in self.held.values() if it.may_leave), None)

    def drop(self, it: Held) -> None:
        del self.held[it.key]
        self.left.append(it.key)
        self._children[it.parent].discard(it.key)

    def reserve(self, key: object, parent: object) -> Held | None:
        if not self.num_free:
            above = self.held.get(parent)
            if above is not None:
                above.busy += 1
            victim = self.victim()
            if above is not None:
                above.busy -= 1
            if victim is None:
                return None
            self.drop(victim)
        self._children.setdefault(parent, set()).add(key)
        it = Held(key, parent, children=self._children.setdefault(key, set()))
        self.held[key] = it
        return it


class ThreeTiers:
    """Serves requests; sizes are in blocks, HBM's in those of the engine.

    Args:
        store: 0 for none. back: whether it is written to when blocks leave DRAM.
    """

    def __init__(self, hbm: int, dram: int, store: int, step_tokens: int, *, back: bool) -> None:
        self._hbm, self._dram = Hbm(hbm), Lru(dram)
        self._store = Lru(store) if store else None
        self._back, self._step = back, step_tokens
        self._num_served = 0
        self._begin()

    def serve(self, keys: list[object], num_prompt: int, num_output: int) -> tuple[int, int, int]:
        """Return the blocks that HBM, DRAM and the store had of a prompt."""
        self._num_served += 1
        hbm, keys = self._hbm, keys[: num_prompt // TOKENS]
        limit, local = (num_prompt - 1) // TOKENS, 0
        while local < limit and keys[local] in hbm.runs:
            local += 1
        sources = self._found(keys, local, limit)
        shared = [block for key in keys[:local] for block in hbm.runs[key]]
        hbm.hold(shared)
        table = shared + hbm.take(-(-num_prompt // 16) - len(shared))
        if sources:
            self._load(keys, local, sources)
        done, taken = (local + len(sources)) * TOKENS, 0
        last = num_prompt + num_output - 1
        keys += [(self._num_served, idx) for idx in range(len(keys), last // TOKENS)]
        while done < last:
            prefill = done < num_prompt
            end = min(num_prompt, done + self._step) if prefill else (done // TOKENS + 1) * TOKENS
            if not prefill and min(end, last) - done > 1:
                self._settle()  # decodes that fill no block
            done = min(end, last)
            table += hbm.take(max(0, -(-done // 16) - len(table)))
            taken = self._offer(keys, taken, done // TOKENS)
            self._settle()
            hbm.cache(table, keys[: done // TOKENS])
        if taken and keys[taken - 1] not in self._dram.held:
            taken = 0
        self._offer(keys, taken, len(keys))
        hbm.release(table)
        if self._new or self._late:  # else no step is made before the next request comes
            self._settle()
        return local, sources.count(0), sources.count(1)

    def _found(self, keys: list[object], local: int, limit: int) -> list[int]:
        """Return where the blocks after the local ones are: as many as one load can bring."""
        sources: list[int] = []
        num_read, best = 0, 0
        for key in keys[local:limit]:
            it = self._dram.held.get(key)
            if it is None and not self._stored(key):
                break
            num_read += it is not None and it.idle and not it.backed
            sources.append(int(it is None))
            if 1 not in sources or num_read < self._dram.size - self._dram.num_busy:
                best = len(sources)
        return sources[:best]

    def _load(self, keys: list[object], local: int, sources: list[int]) -> None:
        dram, end = self._dram, local + len(sources)
        rows = list(zip(keys[local:end], [None, *keys][local:end], sources, strict=True))
        used = []
        for key, _, source in rows:
            used.append((self._store if source else dram).held[key])
            used[-1].busy += 1
            if source:
                self._store.held.move_to_end(key)
        brought = []
        for key, parent, source in rows:
            if source and dram.num_busy < dram.size // 2:
                it = dram.reserve(key, parent)
                if it is not None:
                    it.busy += 1
                    brought.append(it)
        for key, _, _ in reversed(rows):
            if key in dram.held:
                dram.held.move_to_end(key)
        self._order()
        for it in brought:
            it.ready = it.backed = True
        for it in used + brought:
            it.busy -= 1
        self._answer()

    def _stored(self, key: object) -> bool:
        it = None if self._store is None else self._store.held.get(key)
        return it is not None and it.ready

    def _route(self, it: Held) -> Held | None:
        if self._store is None or it.key in self._store.held:
            return None
        return self._store.reserve(it.key, it.parent)

    def _offer(self, keys: list[object], first: int, end: int) -> int:
        """Offer computed blocks to DRAM; returns the first that found no room."""
        for idx in range(first, end):
            key, parent = keys[idx], keys[idx - 1] if idx else None
            it = self._dram.held.get(key)
            if it is not None:
                if it.idle and not self._back and (written := self._route(it)) is not None:
                    it.busy += 1
                    self._late.append((it, written))
                continue
            above = parent is None or parent in self._dram.held
            if not above and (self._store is None or parent not in self._store.held):
                return idx
            if not self._dram.num_free and self._stored(key):
                continue
            it = self._dram.reserve(key, parent)
            if it is None:
                return idx
            self._new.append((it, None if self._back else self._route(it)))
            it.busy += 1
        return end

    def _settle(self) -> None:
        self._order()
        self._answer()

    def _begin(self) -> None:
        self._new: list[tuple[Held, Held | None]] = []
        self._late: list[tuple[Held, Held]] = []
        self._demoted: list[tuple[Held, Held | None]] = []

    def _order(self) -> None:
        """Choose whom DRAM writes back, and note in DRAM what the store has lost."""
        self._demote()
        for key in self._store.left if self._store is not None else ():
            if key in self._dram.held and key not in self._store.held:
                self._dram.held[key].backed = False
        if self._store is not None:
            self._store.left.clear()

    def _demote(self) -> None:
        dram = self._dram
        used = dram.size - dram.num_free
        if self._store is None or not self._back or used <= WATERMARKS[0] * dram.size:
            return
        excess, going = used - int(WATERMARKS[1] * dram.size), set()
        while excess > 0 and (it := dram.victim()) is not None:
            while it is not None and excess > 0:
                written = self._route(it)
                excess -= 1
                if written is None and it.may_leave:
                    dram.drop(it)
                    break
                it.busy += 1
                going.add(it.key)
                self._demoted.append((it, written))
                above = dram.held.get(it.parent)
                goes = above is not None and above.idle and above.children <= going
                it = above if goes else None

    def _answer(self) -> None:
        """Let all copies end."""
        for it, _ in self._new:
            it.ready = True
            it.backed = self._stored(it.key)
        for it, written in (*self._late, *self._demoted, *self._new):
            if written is not None:
                written.ready = it.backed = True
            it.busy -= 1
        dram = self._dram
        for it, _ in self._demoted:
            if dram.size - dram.num_free > int(WATERMARKS[1] * dram.size) and it.may_leave:
                dram.drop(it)
        self._begin()
