"""Promises of `kvtiers.bench.paper` and its report: predictions on paper, and what shows them."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser

import pytest

from kvtiers.bench.paper import PaperPlan, run_paper
from kvtiers.bench.paper_report import NO_PICTURES, page, write_report
from kvtiers.cost.known_models import KNOWN_MODELS
from kvtiers.cost.model_source import load_shape
from kvtiers.model.errors import ConfigError

LLAMA_ON_H100 = PaperPlan("llama-3.1-8b", "h100", stores=("nvme-gen5", "nvme-gen4", "sata"))


@pytest.fixture(scope="module")
def result():
    return run_paper(LLAMA_ON_H100)


def tier(result, name: str):
    return next(tier for tier in result.tiers if tier.name == name)


class TestPredictions:
    def test_every_length_is_there_on_every_tier(self, result):
        assert [tier.name for tier in result.tiers] == ["dram", *LLAMA_ON_H100.stores]
        for found in result.tiers:
            assert tuple(point.num_tokens for point in found.points) == LLAMA_ON_H100.lengths

    def test_recompute_is_the_same_on_every_tier_and_grows_faster_than_reload(self, result):
        times = [[point.recompute_seconds for point in tier.points] for tier in result.tiers]
        assert all(row == times[0] for row in times)
        for found in result.tiers:
            gains = [point.gain for point in found.points]
            assert gains[-1] > gains[0]

    def test_slower_media_break_even_later_or_never(self, result):
        even = [tier.break_even_tokens for tier in result.tiers]
        assert even[-1] is None  # SATA up to 128k tokens
        assert even[:-1] == sorted(even[:-1])
        assert 0 < even[0] < 1024 < even[2] < 32_768

    @pytest.mark.parametrize("name", ["dram", "nvme-gen5", "nvme-gen4"])
    def test_break_even_is_where_reload_becomes_faster(self, result, name):
        even = tier(result, name).break_even_tokens
        plan = LLAMA_ON_H100
        lengths = (even - plan.block_size + 1, even + 1)
        around = run_paper(PaperPlan(plan.model, plan.hardware, plan.stores, lengths=lengths))
        before, after = tier(around, name).points
        assert before.gain <= 1 < after.gain

    def test_the_planner_is_never_worse_than_either_and_a_split_never_worse_than_it(self, result):
        for found in result.tiers:
            for point in found.points:
                better = min(point.recompute_seconds, point.reload_seconds)
                assert point.split_seconds <= point.chosen_seconds * (1 + 1e-12)
                assert point.chosen_seconds <= better * (1 + 1e-12)
                assert point.split_gain >= 1 - 1e-12

    def test_where_load_and_compute_are_alike_a_split_gains(self, result):
        point = next(p for p in tier(result, "nvme-gen4").points if p.num_tokens == 8192)
        assert 0.9 < point.gain < 1.1
        assert point.split_gain > 1.5
        assert 0 < point.num_split_tokens < 8192

    def test_fp8_kv_halves_what_is_loaded(self, result):
        fp8 = run_paper(PaperPlan("llama-3.1-8b", "h100", ("nvme-gen4",), kv_dtype="fp8"))
        assert fp8.kv_nbytes_per_token == result.kv_nbytes_per_token / 2
        assert fp8.tiers[1].break_even_tokens < tier(result, "nvme-gen4").break_even_tokens

    def test_ranks_share_the_disk_and_compute_faster(self, result):
        eight = run_paper(PaperPlan("llama-3.1-8b", "h100", ("nvme-gen4",), tensor_parallel_size=8))
        assert "8 x H100 SXM" in eight.title
        later, one = eight.tiers[1].break_even_tokens, tier(result, "nvme-gen4").break_even_tokens
        assert later is None or later > one

    @pytest.mark.parametrize("model", sorted(KNOWN_MODELS))
    def test_every_known_model_can_be_compared(self, model):
        found = run_paper(PaperPlan(model, "h200", ("nvme-gen5",), lengths=(512, 8192)))
        assert all(point.reload_seconds > 0 for t in found.tiers for point in t.points)

    def test_weights_that_do_not_fit_are_noted(self):
        notes = run_paper(PaperPlan("llama-3.1-70b", "h100")).notes
        assert any("141 GB of weights a device do not fit 80 GB" in note for note in notes)
        eight = PaperPlan("llama-3.1-70b", "h100", tensor_parallel_size=8)
        assert len(run_paper(eight).notes) == 1

    def test_of_layers_with_a_window_little_is_loaded(self):
        """Gemma 3: 10 of 62 layers attend to everything, the others to 1,024 tokens."""
        found = run_paper(PaperPlan("gemma-3-27b", "h100", ("nvme-gen4",), lengths=(65_537,)))
        point, last = found.tiers[1].points[0], found.tiers[1].points[0].reload_seconds
        everything = 65_536 * found.kv_nbytes_per_token / 6.9e9
        needed = (10 / 62 + 52 / 62 * 1040 / 65_536) * everything
        assert needed < last < 1.2 * needed + 0.05
        assert point.num_chosen_tokens == 65_536


class TestInput:
    config = dict(KNOWN_MODELS["qwen3-8b"].config)

    @pytest.mark.parametrize("folder", [True, False])
    def test_a_config_json_or_its_folder_is_a_model(self, tmp_path, folder):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(self.config))
        shape, source = load_shape(str(tmp_path if folder else path))
        assert shape == KNOWN_MODELS["qwen3-8b"].shape
        assert source == str(path)

    def test_a_missing_field_names_the_file_and_the_field(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**self.config, "hidden_size": None}))
        with pytest.raises(ConfigError, match=r"config\.json: .*'hidden_size'"):
            load_shape(str(path))

    @pytest.mark.parametrize(
        ("text", "match"), [("{", "cannot be read as JSON"), ("[1]", "holds a list")]
    )
    def test_a_file_that_is_no_configuration_is_refused(self, tmp_path, text, match):
        path = tmp_path / "model.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=match):
            load_shape(str(path))

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"none\.json: no such file"):
            load_shape(str(tmp_path / "none.json"))

    @pytest.mark.parametrize(
        ("changed", "match"),
        [
            ({"model": "gpt-5"}, "no model 'gpt-5' is known"),
            ({"hardware": "tpu"}, "no hardware 'tpu' is known"),
            ({"stores": ("tape",)}, "no storage 'tape' is known"),
            ({"dtype": "int3"}, "no figure for 'int3'; known: bf16, fp8"),
            ({"kv_dtype": "int3"}, "no data type 'int3'"),
            ({"lengths": (8,)}, "more than a block of 16"),
            ({"lengths": ()}, "lengths"),
            ({"tensor_parallel_size": 0}, "at least 1"),
        ],
    )
    def test_wrong_input_says_what_would_be_right(self, changed, match):
        with pytest.raises(ConfigError, match=match):
            run_paper(PaperPlan(**{"model": "llama-3.1-8b", "hardware": "h100", **changed}))


class Links(HTMLParser):
    """Collects what a page would fetch, and checks that its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


