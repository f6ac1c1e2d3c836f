"""YAML text as plain data that remembers the line of every key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

KeyPath = tuple[str | int, ...]
_MAX_NODES: Final = 10_000  # a configuration has some thirty; more is an alias bomb
_PREFIX: Final = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration.

    Attributes:
        path: keys and list positions that lead to the value.
        message: what is wrong; what would be right.
        line: 1-based, None where there is no text.
    """

    path: KeyPath
    message: str
    line: int | None = None

    def render(self, source: str) -> str:
        """Return the problem as one line: ``file.yaml:3: tiers[0].capacity: message``."""
        where = f"{source}:{self.line}" if self.line is not None else source
        path = path_text(self.path)
        return f"{where}: {path}: {self.message}" if path else f"{where}: {self.message}"


@dataclass(slots=True)
class Document:
    """A parsed configuration.

    Attributes:
        data: dicts, lists and scalars; None when the text could not be parsed.
        lines: 1-based line of the key or list item at each path.
        problems: what is wrong with the text itself.
    """

    data: object = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line_of(self, path: KeyPath) -> int | None:
        """Return the line of a path, or of its nearest parent that the text holds."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None


def path_text(path: KeyPath) -> str:
    """Return a path as people write it: ``tiers[0].capacity``."""
    parts = (part if isinstance(part, int) or part.isprintable() else repr(part) for part in path)
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")


def read_yaml(text: str) -> Document:
    """Parse one YAML document; what is wrong with it lies in `Document.problems`.

    Scalars follow the YAML 1.2 core schema: ``on`` and ``off`` are text, not booleans.
    """
    document = Document()
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        document.problems.append(_syntax_problem(error))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"character U+{error.character:04X} is not allowed in YAML; remove it"
        document.problems.append(Problem((), message, line))
    except RecursionError:
        document.problems.append(Problem((), "is nested too deeply; write a flat file", 1))
    else:
        if root is None:
            message = "is empty; write at least 'tiers: [{kind: dram, capacity: 4GiB}]'"
            document.problems.append(Problem((), message, 1))
        else:
            _Builder(document).build(root)
    return document


def write_yaml(data: Mapping[str, Any]) -> str:
    """Return plain data as YAML text, keys in the given order."""
    return yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )


class _Builder:
    """Turns a node tree into plain data, and notes lines and problems."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._num_nodes = 0
        self._open: set[int] = set()

    def build(self, root: yaml.Node) -> None:
        data = self._value(root, ())
        self._document.data = data if self._num_nodes <= _MAX_NODES else None

    def _value(self, node: yaml.Node, path: KeyPath) -> object:
        self._document.lines.setdefault(path, _line(node))
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            if self._num_nodes == _MAX_NODES + 1:
                self._report(node, (), f"has more than {_MAX_NODES} values; write fewer aliases")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self._report(node, path, "contains itself through an alias; write the value out")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._value(item, (*path, i)) for i, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))
        raise AssertionError(f"unexpected YAML node {node!r}")

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._report(key_node, path, "a key is a list or mapping; write a plain word")
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key == "<<":
                self._report(key_node, path, "'<<' does not merge here; write the keys out")
                continue
            if key_node.style is None and ":" in key and not value_node.value:
                name, _, rest = key.partition(":")
                self._report(
                    key_node, path, f"{key!r} has no space after ':'; write '{name}: {rest}'"
                )
                continue
            if key in values:
                first = self._document.lines[here]
                self._report(key_node, here, f"is given twice, first on line {first}; keep one")
                continue
            self._document.lines[here] = _line(key_node)
            values[key] = self._value(value_node, here)
        return values

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        text, kind = str(node.value), str(node.tag).removeprefix(_PREFIX)
        if kind in ("str", "null"):
            return text if kind == "str" else None
        if kind in _RESOLVERS and _RESOLVERS[kind].fullmatch(text):
            if kind == "bool":
                return text.lower() == "true"
            return int(text) if kind == "int" else float(text)
        self._report(node, path, f"has the tag {node.tag!r}; write the value without a tag")
        return None

    def _report(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        self._document.problems.append(Problem(path, message, _line(node)))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _syntax_problem(error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    what = " ".join(str(error.problem or error.context or "cannot be parsed").split())
    begun = error.context_mark.line + 1 if error.context_mark else 0
    remedy = "indent with spaces and quote text with special characters"
    if "'\\t'" in what:
        remedy = "indent with spaces, not tabs"
    elif "single document" in str(error.context):
        what, remedy = "holds more than one document", "keep one and remove the '---' lines"
    elif "alias" in what:
        remedy = "write the value out, or quote a text that begins with '*'"
    elif what == "could not find expected ':'":  # noticed a line too late
        what, mark = "a key without ':' and a value", error.context_mark
        remedy = "write 'key: value', with a space after the colon"
    elif what.startswith("expected <block end>"):
        what = f"this does not line up with what begins on line {begun}"
        remedy = "begin the keys of a mapping, and the '-' of a list, all in one column"
    elif "flow" in str(error.context):
        remedy = f"end with '}}' or ']' what begins on line {begun}, and quote special characters"
    return Problem((), f"is not YAML: {what}; {remedy}", mark.line + 1 if mark else 1)


# The YAML 1.2 core schema, without hexadecimal, octal, infinity and NaN.
_RESOLVERS: Final = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]{1,300}"),
    "float": re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


for _kind, _pattern in _RESOLVERS.items():
    _anchored = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Loader.add_implicit_resolver(_PREFIX + _kind, _anchored, None)
    _Dumper.add_implicit_resolver(_PREFIX + _kind, _anchored, None)
