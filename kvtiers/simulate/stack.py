"""Stack distances: what caches of every size would hit, from one pass over a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtiers.simulate.trace import Int64s, Trace, TraceRequest

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class StackDistances:
    """For each block of a prompt that an earlier one had, how many blocks were used since.

    A least-recently-used cache of at least so many blocks hits it. What it hits of a prompt is a
    prefix, for a block is used whenever one behind it is.

    Attributes:
        distances: blocks, itself included; request after request, each from its first block on.
        request_idx: of each distance. num_tokens: of each, but for a last block that is a part.
        num_prompt_tokens: one per request.
    """

    distances: Int64s
    request_idx: Int64s
    num_tokens: Int64s
    num_prompt_tokens: Int64s
    block_size: int

    @classmethod
    def of(cls, trace: Trace, *, whole_blocks: bool = True) -> StackDistances:
        """Return the distances in a trace.

        Args:
            whole_blocks: leave out a last block that is a part, and the block of a prompt's last
                token: an engine computes that in any case.
        """
        requests, size = trace.requests, trace.block_size
        most = sum(len(request.block_ids) for request in requests)
        recency = _Recency(most)
        distances: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        for request in requests:
            found = recency.use(request.block_ids.tolist())
            if whole_blocks:
                del found[(request.num_prompt_tokens - 1) // size :]
            distances += found
            counts.append(len(found))
            tokens += _tokens(request, len(found), size)
        return cls(
            np.array(distances, np.int64),
            np.repeat(np.arange(len(requests)), counts),
            np.array(tokens, np.int64),
            np.array([request.num_prompt_tokens for request in requests], np.int64),
            size,
        )

    def hit_tokens(self, capacity_tokens: float) -> Int64s:
        """Return the tokens that a cache of this capacity hits, one number per request."""
        hit = self.distances <= capacity_tokens // self.block_size
        weights = self.num_tokens[hit].astype(np.float64)
        found = np.bincount(self.request_idx[hit], weights, minlength=len(self.num_prompt_tokens))
        return found.astype(np.int64)

    def hit_rates(self, capacities_tokens: Sequence[float]) -> list[float]:
        """Return the share of all prompt tokens that caches of these sizes hit."""
        order = np.argsort(self.distances, kind="stable")
        ascending = self.distances[order]
        summed = np.concatenate(([0], np.cumsum(self.num_tokens[order])))
        blocks = np.asarray(capacities_tokens, np.float64) // self.block_size
        found = summed[np.searchsorted(ascending, blocks, side="right")]
        return [float(rate) for rate in found / max(1, int(self.num_prompt_tokens.sum()))]

    @property
    def working_set_tokens(self) -> int:
        """The least capacity with which a cache hits all that can be hit, in tokens."""
        return int(self.distances.max(initial=0)) * self.block_size


def knee(capacities: Sequence[float], rates: Sequence[float], above: float = 0.0) -> float:
    """Return the capacity beyond which a further byte hits less than one did on average.

    The point of the curve that lies furthest above the straight line from nothing to the smallest
    capacity that hits 95 % of all that can be hit (V. Satopaa et al., Finding a "Kneedle" in a
    Haystack, 2011). Capacities are taken as they are, for that is how they are paid for: on a
    logarithmic scale curves of caches are S-shaped, and the point is where they end. It is a
    corner of the curve's concave hull, so that a foot on which nothing is hit does not matter;
    where the curve lies nowhere above the line, its end is the answer.

    Args:
        capacities: ascending, above 0. rates: not descending.
        above: a capacity that there is in any case, from which the line begins.
    """
    x, y = np.asarray(capacities, np.float64), np.asarray(rates, np.float64)
    first = float(np.interp(above, x, y, left=0.0))
    if y[-1] <= first:  # nothing is left to be hit
        return float(x[min(int(np.searchsorted(x, above)), len(x) - 1)])
    x, y = x[x > above] - above, y[x > above] - first
    end = int(np.searchsorted(y, 0.95 * y[-1]))
    height = y[: end + 1] / y[end] - x[: end + 1] / x[end]
    best = end - int(np.argmax(height[::-1] > height.max() - 1e-9))
    return float(x[best] + above)


@dataclass(frozen=True, slots=True)
class Curve:
    """What caches of every size would hit, least recently used first out.

    Attributes:
        tokens: of the caches, ascending. rates: shares of the prompt tokens.
        knee_tokens: beyond which a further byte hits less than average; beyond HBM.
    """

    tokens: tuple[float, ...]
    rates: tuple[float, ...]
    knee_tokens: float
    working_set_tokens: int

    @classmethod
    def of(cls, distances: StackDistances, hbm_tokens: float) -> Curve:
        """Return the curve of a trace, up to twice what it ever uses again."""
        most = max(distances.block_size * 4, distances.working_set_tokens * 2)
        tokens = [most / 2 ** (number / 2) for number in range(28, -1, -1)]
        rates = distances.hit_rates(tokens)
        return cls(
            tuple(tokens),
            tuple(rates),
            min(knee(tokens, rates, hbm_tokens), distances.working_set_tokens),
            distances.working_set_tokens,
        )


def _tokens(request: TraceRequest, num_blocks: int, size: int) -> list[int]:
    """Return the tokens of the leading blocks; the last one of a prompt may be a part."""
    found = [size] * num_blocks
    over = num_blocks * size - request.num_prompt_tokens
    if over > 0:
        found[-1] -= over
    return found


class _Recency:
    """Which blocks were used since: a binary indexed tree over the times of last uses.

    Args:
        most: uses at most, ever.
    """

    def __init__(self, most: int) -> None:
        self._tree = [0] * (most + 1)
        self._last: dict[int, int] = {}
        self._time = 0

    def use(self, ids: Sequence[int]) -> list[int]:
        """Use a request's blocks, the last one first; returns the distances of those that are
        known, up to the first one that is not."""
        last, found, deepest = self._last, [], 0
        for block_id in ids:
            time = last.get(block_id)
            if time is None:
                break
            deepest = max(deepest, len(last) - self._num_until(time) + 1)
            found.append(deepest)
        for block_id in reversed(ids):
            before = last.get(block_id)
            if before is not None:
                self._add(before, -1)
            self._time += 1
            last[block_id] = self._time
            self._add(self._time, 1)
        return found

    def _num_until(self, time: int) -> int:
        tree, total = self._tree, 0
        while time > 0:
            total += tree[time]
            time &= time - 1
        return total

    def _add(self, time: int, num: int) -> None:
        tree, most = self._tree, len(self._tree)
        while time < most:
            tree[time] += num
            time += time & -time