class TestReport:
    def test_three_files_are_written(self, result, tmp_path):
        pytest.importorskip("matplotlib")
        written, missing = write_report(result, tmp_path / "new" / "folder", "llama")
        assert missing is None
        assert sorted(path.name for path in written) == ["llama.html", "llama.json", "llama.png"]
        assert (tmp_path / "new/folder/llama.png").read_bytes().startswith(b"\x89PNG")

    def test_json_holds_every_point_and_the_source_of_every_figure(self, result, tmp_path):
        write_report(result, tmp_path, "llama")
        data = json.loads((tmp_path / "llama.json").read_text())
        assert data["plan"]["model"] == "llama-3.1-8b"
        for found, expected in zip(data["tiers"], result.tiers, strict=True):
            assert found["break_even_tokens"] == expected.break_even_tokens
            gains = [point["gain"] for point in found["points"]]
            assert gains == [point.gain for point in expected.points]
        assert len(data["assumptions"]) > 15
        assert all(figure["source"] for figure in data["assumptions"].values())

    @pytest.mark.parametrize("picture", [None, b"\x89PNG"])
    def test_the_page_needs_no_other_file(self, result, picture):
        links = Links()
        text = page(result, picture)
        links.feed(text)
        assert links.open == []
        assert all(url.startswith("data:") for url in links.fetched)
        assert len(links.fetched) == (picture is not None)
        assert (NO_PICTURES.replace("'", "&#x27;") in text) == (picture is None)

    def test_the_page_shows_names_as_text(self, tmp_path):
        path = tmp_path / "<b>config.json"
        path.write_text(json.dumps(dict(KNOWN_MODELS["qwen3-8b"].config)))
        text = page(run_paper(PaperPlan(str(path), "h100")), None)
        assert "<b>config" not in text
        assert "&lt;b&gt;config" in text

    def test_without_matplotlib_there_is_no_picture_and_a_reason(
        self, result, tmp_path, monkeypatch
    ):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        written, missing = write_report(result, tmp_path, "llama")
        assert missing == NO_PICTURES
        assert sorted(path.suffix for path in written) == [".html", ".json"]

    def test_a_folder_that_cannot_be_made_is_named(self, result, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="file: cannot write there"):
            write_report(result, tmp_path / "file", "llama")
