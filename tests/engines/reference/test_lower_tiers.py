"""kvtiers is told what it has to know: who runs, what is computed, and what a reset voids."""

import pytest

from kvtiers.cost.links import LinkSeed

from .engines import engine_of, hashes_of, request_of, run, settings_of, tiers_of


def test_all_that_run_are_known_to_run_also_where_none_fills_a_block():
    engine = engine_of(settings_of(), tiers_of())
    for idx in range(5):
        engine.add(request_of(f"r{idx}", 5, 12))
    outlook = engine.runner.connector.controller.outlook
    while engine.num_unfinished:
        report = engine.step()
        left = {it.request_id for it in report.finished}
        assert outlook.running == set(report.num_tokens) - left
        if not left:
            assert len(outlook.running) == 5
    assert outlook.running == set()


@pytest.mark.parametrize("num_guesses", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("offload", ["eager", "lazy"])
def test_blocks_that_right_guesses_filled_are_offloaded(offload, num_guesses):
    """Steps of as many tokens as a block has never end where one was just filled."""
    knobs = settings_of(max_num_batched_tokens=64, num_speculative_tokens=num_guesses)
    engine = engine_of(knobs, tiers_of(mode="always", offload=offload), acceptance=1.0)
    hashes = hashes_of(0, 14)
    engine.add(request_of("first", 8, 49, block_hashes=hashes))
    run(engine)
    engine.settle()
    engine.pool.forget_all()
    engine.add(request_of("second", 57, 1, block_hashes=hashes))
    (served,) = (it for report in run(engine) for it in report.finished)
    # Of 56 tokens that were computed those of the last step may not have been told.
    assert served.num_reloaded_tokens >= 56 - 4 - num_guesses


def test_what_a_reset_voids_was_not_reloaded():
    slow = LinkSeed(0.05, 1e-3, 1e8)
    links = dict.fromkeys(("hbm>dram", "dram>hbm"), slow)
    engine = engine_of(settings_of(), tiers_of(mode="always"), links=links)
    hashes = hashes_of(0, 10)
    engine.add(request_of("first", 40, 1, block_hashes=hashes))
    run(engine)
    engine.settle()
    engine.pool.free(engine.pool.take(60))  # which leaves 4 of the 10 that are cached
    engine.add(request_of("second", 40, 1, block_hashes=hashes))
    assert engine.step(idle_until=engine.now).gauges.num_loading == 1
    assert engine.scheduler.running[0].num_local_tokens == 16
    engine.reset()
    (served,) = (it for report in run(engine) for it in report.finished)
    assert (served.num_local_tokens, served.num_reloaded_tokens) == (0, 0)
    assert sum(served.reloaded_by_tier.values()) == 0
    assert served.num_computed_tokens == 40
