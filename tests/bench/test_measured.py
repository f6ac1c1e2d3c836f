"""A whole measured comparison of a tiny model, through the real tiers."""

import json
import math
import re
from dataclasses import replace

import pytest

from kvtiers.bench.lives import Lives
from kvtiers.bench.measure import (
    SPLIT,
    BenchError,
    Measured,
    Splits,
    Watch,
    measure_splits,
    measure_ways,
)
from kvtiers.bench.measured_report import draw, page, write_measured_report
from kvtiers.bench.measured_run import POINTS_FILE, run_measured
from kvtiers.bench.plan import MeasuredPlan
from kvtiers.bench.scratch import PREFIX
from kvtiers.bench.split import Split, measure_split
from kvtiers.engines.reference.shape import ReferenceShape
from kvtiers.model.errors import ConfigError, ProtocolError

PLAN = MeasuredPlan(
    "tiny",
    ReferenceShape(3, 32, 4, 2, 8, 48, 512),
    lengths=(24, 40, 64),
    num_repeats=2,
    block_size=8,
    max_tokens_per_step=32,
    num_stages=3,
)


def quiet(what, num_done):
    pass


def watch(keep=lambda point: None):
    return Watch(keep, lambda what: None, math.inf)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    result = run_measured(PLAN, folder / "stores", folder / "out", False, quiet)
    assert list((folder / "stores").iterdir()) == []  # it cleans up after itself
    return result, folder / "out"


def test_every_way_is_measured_at_every_length(result):
    points = [point for point in result[0].points if point.way != SPLIT]
    assert len(points) == 4 * 3 * 2
    for point in points:
        most = (point.num_tokens - 1) // 8
        assert point.num_loaded_blocks == (0 if point.way == "recompute" else most)
        assert (point.load_seconds > 0) == (point.way != "recompute")
        assert point.ttft_seconds >= point.load_seconds + point.rest_seconds
    assert {c.way for c in result[0].verdict.comparisons} == {"recompute", "dram", "nvme", "lmdb"}


def test_finished_points_are_kept_and_not_measured_again(result):
    first, out = result
    held = json.loads((out / POINTS_FILE).read_text())
    kept = replace(PLAN, max_seconds=1e-9)  # no time for anything new
    again = run_measured(kept, None, out, True, quiet)
    assert again.points[: len(held["points"])] == first.points
    assert again.verdict.comparisons == first.verdict.comparisons


def test_a_run_that_was_cut_off_goes_on(tmp_path):
    short = replace(PLAN, tiers=("dram",), num_repeats=1)
    cut = run_measured(replace(short, max_seconds=1e-9), None, tmp_path, False, quiet)
    assert cut.points == ()
    assert cut.verdict is None
    assert any("--resume" in note for note in cut.notes)
    whole = run_measured(short, None, tmp_path, True, quiet)
    held = json.loads((tmp_path / POINTS_FILE).read_text())
    held["points"] = held["points"][:3]
    (tmp_path / POINTS_FILE).write_text(json.dumps(held))
    again = run_measured(short, None, tmp_path, True, quiet)
    assert again.points[:3] == whole.points[:3]
    assert len(again.points) == len(whole.points) == 6


def test_a_throttle_that_was_found_is_kept(tmp_path):
    plan = replace(PLAN, tiers=("dram", "nvme"), num_repeats=1, num_stages=1, balanced=True)
    first = run_measured(plan, None, tmp_path, False, quiet)
    assert first.plan.throttle > 0
    again = run_measured(plan, None, tmp_path, True, quiet)
    assert again.plan == first.plan
    assert again.points == first.points


def test_folders_of_runs_that_were_killed_are_removed(tmp_path):
    left = tmp_path / f"{PREFIX}old"
    left.mkdir()
    (left / "lock").touch()
    run_measured(replace(PLAN, tiers=("dram",), num_repeats=1), tmp_path, None, False, quiet)
    assert list(tmp_path.iterdir()) == []


