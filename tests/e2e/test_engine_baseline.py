"""The engine without kvtiers: what the other end-to-end tests take for granted about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtiers.bench.random_model import TINY, TINY_HYBRID, RandomModel

from .answers import Answer, differences, logprob_noise, random_prompt
from .harness import Engine, EngineOptions, Engines
from .inside import NULL_BLOCK_ID
from .scenarios import SCENARIOS, SMALL_HYBRID_POOL, SMALL_POOL, References, Scenario

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = random_prompt(650, seed=1)
NUM_BLOCKS = 650 // 32


@pytest.fixture(scope="module", params=[TINY, TINY_HYBRID], ids=["one KV group", "two KV groups"])
def model(request: pytest.FixtureRequest) -> RandomModel:
    return request.param


@pytest.fixture(
    scope="module", params=[SMALL_POOL, SMALL_HYBRID_POOL], ids=["one KV group", "two KV groups"]
)
def small_pool(request: pytest.FixtureRequest) -> EngineOptions:
    return request.param


def roomy(model: RandomModel) -> EngineOptions:
    """An engine that never has to preempt here."""
    return EngineOptions(model=model, num_gpu_blocks=512)


def answer(engine: Engine, num_tokens: int = 16) -> Answer:
    [answer] = engine.generate([PROMPT], num_tokens)
    return answer


def test_a_prefix_hit_changes_nothing(engines: Engines, model: RandomModel) -> None:
    engine = engines.get(roomy(model))
    first, second = answer(engine), answer(engine)
    assert (first.num_local_cached_tokens, second.num_local_cached_tokens) == (0, 640)
    assert not differences({"it": first}, {"it": second}, tolerance=2e-5)


def test_every_block_of_kv_matters(engines: Engines, model: RandomModel) -> None:
    engine = engines.get(roomy(model))
    right = answer(engine)
    for group_idx in range(len(engine.inside.kv_groups)):
        for block_idx in range(NUM_BLOCKS):
            engine.clear()
            assert not differences({"it": right}, {"it": answer(engine)})
            block_id = engine.inside.cached_block_ids(PROMPT)[group_idx][block_idx]
            if block_id == NULL_BLOCK_ID:
                continue
            engine.inside.spoil_kv([block_id])
            spoiled = answer(engine)
            assert spoiled.num_local_cached_tokens == 640
            assert spoiled.token_ids != right.token_ids, f"block {block_idx} of group {group_idx}"


def test_the_kv_of_another_prompt_changes_the_tokens(engines: Engines, model: RandomModel) -> None:
    engine = engines.get(roomy(model))
    other = random_prompt(650, seed=2)
    right = answer(engine)
    engine.generate([other])
    inside = engine.inside
    groups = zip(inside.cached_block_ids(PROMPT), inside.cached_block_ids(other), strict=True)
    for group_idx, (mine, others) in enumerate(groups):
        inside.replace_kv(mine, inside.kv_of_blocks(others, group_idx))
    assert answer(engine).token_ids != right.token_ids


def test_exchanged_blocks_show_in_a_shorter_prefix_only(engines: Engines) -> None:
    """Keys carry their position: why reloads are checked with shorter prefixes too."""
    engine = engines.get(roomy(TINY))
    shorter = PROMPT[: 8 * 32 + 1]
    right = answer(engine)
    [right_shorter] = engine.generate([shorter], 16)
    inside = engine.inside
    [block_ids] = inside.cached_block_ids(PROMPT)
    pair = [block_ids[2], block_ids[12]]
    inside.replace_kv(pair[::-1], inside.kv_of_blocks(pair))
    assert not differences({"it": right}, {"it": answer(engine)})
    [wrong_shorter] = engine.generate([shorter], 16)
    assert wrong_shorter.num_local_cached_tokens == 8 * 32
    assert wrong_shorter.token_ids != right_shorter.token_ids


def test_kv_is_the_same_block_by_block_after_recomputing(
    engines: Engines, model: RandomModel
) -> None:
    engine = engines.get(roomy(model))
    answer(engine)
    first = engine.inside.kv_of_prompt(PROMPT)
    engine.clear()
    engine.generate([random_prompt(400, seed=3), PROMPT])
    second = engine.inside.kv_of_prompt(PROMPT)
    assert first.keys() == second.keys()
    for layer, blocks in first.items():
        assert (blocks - second[layer]).abs().max() < 1e-4


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_scenarios_do_not_depend_on_chunks_and_preemption(
    engines: Engines, references: References, small_pool: EngineOptions, scenario: Scenario
) -> None:
    expected = references.answers(scenario, small_pool)
    roomier = replace(small_pool, num_gpu_blocks=512, max_num_batched_tokens=1024)
    actual = scenario.drive(engines.get(roomier))
    assert not differences(expected, actual, tolerance=2e-5)
    if scenario.name == "preemption":
        assert any(each.num_preemptions for each in expected.values())
        assert not any(each.num_preemptions for each in actual.values())


def test_noise_is_far_below_the_tolerance(engines: Engines) -> None:
    """Spoiled KV moves log-probabilities 10,000 times further than chunks and hits do."""
    engine = engines.get(roomy(TINY))
    right = answer(engine)
    engine.inside.spoil_kv([engine.inside.cached_block_ids(PROMPT)[0][5]])
    assert logprob_noise(right, answer(engine)) > 0.2


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_processes_answer_like_one_process(
    engines: Engines, references: References, tensor_parallel_size: int
) -> None:
    options = replace(SMALL_POOL, multiprocess=True, tensor_parallel_size=tensor_parallel_size)
    scenarios = [scenario for scenario in SCENARIOS if not scenario.in_process]
    expected = {scenario: references.answers(scenario) for scenario in scenarios}
    for scenario in scenarios:
        actual = scenario.drive(engines.get(options))
        assert not differences(expected[scenario], actual)
