"""Promises of `kvtiers.observe.decisions`."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtiers.observe.decisions import Decision, DecisionLog, DecisionOutcome

LOADED = DecisionOutcome(num_loaded_blocks=4, num_failed_blocks=0, measured_seconds=0.5)


def decision(request_id: str = "r", reason: str = "reload_all", chosen: float = 0.4) -> Decision:
    return Decision(
        time=12.5,
        request_id=request_id,
        epoch=1,
        num_tokens=100,
        num_local_tokens=16,
        num_hit_blocks={"dram": 3, "nvme0": 1},
        predicted_seconds={"reload": 0.4, "recompute": 2.0, "load": chosen},
        num_chosen_blocks=4,
        mode="auto",
        reason=reason,
    )


def test_finished_decision_has_prediction_and_outcome():
    log = DecisionLog()
    log.record(decision())
    assert log.open_decision("r") == decision()
    assert log.finish("r", LOADED) == replace(decision(), outcome=LOADED)
    assert log.finished() == (replace(decision(), outcome=LOADED),)
    assert log.open_decision("r") is None


def test_outcome_without_decision_is_ignored():
    log = DecisionLog()
    assert log.finish("unheard-of", LOADED) is None
    assert log.finished() == ()


def test_ring_keeps_the_last():
    log = DecisionLog(capacity=3)
    for i in range(10):
        log.record(decision(f"r{i}"))
        log.finish(f"r{i}", LOADED)
    assert [d.request_id for d in log.finished()] == ["r7", "r8", "r9"]


def test_open_decisions_are_bounded_too():
    log = DecisionLog(capacity=3)
    for i in range(10):
        log.record(decision(f"r{i}"))
    assert log.summary().num_open == 3
    assert log.summary().num_lost == 7
    assert log.finish("r0", LOADED) is None
    assert log.finish("r9", LOADED) is not None


def test_second_decision_of_a_request_takes_the_first_one_s_place():
    log = DecisionLog(capacity=2)
    log.record(decision("other"))
    log.record(decision())
    log.record(decision(reason="recompute_faster"))
    assert log.summary().num_open == 2
    assert log.summary().num_lost == 1
    assert log.finish("r", LOADED).reason == "recompute_faster"


def test_summary_counts_what_is_in_the_ring():
    log = DecisionLog()
    for request_id, reason, chosen in (("a", "x", 0.4), ("b", "x", 0.5), ("c", "y", 1.0)):
        log.record(decision(request_id, reason, chosen))
        log.finish(request_id, DecisionOutcome(3, 1, 0.5))
    log.record(decision("d"))
    log.record(decision("e"))
    log.finish("e", DecisionOutcome(0, 4))
    summary = log.summary()
    assert (summary.num_open, summary.num_lost, summary.num_finished) == (1, 0, 4)
    assert summary.num_by_reason == {"x": 2, "y": 1, "reload_all": 1}
    assert (summary.num_loaded_blocks, summary.num_failed_blocks) == (9, 7)
    assert summary.median_relative_error == pytest.approx(0.2)


def test_empty_summary_has_no_error():
    assert DecisionLog().summary().median_relative_error is None


def test_every_finished_decision_is_one_line(tmp_path: Path):
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"earlier": true}\n')
    log = DecisionLog(capacity=1, path=path)
    log.open()
    log.open()
    for request_id in ("a", "b\nc", "d"):
        log.record(decision(request_id))
        log.finish(request_id, LOADED)
    log.record(decision("unfinished"))
    assert len(path.read_text().splitlines()) == 4, "lines are there before the log is closed"
    log.close()
    log.close()
    _, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["request_id"] for line in lines] == ["a", "b\nc", "d"]
    assert lines[0]["num_hit_blocks"] == {"dram": 3, "nvme0": 1}
    assert lines[0]["outcome"]["measured_seconds"] == 0.5


def test_file_that_is_rotated_by_copying_and_cutting_it_goes_on_from_its_beginning(tmp_path: Path):
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path=path)
    log.open()
    for name in ("before", "after"):
        log.record(decision(name))
        log.finish(name, LOADED)
        if name == "before":
            assert path.read_text().endswith("\n")
            path.write_bytes(b"")
    log.close()
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["request_id"] == "after"


def test_log_without_file_writes_none(tmp_path: Path):
    log = DecisionLog()
    log.open()
    log.record(decision())
    log.finish("r", LOADED)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_file_that_cannot_be_opened_is_done_without(tmp_path: Path, caplog):
    log = DecisionLog(path=tmp_path / "absent" / "decisions.jsonl")
    with caplog.at_level(logging.WARNING):
        log.open()
        for _ in range(3):
            log.record(decision())
            assert log.finish("r", LOADED) is not None
    log.close()
    assert len(caplog.records) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_switches_the_file_off_with_one_warning(caplog):
    log = DecisionLog(path=Path("/dev/full"))
    log.open()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log.record(decision())
            assert log.finish("r", LOADED) is not None
    log.close()
    assert len(caplog.records) == 1
    assert len(log.finished()) == 3


def test_any_number_becomes_valid_json():
    line = replace(
        decision("\ud800\n"),
        num_tokens=np.int64(5),
        predicted_seconds={"load": float("inf"), "reload": np.float32("nan"), "x": np.float64(1)},
    ).to_json()
    assert "\n" not in line
    found = json.loads(line)
    assert found["num_tokens"] == 5
    assert found["predicted_seconds"] == {"load": None, "reload": None, "x": 1.0}


def test_log_must_hold_something():
    with pytest.raises(ValueError, match="0 decisions"):
        DecisionLog(capacity=0)


def test_a_pipe_without_reader_does_not_stop_the_start(tmp_path, caplog):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    log = DecisionLog(path=path)
    log.open()
    assert "no regular file" in caplog.text
