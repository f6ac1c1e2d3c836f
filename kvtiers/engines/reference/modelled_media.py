"""Modelled links and shared stores: when a transfer ends, and which frames a store holds."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtiers.control.controller import Controller
from kvtiers.cost.links import LinkSeed
from kvtiers.model.keys import BlockKey, unpack_keys
from kvtiers.model.messages import Presence


@dataclass(frozen=True, slots=True)
class HandOver:
    """What a reload takes beside its links and the steps around it, as measured on an engine.

    Attributes:
        plan_seconds: that the scheduler takes for each reload that it begins.
        idle_seconds: that a step takes which begins reloads and computes no token; other steps
            have it in their own time.
        notice_seconds: from a reload's last copy to its answer, unless the step waits for it.
    """

    plan_seconds: float = 0.0
    idle_seconds: float = 0.0
    notice_seconds: float = 0.0

    def before_step(self, num_loads: int, *, computes: bool) -> float:
        """Return the seconds that the reloads of a step take before its orders go out."""
        idle = 0.0 if computes or not num_loads else self.idle_seconds
        return idle + num_loads * self.plan_seconds


NO_HAND_OVER: Final = HandOver()


class ModelledLink:
    """One link in one direction, which serves one job after another, first come, first served.

    Attributes:
        per_block: seconds of a block beside the job's latency. free_at: when the queue is empty.

    Args:
        seed: latency, seconds a piece, bandwidth. block_nbytes: of one block.
        pieces_per_block: pieces that one block consists of.
    """

    def __init__(self, seed: LinkSeed, block_nbytes: int, pieces_per_block: int) -> None:
        self._latency = seed.latency_seconds
        bandwidth = seed.bandwidth_bytes_per_second
        self.per_block = seed.seconds_per_piece * pieces_per_block + block_nbytes / bandwidth
        self.free_at = 0.0

    def seconds(self, num_blocks: int) -> float:
        """Return the seconds of a job on an idle link; 0 for one without blocks."""
        return self._latency + num_blocks * self.per_block if num_blocks else 0.0

    def begins(self, now: float, num_blocks: int, until: float) -> int:
        """Return how many blocks of a job that is queued now begin before the time `until`."""
        left = until - max(now, self.free_at) - self._latency
        if left <= 0:
            return 0
        if self.per_block == 0:
            return num_blocks
        return min(num_blocks, int(left / self.per_block) + 1)

    def serve(self, now: float, num_blocks: int) -> float:
        """Queue a job; returns the time at which it ends."""
        if not num_blocks:
            return now
        self.free_at = max(now, self.free_at) + self.seconds(num_blocks)
        return self.free_at


class SharedStore:
    """A store whose own process evicts: what was not used for longest leaves first."""

    def __init__(self, num_frames: int) -> None:
        self._num_frames = num_frames
        self._frames: OrderedDict[BlockKey, None] = OrderedDict()

    def put(self, key: BlockKey) -> None:
        """Store a frame; of one that is there, note the access."""
        self._frames[key] = None
        self._frames.move_to_end(key)
        if len(self._frames) > self._num_frames:
            self._frames.popitem(last=False)

    def read(self, key: BlockKey) -> bool:
        """Return whether a frame is there, and note the access."""
        if key not in self._frames:
            return False
        self._frames.move_to_end(key)
        return True

    def holds(self, key: BlockKey) -> bool:
        """Whether a frame is there; no access."""
        return key in self._frames

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Delete frames."""
        for key in keys:
            self._frames.pop(key, None)

    def clear(self) -> None:
        """Delete all: a new generation does not find them."""
        self._frames.clear()

    @property
    def usage(self) -> tuple[int, int]:
        """Frames held, and how many it may hold."""
        return len(self._frames), self._num_frames

    def __len__(self) -> int:
        return len(self._frames)


class ModelledLasting:
    """What outlives a modelled engine: shared stores, whose contents control asks about.

    An answer is ready at once, and told when control next listens: in a later step.

    Attributes:
        generation: what frames are named with; a reset begins another.
    """

    def __init__(self, shared: Mapping[str, SharedStore]) -> None:
        self.generation = 0
        self._shared = shared
        self._answers: deque[Presence] = deque()

    @property
    def pending(self) -> bool:
        """Whether an answer is ready that control has not been told."""
        return bool(self._answers)

    @property
    def usage(self) -> dict[str, tuple[int, int]]:
        """Frames held, and how many may be, by store."""
        return {name: store.usage for name, store in self._shared.items()}

    def ask(self, controller: Controller) -> None:
        """Look up what control wants to know."""
        for lookup in controller.take_lookups():
            store = self._shared[lookup.store]
            present = [store.holds(key) for key in unpack_keys(lookup.keys)]
            column = np.array(present, np.uint8)
            self._answers.append(Presence(lookup.store, lookup.keys, column, lookup.epoch))

    def tell(self, controller: Controller) -> None:
        """Tell control what was found."""
        while self._answers:
            controller.answered(self._answers.popleft())

    def renew(self) -> bool:
        """Begin a new generation."""
        self.generation += 1
        for store in self._shared.values():
            store.clear()
        return True

    def close(self) -> None:
        """Nothing is held."""
