import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.simulate.trace import (
    TraceReader,
    infinite_hit_tokens,
    load_trace,
)
from kvtiers.simulate.trace_fields import TraceError
from tests.simulate.traces import (
    call,
    line,
    real_trace,
    session,
    write_conversation,
    write_sessions,
)


def blocks(trace):
    return [request.block_ids.tolist() for request in trace.requests]


# Conversations


def test_conversation_keeps_times_tokens_and_shared_prefixes(tmp_path):
    path = write_conversation(
        tmp_path / "chat.jsonl", line(0, [7, 8], 3, tokens=1000), line(2500, [7, 8, 9], 4)
    )
    trace = load_trace(path)
    first, second = trace.requests
    assert (trace.name, trace.block_size) == ("chat", 512)
    assert (first.arrival_seconds, second.arrival_seconds) == (0.0, 2.5)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (1000, 3)
    assert second.block_ids[:2].tolist() == first.block_ids.tolist()
    assert (trace.num_prompt_tokens, trace.num_output_tokens) == (2536, 7)
    assert trace.seconds == 2.5


def test_requests_come_in_order_of_arrival_and_equal_times_as_they_stand(tmp_path):
    path = write_conversation(
        tmp_path / "t.jsonl", line(9, [1], 1), line(5, [2], 2), line(5, [3], 3)
    )
    assert [r.num_output_tokens for r in load_trace(path).requests] == [2, 3, 1]
    assert [r.num_output_tokens for r in TraceReader(path, None)] == [1, 2, 3]


def test_the_same_id_after_another_prefix_is_another_block(tmp_path):
    path = write_conversation(tmp_path / "t.jsonl", line(0, [1, 2]), line(1, [3, 2]))
    first, second = blocks(load_trace(path))
    assert first[1] != second[1]


