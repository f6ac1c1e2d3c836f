"""Reads vLLM's source without importing it, and compares the connector with it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
BASE_CLASSES = ("KVConnectorBase_V1", "SupportsHMA")
ADAPTER = Path(__file__).parents[2] / "kvtiers" / "engines" / "vllm"

Read = Callable[[str], str | None]
"""Gives the text of one file of vLLM's source by its path, None when there is none."""


@dataclass(frozen=True)
class Method:
    """One method as its definition says it.

    Attributes:
        kind: "method", "property", "classmethod" or "staticmethod".
        parameters: names in order, without self; required: those without a default.
        takes_rest: whether it has ``**kwargs``.
    """

    kind: str
    parameters: tuple[str, ...]
    required: frozenset[str]
    takes_rest: bool
    abstract: bool


def methods_of(source: str, *class_names: str) -> dict[str, Method]:
    """Return the methods that some classes of a file define, by name."""
    found: dict[str, Method] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in class_names:
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    found[item.name] = _method(item)
    return found


def _method(node: ast.FunctionDef) -> Method:
    marks = {getattr(mark, "attr", getattr(mark, "id", "")) for mark in node.decorator_list}
    kinds = marks & {"property", "classmethod", "staticmethod"}
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
    num_optional = len(node.args.defaults)
    required = names[: len(names) - num_optional]
    by_name = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    required += [arg.arg for arg, default in by_name if default is None]
    if "staticmethod" not in kinds:
        required = [name for name in required if name != names[0]]
        names = names[1:]
    return Method(
        kind=kinds.pop() if kinds else "method",
        parameters=tuple(names),
        required=frozenset(required),
        takes_rest=node.args.kwarg is not None,
        abstract="abstractmethod" in marks,
    )


def misfits(ours: dict[str, Method], base: dict[str, Method], own: set[str]) -> list[str]:
    """Return what keeps a connector from standing in for its base class, a line each.

    Args:
        own: methods of ours that no engine calls.
    """
    wrong = []
    for name, method in base.items():
        if method.abstract and name not in ours:
            wrong.append(f"{name}: abstract in vLLM, not implemented")
    for name, method in ours.items():
        if name in own:
            continue
        if name not in base:
            wrong.append(f"{name}: not in vLLM's base class, so that nobody calls it")
        else:
            wrong += [f"{name}: {text}" for text in _misfit(method, base[name])]
    return wrong


def _misfit(ours: Method, base: Method) -> Iterator[str]:
    if ours.kind != base.kind:
        yield f"a {ours.kind}, in vLLM a {base.kind}"
    num = len(base.parameters)
    if ours.parameters[:num] != base.parameters and not ours.takes_rest:
        yield f"takes {ours.parameters}, vLLM gives {base.parameters}"
    extra = ours.required - set(base.parameters)
    if extra:
        yield f"needs {sorted(extra)}, which vLLM does not give"
    needed = {name for name in base.parameters if name not in base.required} & ours.required
    if needed:
        yield f"needs {sorted(needed)}, which vLLM may leave out"
    if base.takes_rest and not ours.takes_rest:
        yield "takes no **kwargs"


def missing_names(read: Read) -> list[str]:
    """Return what the adapter imports from vLLM and the source lacks."""
    missing = []
    for path in sorted(ADAPTER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                place = node.module.replace(".", "/")
                text = read(f"{place}.py") or read(f"{place}/__init__.py")
                if text is None:
                    missing.append(f"{path.name}: no module {node.module}")
                    continue
                defined = _top_level_names(text)
                names = [alias.name for alias in node.names if alias.name not in defined]
                missing += [f"{path.name}: no {name} in {node.module}" for name in names]
    return missing


def _top_level_names(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def check(read: Read) -> list[str]:
    """Compare the connector with one vLLM source; returns what does not fit, [] if all does."""
    base_source = read(BASE)
    if base_source is None:
        return [f"no {BASE}"]
    base = methods_of(base_source, *BASE_CLASSES)
    ours = methods_of((ADAPTER / "connector.py").read_text(), "KVTiersConnector")
    return misfits(ours, base, own={"scheduler_side", "worker_side"}) + missing_names(read)
