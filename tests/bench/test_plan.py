"""What is measured: models cut down, bounds kept, bad input named."""

import json

import pytest

from kvtiers.bench.plan import SMALL, MeasuredPlan, load_reference_shape
from kvtiers.engines.reference.shape import ReferenceShape
from kvtiers.model.errors import ConfigError

SHAPE = ReferenceShape(2, 32, 4, 2, 8, 48, 64)


def test_a_known_model_is_cut_down_and_keeps_its_proportions():
    whole = load_reference_shape("llama-3.1-8b")
    assert (whole.num_layers, whole.hidden_size, whole.head_size) == (32, 4096, 128)
    small = load_reference_shape("llama-3.1-8b", num_layers=2, hidden_size=1024)
    assert (small.num_layers, small.hidden_size, small.head_size) == (2, 1024, 128)
    assert (small.num_heads, small.num_kv_heads) == (8, 2)
    assert small.intermediate_size == 3584
    assert small.vocab_size == 8192


def test_windows_survive_fewer_layers():
    pattern = ["sliding_attention", "full_attention"] * 3
    config = {**load_reference_shape(SMALL).to_hf_config(), "num_hidden_layers": 6}
    config |= {"sliding_window": 64, "layer_types": pattern}
    assert ReferenceShape.from_hf_config({**config, "num_hidden_layers": 3}).windows == (
        64,
        None,
        64,
    )


def test_a_file_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE.to_hf_config()))
    assert load_reference_shape(str(tmp_path)) == SHAPE
    assert load_reference_shape(str(tmp_path / "config.json"), dtype="bfloat16").itemsize == 2


@pytest.mark.parametrize(
    ("model", "cut", "message"),
    [
        ("llama-9", {}, "Known: "),
        ("missing/config.json", {}, "no such file"),
        ("deepseek-v3", {}, "latent attention"),
        ("llama-3.1-8b", {"hidden_size": 64}, "must be from 128, one head, to 4096"),
        ("llama-3.1-8b", {"hidden_size": 8192}, "must be from 128, one head, to 4096"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused(model, cut, message):
    with pytest.raises(ConfigError, match=message):
        load_reference_shape(model, **cut)


@pytest.mark.parametrize("text", ["[1]", "{", '{"text_config": 3}'])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_reference_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": (64, 128)}, "at least three"),
        ({"lengths": (128, 64, 256)}, "ascending"),
        ({"lengths": (32, 64, 128)}, "not more than a block"),
        ({"num_repeats": 0}, "at least one repeat"),
        (
            {"tiers": ("dram", "tape")},
            "'dram', 'tape': dram is always measured, below it any of nvme",
        ),
        ({"tiers": ("nvme",)}, "dram is always measured"),
        ({"throttle": 0.0}, "must be > 0"),
        ({"device": "tpu"}, "no device 'tpu'"),
        ({"num_stages": 3}, "must be 1 to the 2 layers"),
        ({"max_disk_nbytes": 1000}, "are allowed; give shorter lengths"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change, message):
    given = {"lengths": (64, 128, 256), "num_stages": 2, **change}
    with pytest.raises(ConfigError, match=message):
        MeasuredPlan("tiny", SHAPE, **given)


def test_a_model_beyond_the_memory_is_refused():
    shape = ReferenceShape(96, 65536, 64, 64, 1024, 262144, 256000)
    with pytest.raises(ConfigError, match="cut it down with fewer layers"):
        MeasuredPlan("huge", shape, max_disk_nbytes=2**62)


def test_every_second_length_judges():
    plan = MeasuredPlan("tiny", SHAPE, lengths=(64, 128, 256, 512, 1024), num_stages=2)
    assert plan.fitted_lengths == (64, 256, 1024)
    assert MeasuredPlan("tiny", SHAPE, num_stages=1, tiers=("dram",)).disk_nbytes == 0
