"""What is wrong with a configuration, in words that name the remedy."""

from __future__ import annotations

import difflib
import json
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from kvtiers.model.config_yaml import Document, KeyPath, Problem
from kvtiers.model.units import as_written

TIER_KINDS: Final = ("dram", "memory", "nvme", "lmdb")
TIER_LIST: Final = "tier_list"
"""Type of the pydantic error that repeats what `tier_list_problems` says."""

_COMPARISONS: Final = {
    "greater_than": ("gt", "must be above"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be below"),
    "less_than_equal": ("le", "must be at most"),
}
_SWITCHES: Final = {"true": "on", "yes": "on", "false": "off", "no": "off"}
_NOT_A_MAPPING: Final = ("model_type", "dict_type", "model_attributes_type")


def schema_problems(
    error: ValidationError, document: Document, root: type[BaseModel]
) -> list[Problem]:
    """Return the errors that pydantic found, in the words of the configuration file."""
    problems = []
    for detail in error.errors(include_url=False):
        if detail["type"] == TIER_LIST:
            continue
        loc: KeyPath = tuple(detail["loc"])
        if loc[:1] == ("tiers",) and len(loc) > 2:
            loc = (*loc[:2], *loc[3:])  # pydantic names the tier's kind after its position
        if detail["type"].startswith("union_tag"):
            loc = (*loc, "kind")
        model = _model_at(loc[:-1], document.data, root)
        message = _message(detail["type"], detail, loc, model)
        problems.append(Problem(loc, message, document.line_of(loc)))
    return problems


MAX_STORES: Final = 8  # an offload names its stores by the bits of one byte


def tier_list_problems(tiers: object) -> list[tuple[KeyPath, str]]:
    """Return what is wrong with the order of a tier list: paths below ``tiers``, messages.

    Args:
        tiers: the list as plain data; a value that is no list is nobody's order.
    """
    if not isinstance(tiers, list | tuple):
        return []
    if not tiers:
        return [((), "is empty; write '- {kind: dram, capacity: 4GiB}'")]
    problems: list[tuple[KeyPath, str]] = []
    kinds = [tier.get("kind") if isinstance(tier, Mapping) else None for tier in tiers]
    if kinds[0] in TIER_KINDS and kinds[0] != "dram":
        there = "move the dram tier here" if "dram" in kinds else "add one before this tier"
        problems.append(((0,), f"is {kinds[0]}, but the first tier must be dram; {there}"))
    drams = [position for position, kind in enumerate(kinds) if kind == "dram"]
    for position in drams[1:]:
        message = f"is a second dram tier after tiers[{drams[0]}]; keep one, with their capacities"
        problems.append(((position,), message))
    if len(tiers) > 1 + MAX_STORES:
        message = f"is tier {len(tiers)}; at most {MAX_STORES} may lie below dram"
        problems.append(((1 + MAX_STORES,), message))
    problems += _shared_folders(tiers)
    named: dict[object, int] = {}
    for position, (kind, tier) in enumerate(zip(kinds, tiers, strict=True)):
        is_store = kind in TIER_KINDS and kind != "dram"
        name = tier.get("name", kind) if is_store else None
        if not isinstance(name, str):
            continue
        if name in named:
            message = f"{name!r} is the name of tiers[{named[name]}] too; write another name"
            if "name" not in tier:
                message = f"is {name!r} here and in tiers[{named[name]}]; add 'name: {name}2'"
            problems.append(((position, "name"), message))
        named.setdefault(name, position)
    return problems


def _shared_folders(tiers: Sequence[object]) -> list[tuple[KeyPath, str]]:
    """Return which tiers name a folder that another tier has already."""
    problems: list[tuple[KeyPath, str]] = []
    taken: dict[str, int] = {}
    for position, tier in enumerate(tiers):
        if not isinstance(tier, Mapping):
            continue
        several = tier.get("paths")
        folders = list(several) if isinstance(several, list | tuple) else []
        key = "paths" if "paths" in tier else "path"
        named = (str(folder) for folder in [*folders, tier.get("path")] if folder)
        plain = ("/" + os.path.normpath(folder).lstrip("/") for folder in named)
        for folder in dict.fromkeys(plain):
            if folder in taken:
                message = f"{folder!r} is a folder of tiers[{taken[folder]}] too; write another"
                problems.append(((position, key), message))
            taken.setdefault(folder, position)
    return problems


def _message(kind: str, detail: Mapping[str, Any], loc: KeyPath, model: type[BaseModel]) -> str:
    """Return what is wrong and what would be right for one pydantic error."""
    context: Mapping[str, Any] = detail.get("ctx", {})
    value = detail["input"]
    if kind in _COMPARISONS:
        name, words = _COMPARISONS[kind]
        bound = f"{context[name]:g}"
        return f"{_shown(value)} {words} {bound}; {_write(loc, model)}"
    if kind == "value_error":
        return str(context["error"])
    words_for: dict[str, Callable[[], str]] = {
        "extra_forbidden": lambda: _unknown_key(loc, model),
        "missing": lambda: f"is missing; {_write(loc, model).replace('write', 'add', 1)}",
        "literal_error": lambda: _unknown_choice(value, _choices(loc, model)),
        "union_tag_invalid": lambda: _unknown_kind(value, loc[-2]),
        "union_tag_not_found": lambda: f"is missing; add one of {', '.join(TIER_KINDS)}",
        "int_type": lambda: f"{_shown(value)} is not a whole number; {_write(loc, model)}",
        "float_type": lambda: f"{_shown(value)} is not a number; {_write(loc, model)}",
        "finite_number": lambda: f"{_shown(value)} is not a finite number; {_write(loc, model)}",
        "string_type": lambda: f"{_shown(value)} is not text; {_write(loc, model)}",
        "tuple_type": lambda: (
            f"{_shown(value)} is not a list; write '- {{kind: dram, capacity: 4GiB}}'"
        ),
    }
    if kind in _NOT_A_MAPPING:
        return f"{_shown(value)} is not a mapping; {_write_section(loc, model)}"
    if kind in words_for:
        return words_for[kind]()
    return f"{_shown(value)}: {detail['msg']}; {_write(loc, model)}"


def _shown(value: object) -> str:
    return "an empty value" if value is None else as_written(value)


def _unknown_key(loc: KeyPath, model: type[BaseModel]) -> str:
    names = [_yaml_name(name, info) for name, info in model.model_fields.items()]
    near = _nearest(str(loc[-1]), names)
    remedy = f"did you mean {near!r}?" if near else "remove it"
    return f"unknown key; {remedy} (keys here: {', '.join(names)})"


def _unknown_choice(value: object, choices: Sequence[str]) -> str:
    near = _nearest(str(value), choices) if isinstance(value, str) else None
    switch = _SWITCHES.get(str(value).casefold())
    meant = switch if switch in choices else choices[0]
    remedy = f"did you mean {near!r}?" if near else f"write {meant}"
    return f"{_shown(value)} is not one of {', '.join(choices)}; {remedy}"


def _unknown_kind(tier: object, position: object) -> str:
    kind = tier.get("kind") if isinstance(tier, Mapping) else None
    if position != 0 and not (isinstance(kind, str) and _nearest(kind, TIER_KINDS)):
        stores = [name for name in TIER_KINDS if name != "dram"]
        return f"{_shown(kind)} is not one of {', '.join(stores)}; write nvme for a local disk"
    return _unknown_choice(kind, TIER_KINDS)


def _nearest(word: str, choices: Sequence[str]) -> str | None:
    folded = {choice.casefold(): choice for choice in choices}
    found = difflib.get_close_matches(word.casefold(), folded, n=1)
    return folded[found[0]] if found else None


def _write(loc: KeyPath, model: type[BaseModel]) -> str:
    """Return the remedy that shows a good value of the field."""
    info = _field(loc, model)
    if info is None or not loc:
        return "see 'kvtiers config schema'"
    if info.examples:
        example = info.examples[0]
        text = example if isinstance(example, str) else json.dumps(example)
        return f"write '{loc[-1]}: {text}'"
    if isinstance(info.default, bool | int | float | str):
        return f"write '{loc[-1]}: {info.default}'"
    return f"see '{loc[-1]}' in 'kvtiers config schema'"


def _write_section(loc: KeyPath, model: type[BaseModel]) -> str:
    info = _field(loc, model)
    section = info.annotation if info is not None else None
    if isinstance(section, type) and issubclass(section, BaseModel):
        return f"write keys under it (keys here: {', '.join(section.model_fields)}), or remove it"
    return "write '{kind: dram, capacity: 4GiB}'"


def _field(loc: KeyPath, model: type[BaseModel]) -> FieldInfo | None:
    for name, info in model.model_fields.items():
        if loc and loc[-1] == _yaml_name(name, info):
            return info
    return None


def _yaml_name(name: str, info: FieldInfo) -> str:
    return info.alias or name


def _choices(loc: KeyPath, model: type[BaseModel]) -> tuple[str, ...]:
    info = _field(loc, model)
    return tuple(str(c) for c in typing.get_args(info.annotation)) if info is not None else ("",)


def _model_at(path: KeyPath, data: object, root: type[BaseModel]) -> type[BaseModel]:
    """Return the model whose keys stand at a path; ``root`` where the path leads nowhere."""
    if not path:
        return root
    info = _field(path[:1], root)
    if info is None:
        return root
    annotation = info.annotation
    if len(path) == 1 and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    kind = _kind_at(path, data)
    for tier in models_in(annotation):
        if kind in typing.get_args(tier.model_fields["kind"].annotation):
            return tier
    return root


def models_in(annotation: object) -> list[type[BaseModel]]:
    """Return the models that an annotation names, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_in(part)]


def _kind_at(path: KeyPath, data: object) -> object:
    value = data
    for part in path:
        try:
            value = value[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return value.get("kind") if isinstance(value, Mapping) else None
