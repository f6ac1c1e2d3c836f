from dataclasses import replace

import pytest

from kvtiers.cost.capacity import KVPool, Limit
from kvtiers.cost.catalogue import known_hardware
from kvtiers.cost.engine_memory import EngineMemory, prefill_chunks
from kvtiers.cost.known_models import known_model
from kvtiers.cost.links import LinkModel, LinkSeed
from kvtiers.model.errors import CapacityError, ConfigError

GB = 10**9


def memory(model="llama-3.1-8b", hardware="h100", **more) -> EngineMemory:
    return EngineMemory(known_model(model).shape, known_hardware(hardware), **more)


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [("llama-3.1-8b", 131_072), ("llama-3.1-70b", 327_680), ("deepseek-v3", 61 * 576 * 2)],
)
def test_kv_bytes_of_a_token(model, nbytes):
    assert memory(model).kv_nbytes_per_token == nbytes


def seqs(pool: KVPool, average_context: int, max_num_seqs: int):
    found = pool.concurrency(average_context, max_num_seqs)
    return found.num_sequences, found.limit


def test_pool_of_120_gb_holds_about_400_000_tokens_and_100_sequences_of_4000():
    pool = KVPool(120 * GB, 300_000)
    assert pool.num_tokens == 400_000
    assert seqs(pool, 4000, 256) == (100, Limit.KV)


def test_what_binds_is_the_smaller_of_kv_and_max_num_seqs():
    pool = KVPool(60 * 4000 * 300_000, 300_000)
    assert seqs(pool, 4000, 256) == (60, Limit.KV)
    assert seqs(pool, 4000, 59) == (59, Limit.MAX_NUM_SEQS)
    assert seqs(pool, 4000, 60) == (60, Limit.KV)


def test_pool_is_what_weights_and_runtime_leave():
    found = memory(utilization=0.9, runtime_nbytes=4 * GB)
    assert found.pool_nbytes == 72 * GB - known_model("llama-3.1-8b").shape.num_params * 2 - 4 * GB
    assert found.pool.num_blocks == found.pool_nbytes // (16 * 131_072)


def test_utilization_up_is_pool_and_down_is_headroom():
    less, more = memory(utilization=0.8), memory(utilization=0.9)
    total = less.hardware.memory_nbytes.value
    assert more.pool_nbytes - less.pool_nbytes == pytest.approx(0.1 * total, abs=1)
    assert total - more.claimed_nbytes == pytest.approx(0.1 * total, abs=1)
    assert more.pool.num_blocks > less.pool.num_blocks


def test_fp8_about_doubles_the_pool():
    found = memory()
    assert found.with_kv_dtype("fp8").pool.num_tokens == pytest.approx(
        2 * found.pool.num_tokens, rel=1e-3
    )


def test_tensor_parallelism_divides_weights_and_kv_heads_but_not_below_one():
    four, sixteen = memory("llama-3.1-70b").with_ranks(4), memory("llama-3.1-70b").with_ranks(16)
    assert four.kv_nbytes_per_token == 327_680 // 4
    assert sixteen.kv_nbytes_per_token == 327_680 // 8
    assert four.weights_nbytes == pytest.approx(141 * GB / 4, rel=0.01)


def test_70b_in_16_bits_does_not_load_on_one_card_of_80_gb():
    with pytest.raises(CapacityError) as caught:
        memory("llama-3.1-70b").check()
    text = str(caught.value)
    assert "141.1 GB of weights (bf16)" in text
    assert "does not even load" in text
    ranks = int(text.split("parallelism over ")[1].split(maxsplit=1)[0])
    memory("llama-3.1-70b").with_ranks(ranks).check()
    with pytest.raises(CapacityError):
        memory("llama-3.1-70b").with_ranks(ranks // 2).check()


def test_longest_sequence_must_fit_and_each_remedy_holds_what_it_promises():
    found = memory(hardware="l40s", utilization=0.6)
    room = found.pool.num_tokens
    found.check(room)
    with pytest.raises(CapacityError) as caught:
        found.check(room + 10_000)
    text = str(caught.value)
    assert f"max_model_len of at most {room:,}" in text
    utilization = float(text.split("utilization of ")[1].split(";", maxsplit=1)[0])
    replace(found, utilization=utilization).check(room + 10_000)
    found.with_kv_dtype("fp8").check(room + 10_000)
    ranks = int(text.split("parallelism over ")[1].split(maxsplit=1)[0])
    found.with_ranks(ranks).check(room + 10_000)


def test_step_of_8192_with_200_decodes_leaves_7992():
    assert prefill_chunks(4000, 8192, 200) == (4000,)
    now, *later = prefill_chunks(30_000, 8192, 200)
    assert now == 7992
    assert sum(later) == 22_008


def test_prompt_of_30_000_takes_4_steps_at_8192_and_15_at_2048():
    assert len(prefill_chunks(30_000, 8192)) == 4
    assert len(prefill_chunks(30_000, 2048)) == 15
    assert sum(prefill_chunks(30_000, 2048)) == 30_000


def test_values_without_sense_are_refused():
    with pytest.raises(ConfigError, match="200 decodes leave nothing of a step of 200 tokens"):
        prefill_chunks(10, 200, 200)
    with pytest.raises(ConfigError, match="no data type 'int3' for the KV cache; known: fp32"):
        memory(kv_dtype="int3")
    with pytest.raises(ConfigError, match=r"utilization 1\.5 must be above 0"):
        memory(utilization=1.5)
    with pytest.raises(ConfigError, match="must be at least 1"):
        memory(block_size=0)


def test_a_long_context_of_a_70b_model_takes_hundreds_of_milliseconds_to_restore():
    bandwidth = known_hardware("a100").host_bandwidth.value  # PCIe 4 x16
    link = LinkModel.of(LinkSeed(0.0, 0.0, bandwidth))
    nbytes = 32_000 * memory("llama-3.1-70b").kv_nbytes_per_token
    assert 0.2 < float(link.seconds(1, nbytes)) < 1.0
