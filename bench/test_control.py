"""The deciding plane under pytest-benchmark; ``python bench/control.py`` gives the summary."""

from __future__ import annotations

import pytest
from control_world import BLOCK_SIZE, PROMPT_BLOCKS, DecodingEngine, connect, fill_index, hashes_of

INDEX_BLOCKS = 122 * PROMPT_BLOCKS
NUM_TOKENS = PROMPT_BLOCKS * BLOCK_SIZE + 1
NUM_RUNNING = 256


@pytest.fixture(scope="module")
def full_index():
    connector = connect(INDEX_BLOCKS + 1024)
    fill_index(connector, INDEX_BLOCKS)
    return connector


def test_first_question_about_8192_blocks(benchmark, full_index):
    prompt = hashes_of(3, PROMPT_BLOCKS)
    ids = iter(range(10**6))

    def ask():
        return full_index.reloadable(f"first {next(ids)}", prompt, NUM_TOKENS, 0)

    reload = benchmark(ask)
    benchmark.extra_info.update(index_blocks=INDEX_BLOCKS, ceiling_seconds=0.015, copied_nbytes=0)
    assert reload.num_tokens == PROMPT_BLOCKS * BLOCK_SIZE


def test_same_question_again(benchmark, full_index):
    prompt = hashes_of(4, PROMPT_BLOCKS)
    first = full_index.reloadable("again", prompt, NUM_TOKENS, 0)
    assert benchmark(full_index.reloadable, "again", prompt, NUM_TOKENS, 0) == first
    benchmark.extra_info.update(index_blocks=INDEX_BLOCKS, ceiling_seconds=0.0002, copied_nbytes=0)


@pytest.mark.parametrize("num_completing", [NUM_RUNNING // BLOCK_SIZE, NUM_RUNNING])
def test_step_of_256_decoding_requests(benchmark, num_completing):
    engine = DecodingEngine(connect(64 * 1024), NUM_RUNNING, num_blocks=128)

    def coming_step():
        return (engine.advance(num_completing),), {}

    def step(coming):
        nonlocal orders
        orders = engine.connector.schedule(coming)

    def settle():
        engine.answer(orders)

    orders = None
    benchmark.pedantic(step, setup=coming_step, teardown=lambda *_: settle(), rounds=60)
    benchmark.extra_info.update(
        num_running=NUM_RUNNING, num_completing=num_completing, ceiling_seconds=0.001
    )
    assert sum(t.num_blocks for t in orders.after) == num_completing