def test_points_of_another_run_are_not_mixed_in(result):
    _, out = result
    with pytest.raises(ConfigError, match=r"points of another run \(num_repeats 2, now 3\)"):
        run_measured(replace(PLAN, num_repeats=3), None, out, True, quiet)
    with pytest.raises(ConfigError, match="--resume needs the folder"):
        run_measured(PLAN, None, None, True, quiet)


@pytest.mark.parametrize("text", ["{}", '{"plan": [], "points": []}', "[" * 100_000])
def test_a_file_that_holds_no_points_is_named(tmp_path, text):
    (tmp_path / POINTS_FILE).write_text(text)
    with pytest.raises(ConfigError, match="is no file of points"):
        run_measured(PLAN, None, tmp_path, True, quiet)


def test_a_reload_that_gives_another_token_stops_the_bench(tmp_path):
    wrong = Measured("recompute", 24, 0, 1.0, 0, 0.0, 1.0, token_id=-1)
    with pytest.raises(BenchError, match="gave token"):
        measure_ways(replace(PLAN, tiers=("dram",)), tmp_path, [wrong], watch())


@pytest.mark.parametrize("num_blocks", [0, 3, 7])
def test_a_split_gives_the_token_of_a_computed_prompt(tmp_path, num_blocks):
    lives = Lives(PLAN, tmp_path)
    plain = lives.plain()
    (expected,) = plain.generate(lives.document).token_ids
    lives.fill(["nvme"], PLAN.num_stages)
    reader = lives.reader("nvme", PLAN.num_stages)
    for layer in reader.kv.layers:
        layer.fill_(1e3)
    seconds, token = measure_split(reader, lives.document, Split(64, num_blocks))
    assert token == expected
    assert seconds > 0
    reader.close()


def test_a_split_of_blocks_that_are_not_there_is_no_measurement(tmp_path):
    lives = Lives(PLAN, tmp_path)
    reader = lives.reader("nvme", PLAN.num_stages)
    with pytest.raises(ProtocolError, match="blocks of a split were not loaded"):
        measure_split(reader, lives.document, Split(64, 3))
    reader.close()
    with pytest.raises(ProtocolError, match="needs an engine with tiers"):
        measure_split(lives.plain(), lives.document, Split(64, 3))


def test_splits_are_measured_in_turn(tmp_path):
    wanted = Splits("nvme", [64], lambda points, num_tokens: 3)
    computed = [Measured("recompute", 64, 0, 1.0, 0, 0.0, 1.0, _token(tmp_path))]
    kept = []
    points = measure_splits(PLAN, tmp_path / "b", wanted, computed, watch(kept.append))
    assert [point.num_loaded_blocks for point in points[1:]] == [0, 7, 3, 0, 7, 3]
    assert kept == points[1:]
    assert measure_splits(PLAN, tmp_path / "c", wanted, points, watch()) == points


def _token(folder):
    lives = Lives(PLAN, folder / "a")
    return lives.plain().generate(lives.document).token_ids[0]


def test_the_report_is_one_page_that_needs_no_other_file(result, tmp_path):
    written, missing = write_measured_report(result[0], tmp_path)
    assert {path.suffix for path in written} == {".json", ".html"} | (
        set() if missing else {".png"}
    )
    text = (tmp_path / "bench.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)', text)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert json.loads((tmp_path / "bench.json").read_text())["verdict"]["complete"] is True


def test_without_matplotlib_the_page_says_so(result, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert draw(result[0]) is None
    _, missing = write_measured_report(result[0], tmp_path)
    assert "kvtiers[bench]" in missing
    assert "matplotlib is not installed" in page(result[0], None)


def test_a_folder_that_cannot_be_written_is_named(result, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write there"):
        write_measured_report(result[0], tmp_path / "file")
    with pytest.raises(ConfigError, match="no stores can be made there"):
        run_measured(PLAN, tmp_path / "file", None, False, quiet)
