"""Loads that come range of layers by range of layers, within the step that computes the rest."""

import pytest
import torch

from kvtiers.cost.prefill import PrefillModel, PrefillSpeed
from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.one_request import OneRequestEngine, OneRequestSettings
from kvtiers.model.config import parse_mapping
from kvtiers.model.errors import ConfigError
from kvtiers.model.messages import Link
from kvtiers.model.outcome import Outcome
from kvtiers.testing.faults import FaultyStore, Flip, ThrottledStore, WrapperStore

from .small import plain_logits, prompt_of, small_shape

MODEL = ReferenceModel(small_shape(num_layers=4))
SETTINGS = OneRequestSettings(num_blocks=40, block_size=4, max_tokens_per_step=64)
PROMPT = prompt_of(61)
NUM_BLOCKS = 9  # loaded of 15: about what the step then computes
RANGES = pytest.mark.parametrize("num_ranges", [1, 2, 4])


def greedy(prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(plain_logits(MODEL, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def tier(kind, folder):
    places = {"nvme": {"paths": [f"{folder}/nvme"]}, "lmdb": {"path": f"{folder}/s.lmdb"}}
    return {"kind": kind, "capacity": "16MiB", **places.get(kind, {})}


def config_of(num_ranges, *stores, dram="4MiB", **reload):
    return parse_mapping(
        {
            "tiers": [{"kind": "dram", "capacity": dram, "pin": "off"}, *stores],
            "cost": {"mode": "always"},
            "reload": {
                "layer_ranges": num_ranges,
                "sync_below": "0ms",
                "lookup_deadline": "30s",
                **reload,
            },
        }
    )


@pytest.fixture
def running():
    runners = []

    def make(config, **more):
        runners.append(OneRequestEngine(MODEL, SETTINGS, config, **more))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def forget(runner, *, dram=False):
    """Overwrite the engine's KV, and let DRAM forget all."""
    runner.settle()
    for layer in runner.kv.layers:
        layer.copy_(torch.full_like(layer, 1e3))
    if dram:
        tier = runner.scheduler.controller.dram
        for entry in list(tier.entries()):
            tier.doom(entry)


def again(runner, max_blocks=NUM_BLOCKS):
    """Run the prompt as if computing took a second: what overlaps is not left to the clock."""
    cost = runner.scheduler.controller.cost
    cost.prefill = PrefillModel.of(PrefillSpeed(1.0, 1e12), cost.prefill.shape, 64)
    return runner.generate(PROMPT, 3, max_reloaded_blocks=max_blocks)


@RANGES
@pytest.mark.parametrize("kind", ["dram", "memory", "nvme", "lmdb"])
def test_every_tier_gives_the_same_tokens(running, tmp_path, num_ranges, kind):
    below = [] if kind == "dram" else [tier(kind, tmp_path)]
    runner = running(config_of(num_ranges, *below, prefetch="off"))
    runner.generate(PROMPT, 3)
    forget(runner, dram=kind != "dram")
    result = again(runner)
    assert result.token_ids == greedy(PROMPT, 3)
    assert result.num_reloaded_tokens == NUM_BLOCKS * 4
    assert result.decision.num_hit_blocks == {kind: NUM_BLOCKS}
    assert result.decision.in_step == (num_ranges > 1)
    runner.settle()
    name = result.decision.request_id
    (outcome,) = (d.outcome for d in runner.scheduler.decisions.finished() if d.request_id == name)
    assert (outcome.num_loaded_blocks, outcome.num_failed_blocks) == (NUM_BLOCKS, 0)
    assert (result.load_seconds == 0) == (num_ranges > 1)


def test_another_life_with_other_ranges_finds_nothing(running, tmp_path):
    first = running(config_of(2, tier("nvme", tmp_path)))
    first.generate(PROMPT)
    first.settle()
    first.close()
    other = running(config_of(4, tier("nvme", tmp_path)))
    assert other.generate(PROMPT).num_reloaded_tokens == 0
    other.close()
    found = running(config_of(2, tier("nvme", tmp_path))).generate(PROMPT, 3)
    assert found.num_reloaded_tokens == 60
    assert found.token_ids == greedy(PROMPT, 3)


def test_a_load_that_takes_much_longer_than_the_rest_runs_before_the_step(running):
    runner = running(config_of(4, tier("memory", None), prefetch="off"))
    runner.generate(PROMPT, 3)
    forget(runner, dram=True)
    # Of the whole prompt one token is left to compute.
    links = runner.scheduler.controller.cost.links
    for _ in range(8):
        links.observe(Link("memory>dram", 4, 4 * 8192, 9.0))
    result = again(runner, None)
    assert not result.decision.in_step
    assert result.num_reloaded_tokens == 60
    assert result.token_ids == greedy(PROMPT, 3)


class Losing(WrapperStore):
    """Loses a frame before it is asked for."""

    def get(self, frames):
        self.inner.delete([frames[-1].key])
        return self.inner.get(frames)


FAULTS = {
    "flipped": Flip(offset=4096 + 7),
    "failed": Outcome.FAILED,
    "raised": OSError("gone"),
    "lost": None,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("num_ranges", [2, 4])
def test_what_does_not_come_in_mid_forward_is_computed(running, tmp_path, num_ranges, fault):
    config = config_of(num_ranges, tier("nvme", tmp_path), prefetch="off")
    first = running(config)
    first.generate(PROMPT)
    first.settle()
    first.close()
    made = []

    def wrap(_, store):
        made.append(FaultyStore(store, None) if FAULTS[fault] else Losing(store))
        return made[-1]

    runner = running(config, wrap_store=wrap)
    if FAULTS[fault]:
        made[0]._slab = runner.worker._executor._executor._shop.slab
        made[0].fail("get", FAULTS[fault])
    result = again(runner)
    assert result.decision.in_step
    assert result.num_failed_blocks > 0
    assert result.token_ids == greedy(PROMPT, 3)
    forget(runner)
    assert again(runner).token_ids == greedy(PROMPT, 3)


@pytest.mark.parametrize("num_ranges", [2, 4])
def test_a_store_that_stalls_costs_a_step_its_deadline_and_no_token(running, num_ranges):
    made = []

    def wrap(_, store):
        made.append(ThrottledStore(store, 1e12))
        return made[-1]

    config = config_of(num_ranges, tier("memory", None), prefetch="off", deadline="300ms")
    runner = running(config, wrap_store=wrap)
    first = runner.generate(PROMPT, 8)
    forget(runner, dram=True)
    made[0].bytes_per_second = 1.0
    result = again(runner)
    assert result.decision.in_step
    assert result.num_failed_blocks == NUM_BLOCKS
    assert 0.25 < result.ttft_seconds < 0.3 + 20 * first.ttft_seconds + 2.0
    assert result.token_ids == first.token_ids[:3] == greedy(PROMPT, 3)
    # What it has computed for itself is in DRAM: nobody needs what the store brings late.
    later = again(runner)
    assert later.decision.num_hit_blocks == {"dram": NUM_BLOCKS}
    assert (later.num_reloaded_tokens, later.num_failed_blocks) == (4 * NUM_BLOCKS, 0)
    assert later.token_ids == first.token_ids[:3]


def test_more_ranges_than_layers_are_refused():
    with pytest.raises(ConfigError, match="5 ranges of 4 layers; write 4 at most"):
        OneRequestEngine(MODEL, SETTINGS, config_of(5))
