"""The types of single values in the configuration: text in the file, numbers in the program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from kvtiers.model.units import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    as_written,
    duration_from,
    format_duration,
    format_size,
    size_from,
)

MAX_THREADS: Final = 256
SMALLEST_FRAME_NBYTES: Final = 8192  # a header and one page
# Names of the tiers that every installation has, and a word of the messages.
RESERVED_NAMES: Final = ("hbm", "dram", "released")


def _capacity(value: object) -> int:
    nbytes = size_from(value)
    if nbytes < SMALLEST_FRAME_NBYTES:
        raise ValueError(f"{as_written(value)} holds no block; write 1GiB, or remove the tier")
    return nbytes


def _budget(value: object) -> int | None:
    if value is None:
        return None
    nbytes = size_from(value)
    if nbytes == 0:
        raise ValueError(f"{as_written(value)} allows no write at all; write 500GiB, or null")
    return nbytes


def _positive_duration(value: object) -> float:
    seconds = duration_from(value)
    if seconds == 0:
        raise ValueError(f"{as_written(value)} leaves no time at all; write 50ms")
    return seconds


def _threads(value: object) -> object:
    if value == "auto" or (type(value) is int and 1 <= value <= MAX_THREADS):
        return value
    raise ValueError(
        f"{as_written(value)} is no number of threads; write auto or 1 to {MAX_THREADS}"
    )


def _path(value: object) -> object:
    if isinstance(value, Path) or value is None:
        return value
    # Characters that do not print (line breaks of every kind) have no safe form in YAML and logs.
    if not isinstance(value, str) or not value.isprintable() or not value or value[0] == "~":
        raise ValueError(
            f"{as_written(value)} is no path; write it out, such as /var/lib/kvtiers/FILE, or null"
        )
    _refuse_variable(value)
    return Path(value)


def _store_path(value: object) -> object:
    written = isinstance(value, str) and value.isprintable()
    path = Path(value) if isinstance(value, str) and written else value
    if isinstance(value, str):
        _refuse_variable(value)
    if not isinstance(path, Path) or not path.is_absolute():
        raise ValueError(f"{as_written(value)} is no absolute path; write /mnt/nvme0/kvtiers")
    if ".." in path.parts:
        raise ValueError(f"{as_written(value)} goes back by '..'; write {os.path.normpath(path)}")
    return Path("/", *path.parts[1:])  # '//x' is '/x', which pathlib does not say


def _refuse_variable(path: str) -> None:
    if "$" in path:
        raise ValueError(f"{path!r}: variables are not replaced; write the path out, without '$'")


def _paths(value: object) -> object:
    if not isinstance(value, tuple) or not value:
        meant = value if isinstance(value, str) and value[:1] == "/" else "/mnt/nvme0/kvtiers"
        raise ValueError(f"{as_written(value)} is no list of paths; write [{meant}]")
    paths = tuple(_store_path(path) for path in value)
    if len(set(paths)) < len(paths):
        raise ValueError("names a path twice; name each disk's folder once")
    return paths


def _instance(value: object) -> object:
    if value is None:
        return None
    plain = isinstance(value, str) and all(c.isalnum() or c in "-_." for c in value)
    if not plain or not str(value).isascii() or not str(value)[:1].isalnum():
        raise ValueError(
            f"{as_written(value)} is no name of a folder; write letters, digits, '-', '_', '.'"
        )
    return value


def _name(value: object) -> object:
    plain = isinstance(value, str) and value.replace("-", "a").replace("_", "a").isalnum()
    if not plain or not str(value).isascii() or not str(value)[0].isalpha():
        raise ValueError(
            f"{as_written(value)} is no name; write letters, digits, '-' and '_' (memory2)"
        )
    if value in RESERVED_NAMES:
        raise ValueError(f"{as_written(value)} is reserved; write another name (memory2)")
    return value


def as_tuple(value: object) -> object:
    """Return a list as a tuple, and anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


_SIZE_SCHEMA: Final = WithJsonSchema({"type": "string", "format": "size", "pattern": SIZE_PATTERN})
_OPTIONAL_SIZE_SCHEMA: Final = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string", "format": "size", "pattern": SIZE_PATTERN},
            {"type": "null"},
        ]
    }
)
_DURATION_SCHEMA: Final = WithJsonSchema(
    {"type": "string", "format": "duration", "pattern": DURATION_PATTERN}
)
_THREADS_SCHEMA: Final = WithJsonSchema(
    {"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": MAX_THREADS}]}
)
_NAME_SCHEMA: Final = WithJsonSchema(
    {"type": "string", "format": "name", "pattern": "^[A-Za-z][A-Za-z0-9_-]*$"}
)
_DURATION_TEXT: Final = PlainSerializer(format_duration, return_type=str, when_used="json")
_BUDGET_TEXT: Final = PlainSerializer(
    lambda nbytes: None if nbytes is None else format_size(nbytes),
    return_type=str | None,
    when_used="json",
)
_NBYTES_TEXT: Final = PlainSerializer(format_size, return_type=str, when_used="json")

Capacity = Annotated[int, BeforeValidator(_capacity), _NBYTES_TEXT, _SIZE_SCHEMA]
Budget = Annotated[int | None, BeforeValidator(_budget), _BUDGET_TEXT, _OPTIONAL_SIZE_SCHEMA]
Duration = Annotated[float, BeforeValidator(duration_from), _DURATION_TEXT, _DURATION_SCHEMA]
Deadline = Annotated[float, BeforeValidator(_positive_duration), _DURATION_TEXT, _DURATION_SCHEMA]
Threads = Annotated[Literal["auto"] | int, BeforeValidator(_threads), _THREADS_SCHEMA]
Name = Annotated[str, BeforeValidator(_name), _NAME_SCHEMA]
LogPath = Annotated[Path | None, BeforeValidator(_path)]
StorePath = Annotated[Path, BeforeValidator(_store_path)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_paths)]
Instance = Annotated[str | None, BeforeValidator(_instance)]
