"""The reference model computes what plain attention does, however its KV is cut and laid."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.cost.shapes import model_shape
from kvtiers.engines.reference.model import TILE, Chunk, ReferenceModel
from kvtiers.engines.reference.paged_kv import PagedKV
from kvtiers.engines.reference.shape import ReferenceShape
from kvtiers.model.errors import ConfigError

from .small import TOLERANCE, plain_logits, prompt_of, small_shape

WINDOWS = (None, 5)
MODELS = {window: ReferenceModel(small_shape(window)) for window in WINDOWS}


def chunked(model, tokens, cuts, block_ids, block_size):
    """Return each chunk's logits, computed one after another."""
    kv = PagedKV(model.shape, max(block_ids) + 1, block_size)
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]
    return [
        (end - 1, model.forward([Chunk(tokens[start:end], start, block_ids)], kv)[0])
        for start, end in itertools.pairwise(bounds)
    ]


@settings(deadline=None, max_examples=60)
@given(
    window=st.sampled_from(WINDOWS),
    num_tokens=st.integers(1, 60),
    cuts=st.lists(st.integers(1, 59), max_size=6),
    block_size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_chunking_and_block_order_gives_the_logits_of_plain_attention(
    window, num_tokens, cuts, block_size, seed
):
    model, tokens = MODELS[window], prompt_of(num_tokens, seed)
    block_ids = list(range(-(-num_tokens // block_size) + 3))
    random.Random(seed).shuffle(block_ids)
    expected = plain_logits(model, tokens)
    for position, logits in chunked(model, tokens, cuts, block_ids, block_size):
        torch.testing.assert_close(logits, expected[position], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 5, 300])
def test_prompts_longer_than_a_tile(window):
    model = ReferenceModel(small_shape(window))
    tokens = prompt_of(2 * TILE + 37)
    (last,) = chunked(model, tokens, [], list(range(70)), 8)
    expected = plain_logits(model, tokens)[-1]
    torch.testing.assert_close(last[1], expected, rtol=0, atol=TOLERANCE)


def test_a_step_of_several_sequences_equals_each_alone():
    model = MODELS[None]
    kv = PagedKV(model.shape, 20, 4)
    first, second = prompt_of(11, 1), prompt_of(6, 2)
    model.forward([Chunk(first[:7], 0, [3, 9, 4])], kv)
    both = model.forward([Chunk(first[7:], 7, [3, 9, 4]), Chunk(second, 0, [8, 2])], kv)
    expected = torch.stack([plain_logits(model, t)[-1] for t in (first, second)])
    torch.testing.assert_close(both, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layer", range(3))
def test_the_output_depends_on_the_kv_of_every_layer(layer):
    model, tokens = MODELS[None], prompt_of(32)
    kv = PagedKV(model.shape, 9, 4)
    model.forward([Chunk(tokens[:31], 0, range(9))], kv)
    right = model.forward([Chunk(tokens[31:], 31, range(9))], kv)
    kv.layers[layer][2].zero_()  # four tokens of thirty-one
    wrong = model.forward([Chunk(tokens[31:], 31, range(9))], kv)
    assert (right - wrong).abs().max() > 100 * TOLERANCE


def test_the_hook_comes_before_each_layer_in_order():
    model = MODELS[None]
    kv = PagedKV(model.shape, 4, 4)
    seen = []

    def before_layer(idx):
        seen.append((idx, bool(kv.layers[idx].any())))

    model.forward([Chunk(prompt_of(5), 0, range(2))], kv, before_layer)
    assert seen == [(0, False), (1, False), (2, False)]  # nothing of it was written before


def test_equal_seeds_give_equal_weights():
    one, two = (ReferenceModel(small_shape(), "cpu") for _ in range(2))
    assert torch.equal(one.head, two.head)
    other = ReferenceModel(small_shape(seed=1))
    assert not torch.equal(one.head, other.head)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_compute_too(dtype):
    model = ReferenceModel(small_shape(dtype=dtype))
    (last,) = chunked(model, prompt_of(20), [], [4, 2, 0, 1, 3], 4)
    assert torch.isfinite(last[1]).all()


def test_an_empty_chunk_is_refused():
    model = MODELS[None]
    with pytest.raises(ValueError, match="no tokens"):
        model.forward([Chunk([], 4, [0])], PagedKV(model.shape, 1, 4))


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_the_layout_covers_every_byte_of_a_block(num_groups):
    kv = PagedKV(small_shape(), 7, 4)
    layout = kv.layout(num_groups)
    assert [group.group for group in layout.groups] == list(range(num_groups))
    assert sum(group.payload_nbytes for group in layout.groups) == 3 * 2 * 2 * 4 * 8 * 4
    pages = [page.layer for group in layout.groups for page in group.pages]
    assert pages == ["layer0", "layer1", "layer2"]
    with pytest.raises(ValueError, match="3 layers do not make 4 ranges"):
        kv.layout(4)


def test_a_shape_survives_its_configuration():
    for window in WINDOWS:
        shape = small_shape(window)
        assert ReferenceShape.from_hf_config(shape.to_hf_config()) == shape


def test_the_shape_counts_what_the_cost_model_counts():
    shape = small_shape()
    cost = model_shape(shape.to_hf_config())
    assert cost.num_params == shape.num_params
    assert cost.kv_nbytes_per_token(shape.itemsize) == shape.kv_nbytes_per_token


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"num_hidden_layers": "3"}, "'num_hidden_layers' is '3'"),
        ({"num_key_value_heads": 3}, "no multiple of"),
        ({"dtype": "int4"}, "dtype 'int4' is none of float32"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"n_routed_experts": 64}, "mixture of experts"),
        ({"head_dim": 7}, "need an even number"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "for 3 layers"),
    ],
)
def test_a_configuration_that_is_wrong_or_of_another_kind_is_refused(change, message):
    config = {**small_shape().to_hf_config(), **change}
    with pytest.raises(ConfigError, match=message):
        ReferenceShape.from_hf_config(config)
