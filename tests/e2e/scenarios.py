"""Workloads that an engine must answer alike with and without a cache below it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtiers.bench.random_model import TINY_HYBRID

from .answers import Answer, Answers, Prompt, random_prompt
from .harness import Engine, EngineOptions, Engines

#: One pool for all scenarios, so that they share an engine: 47 usable blocks, 1,504 tokens.
SMALL_POOL = EngineOptions(
    num_gpu_blocks=48, max_model_len=1024, max_num_batched_tokens=256, max_num_seqs=8
)

#: The same for a model with two KV groups, whose blocks come from one pool.
SMALL_HYBRID_POOL = replace(SMALL_POOL, model=TINY_HYBRID, num_gpu_blocks=72)


@dataclass(frozen=True)
class Scenario:
    """A workload: ``drive`` runs it on a cleared engine and returns the answers to compare.

    Requests that were aborted are not among them: how far those came depends on the cache.
    """

    name: str
    drive: Callable[[Engine], Answers]
    #: True where the driver counts engine steps: those of another process it cannot see.
    in_process: bool = False

    def __str__(self) -> str:
        return self.name


def long_prompt_again(engine: Engine) -> Answers:
    """(a) One long prompt; the engine forgets it; the same prompt again, and once more."""
    prompt = random_prompt(900, seed=1)
    _run(engine, {"first": (prompt, 24)})
    assert engine.reset_prefix_cache()
    _run(engine, {"again": (prompt, 24)})
    return _run(engine, {"from the engine's own cache": (prompt, 24)})


def preemption(engine: Engine) -> Answers:
    """(b) Six requests that grow to twice the pool: the engine must preempt and resume."""
    requests = {
        f"grows-{i}": (random_prompt(140 + 9 * i, seed=20 + i), 320 - 16 * i) for i in range(6)
    }
    return _run(engine, requests)


def waves(engine: Engine, num_requests: int = 60) -> Answers:
    """(c) Mixed requests over shared prefixes; waves arrive while the last one still runs."""
    source = random.Random(3)
    prefixes = [random_prompt(64 + 71 * i, seed=30 + i) for i in range(5)]
    for start in range(0, num_requests, 10):
        for i in range(start, min(start + 10, num_requests)):
            prefix = prefixes[source.randrange(len(prefixes))]
            suffix = random_prompt(source.randrange(1, 140), seed=300 + i)
            engine.add(prefix + suffix, source.randrange(1, 28), name=f"mixed-{i}")
        for _ in range(12):
            engine.step()
    return engine.run()


def block_boundaries(engine: Engine) -> Answers:
    """(d) Prompts that end at, just before and just after a block, then shorter prefixes.

    The last requests are served from blocks that the engine itself cached, some of them after
    a reload: an order that a reload got wrong is visible only there.
    """
    block_size = engine.options.block_size
    num_tokens = 20 * block_size
    whole = random_prompt(num_tokens, seed=40)
    common = whole[: num_tokens * 2 // 5]
    prompts = {f"at {d:+d}": random_prompt(num_tokens + d, seed=40) for d in (-1, 0, 1)}
    prompts["40 % common"] = common + random_prompt(num_tokens - len(common), seed=41)
    for name, prompt in prompts.items():
        _run(engine, {name: (prompt, 12)})
    assert engine.reset_prefix_cache()
    for name, prompt in prompts.items():
        _run(engine, {f"{name}, again": (prompt, 12)})
    for num_blocks in (1, 3, 8, 9, 15, 19):
        for d in (-1, 0, 1):
            prompt = whole[: num_blocks * block_size + d]
            _run(engine, {f"shorter {num_blocks} {d:+d}": (prompt, 12)})
    return dict(engine.answers)


def cache_salts(engine: Engine) -> Answers:
    """(e) One prompt under two salts and under none, before and after a reset."""
    prompt = random_prompt(500, seed=50)
    for turn in ("first", "again"):
        for salt in ("red", "blue", "red", None):
            name = f"{turn} {salt}"
            if name in engine.answers:
                name += " once more"
            engine.add(prompt, 12, name=name, cache_salt=salt)
            engine.run()
        assert engine.reset_prefix_cache()
    return dict(engine.answers)


def aborts(engine: Engine, num_steps: int = 1) -> Answers:
    """(f) Aborts before the first step, in a load (after ``num_steps``) and after a token.

    Each time another request takes the freed blocks while the aborted load may still run.
    """
    prompt = random_prompt(800, seed=60)
    answers = _run(engine, {"first": (prompt, 16)})

    def queued(name: str) -> None:
        assert not engine.answers[name].token_ids

    def loading(name: str) -> None:
        for _ in range(num_steps):
            engine.step()

    def decoding(name: str) -> None:
        engine.run_until(lambda: bool(engine.answers[name].token_ids))

    for i, reach in enumerate((queued, loading, decoding)):
        when = reach.__name__
        assert engine.reset_prefix_cache()
        name = engine.add(prompt, 64, name=f"aborted while {when}")
        reach(name)
        engine.abort(name)
        other = random_prompt(700, seed=61 + i)
        engine.add(other, 16, name=f"beside the abort while {when}")
        engine.add(prompt, 16, name=f"after the abort while {when}")
        answers = engine.run()
    return {name: a for name, a in answers.items() if a.finish_reason != "abort"}


def reset_in_flight(engine: Engine, *, reset_connector: bool = True) -> Answers:
    """(g) All caches are reset while requests run and while others wait."""
    prompts = {f"in flight {i}": random_prompt(300 + 40 * i, seed=70 + i) for i in range(5)}
    _run(engine, {f"before {name}": (prompt, 4) for name, prompt in prompts.items()})
    assert engine.reset_prefix_cache()
    for name, prompt in prompts.items():
        engine.add(prompt, 24, name=name)
    for num_steps in (1, 1, 5):
        for _ in range(num_steps):
            engine.step()
        engine.reset_prefix_cache(reset_connector=reset_connector)
        if not engine.loading:
            assert engine.reset_prefix_cache(
                reset_running_requests=True, reset_connector=reset_connector
            )
    engine.run()
    return _run(engine, {f"after {name}": (prompt, 8) for name, prompt in prompts.items()})


def dram(num_blocks: int, options: EngineOptions = SMALL_POOL, **sections: object) -> EngineOptions:
    """(h) Return ``options`` with a DRAM tier of about ``num_blocks`` blocks of one KV group.

    Every hit is reloaded, asynchronously, unless ``sections`` of the configuration say
    otherwise. Eight blocks are far fewer than most requests here have.
    """
    group_share = 2 if options.model.sliding_window else 1
    block_nbytes = options.model.kv_nbytes_per_token * options.block_size // group_share
    config: dict[str, object] = {
        "tiers": [{"kind": "dram", "capacity": f"{num_blocks * (block_nbytes + 4096)}B"}],
        "cost": {"mode": "always"},
        "reload": {"sync_below": "0ms"},
    }
    return replace(options, kvtiers=config | sections)


SCENARIOS = (
    Scenario("long prompt again", long_prompt_again),
    Scenario("preemption", preemption),
    Scenario("waves", waves, in_process=True),
    Scenario("block boundaries", block_boundaries),
    Scenario("cache salts", cache_salts),
    Scenario("aborts", aborts, in_process=True),
    Scenario("reset in flight", reset_in_flight, in_process=True),
)


class References:
    """What an engine without connector answers, computed once for each set of options."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._answers: dict[str, dict[str, Answers]] = {}

    def answers(self, scenario: Scenario, options: EngineOptions = SMALL_POOL) -> Answers:
        """Return the answers to ``scenario`` of the same engine without connector.

        A first call with new options runs all scenarios, and stops the engine that is alive.
        """
        plain = replace(options.plain, multiprocess=False, tensor_parallel_size=1)
        key = repr(plain)
        if key not in self._answers:
            self._answers[key] = {
                each.name: each.drive(self._engines.get(plain)) for each in SCENARIOS
            }
        return self._answers[key][scenario.name]


def _run(engine: Engine, requests: dict[str, tuple[Prompt, int]]) -> dict[str, Answer]:
    """Run named requests of (prompt, number of tokens) together; return all answers so far."""
    for name, (prompt, max_tokens) in requests.items():
        engine.add(prompt, max_tokens, name=name)
    return engine.run()
