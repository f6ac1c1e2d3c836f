"""A trace that several engines share: who gets which request, as a prefix-aware router would."""

from __future__ import annotations

from dataclasses import replace

from kvtiers.model.errors import ConfigError
from kvtiers.simulate.trace import Trace, TraceRequest


def busiest_share(trace: Trace, num_engines: int, longest: int | None = None) -> Trace:
    """Return the requests of the engine that gets the most prompt tokens.

    A request goes to the engine that was last to have its longest known prefix, if that is at
    least half of its prompt and the engine is no more than a tenth ahead of its share; any other
    goes to the engine that was given the fewest tokens. (The rule of SGLang's cache-aware load
    balancer, with the imbalance counted in tokens.)

    Args:
        longest: tokens of a request that engines serve, None for any: longer ones, which all
            refuse, are among the requests of each, and cost nothing.

    Raises:
        ConfigError: there are more engines than requests.
    """
    if num_engines == 1:
        return trace
    if not 1 <= num_engines <= len(trace.requests):
        raise ConfigError(
            f"{num_engines} engines share {len(trace.requests)} requests; must be at least 1, and "
            "no more than requests"
        )
    shares: list[list[TraceRequest]] = [[] for _ in range(num_engines)]
    num_tokens, last = [0] * num_engines, dict[int, int]()
    for request in trace.requests:
        if longest is not None and request.num_tokens > longest:
            for share in shares:
                share.append(request)
            continue
        ids = request.block_ids.tolist()
        depth = next((n for n in range(len(ids), 0, -1) if ids[n - 1] in last), 0)
        engine = last[ids[depth - 1]] if depth and 2 * depth >= len(ids) else -1
        ahead = 1.1 * sum(num_tokens) / num_engines + request.num_prompt_tokens
        if engine < 0 or num_tokens[engine] > ahead:
            engine = min(range(num_engines), key=num_tokens.__getitem__)
        shares[engine].append(request)
        num_tokens[engine] += request.num_prompt_tokens
        last.update(dict.fromkeys(ids, engine))
    busiest = max(range(num_engines), key=num_tokens.__getitem__)
    return Trace(trace.name, trace.block_size, tuple(shares[busiest]))


def servable(trace: Trace, longest: int) -> Trace:
    """Return the requests of at most `longest` tokens, prompt and output together.

    Raises:
        ConfigError: there is none.
    """
    kept = tuple(request for request in trace.requests if request.num_tokens <= longest)
    if not kept:
        raise ConfigError(
            f"every request of {trace.name} is longer than the {longest:,} tokens that the engine "
            "allows: raise --max-model-len if you gave it; an fp8 cache or more devices (--tp) "
            "hold longer ones"
        )
    return trace if len(kept) == len(trace.requests) else replace(trace, requests=kept)


class Shares:
    """The busiest engines' shares of one trace, each made once.

    Args:
        longest: tokens of a request that engines serve; None: any.
    """

    def __init__(self, trace: Trace, longest: int | None = None) -> None:
        self.trace = trace
        self.longest = longest
        self._made: dict[int, Trace] = {}

    def of(self, num_engines: int) -> Trace:
        """Return the share of the busiest of `num_engines` engines; see `busiest_share`."""
        if num_engines not in self._made:
            self._made[num_engines] = busiest_share(self.trace, num_engines, self.longest)
        return self._made[num_engines]
