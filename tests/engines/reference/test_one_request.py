"""A prompt that is offloaded, forgotten and reloaded gives the tokens of a computed one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.one_request import OneRequestEngine, OneRequestSettings
from kvtiers.model.config import parse_mapping
from kvtiers.model.errors import CapacityError, ConfigError
from kvtiers.testing.faults import WrapperStore

from .small import plain_logits, prompt_of, small_shape

MODEL = ReferenceModel(small_shape())
SETTINGS = OneRequestSettings(num_blocks=40, block_size=4, max_tokens_per_step=16)
NUM_TOKENS = 9


def config_of(*stores, dram="4MiB", mode="always", **more):
    tiers = [{"kind": "dram", "capacity": dram, "pin": "off"}, *stores]
    return parse_mapping({"tiers": tiers, "cost": {"mode": mode}, **more})


def nvme(folder):
    return {"kind": "nvme", "paths": [str(folder / "nvme")], "capacity": "4MiB"}


def lmdb(folder):
    return {"kind": "lmdb", "path": str(folder / "shared.lmdb"), "capacity": "16MiB"}


def greedy(prompt, num_tokens=NUM_TOKENS):
    """What the model says without KV, blocks or kvtiers."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(plain_logits(MODEL, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture
def running():
    """Make engines that are closed at the end."""
    engines = []

    def make(config=None, settings=SETTINGS, **more):
        engines.append(OneRequestEngine(MODEL, settings, config, **more))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def live(running, config, prompt):
    """Compute a prompt, and leave what it takes in the stores."""
    first = running(config)
    first.generate(prompt)
    first.settle()
    first.close()


def test_without_kvtiers_it_generates_what_plain_attention_says(running):
    prompt = prompt_of(37)
    result = running().generate(prompt, NUM_TOKENS)
    assert result.token_ids == greedy(prompt)
    assert [step.num_tokens for step in result.steps] == [16, 16, 5] + [1] * (NUM_TOKENS - 1)
    assert [step.num_context_tokens for step in result.steps[:3]] == [0, 16, 32]


@pytest.mark.parametrize("num_ranges", [1, 3])
@pytest.mark.parametrize("sync_below", ["0ms", "1s"])
def test_a_reload_from_dram_gives_the_same_tokens(running, num_ranges, sync_below):
    engine = running(config_of(reload={"sync_below": sync_below, "layer_ranges": num_ranges}))
    prompt = prompt_of(37)
    first = engine.generate(prompt, NUM_TOKENS)
    engine.settle()
    spoil(engine)
    again = engine.generate(prompt, NUM_TOKENS)
    assert first.num_reloaded_tokens == 0
    assert again.num_reloaded_tokens == 36
    assert first.token_ids == again.token_ids == greedy(prompt)
    assert again.decision.num_hit_blocks == {"dram": 9}


def test_what_was_generated_is_reloaded_too(running):
    engine = running(config_of())
    prompt = prompt_of(30)
    first = engine.generate(prompt, 20)
    engine.settle()
    spoil(engine)
    longer = prompt + first.token_ids
    again = engine.generate(longer, 5)
    assert again.num_reloaded_tokens == 48
    assert again.token_ids == greedy(longer, 5)


def test_every_decision_is_closed_with_its_first_token(running):
    engine = running(config_of())
    for _ in range(2):
        engine.generate(prompt_of(37), 2)
        engine.settle()
    finished = engine.scheduler.decisions.finished()
    assert [d.outcome.ttft_seconds is not None for d in finished] == [True] * len(finished)
    assert finished
    assert finished[-1].outcome.ttft_seconds > 0


@pytest.mark.parametrize("tier", [nvme, lmdb])
def test_another_life_reloads_from_disk(running, tmp_path, tier):
    prompt = prompt_of(61)
    config = config_of(tier(tmp_path), reload={"lookup_deadline": "30s"})
    live(running, config, prompt)
    again = running(config).generate(prompt, NUM_TOKENS)
    assert again.num_reloaded_tokens == 60
    assert set(again.decision.num_hit_blocks) == {config.stores[0].name}
    assert again.token_ids == greedy(prompt)


def test_other_weights_find_nothing(running, tmp_path):
    prompt = prompt_of(61)
    config = config_of(nvme(tmp_path))
    live(running, config, prompt)
    other = OneRequestEngine(ReferenceModel(small_shape(seed=1)), SETTINGS, config)
    result = other.generate(prompt)
    other.close()
    assert result.num_reloaded_tokens == 0


class Spoiling(WrapperStore):
    """Loses the frame of one block before it is asked for."""

    def get(self, frames):
        self.inner.delete([frames[len(frames) // 2].key])
        return self.inner.get(frames)


def test_blocks_that_do_not_come_are_computed(running, tmp_path):
    prompt = prompt_of(61)
    config = config_of(nvme(tmp_path))
    live(running, config, prompt)
    result = running(config, wrap_store=lambda _, store: Spoiling(store)).generate(prompt, 3)
    assert result.num_failed_blocks > 0
    assert 0 < result.num_reloaded_tokens < 60
    assert result.token_ids == greedy(prompt, 3)


def test_mode_never_computes_and_says_so(running):
    engine = running(config_of(mode="never"))
    prompt = prompt_of(37)
    engine.generate(prompt)
    engine.settle()
    again = engine.generate(prompt, 3)
    assert again.num_reloaded_tokens == 0
    assert again.decision.reason == "never"
    assert again.token_ids == greedy(prompt, 3)


def test_blocks_return_and_what_does_not_fit_is_refused(running):
    engine = running(config_of())
    for seed in range(6):  # more than the KV holds at once
        engine.generate(prompt_of(100, seed))
    with pytest.raises(CapacityError, match="need 41 blocks, the KV has 40"):
        engine.generate(prompt_of(161))
    with pytest.raises(ConfigError, match="each must be at least 1"):
        engine.generate([])


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=5),
    budget=st.integers(1, 40),
    block_size=st.integers(1, 8),
)
def test_prompts_that_share_a_prefix_get_the_tokens_of_computed_ones(lengths, budget, block_size):
    document = prompt_of(60)
    engine = OneRequestEngine(MODEL, OneRequestSettings(70, block_size, budget), config_of())
    try:
        for length in lengths:
            assert engine.generate(document[:length], 2).token_ids == greedy(document[:length], 2)
            spoil(engine)
    finally:
        engine.close()


def spoil(engine):
    """Overwrite the engine's KV: what is served again came from below. Offloads end first."""
    engine.settle()
    for layer in engine.kv.layers:
        layer.copy_(torch.full_like(layer, 1e3))
