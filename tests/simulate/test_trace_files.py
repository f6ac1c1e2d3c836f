"""Files and folders that hold no trace, or not quite: refused with place and remedy."""

import json
import os
import re

import pytest

from kvtiers.simulate.trace import load_trace
from kvtiers.simulate.trace_fields import TraceError
from tests.simulate.traces import call, line, session, write_conversation, write_sessions


def refused(path, says: str) -> None:
    with pytest.raises(TraceError, match=re.escape(says)):
        load_trace(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_pipe_in_a_folder_is_refused_instead_of_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    refused(tmp_path, f"{name}: is a pipe or a device, and would be read twice")


def test_a_folder_that_may_not_be_read_is_not_called_empty(tmp_path, monkeypatch):
    def denied(_path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.os.listdir", denied)
    monkeypatch.setattr("pathlib.os.scandir", denied)
    refused(tmp_path, "cannot be read (Permission denied); check path and rights")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"timestamp": 1, ', "t.jsonl:2: is no JSON: Expecting property name enclosed in double "),
        ('{"timestamp', "t.jsonl:2: is no JSON: Unterminated string starting at column 2"),
    ],
)
def test_a_broken_line_is_one_line_with_a_column(tmp_path, text, says):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(line(0, [1])) + "\n" + text + "\n")
    with pytest.raises(TraceError, match=re.escape(says)) as caught:
        load_trace(path)
    assert re.search(r" at column \d+$", str(caught.value))


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("output_length", True, "'output_length' is true, not"),
        ("timestamp", float("nan"), "'timestamp' is NaN, not"),
        ("input_length", None, "'input_length' is null, not"),
        ("hash_ids", {"a": 1}, """'hash_ids' is {"a": 1}, not"""),
    ],
)
def test_a_wrong_value_is_shown_as_it_stands_in_the_file(tmp_path, field, value, shown):
    refused(write_conversation(tmp_path / "t.jsonl", {**line(0, [1]), field: value}), shown)


def test_entries_of_the_wrong_format_are_told_what_they_are(tmp_path):
    (tmp_path / "list.json").write_text(json.dumps([line(0, [1])]))
    refused(tmp_path / "list.json", "holds a list, not an object; write its objects to a JSONL")
    (tmp_path / "one.json").write_text(json.dumps(line(0, [1]), indent=1))
    refused(tmp_path / "one.json", "is a request of a conversation trace, not a session; write")
    twice = write_conversation(tmp_path / "s.jsonl", session(call(0, [1])), session(call(1, [1])))
    refused(twice, "holds a session on its first line, and more after it; write each session to")
    other = session(call(0, [1], tokens=128), call(1, [2], tokens=128)) | {"block_size": 128}
    folder = write_sessions(tmp_path / "two", session(call(0, [1])), other)
    refused(folder, "ask for a multiple, such as 128 (--trace-block)")


def test_a_sub_agent_has_the_blocks_of_its_session(tmp_path):
    agent = {"t": 3, "block_size": 128, "requests": [call(0, [1])]}
    folder = write_sessions(tmp_path, session(call(0, [1]), agent))
    refused(folder, "session_000.json: requests[1]: 'block_size' differs from that of the session")
    same = {**agent, "block_size": 64, "hash_id_scope": "local"}
    document = session(call(0, [1]), same)
    del document["hash_id_scope"]  # that of the session is local, too
    write_sessions(tmp_path, document)
    assert len(load_trace(tmp_path).requests) == 2


def test_a_request_that_starts_a_sub_agent_is_a_request_as_well(tmp_path):
    agent = {**call(3, [2]), "requests": [call(1, [3]), call(2, [4])]}
    folder = write_sessions(tmp_path, session(call(0, [1]), agent))
    times = [request.arrival_seconds for request in load_trace(folder).requests]
    assert times == [0, 3, 4, 5]


def test_sub_agents_without_end_are_refused(tmp_path):
    deep = call(0, [1])
    for _ in range(200):
        deep = {"t": 0, "requests": [deep]}
    refused(write_sessions(tmp_path, session(deep)), "more than 100 deep; that is no session")
