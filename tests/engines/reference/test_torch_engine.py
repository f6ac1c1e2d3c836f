"""The torch engine generates the same tokens however little room it has, and whoever gives way."""

import pytest

from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.engines.reference.torch_runner import torch_engine
from kvtiers.model.config import parse_mapping
from kvtiers.model.errors import ConfigError

from .small import prompt_of, small_shape

MODEL = ReferenceModel(small_shape())
BLOCK = 4
LENGTHS = (21, 9, 33, 14, 26, 21)
NUM_OUTPUTS = 14
POOLS = {"ample": 120, "tight": 24, "barely": 12}  # the longest request needs 12 blocks
SHARED = 8  # tokens with which all prompts begin


def config_of(mode="auto", offload="eager", dram="4MiB", **more):
    return parse_mapping(
        {
            "tiers": [{"kind": "dram", "capacity": dram, "pin": "off"}],
            "cost": {"mode": mode},
            "policy": {"offload": offload},
            **more,
        }
    )


def settings_of(num_blocks, **more):
    return EngineSettings(
        **{
            "num_blocks": num_blocks,
            "max_model_len": 48,
            "block_size": BLOCK,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 4,
            "watermark": 0.0,
            **more,
        }
    )


def prompts():
    head = prompt_of(SHARED, 99)
    return [head + prompt_of(n - SHARED, seed) for seed, n in enumerate(LENGTHS)]


def new_requests(**more):
    return [
        NewRequest(f"r{i}", 0.0, NUM_OUTPUTS, prompt, **more) for i, prompt in enumerate(prompts())
    ]


def serve(engine, requests):
    """Run requests to their end; returns tokens by id, and what was served."""
    for request in requests:
        engine.add(request)
    served = {}
    num_steps = 0
    while engine.num_unfinished:
        report = engine.step()
        served |= {it.request_id: it for it in report.finished}
        num_steps += 1
        assert num_steps < 20_000, engine.gauges
    engine.settle()
    assert engine.pool.num_free == engine.settings.num_blocks
    return {name: it.token_ids for name, it in served.items()}, served


@pytest.fixture(scope="module")
def expected():
    """Each request alone, in a pool of its own, without kvtiers."""
    tokens = {}
    for request in new_requests():
        engine = torch_engine(MODEL, settings_of(200, max_num_batched_tokens=64))
        tokens |= serve(engine, [request])[0]
        engine.close()
    return tokens


@pytest.mark.parametrize("pool", POOLS)
def test_tokens_without_kvtiers(pool, expected):
    engine = torch_engine(MODEL, settings_of(POOLS[pool]))
    tokens, _ = serve(engine, new_requests())
    assert tokens == expected
    assert (engine.gauges.num_preemptions > 0) == (pool != "ample")
    assert engine.gauges.num_swaps == 0


@pytest.mark.parametrize("offload", ["eager", "lazy"])
@pytest.mark.parametrize("mode", PreemptMode)
@pytest.mark.parametrize("pool", POOLS)
def test_tokens_under_preemption_with_kvtiers(pool, mode, offload, expected):
    settings = settings_of(POOLS[pool], preemption=mode)
    engine = torch_engine(MODEL, settings, config_of("always", offload))
    try:
        tokens, served = serve(engine, new_requests())
        gauges = engine.gauges
    finally:
        engine.close()
    assert tokens == expected
    if mode is PreemptMode.SWAP:
        assert gauges.num_swaps == gauges.num_preemptions
    if mode is PreemptMode.RECOMPUTE:
        assert gauges.num_swaps == 0
    if pool != "ample":
        assert gauges.num_preemptions > 0
    assert sum(it.num_swaps + it.num_recomputes for it in served.values()) == gauges.num_preemptions


@pytest.mark.parametrize("config", [None, config_of("always"), config_of("always", "lazy")])
@pytest.mark.parametrize("mode", PreemptMode)
@pytest.mark.parametrize("pool", POOLS)
def test_speculative_tokens_change_no_token(pool, mode, config, expected):
    settings = settings_of(POOLS[pool], num_speculative_tokens=3, preemption=mode)
    engine = torch_engine(MODEL, settings, config)
    try:
        assert serve(engine, new_requests())[0] == expected
    finally:
        engine.close()


