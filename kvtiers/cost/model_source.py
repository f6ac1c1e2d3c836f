"""The shape of a model that a user names: one that is known, or one whose files are here."""

from __future__ import annotations

import json
from pathlib import Path

from kvtiers.cost.known_models import known_model
from kvtiers.cost.prefill import ModelShape
from kvtiers.cost.shapes import model_shape
from kvtiers.model.errors import ConfigError


def load_shape(model: str) -> tuple[ModelShape, str]:
    """Return a model's shape, and where it comes from.

    Raises:
        ConfigError: no such name or file, no JSON object, or a field is missing.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        if path.suffix == ".json":
            raise ConfigError(f"{path}: no such file; give a config.json or a known model's name")
        known = known_model(model)
        return known.shape, known.source
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: holds a {type(config).__name__}, not an object")
    try:
        return model_shape(config), str(path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
