"""A vLLM engine in a process of its own, driven step by step: `python -m` this module.

Reads lines of JSON from standard input: first a `Script`, then steps, until the end of the
input. Writes one line per event to standard output, each after `EVENT`; vLLM's own output is
on the same stream.

A step is a pair (name, what). "fresh" empties vLLM's prefix cache and kvtiers' tiers, "drop" vLLM's
prefix cache only, "keep" neither; then the prompt is run. "settle" runs nothing: it waits until
kvtiers has written all that it was about to write.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvtiers.observe.metrics import TOKENS_RELOADED

EVENT: Final = "KVTIERS-EVENT "
_SETTLE_SECONDS: Final = 120


@dataclass(frozen=True, slots=True)
class Script:
    """What to start, and what to ask of it.

    Attributes:
        engine_args: keyword arguments of vLLM's ``EngineArgs``.
        prompt: token ids. warm_up: another prompt, run first and not timed.
        num_output_tokens: to generate for each request.
    """

    engine_args: dict[str, Any]
    prompt: list[int]
    warm_up: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of the prompt.

    Attributes:
        ttft_seconds: from adding the request to its first token.
        num_cached_tokens: of the prompt, that were not computed.
        reloaded_tokens: of those, what kvtiers brought, by tier; the rest was in HBM.
    """

    name: str
    ttft_seconds: float
    token_ids: list[int]
    num_cached_tokens: int
    reloaded_tokens: dict[str, int]


class Driver:
    """One in-process engine."""

    def __init__(self, script: Script) -> None:
        # Imported here: vLLM takes seconds, and `Script` is for those who do not have it.
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        self._script = script
        args = EngineArgs(**script.engine_args)
        self._engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        self._num_requests = 0

    def run(self, steps: Iterable[str]) -> None:
        """Do each step as it comes, emitting an event for it.

        Args:
            steps: lines of JSON.
        """
        emit("started", device=str(self._engine.vllm_config.device_config.device_type))
        self._generate("warm-up", self._script.warm_up)
        emit("warm")
        for name, what in map(json.loads, steps):
            if what == "settle":
                self._settle()
                emit("settled")
                continue
            if what != "keep":
                self._drop(reset_connector=what == "fresh")
            emit("measured", **asdict(self._generate(name, self._script.prompt)))
        self._engine.engine_core.shutdown()

    def _generate(self, name: str, prompt: list[int]) -> Measured:
        from vllm import SamplingParams  # noqa: PLC0415

        self._num_requests += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self._script.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        started = time.perf_counter()
        request_id = f"{name}-{self._num_requests}"
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        ttft, tokens, num_cached = 0.0, [], 0
        before = self._reloaded_by_tier()
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens = list(output.outputs[0].token_ids)
                ttft = ttft or time.perf_counter() - started
                num_cached = int(output.num_cached_tokens or 0)
        after = self._reloaded_by_tier()
        reloaded = {tier: num - before.get(tier, 0) for tier, num in after.items()}
        return Measured(name, ttft, tokens, num_cached, {t: n for t, n in reloaded.items() if n})

    def _reloaded_by_tier(self) -> dict[str, int]:
        """Return the tokens that kvtiers has reloaded since the start, by tier."""
        connector = self._engine.engine_core.engine_core.scheduler.connector
        if connector is None:
            return {}
        counters = connector.scheduler_side.connector.counters.snapshot().counters
        return {
            labels[0]: int(num)
            for (name, labels), num in counters.items()
            if name == TOKENS_RELOADED
        }

    def _settle(self) -> None:
        """Step until the ranks have answered everything."""
        connector = self._engine.engine_core.engine_core.scheduler.connector
        deadline = time.monotonic() + _SETTLE_SECONDS
        while connector is not None and connector.has_pending_push_work():
            self._engine.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"kvtiers is still writing after {_SETTLE_SECONDS} s")

    def _drop(self, *, reset_connector: bool) -> None:
        deadline = time.monotonic() + 30
        while not self._engine.reset_prefix_cache(False, reset_connector):
            self._engine.step()
            if time.monotonic() > deadline:
                raise TimeoutError("vLLM still holds blocks after 30 s")


def emit(event: str, **values: Any) -> None:
    """Write one event."""
    sys.stdout.write(f"{EVENT}{json.dumps({'event': event, **values})}\n")
    sys.stdout.flush()


def main() -> None:
    """Run what standard input says."""
    script = Script(**json.loads(sys.stdin.readline()))
    Driver(script).run(sys.stdin)


if __name__ == "__main__":
    main()
