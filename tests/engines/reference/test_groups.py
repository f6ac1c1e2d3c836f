"""The sequences of a group share what they can, give way together, and end one by one."""

import pytest

from kvtiers.cost.preempt import PreemptMode
from kvtiers.engines.reference.requests import NewRequest, State

from .engines import counting, engine_of, request_of, run, settings_of, tiers_of
from .machine import Moody


@pytest.mark.parametrize("mode", PreemptMode)
def test_a_group_is_swapped_whatever_the_mode(mode):
    engine = engine_of(settings_of(17, watermark=0.0, preemption=mode), tiers_of())
    for idx in range(2):
        engine.add(request_of(f"g{idx}", 10, 14, num_sequences=2))
    reports = run(engine)
    assert engine.gauges.num_swaps == engine.gauges.num_preemptions > 0
    assert all(it.num_output_tokens == 28 for report in reports for it in report.finished)


def test_a_group_whose_swap_was_lost_begins_again_with_every_sequence():
    """What they share is computed only as far as the first of them has come."""
    knobs = settings_of(17, watermark=0.0, max_num_batched_tokens=64)
    engine = engine_of(knobs, tiers_of())
    moody = Moody(engine.runner.connector, 4)
    for idx in range(2):
        engine.add(request_of(f"g{idx}", 10, 14, num_sequences=2))
    while not engine.gauges.num_swapped:
        engine.step()
    moody.moods.extend(["nothing"] * 40)
    engine.pool.forget_all()
    (victim,) = [it for it in engine.scheduler.queue if it.state is State.SWAPPED]
    starts, run_step = {}, engine.runner.run

    def seen(work, orders):
        for it in work.sequences:
            starts.setdefault(it.sequence_id, it.start)
        return run_step(work, orders)

    engine.runner.run = seen
    while victim.request_id not in starts:
        engine.step()
        engine.pool.forget_all()
    assert {starts[sequence.sequence_id] for sequence in victim.sequences} == {0}
    run(engine)


def test_a_group_of_which_one_sequence_stops_has_stopped():
    engine = engine_of(config=tiers_of())
    counting(engine)
    prompt = list(range(100, 108))
    engine.add(NewRequest("g", 0.0, 3, prompt, num_sequences=2, stop_token_ids=frozenset({4})))
    (served,) = run(engine)[-1].finished
    assert served.token_ids == [[1, 3, 5], [2, 4]]
    assert (served.reason, served.num_output_tokens) == ("stop", 5)


@pytest.mark.parametrize("how", ["abort", "reset"])
def test_a_group_that_ends_before_it_parts_gives_back_what_it_would_need(how):
    engine = engine_of(settings_of(90, max_num_batched_tokens=18), tiers_of())
    engine.add(request_of("group", 50, 4, num_sequences=3))
    engine.step()
    (request,) = engine.scheduler.running
    assert len(request.spare_block_ids) == 2
    if how == "abort":
        engine.abort("group")
    else:
        engine.reset()
    assert engine.pool.num_free == 90
    run(engine)
    assert engine.pool.num_free == 90


def test_the_place_of_a_sequence_that_is_over_is_free():
    engine = engine_of(settings_of(max_num_seqs=2), tiers_of())
    counting(engine)
    prompt, stop = list(range(100, 108)), frozenset({4})  # the second one's second token
    engine.add(NewRequest("g", 0.0, 9, prompt, num_sequences=2, stop_token_ids=stop))
    engine.add(NewRequest("next", 0.0, 2, prompt))
    assert [engine.step().admitted for _ in range(3)] == [["g"], [], ["next"]]
    assert engine.state("g") is State.RUNNING


def test_the_tokens_of_a_group_are_those_of_all_its_sequences():
    engine = engine_of(settings_of(), tiers_of())
    engine.add(request_of("g", 10, 3, num_sequences=2))
    assert [report.num_tokens for report in run(engine)] == [{"g": 10}, {"g": 2}, {"g": 2}]


def swapped_group(offload="eager"):
    """An engine in which a group of two is swapped, and that group."""
    engine = engine_of(settings_of(17, watermark=0.0), tiers_of(mode="always", offload=offload))
    for idx in range(2):
        engine.add(request_of(f"g{idx}", 10, 14, num_sequences=2))
    while not engine.gauges.num_swapped:
        engine.step()
    (group,) = [it for it in engine.scheduler.queue if it.state is State.SWAPPED]
    return engine, group


def test_all_sequences_of_a_group_are_copied_down():
    engine, group = swapped_group("lazy")
    num_full = [sequence.num_known - 1 for sequence in group.sequences]
    while group.state is State.SWAPPED:
        engine.pool.forget_all()
        engine.step()
    wanted = sum(num // 4 * 4 for num in num_full) - 8  # what they share comes once
    assert group.num_reloaded_tokens == wanted > 16
    run(engine)


def test_a_group_that_comes_back_needs_no_blocks_to_part_once_more():
    engine, group = swapped_group()
    while group.state is State.SWAPPED:
        engine.step()
    assert group.num_blocks == sum(len(sequence.block_ids) for sequence in group.sequences)
    run(engine)


def test_what_the_sequences_of_a_group_share_is_reloaded_once():
    engine, group = swapped_group()
    connector, asked = engine.runner.connector, {}
    ask = connector.reloadable

    def asking(name, hashes, num_tokens, num_local):
        asked[name] = num_local
        return ask(name, hashes, num_tokens, num_local)

    connector.reloadable = asking
    while group.state is State.SWAPPED:
        engine.pool.forget_all()
        engine.step()
    first, second = (sequence.sequence_id for sequence in group.sequences)
    assert (asked[first], asked[second]) == (0, 8)
    run(engine)
