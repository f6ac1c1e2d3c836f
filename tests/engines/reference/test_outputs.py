"""What the tokens of a step mean for the requests that get them."""

import pytest

from kvtiers.engines.reference.requests import NewRequest

from .engines import counting, engine_of, hashes_of, request_of, run, settings_of


@pytest.mark.parametrize(("stop", "max_tokens"), [(7, 30), (None, 7)])
def test_what_was_guessed_beyond_the_end_is_not_output(stop, max_tokens):
    """1, 2 to 5, and of 6 to 9 the first two."""
    knobs = settings_of(max_num_batched_tokens=64, num_speculative_tokens=3)
    engine = engine_of(knobs, acceptance=1.0)
    counting(engine)
    prompt, stop_ids = list(range(100, 108)), frozenset({stop} - {None})
    engine.add(NewRequest("r", 0.0, max_tokens, prompt, stop_token_ids=stop_ids))
    reports = run(engine)
    (served,) = reports[-1].finished
    assert served.token_ids == [[1, 2, 3, 4, 5, 6, 7]]
    assert served.reason == ("length" if stop is None else "stop")
    assert [len(report.itl_seconds) for report in reports] == [0, 4, 2]
    assert sum(report.num_output_tokens for report in reports) == 7


@pytest.mark.parametrize("num_guesses", [0, 3])
def test_the_next_turn_of_a_conversation_hits_the_answer_of_the_one_before(num_guesses):
    """Its last token was returned and not computed."""
    knobs = settings_of(max_num_batched_tokens=64, num_speculative_tokens=num_guesses)
    engine = engine_of(knobs, acceptance=1.0)
    hashes = hashes_of(0, 12)
    engine.add(request_of("first", 10, 31, block_hashes=hashes))
    run(engine)
    engine.add(request_of("next", 48, 1, block_hashes=hashes))
    (served,) = run(engine)[-1].finished
    assert served.num_local_tokens == 40
