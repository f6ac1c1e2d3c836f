"""The pages for people: their links lead somewhere, and what they tell you to write is right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from kvtiers.cli.main import app
from kvtiers.control.controller import Controller
from kvtiers.model.config import parse_config

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")
TIERS_FIRST = re.compile(r"\A(?:#.*\n)?tiers:")

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix()
)


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of the fenced blocks of one language."""
    text = page.read_text()
    for fence in FENCE.finditer(text):
        if fence["language"] == language:
            yield text.count("\n", 0, fence.start()) + 2, fence["body"]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in HEADING.findall(prose(page)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        num = next(
            n for n in range(len(found) + 1) if (slug if not n else f"{slug}-{n}") not in found
        )
        found.add(slug if not num else f"{slug}-{num}")
    return found


def test_the_pages_are_found():
    assert len(PAGES) > 5


@each_page
def test_links_lead_to_files_and_headings(page):
    wrong = []
    for target in LINK.findall(prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(path):
            wrong.append(f"{target}: no such heading; there are {sorted(anchors(path))}")
    assert not wrong


@each_page
def test_configurations_are_right(page):
    for line, text in blocks(page, "yaml"):
        if TIERS_FIRST.match(text):
            parse_config(text, f"{page.name}:{line}")


@each_page
def test_commands_exist(page):
    group = typer.main.get_command(app)
    for line, text in blocks(page, "console"):
        for command in re.findall(r"^(?:\$ )?kvtiers +(.+)$", text, re.MULTILINE):
            words = command.split()
            if words[0].startswith("-"):
                continue
            assert words[0] in group.commands, f"{page.name}:{line}: kvtiers {command}"
            found = group.commands[words[0]]
            verbs = getattr(found, "commands", None)
            assert verbs is None or words[1] in verbs, f"{page.name}:{line}: kvtiers {command}"
            found = found if verbs is None else verbs[words[1]]
            known = {option for parameter in found.params for option in parameter.opts}
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= known | {"--help"}, f"{page.name}:{line}: kvtiers {command}"


@each_page
def test_tests_that_are_named_exist(page):
    wrong = []
    for name, function in TEST_NAME.findall(page.read_text()):
        path = REPOSITORY / name
        if not path.is_file():
            wrong.append(name)
        elif function:
            tree = ast.parse(path.read_text())
            names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            if function not in names:
                wrong.append(f"{name}::{function}")
    assert not wrong


def test_the_table_of_verbs_is_that_of_the_controller():
    page = (REPOSITORY / "docs/explanation/two-planes.md").read_text()
    section = page.partition("## The verbs")[2].partition("## The flow")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = {verb for row in rows for verb in re.findall(r"`(\w+)`", row)}
    methods = {name for name in vars(Controller) if not name.startswith("_")}
    assert listed == methods
