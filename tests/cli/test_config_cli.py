import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtiers import __version__
from kvtiers.cli.main import app
from kvtiers.model.config import ENVIRONMENT_VARIABLE, json_schema, parse_config

REPOSITORY = Path(__file__).parents[2]
RIGHT = """\
tiers:
  - {kind: dram, capacity: 64GiB}
  - {kind: memory, capacity: 192GiB}
"""
WRONG = """\
tiers:
  - {kind: dram, capacity: 64}
plicy: {}
"""


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def file(tmp_path):
    """Write a configuration file, return its path."""

    def write(text: str) -> str:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return str(path)

    return write


def kvtiers(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_check_of_a_right_file_is_one_line_with_the_totals(file):
    path = file(RIGHT)
    result = kvtiers("config", "check", path)
    assert result.exit_code == 0
    assert result.output == (
        f"{path}: ok: dram 64GiB (pin auto), memory 192GiB (write through, admit always); "
        "256GiB of host memory in total; offload eager, cost auto with margin 0.05\n"
    )


def test_check_tells_memory_from_disk(file, tmp_path):
    path = file(
        "tiers: [{kind: dram, capacity: 1MiB}, "
        f"{{kind: nvme, paths: [{tmp_path / 'kv'}], capacity: 2MiB}}]"
    )
    result = kvtiers("config", "check", path, "--here")
    assert result.exit_code == 0
    assert "1MiB of host memory and 2MiB on disk in total" in result.output


def test_check_here_asks_the_machine(file, tmp_path):
    path = file(
        "tiers:\n  - {kind: dram, capacity: 1MiB}\n"
        f"  - {{kind: nvme, paths: [{tmp_path / 'kv'}], capacity: 800TiB}}"
    )
    assert kvtiers("config", "check", path).exit_code == 0
    result = kvtiers("config", "check", path, "--here")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{path}:3: tiers[1].capacity: the file store at ")


def test_check_here_names_the_line_of_a_calibration_that_is_none(file, tmp_path):
    path = file(
        "tiers:\n  - {kind: dram, capacity: 1MiB}\n"
        f"cost:\n  calibration: {tmp_path / 'none.json'}\n"
    )
    result = kvtiers("config", "check", path, "--here")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{path}:4: cost.calibration: {tmp_path}/none.json: no such")


def test_check_of_a_wrong_file_lists_all_problems_and_exits_2(file):
    path = file(WRONG)
    result = kvtiers("config", "check", path)
    assert (result.exit_code, result.stdout) == (2, "")
    first, second = result.stderr.splitlines()
    assert first == f"{path}:2: tiers[0].capacity: 64 has no unit; write 64GiB"
    assert second.startswith(f"{path}:3: plicy: unknown key; did you mean 'policy'?")


def test_check_of_a_missing_file_exits_2_without_a_traceback(tmp_path):
    result = kvtiers("config", "check", str(tmp_path / "none.yaml"))
    assert result.exit_code == 2
    assert "no such file" in result.stderr
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_check_prints_json(file):
    path = file(RIGHT)
    assert json.loads(kvtiers("config", "check", path, "--json").stdout) == {
        "ok": True,
        "source": path,
        "tiers": [
            {"kind": "dram", "name": "dram", "capacity_nbytes": 64 * 2**30},
            {"kind": "memory", "name": "memory", "capacity_nbytes": 192 * 2**30},
        ],
        "memory_nbytes": 256 * 2**30,
        "disk_nbytes": 0,
    }


def test_check_prints_problems_as_json(file):
    result = kvtiers("config", "check", file(WRONG), "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"]) == (2, False)
    assert answer["problems"] == result.stderr.splitlines()


def test_show_prints_a_file_that_means_the_same(file):
    path = file(RIGHT)
    result = kvtiers("config", "show", path)
    assert result.stdout.startswith(f"# source: {path}\n")
    assert parse_config(result.stdout) == parse_config(RIGHT)


def test_show_without_a_path_follows_the_environment(file, monkeypatch):
    path = file(RIGHT)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, path)
    assert kvtiers("config", "show").stdout.startswith(f"# source: {ENVIRONMENT_VARIABLE}={path}\n")


def test_show_without_any_choice_says_defaults():
    answer = json.loads(kvtiers("config", "show", "--json").stdout)
    assert answer["source"] == "<defaults>"
    assert answer["config"]["tiers"][0]["capacity"] == "4GiB"
    assert answer["config"]["copy"] == {"threads": "auto", "native": "auto"}


def test_show_of_a_wrong_file_exits_2(file):
    assert kvtiers("config", "show", file(WRONG)).exit_code == 2


def test_schema_is_json_schema():
    assert json.loads(kvtiers("config", "schema").stdout) == json_schema()
    assert json.loads(kvtiers("config", "schema", "--json").stdout) == json_schema()


def test_schema_is_either_markdown_or_json():
    result = kvtiers("config", "schema", "--json", "--markdown")
    assert (result.exit_code, result.stdout) == (2, "")


def test_committed_reference_page_is_current():
    page = (REPOSITORY / "docs/reference/config.md").read_text()
    assert kvtiers("config", "schema", "--markdown").stdout == page


def test_reference_page_of_the_command_line_names_every_verb():
    page = (REPOSITORY / "docs/reference/cli.md").read_text()
    for group in app.registered_groups:
        for command in group.typer_instance.registered_commands:
            assert f"## `kvtiers {group.name} {command.callback.__name__}" in page
    for command in app.registered_commands:
        assert f"## `kvtiers {command.name}" in page


def test_version_is_printed_by_the_module():
    command = [sys.executable, "-W", "error", "-m", "kvtiers", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == f"kvtiers {__version__}\n"


def test_wrong_file_shows_no_traceback_in_a_real_process(file):
    command = [sys.executable, "-m", "kvtiers", "config", "check", file(WRONG)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_without_a_verb_help_is_shown():
    result = kvtiers()
    assert "Usage" in result.output
    assert "config" in result.output