def test_blank_lines_are_no_requests(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(f"\n{json.dumps(line(0, [1]))}\n\n")
    assert len(load_trace(path).requests) == 1


# Sessions


def test_ids_of_sessions_are_their_own_unless_they_say_global(tmp_path):
    requests = [session(call(0, [1, 2]), scope=scope) for scope in ("local", "local")]
    first, second = blocks(load_trace(write_sessions(tmp_path / "own", *requests)))
    assert not set(first) & set(second)
    shared = [session(call(0, [1, 2]), scope="global") for _ in range(2)]
    first, second = blocks(load_trace(write_sessions(tmp_path / "shared", *shared)))
    assert first == second


def test_sub_agents_run_from_when_they_are_started(tmp_path):
    agent = {"t": 100.0, "type": "subagent", "requests": [call(0.0, [5]), call(7.5, [5, 6])]}
    folder = write_sessions(tmp_path / "a", session(call(0, [1]), agent, call(103, [1, 2])))
    trace = load_trace(folder)
    assert [r.arrival_seconds for r in trace.requests] == [0.0, 100.0, 103.0, 107.5]
    assert {r.session for r in trace.requests} == {0}
    ids = blocks(trace)
    assert ids[2][0] == ids[0][0]
    assert ids[3][0] == ids[1][0]


def test_sub_agents_with_times_of_the_session_do_not_run_twice_as_late(tmp_path):
    inner = {"t": 108.0, "type": "subagent", "requests": [call(109.0, [6])]}
    relative = {"t": 110.0, "type": "subagent", "requests": [call(2.0, [7])]}
    agent = {"t": 100.0, "type": "subagent"}
    agent["requests"] = [inner, relative, call(100.0, [5]), call(107.5, [5, 6])]
    folder = write_sessions(tmp_path / "a", session(call(0, [1]), agent, call(103, [1, 2])))
    found = [request.arrival_seconds for request in load_trace(folder).requests]
    assert found == [0.0, 100.0, 103.0, 107.5, 109.0, 112.0]


def test_sub_agents_that_are_empty_or_only_start_others_are_read(tmp_path):
    deepest = {"t": 1.0, "type": "subagent", "requests": [call(0.5, [5])]}
    agent = {"t": 100.0, "type": "subagent", "requests": [deepest]}
    empty = {"t": 7.0, "type": "subagent", "status": "async_launched", "requests": []}
    folder = write_sessions(tmp_path / "a", session(call(0, [1]), empty, agent))
    assert [request.arrival_seconds for request in load_trace(folder).requests] == [0.0, 101.5]


def test_sessions_are_merged_by_time_and_keep_think_time(tmp_path):
    folder = write_sessions(
        tmp_path / "a",
        session(call(0, [1]), call(50, [1], think_time=12.5)),
        session(call(20, [1], think_time=None)),
    )
    found = [(r.session, r.think_seconds) for r in load_trace(folder).requests]
    assert found == [(0, None), (1, None), (0, 12.5)]


def test_small_blocks_make_large_ones_of_whole_runs(tmp_path):
    long = list(range(1, 21))
    folder = write_sessions(
        tmp_path / "a", session(call(0, long), call(1, long[:12]), call(2, long[:8] + [99] * 8))
    )
    first, second, third = blocks(load_trace(folder, 512))
    assert [len(first), len(second), len(third)] == [2, 1, 2]
    assert first[0] == second[0] == third[0]
    assert first[1] != third[1]


def test_blocks_that_ids_do_not_make_are_refused(tmp_path):
    path = write_conversation(tmp_path / "t.jsonl", line(0, [1]))
    with pytest.raises(TraceError, match="ids of 512 tokens, which make no blocks of 64"):
        load_trace(path, 64)
    mixed = write_sessions(tmp_path / "m", session(call(0, [1])), session(call(0, [1])))
    (mixed / "session_001.json").write_text(
        json.dumps({"block_size": 48, "requests": [{**call(0, [1]), "in": 48}]})
    )
    with pytest.raises(TraceError, match=r"session_001.json: has ids of 48 tokens"):
        load_trace(mixed)


# Formats


def test_format_is_told_from_the_content(tmp_path):
    lines = write_conversation(tmp_path / "no_suffix", line(0, [1]))
    folder = write_sessions(tmp_path / "f", session(call(0, [1])))
    pretty = tmp_path / "pretty.json"
    pretty.write_text(json.dumps(session(call(0, [1])), indent=2))
    one = tmp_path / "one"
    one.mkdir()
    write_conversation(one / "t.jsonl", line(0, [1]))
    for path, block_size in (
        (lines, 512),
        (one, 512),
        (folder, 64),
        (folder / "session_000.json", 64),
        (pretty, 64),
    ):
        trace = load_trace(path)
        assert (trace.block_size, len(trace.requests)) == (block_size, 1)


def test_what_is_no_trace_is_refused_with_what_would_be(tmp_path):
    with pytest.raises(TraceError, match=r"gone.jsonl: no such file or folder; name a JSONL file"):
        load_trace(tmp_path / "gone.jsonl")
    with pytest.raises(TraceError, match=r"is a folder with no \*.json or \*.jsonl"):
        load_trace(tmp_path)
    both = write_sessions(tmp_path / "both", session(call(0, [1])))
    write_conversation(both / "chat.jsonl", line(0, [1]))
    with pytest.raises(TraceError, match=r"holds 1 \*.json and 1 \*.jsonl, which are not read"):
        load_trace(both)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(TraceError, match="holds no request"):
        load_trace(tmp_path / "empty.jsonl")
    (tmp_path / "other").write_text('{"prompt": "hello"}\n')
    with pytest.raises(TraceError, match=r"other:1: is neither a request .* there is 'prompt'"):
        load_trace(tmp_path / "other")
    with pytest.raises(TraceError, match="holds no request"):
        load_trace(write_sessions(tmp_path / "s", session()))


# Malformed values


GOOD = line(0, [1, 2], tokens=1000)
not_counts = st.one_of(
    st.none(),
    st.booleans(),
    st.text(),
    st.integers(max_value=-1),
    st.floats(),
    st.lists(st.integers()),
)
not_times = st.one_of(
    st.none(),
    st.booleans(),
    st.text(),
    st.integers(max_value=-1),
    st.sampled_from([float("nan"), float("inf"), -0.5]),
)
not_ids = st.one_of(
    st.none(),
    st.integers(),
    st.text(),
    st.lists(st.text(), min_size=2, max_size=2),
    st.lists(st.one_of(st.none(), st.floats(), st.booleans()), min_size=1, max_size=2),
)


@given(
    wrong=st.one_of(
        st.tuples(st.sampled_from(["input_length", "output_length"]), not_counts),
        st.tuples(st.just("timestamp"), not_times),
        st.tuples(st.just("hash_ids"), not_ids),
    ),
    before=st.integers(0, 3),
)
def test_a_wrong_value_is_reported_with_line_and_field(tmp_path_factory, wrong, before):
    field, value = wrong
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    write_conversation(path, *[GOOD] * before, {**GOOD, field: value})
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(f"{path}:{before + 1}: ")
    assert field in str(caught.value)


@given(field=st.sampled_from(sorted(GOOD)))
def test_a_missing_field_is_named_with_those_that_are_there(tmp_path_factory, field):
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    write_conversation(path, GOOD, {name: GOOD[name] for name in GOOD if name != field})
    with pytest.raises(TraceError, match=rf":2: '{field}' is missing; there is '"):
        load_trace(path)


@given(text=st.binary(min_size=1).filter(lambda found: b"\n" not in found and found.strip()))
def test_no_line_of_bytes_ends_in_another_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + text + b"\n")
    with pytest.raises(TraceError, match=":2: "):
        load_trace(path)


