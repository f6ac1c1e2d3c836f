"""The shape of a model that a user names: one that is known, or one whose files are here."""

from __future__ import annotations

import json
from pathlib import Path

from kvtiers.cost.known_models import known_model
from kvtiers.cost.prefill import ModelShape
from kvtiers.cost.shapes import HFConfig, model_shape
from kvtiers.model.errors import ConfigError


def load_shape(model: str) -> tuple[ModelShape, str]:
    """Return a model's shape, and where it comes from.

    Raises:
        ConfigError: no such name or file, no JSON object, or a field is missing.
    """
    config, source = read_model_config(model)
    try:
        return model_shape(config), source
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def read_model_config(model: str) -> tuple[HFConfig, str]:
    """Return a model's configuration, and where it comes from.

    Args:
        model: a ``config.json``, its folder, or a name that `known_model` knows.

    Raises:
        ConfigError: no such name or file, or no JSON object.
    """
    path = Path(model)
    try:
        if path.is_dir():
            path = path / "config.json"
        if path.is_file():
            return _read_object(path), str(path)
    except (OSError, ValueError, RecursionError) as error:  # a name too long, no UTF-8, no JSON
        raise ConfigError(f"{_short(path)}: cannot be read as JSON: {error}") from error
    if path.suffix == ".json":
        raise ConfigError(f"{path}: no such file; give a config.json or a known model's name")
    known = known_model(model)
    return known.config, known.source


def _read_object(path: Path) -> HFConfig:
    config = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds a {type(config).__name__}, not an object")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ConfigError(f"{path}: 'text_config' holds a {type(text).__name__}, not an object")
    return config


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:197]}..."
