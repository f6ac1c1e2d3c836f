"""What of a request is stored: all that is true, and nothing else."""

from __future__ import annotations

import pytest
from lives import ALWAYS, Told, fake

from kvtiers.testing.fake_engine import Setup, prompt_of
from kvtiers.testing.fake_step import EngineSettings, Execution


@pytest.mark.parametrize("execution", list(Execution))
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_a_chunked_prompt_is_stored_without_holes(execution, num_draft_tokens):
    """R85: chunks of 5 tokens over blocks of 4, drafts that are held back and rejected."""
    settings = EngineSettings(
        num_blocks=60, max_step_tokens=5, execution=execution, num_draft_tokens=num_draft_tokens
    )
    engine = fake(Setup(engine=settings, num_slots=200, options=ALWAYS))
    request = engine.generate(prompt_of(1, 44), max_tokens=8)
    engine.step()
    entries = list(engine.connector.controller.dram.entries())
    num_full = (request.num_tokens - 1) // 4
    assert len(entries) >= num_full - 1  # the last one's key may have come with the end
    assert sum(entry.parent_key is None for entry in entries) == 1
    keys = {entry.key for entry in entries}
    assert all(entry.parent_key in keys for entry in entries if entry.parent_key is not None)


def test_a_tail_that_was_lost_meanwhile_is_offered_again_at_the_end():
    """A running request's last blocks made room for others; its end is the last chance."""
    told = Told(num_slots=4)
    told.connector.arrived("r", told.hashes(3))
    told.answer(told.step({"r": 48}))
    told.connector.arrived("other", told.hashes(3, "q"))
    told.answer(told.step({"r": 49, "other": 48}))
    assert told.connector.reloadable("new", told.hashes(3), 49, 0).num_tokens == 16
    told.connector.finished("r", ([100, 101, 102],))
    (order,) = told.step().before
    assert order.block_ids.tolist() == [101, 102]


def test_blocks_that_found_no_room_are_offered_again_in_the_next_step():
    """R15: every slot is pinned; the cursor stays before the first block that was refused."""
    told = Told(num_slots=4)
    told.connector.arrived("other", told.hashes(4, "q"))
    pinned = told.step({"other": 64})
    told.connector.arrived("r", told.hashes(2))
    assert not told.step({"r": 32}).after
    told.answer(pinned)
    (order,) = told.step({"r": 33}).after
    assert order.block_ids.tolist() == [100, 101]


def test_what_was_computed_before_a_reset_is_not_stored_after_it():
    """The weights may have changed: a running request goes on, but is nobody else's."""
    told = Told()
    told.connector.arrived("r", told.hashes(2))
    told.answer(told.step({"r": 32}))
    told.connector.reset()
    hashes = told.hashes(3)
    told.connector.arrived("r", hashes)
    orders = told.step({"r": 48})
    assert not orders.after
    told.connector.finished("r", ([1, 2, 3],))
    assert not told.step().before
    told.connector.arrived("new", hashes)
    assert told.step({"new": 48}).after[0].num_blocks == 3


def test_a_preempted_request_is_stored_again_after_a_reset():
    """It starts from nothing, with the weights of now."""
    told = Told()
    told.connector.arrived("r", told.hashes(2))
    told.answer(told.step({"r": 32}))
    told.connector.reset()
    told.step(preempted=("r",))
    assert told.step({"r": 32}).after[0].num_blocks == 2


@pytest.mark.parametrize(("copied", "num_blocks"), [({}, 3), ({"r": 2}, 2), ({"q": 1}, 3)])
def test_of_a_preempted_request_the_last_blocks_may_be_left_behind(copied, num_blocks):
    """Its engine takes them to be computed again sooner than they were copied."""
    told = Told(policy={"offload": "lazy"})
    told.connector.arrived("r", told.hashes(3))
    assert not told.step({"r": 48}).after
    orders = told.step(preempted=("r",), num_copied_blocks=copied)
    (order,) = orders.before
    assert order.block_ids.tolist() == [100, 101, 102][:num_blocks]
    told.answer(orders)
    found = told.connector.reloadable("r", told.hashes(3), 49, 0)
    assert found.num_tokens == 16 * num_blocks


def test_keys_follow_hashes_that_the_engine_replaced():
    """A streaming session drops its last token: the hashes of a block change under its key."""
    told = Told()
    hashes = told.hashes(3)
    told.connector.arrived("r", hashes)
    told.answer(told.step({"r": 40}))  # two blocks computed, the hash of the third is known
    hashes[2:] = told.hashes(2, "other")
    (order,) = told.step({"r": 64}).after
    assert [key[:32] for key in order.block_keys()] == told.hashes(2, "other")