def test_ids_must_match_the_tokens(tmp_path):
    path = write_conversation(tmp_path / "t.jsonl", line(0, [1], tokens=1025))
    with pytest.raises(
        TraceError, match="'hash_ids' has 1 entries; 1025 tokens in blocks of 512 have 2 or 3"
    ):
        load_trace(path)


def test_wrong_values_of_sessions_are_reported_with_their_path(tmp_path):
    agent = {"t": 3, "requests": [call(0, [1]), {**call(1, [1]), "hash_ids": ["x"]}]}
    folder = write_sessions(tmp_path / "a", session(call(0, [1]), agent))
    with pytest.raises(
        TraceError,
        match=r'session_000.json: requests\[1\]: requests\[1\]: .hash_ids\[0\]. is "x", not an int',
    ):
        load_trace(folder)
    write_sessions(folder, session(call(0, [1]), scope="none"))
    with pytest.raises(TraceError, match="'hash_id_scope' is 'none', not 'local' or 'global'"):
        load_trace(folder)
    (folder / "session_000.json").write_text('{"block_size": 64,\n "requests": [}')
    with pytest.raises(TraceError, match=r"is no JSON: .* at line 2, column"):
        load_trace(folder)


# The infinite cache


def test_infinite_cache_counts_leading_blocks_that_were_seen(tmp_path):
    path = write_conversation(
        tmp_path / "t.jsonl",
        line(0, [1, 2], tokens=1000),
        line(1, [1, 2, 3], tokens=1500),  # 1,024 known
        line(2, [4, 2], tokens=1024),  # none: the first is new
        line(3, [1, 2], tokens=1000),  # all
    )
    found = infinite_hit_tokens(load_trace(path).requests, 512)
    assert (found.num_hit_tokens, found.num_prompt_tokens) == (1024 + 1000, 4524)
    assert found.rate == 2024 / 4524


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12)
)
def test_infinite_cache_equals_the_definition(tmp_path_factory, prompts):
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    write_conversation(path, *(line(number, ids) for number, ids in enumerate(prompts)))
    expected = sum(
        max(
            (
                n
                for n in range(len(ids) + 1)
                if n == 0 or any(earlier[:n] == ids[:n] for earlier in prompts[:number])
            ),
            default=0,
        )
        for number, ids in enumerate(prompts)
    )
    found = infinite_hit_tokens(load_trace(path).requests, 512)
    assert found.num_hit_tokens == expected * 512


# The public traces


def test_conversation_trace_has_its_published_size_and_hit_rate():
    trace = load_trace(real_trace("mooncake_conversation_trace.jsonl"))
    assert len(trace.requests) == 12_031
    assert 3500 < trace.seconds < 3600
    assert infinite_hit_tokens(trace.requests, trace.block_size).rate == pytest.approx(
        0.374, abs=5e-4
    )


def test_coding_agents_read_at_both_block_sizes():
    folder = real_trace("coding_agent_sessions")
    small, large = load_trace(folder), load_trace(folder, 512)
    assert (small.block_size, large.block_size) == (64, 512)
    assert len(small.requests) == len(large.requests) == 1068
    assert len({request.session for request in small.requests}) == 35
    rates = [infinite_hit_tokens(t.requests, t.block_size).rate for t in (small, large)]
    assert rates[1] < rates[0] < 1


@pytest.mark.parametrize(("most", "block_size"), [(512, 512), (200, 192), (127, 64), (1, 64)])
def test_small_blocks_are_put_together_as_if_they_were_read_so(most, block_size, tmp_path):
    first, later = [*range(20)], [*range(17), 90, 91, 92, 93]
    folder = write_sessions(tmp_path / "s", session(call(0, first), call(1, later)))
    coarser, read = load_trace(folder).coarser(most), load_trace(folder, block_size)
    assert coarser.block_size == block_size
    assert blocks(coarser) == blocks(read)
    assert coarser.num_prompt_tokens == read.num_prompt_tokens
