"""A quick guess of what tiers of some sizes bring, to choose which are worth a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtiers.cost.links import read_link, reload_link
from kvtiers.cost.prefill import PrefillModel
from kvtiers.model.config import Config
from kvtiers.simulate.arrivals import ArrivalPlan
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.stack import Float64s, StackDistances
from kvtiers.simulate.trace import Int64s, Trace

# Share of DRAM that one request may count on for what it reloads from NVMe: it goes through DRAM,
# which others use at the same time. Replays of the conversation trace on H100s hit 14, 20 and 25 %
# with 4, 8 and 16 GiB before 4 TiB of NVMe; an eighth gives 14, 19 and 25 % (November 2026).
_STAGED: Final = 1 / 8


@dataclass(frozen=True, slots=True)
class Guess:
    """What is guessed; good for comparing sizes, not for its own sake.

    Attributes:
        hit_rate: of all tiers that are worth loading from. ttft_p90: in seconds.
        alone_p90: seconds to the first token if no request waited for another: the loads, and the
            prefill of what is not hit.
    """

    hit_rate: float
    ttft_p90: float
    alone_p90: float


class Estimator:
    """Guesses from stack distances: each tier an LRU cache, the device one queue.

    A request loads the tiers' prefix whose load and remaining prefill take least, then computes,
    one after another as they come. NVMe gives no more than DRAM has room for. Decodes, batches and
    full links are left out: they slow all sizes alike, or are found out by the replay.

    Args:
        store: whose links an NVMe tier has, and by what name.
    """

    def __init__(
        self,
        trace: Trace,
        distances: StackDistances,
        machine: MachinePlan,
        arrivals: ArrivalPlan,
        store: tuple[str, Config],
    ) -> None:
        name, config = store
        on_paper = machine.machine(config)
        memory = machine.memory()
        self._distances = distances
        self._hbm_tokens = memory.pool.num_tokens
        self._prefill = PrefillModel.of(
            on_paper.speed, on_paper.model, machine.max_num_batched_tokens
        )
        seconds_per_token = [0.0]
        for link in (reload_link(), read_link(name)):
            seed = on_paper.links[link]
            per_byte = memory.kv_nbytes_per_token / seed.bandwidth_bytes_per_second
            seconds_per_token.append(per_byte + seed.seconds_per_piece / machine.block_size)
        self._seconds_per_token = seconds_per_token
        first = trace.requests[0].arrival_seconds
        times = [request.arrival_seconds - first for request in trace.requests]
        self._arrivals = np.array(times) / arrivals.speed
        self._closed = arrivals.concurrency is not None

    def guess(self, dram_tokens: float, store_tokens: float) -> Guess:
        """Guess for tiers of some sizes; 0 for none."""
        distances, prompt = self._distances, self._distances.num_prompt_tokens
        reach: list[float] = [self._hbm_tokens]
        reach.append(max(self._hbm_tokens, dram_tokens))
        reach.append(reach[-1] + store_tokens)
        hits = [distances.hit_tokens(tokens) for tokens in reach]
        hits[2] = np.minimum(hits[2], hits[1] + int(_STAGED * dram_tokens))
        best, had = self._served(prompt, hits)
        wait = np.zeros(len(best)) if self._closed else _waits(self._arrivals, best)
        rate = float(had.sum()) / max(1, int(prompt.sum()))
        return Guess(rate, _p90(wait + best), _p90(best))

    def _served(self, prompt: Int64s, hits: list[Int64s]) -> tuple[Float64s, Int64s]:
        """Return the least seconds to the first token of each request, and the tokens it hits."""
        loads = np.zeros(len(prompt))
        best = self._prefill.seconds(prompt - hits[0], hits[0])
        had = hits[0]
        for tier in (1, 2):
            loads = loads + (hits[tier] - hits[tier - 1]) * self._seconds_per_token[tier]
            seconds = loads + self._prefill.seconds(prompt - hits[tier], hits[tier])
            better = seconds < best
            best, had = np.where(better, seconds, best), np.where(better, hits[tier], had)
        return best, had


def _p90(seconds: Float64s) -> float:
    return float(np.percentile(seconds, 90))


def _waits(arrivals: Float64s, service: Float64s) -> Float64s:
    """Return how long each waits for those before it: D. V. Lindley's recursion, 1952."""
    gone = np.concatenate(([0.0], np.cumsum(service)[:-1])) - arrivals
    return np.asarray(gone - np.minimum.accumulate(gone))
