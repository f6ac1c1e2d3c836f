"""A store that says late what it holds: who has much at stake waits, and an engine serves on."""

import time

import pytest

from kvtiers.connector import lasting
from kvtiers.engines.reference.model import ReferenceModel
from kvtiers.engines.reference.one_request import OneRequestEngine, OneRequestSettings
from kvtiers.engines.reference.requests import NewRequest
from kvtiers.engines.reference.settings import EngineSettings
from kvtiers.engines.reference.torch_runner import torch_engine
from kvtiers.model.config import parse_mapping
from kvtiers.testing.late_index import HANGS, LateInventory

from .small import prompt_of, small_shape

MODEL = ReferenceModel(small_shape())
SETTINGS = OneRequestSettings(num_blocks=80, block_size=4, max_tokens_per_step=16)
LONG, SHORT = 61, 9
STEP_SECONDS = 2.0  # that the model is told a step of it takes: the long prompt 8 s, its tenth 0.8


def config_of(*folders):
    stores = [
        {"kind": "nvme", "name": folder.name, "paths": [str(folder)], "capacity": "4MiB"}
        for folder in folders
    ]
    tiers = [{"kind": "dram", "capacity": "4MiB", "pin": "off"}, *stores]
    return parse_mapping(
        {"tiers": tiers, "cost": {"mode": "always"}, "reload": {"prefetch": "off"}}
    )


@pytest.fixture
def late(monkeypatch):
    """Make the inventories of the next life late, in the order of its stores."""
    made, seconds = [], []

    def make(of_ranks):
        made.append(LateInventory(of_ranks, seconds.pop(0) if seconds else 0.0))
        return made[-1]

    monkeypatch.setattr(lasting, "Inventory", make)

    def set_seconds(*values):
        seconds.extend(values)
        return made

    yield set_seconds
    for inventory in made:
        inventory.release()


@pytest.fixture
def second_life(late):
    """Compute prompts, and return another life that finds each on its disk."""
    engines = []

    def make(contents, *seconds):
        for folder, prompts in contents.items():
            first = OneRequestEngine(MODEL, SETTINGS, config_of(folder))
            for prompt in prompts:
                first.generate(prompt)
            first.settle()
            first.close()
        late(*seconds)
        engines.append(OneRequestEngine(MODEL, SETTINGS, config_of(*contents)))
        for _ in range(30):
            engines[-1].scheduler.step_took([16], [0], STEP_SECONDS)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def timed(engine, prompt):
    """Return the tokens reloaded, and the seconds until a first token."""
    result = engine.generate(prompt)
    return result.num_reloaded_tokens, result.ttft_seconds


def test_a_long_prompt_reloads_what_was_named_after_300_milliseconds(second_life, tmp_path):
    engine = second_life({tmp_path / "nvme": [prompt_of(LONG)]}, 0.3)
    num_reloaded, seconds = timed(engine, prompt_of(LONG))
    assert num_reloaded == 60
    assert seconds >= 0.3


def test_a_short_prompt_does_not_wait_for_it(second_life, tmp_path):
    engine = second_life({tmp_path / "nvme": [prompt_of(SHORT)]}, HANGS)
    num_reloaded, seconds = timed(engine, prompt_of(SHORT))
    assert num_reloaded == 0
    assert seconds >= 0.05


@pytest.mark.alone
def test_of_a_store_that_hangs_one_request_waits_its_share_and_the_next_does_not(
    second_life, late, tmp_path
):
    first, second, third = (prompt_of(LONG, seed) for seed in range(3))
    engine = second_life({tmp_path / "nvme": [first, second, third]}, HANGS)
    num_reloaded, seconds = timed(engine, first)
    assert num_reloaded == 0
    assert 0.3 < seconds < 1.2
    num_reloaded, seconds = timed(engine, second)
    assert num_reloaded == 0
    assert seconds < 0.3
    for inventory in late():
        inventory.release()
    time.sleep(0.2)
    engine.generate(prompt_of(SHORT, seed=3))  # the engine hears of it
    assert timed(engine, third)[0] == 60


def test_a_store_that_hangs_holds_up_no_other_stores_answers(second_life, tmp_path):
    here, there = prompt_of(LONG), prompt_of(LONG, seed=1)
    engine = second_life({tmp_path / "hangs": [there], tmp_path / "answers": [here]}, HANGS, 0.0)
    assert timed(engine, here)[0] == 60


def test_others_are_served_while_one_waits(second_life, late, tmp_path):
    folder = tmp_path / "nvme"
    second_life({folder: [prompt_of(LONG)]}).close()
    late(HANGS)
    settings = EngineSettings(
        80, max_model_len=64, block_size=4, max_num_seqs=6, max_num_batched_tokens=16
    )
    engine = torch_engine(MODEL, settings, config_of(folder))
    for _ in range(30):
        engine.runner.connector.step_took([16], [0], 20 * STEP_SECONDS)
    engine.add(NewRequest("long", 0.0, 1, prompt_of(LONG)))
    engine.add(NewRequest("other", 0.0, 3, prompt_of(SHORT, seed=1)))
    done = {}
    while engine.num_unfinished:
        for served in engine.step(engine.now + 0.01).finished:
            done[served.request_id] = served
        if "other" in done:
            for inventory in late():
                inventory.release()
    engine.close()
    assert list(done) == ["other", "long"]
    assert done["long"].num_reloaded_tokens == 60
