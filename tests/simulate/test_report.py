import html
import json
from dataclasses import replace

from kvtiers.observe.page import canvas
from kvtiers.simulate.arrivals import ArrivalPlan
from kvtiers.simulate.generate import Workload, generate
from kvtiers.simulate.machine import MachinePlan
from kvtiers.simulate.replay import ReplayPlan, replay
from kvtiers.simulate.report import draw, notes, page, rows, summary, write_report
from kvtiers.simulate.trace import Trace
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
    about = {"trace": "<b>chat</b>", "seed": 7, "loop": "closed", "media": ["nvme=x"], "rate": None}
    written, _ = write_report(replays, tmp_path / "out", "simulate", about)
    assert {path.name for path in written} >= {"simulate.json", "simulate.html"}
    document = json.loads((tmp_path / "out" / "simulate.json").read_text())
    assert document["about"] == about
    first, second = document["replays"]
    assert (first["config"], second["config"]["tiers"][0]["kind"]) == (None, "dram")
    for found in (first, second):
        tokens = found["tokens"]
        assert sum(tokens["hits"].values()) + tokens["computed"] == tokens["prompt"]
        assert len(found["timeline"]["seconds"]) == len(found["timeline"]["kv_use"])
    found = (tmp_path / "out" / "simulate.html").read_text()
    assert "http" not in found
    assert "<script" not in found
    assert "where the prompts" in found
    assert "<td>trace</td><td>&lt;b&gt;chat&lt;/b&gt;</td>" in found
    assert "<td>seed</td><td>7</td>" in found
    assert "<td>rate</td>" not in found
    assert "- /nowhere/kvtiers" in found


def test_rows_compare_each_with_the_first():
    replays = both()
    by_name = {row.name: row for row in rows(replays)}
    assert by_name["hits in dram"].cells[0] == "-"
    assert by_name["TTFT p90"].changes[0][-1] == "%"
    shares = [replay.tokens.hit_rate for replay in replays]
    points = 100 * (shares[1] - shares[0])
    assert by_name["hit rate"].changes == (f"{points:+.1f} points",)
    assert {
        "ITL p90",
        "queued p90",
        "queued, share of all TTFT",
        "output tokens/s",
        "infinite cache",
        "written to nvme, a device and day",
    } <= set(by_name)


def test_what_did_not_change_has_no_sign_of_less():
    _, tiers = both()
    hits = {**tiers.tokens.hits, "hbm": tiers.tokens.hits["hbm"] - 1}
    less = replace(tiers, tokens=replace(tiers.tokens, hits=hits))
    by_name = {row.name: row for row in rows([tiers, less])}
    assert by_name["hit rate"].changes == ("+0.0 points",)
    less = replace(tiers, output_tokens_per_second=tiers.output_tokens_per_second * (1 - 1e-6))
    by_name = {row.name: row for row in rows([tiers, less])}
    assert by_name["output tokens/s"].changes == ("+0.0%",)


def test_notes_say_what_is_not_measured():
    assert "The first 10 requests only filled the caches." in notes(both()[1])
    found = page(both(), None, {})
    assert "tiers: The first 10 requests" in found
    assert "matplotlib is not installed" in found


def test_a_label_that_looks_like_mathematics_is_a_label(tmp_path):
    shared = {"trace": CHAT, "machine": MACHINE}
    replays = [replay(ReplayPlan(**shared, label=label)) for label in ("a$\\foo$", "_$x")]
    written, _ = write_report(replays, tmp_path, "labels", {})
    assert len(written) == (3 if canvas() else 2)


def test_a_picture_of_an_earlier_time_does_not_stay_beside_new_numbers(tmp_path, monkeypatch):
    replays = both()
    (tmp_path / "again.png").write_bytes(b"an older one")
    monkeypatch.setattr("kvtiers.simulate.report.canvas", lambda: None)
    _, missing = write_report(replays, tmp_path, "again", {})
    assert missing is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.html", "again.json"]


def test_notes_say_why_blocks_were_not_kept_and_how_short_a_day_was():
    _, tiers = both()
    tiers = replace(
        tiers,
        seconds=30.0,
        written_nbytes={"nvme": 10},
        dropped={"no_room": 3, "no_room_nvme": 2, "off_lmdb": 1, "unwritten": 4, "new_reason": 1},
    )
    said = "\n".join(notes(tiers))
    blocks = "blocks of 512 tokens were not offloaded"
    assert f"3 {blocks} (no_room): DRAM was full" in said
    assert "it is too small, or a store below it too slow." in said
    assert f"2 {blocks} (no_room_nvme): nvme was full" in said
    assert "1 block of 512 tokens was not offloaded (off_lmdb): lmdb was not used" in said
    assert "4 blocks of 512 tokens were not written back (unwritten): DRAM needed" in said
    assert "(new_reason)." in said
    alone = "\n".join(notes(replace(tiers, written_nbytes={}, dropped={"no_room": 3})))
    assert "it is too small." in alone
    failed = notes(replace(tiers, failed={"timed_out": 1, "corrupt": 2}))
    assert (
        "1 block of 512 tokens was not moved (timed_out): they did not begin in time, and were "
        "given up."
    ) in failed
    assert "2 blocks of 512 tokens were not moved (corrupt)." in failed
    assert "Bytes a day are those of 30 s" in said
    assert "Bytes a day" not in "\n".join(notes(replace(tiers, seconds=3600.0)))


def test_prompts_that_are_too_short_to_be_hit_are_said_where_they_matter():
    short = [request for request in CHAT.requests if request.num_prompt_tokens <= 512]
    assert not short, "chat begins with long prompts"
    assert not any("block of this trace" in text for text in notes(both()[0]))
    cut = [
        replace(request, num_prompt_tokens=512, block_ids=request.block_ids[:1])
        if idx < 10
        else request
        for idx, request in enumerate(CHAT.requests)
    ]
    found = replay(ReplayPlan(Trace("cut", 512, tuple(cut)), MACHINE))
    share = 10 * 512 / found.tokens.prompt
    (said,) = (text for text in notes(found) if "block of this trace" in text)
    assert said.startswith(f"10 prompts of 40 (25%; {share:.1%} of the prompt tokens) have no more")
    assert "the 512 tokens of a block of this trace" in said


def test_the_page_begins_with_the_answer_and_has_no_empty_picture():
    replays = both()
    found = page(replays, None, {"media": {}})
    assert all(html.escape(text) in found for text in summary(replays))
    assert "media" not in found
    if (picture := draw(replays[:1])) is not None:
        assert height(draw(replays)) > height(picture)


def height(png: bytes) -> int:
    """Pixels, as the header says."""
    return int.from_bytes(png[20:24], "big")


def test_a_queue_of_a_closed_loop_is_not_blamed_on_the_arrivals():
    crowd = generate(Workload("bursts", 200, seed=1))
    plan = {"trace": crowd, "machine": replace(MACHINE, max_num_seqs=8)}
    closed = replay(ReplayPlan(**plan, arrivals=ArrivalPlan(concurrency=150)))
    opened = replay(ReplayPlan(**plan, arrivals=ArrivalPlan(speed=1e4)))
    (said,) = (text for text in notes(closed) if "queue grew" in text)
    assert "does not admit 150 sessions at a time" in said
    assert "--speed" not in said
    assert "does not keep up" not in summary([closed])[0]
    (said,) = (text for text in notes(opened) if "queue grew" in text)
    assert "Slow the arrivals (--speed)" in said
    assert "does not keep up" in summary([opened])[0]
