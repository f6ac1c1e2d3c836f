import json

from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.replay import ReplayPlan, replay
from kvtiers.simulate.report import notes, page, rows, write_report
from tests.simulate.test_replay import TIERS

CHAT = generate(Workload("chat", 40, seed=1))
MACHINE = MachinePlan("llama-3.1-8b", "h100")


def both():
    shared = {"trace": CHAT, "machine": MACHINE}
    return [
        replay(ReplayPlan(**shared, label="none")),
        replay(ReplayPlan(**shared, config=TIERS, label="tiers", warmup=0.25)),
    ]


def test_files_hold_every_number_and_the_page_needs_no_other(tmp_path):
    replays = both()
    written, _ = write_report(replays, tmp_path / "out", "simulate")
    assert {path.name for path in written} >= {"simulate.json", "simulate.html"}
    first, second = json.loads((tmp_path / "out" / "simulate.json").read_text())["replays"]
    for found in (first, second):
        tokens = found["tokens"]
        assert sum(tokens["hits"].values()) + tokens["computed"] == tokens["prompt"]
        assert len(found["timeline"]["seconds"]) == len(found["timeline"]["kv_use"])
    html = (tmp_path / "out" / "simulate.html").read_text()
    assert 'src="http' not in html
    assert "where the prompts" in html


def test_rows_compare_each_with_the_first():
    replays = both()
    by_name = {row.name: row for row in rows(replays)}
    assert by_name["hits in dram"].cells[0] == "-"
    assert by_name["TTFT p90"].changes[0][-1] == "%"
    assert {
        "ITL p90",
        "output tokens/s",
        "infinite cache",
        "written to nvme, a device and day",
    } <= set(by_name)


def test_notes_say_what_is_not_measured():
    assert "The first 10 requests only filled the caches." in notes(both()[1])
    found = page(both(), None)
    assert "tiers: The first 10 requests" in found
    assert "matplotlib is not installed" in found
