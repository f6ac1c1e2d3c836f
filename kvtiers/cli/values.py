"""Values of options that are written with a unit."""

# ruff: noqa: PLC0415 - what a verb needs is imported when it runs

from __future__ import annotations

from typing import overload

from kvtiers.model.errors import ConfigError


@overload
def size(text: str, option: str) -> int: ...
@overload
def size(text: None, option: str) -> None: ...
@overload
def size(text: str | None, option: str) -> int | None: ...
def size(text: str | None, option: str) -> int | None:
    """Return the bytes that an option such as ``4GiB`` means; None where it is not given.

    Raises:
        ConfigError: no number or no unit; the message names the option and what to write.
    """
    from kvtiers.model.units import parse_size

    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
