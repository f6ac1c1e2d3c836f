"""Promises of `kvtiers.cost.known_models`: names give what was published under them."""

from __future__ import annotations

import pytest

from kvtiers.cost.known_models import KNOWN_MODELS, known_model
from kvtiers.model.errors import ConfigError

each_model = pytest.mark.parametrize("name", sorted(KNOWN_MODELS))


@each_model
def test_weights_are_as_many_as_published(name):
    """An independent check of every field: a wrong one changes the number of weights."""
    model = KNOWN_MODELS[name]
    assert model.shape.num_params == pytest.approx(model.num_params, rel=0.002)


@each_model
def test_every_configuration_names_its_sources(name):
    model = KNOWN_MODELS[name]
    assert "config.json of" in model.source
    assert model.params_source


@pytest.mark.parametrize(
    ("name", "kv_nbytes"),
    [  # bf16: 2 x layers x KV heads x head size x 2 bytes; latent: layers x latent width x 2
        ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2),
        ("llama-3.1-70b", 2 * 80 * 8 * 128 * 2),
        ("llama-3.1-405b", 2 * 126 * 8 * 128 * 2),
        ("qwen2.5-7b", 2 * 28 * 4 * 128 * 2),
        ("qwen2.5-72b", 2 * 80 * 8 * 128 * 2),
        ("qwen3-8b", 2 * 36 * 8 * 128 * 2),
        ("qwen3-30b-a3b", 2 * 48 * 4 * 128 * 2),
        ("mistral-7b", 2 * 32 * 8 * 128 * 2),
        ("mixtral-8x7b", 2 * 32 * 8 * 128 * 2),
        ("gemma-2-9b", 2 * 42 * 8 * 256 * 2),
        ("gemma-3-27b", 2 * 62 * 16 * 128 * 2),
        ("phi-3-mini", 2 * 32 * 32 * 96 * 2),
        ("phi-3-mini-128k", 2 * 32 * 32 * 96 * 2),
        ("llama-2-7b", 2 * 32 * 32 * 128 * 2),
        ("deepseek-v2-lite", 27 * 576 * 2),
        ("deepseek-v3", 61 * 576 * 2),
        ("gpt-oss-120b", 2 * 36 * 8 * 64 * 2),
    ],
)
def test_kv_bytes_per_token_are_exact(name, kv_nbytes):
    assert KNOWN_MODELS[name].shape.kv_nbytes_per_token() == kv_nbytes


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B"]
)
def test_the_same_model_has_many_names(name):
    assert known_model(name) is KNOWN_MODELS["llama-3.1-8b"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"'llama3-8b' is known; did you mean 'llama-3.1-8b'\?"
    ) as e:
        known_model("llama3-8b")
    assert all(name in str(e.value) for name in KNOWN_MODELS)
    with pytest.raises(ConfigError, match=r"'xyz' is known\. Known: deepseek-v2-lite"):
        known_model("xyz")
