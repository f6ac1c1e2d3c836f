"""The arithmetic of the KV pool gives the published examples, and refuses what cannot load."""

import pytest

from kvtiers.cost.capacity import KVPool, Limit, kv_pool
from kvtiers.cost.catalogue import HARDWARE
from kvtiers.cost.links import LinkModel, LinkSeed
from kvtiers.cost.shapes import model_shape
from kvtiers.model.errors import CapacityError

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LLAMA_70B = {
    **LLAMA_8B,
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
SMALL, LARGE = model_shape(LLAMA_8B), model_shape(LLAMA_70B)


def test_kv_bytes_per_token():
    assert SMALL.kv_nbytes_per_token() == 131_072
    assert LARGE.kv_nbytes_per_token() == 327_680


def test_the_published_example_of_sustainable_concurrency():
    pool = KVPool(int(120e9), 300_000)
    assert pool.num_tokens == 400_000
    found = pool.concurrency(4000, max_num_seqs=256)
    assert found.num_kv == found.num_sequences == 100
    assert found.limit is Limit.KV
    assert found.overcommitted


def test_a_knob_above_what_the_pool_holds_means_thrashing():
    pool = KVPool(60 * 4000 * 300_000, 300_000)
    assert pool.concurrency(4000, 256).overcommitted
    within = pool.concurrency(4000, 50)
    assert (within.num_sequences, within.limit) == (50, Limit.MAX_NUM_SEQS)
    assert not within.overcommitted


def test_the_pool_is_what_weights_and_runtime_leave():
    pool = kv_pool(SMALL, 80e9, runtime_nbytes=4e9)
    assert pool.nbytes == int(72e9 - 2 * SMALL.num_params - 4e9)
    assert pool.num_blocks == pool.nbytes // (16 * 131_072)


def test_an_fp8_cache_doubles_the_pool():
    wide, narrow = (kv_pool(SMALL, 80e9, kv_element_nbytes=size) for size in (2, 1))
    assert narrow.num_tokens == pytest.approx(2 * wide.num_tokens, rel=1e-4)


def test_a_70b_model_does_not_load_on_one_card_of_80_gb():
    with pytest.raises(CapacityError, match=r"the model does not load.*tensor_parallel_size"):
        kv_pool(LARGE, 80e9)
    assert kv_pool(LARGE, 80e9, tensor_parallel_size=4).num_blocks > 1000


def test_the_longest_sequence_must_fit():
    pool = kv_pool(SMALL, 24e9)
    pool.check_longest(pool.num_tokens)
    with pytest.raises(CapacityError, match="max_model_len of at most"):
        pool.check_longest(131_072)


def test_a_long_context_of_a_70b_model_takes_hundreds_of_milliseconds_to_restore():
    bandwidth = HARDWARE["a100"].host_bandwidth.value  # PCIe 4 x16
    link = LinkModel.of(LinkSeed(0.0, 0.0, bandwidth))
    assert 0.2 < float(link.seconds(1, 32_000 * 327_680)) < 1.0