def test_right_guesses_save_steps():
    """A prompt after which the model repeats itself: what came before is what follows."""
    steps = {}
    for num in (0, 3):
        engine = torch_engine(MODEL, settings_of(40, num_speculative_tokens=num, max_model_len=140))
        engine.add(NewRequest("r", 0.0, 100, prompt_of(20)))
        steps[num] = 0
        tokens = []
        while engine.num_unfinished:
            tokens += engine.step().finished
            steps[num] += 1
        steps[num, "tokens"] = tokens[0].token_ids
    assert steps[0, "tokens"] == steps[3, "tokens"]
    assert steps[3] < steps[0]


def test_a_second_prompt_with_the_same_head_finds_it_in_hbm():
    engine = torch_engine(MODEL, settings_of(60))
    first, second = prompts()[0], prompts()[2]
    serve(engine, [NewRequest("a", 0.0, 2, first)])
    _, served = serve(engine, [NewRequest("b", 0.0, 2, second)])
    assert served["b"].num_local_tokens == SHARED
    assert served["b"].num_computed_tokens == len(second) - SHARED + 1


def test_kvtiers_brings_back_what_hbm_has_forgotten(expected):
    engine = torch_engine(MODEL, settings_of(12), config_of("always"))
    try:
        serve(engine, new_requests())
        again = [NewRequest(f"again{i}", 0.0, NUM_OUTPUTS, p) for i, p in enumerate(prompts())]
        tokens, served = serve(engine, again)
        reloaded = sum(it.num_reloaded_tokens for it in served.values())
    finally:
        engine.close()
    assert list(tokens.values()) == list(expected.values())
    assert reloaded > sum(LENGTHS) // 2


@pytest.mark.parametrize("num_guesses", [0, 2])
@pytest.mark.parametrize("mode", PreemptMode)
@pytest.mark.parametrize("num_blocks", [120, 20])
def test_a_group_begins_with_the_likeliest_tokens_and_survives_swaps(num_blocks, mode, num_guesses):
    """Each of its sequences is what the model says after prompt and first token."""
    knobs = {"preemption": mode, "num_speculative_tokens": num_guesses}
    settings = settings_of(num_blocks, max_num_seqs=8, max_num_batched_tokens=24, **knobs)
    engine = torch_engine(MODEL, settings, config_of("always"))
    requests = [
        NewRequest(f"g{i}", 0.0, 9, prompt, num_sequences=3)
        for i, prompt in enumerate(prompts()[:4])
    ]
    try:
        tokens, served = serve(engine, requests)
        gauges = engine.gauges
    finally:
        engine.close()
    assert gauges.num_swaps == gauges.num_preemptions
    assert (gauges.num_swaps > 0) == (num_blocks == 20)
    for request in requests:
        group = tokens[request.request_id]
        assert len({sequence[0] for sequence in group}) == 3
        for sequence in group:
            alone = torch_engine(MODEL, settings_of(120))
            prompt = [*request.prompt_token_ids, sequence[0]]
            rest, _ = serve(alone, [NewRequest("x", 0.0, 8, prompt)])
            assert rest["x"] == [sequence[1:]]
    assert all(it.num_output_tokens == 27 for it in served.values())


def test_a_group_needs_kvtiers():
    engine = torch_engine(MODEL, settings_of(40))
    with pytest.raises(ConfigError, match="can only be swapped, which needs kvtiers"):
        engine.add(NewRequest("g", 0.0, 2, prompt_of(5), num_sequences=2))


def test_a_stop_token_ends_a_request(expected):
    stop = expected["r2"][0][4]
    engine = torch_engine(MODEL, settings_of(40))
    request = NewRequest("r2", 0.0, NUM_OUTPUTS, prompts()[2], stop_token_ids=frozenset({stop}))
    tokens, served = serve(engine, [request])
    assert tokens["r2"][0] == expected["r2"][0][: expected["r2"][0].index(stop) + 1]
    assert served["r2"].reason == "stop"


def test_a_reset_serves_nothing_from_before(expected):
    engine = torch_engine(MODEL, settings_of(60), config_of("always"))
    try:
        for request in new_requests():
            engine.add(request)
        for _ in range(6):
            engine.step()
        assert engine.reset()
        assert engine.pool.num_cached == 0
        tokens, _ = serve(engine, [])
        assert tokens == {name: expected[name] for name in tokens}
        assert len(tokens) == len(LENGTHS)
        _, served = serve(engine, [NewRequest("new", 0.0, 1, prompt_of(30, 1234))])
        assert served["new"].num_local_tokens == served["new"].num_reloaded_tokens == 0
    finally:
        engine.close()
