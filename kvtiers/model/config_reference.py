"""The reference page of the configuration, written from its JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvtiers.model.config import default_config, dump_yaml, json_schema
from kvtiers.model.units import DURATION_UNITS, SIZE_UNITS

Schema = Mapping[str, Any]

_INTRODUCTION: Final = """\
<!-- Written by `kvtiers config schema --markdown`; edit the schema, not this page. -->

# Configuration

One YAML file. An unknown key, a missing value or a value of the wrong type is an error that
names the line, the key and the remedy; nothing is ignored. `kvtiers config check FILE` says
whether a file is right, `kvtiers config show FILE` prints it with every default filled in.

The configuration in force is, in this order: the one given explicitly, the file that the
environment variable `KVTIERS_CONFIG` names, the defaults at the end of this page. kvtiers reads
no other environment variable.

- A **size** is a number and a unit, such as `64GiB`. Units: {sizes}.
- A **duration** is a number and a unit, such as `5ms`. Units: {durations}.
- A **name** starts with a letter; letters, digits, `-` and `_` follow.
- A **path** is taken as it is: `~` and variables are refused, not replaced. Folders of stores are
  absolute, without `..`; a file may be relative to where the engine was started.
- `on` and `off` are words, as in YAML 1.2; they need no quotes.
"""


def reference_markdown() -> str:
    """Return the reference page: every key with its values, its default and its meaning."""
    schema = json_schema()
    models: Mapping[str, Schema] = schema["$defs"]
    introduction = _INTRODUCTION.format(sizes=_words(SIZE_UNITS), durations=_words(DURATION_UNITS))
    parts = [introduction, f"## Top level\n\n{_table(schema)}", _tier_heading()]
    for kind, reference in schema["properties"]["tiers"]["items"]["discriminator"][
        "mapping"
    ].items():
        parts.append(_section(f"### `kind: {kind}`", models[_model_name(reference)]))
    for name, field in schema["properties"].items():
        if "$ref" in field:
            parts.append(_section(f"## `{name}`", models[_model_name(field["$ref"])]))
    parts.append(f"## Defaults\n\n```yaml\n{dump_yaml(default_config())}```\n")
    return "\n".join(parts)


def _tier_heading() -> str:
    return (
        "## `tiers`\n\nA list, fastest first. The first tier is `dram`, and there is one of it; "
        "any others follow.\n"
    )


def _section(heading: str, model: Schema) -> str:
    return f"{heading}\n\n{model['description']}\n\n{_table(model)}"


def _table(model: Schema) -> str:
    rows = "".join(_rows(model))
    return f"| key | values | default | meaning |\n| --- | --- | --- | --- |\n{rows}"


def _rows(model: Schema) -> Iterator[str]:
    required = model.get("required", ())
    for name, field in model["properties"].items():
        default = "required" if name in required else f"`{_text(field['default'])}`"
        if "$ref" in field:
            default = "see below"
        yield f"| `{name}` | {_values(field)} | {default} | {field['description']} |\n"


def _values(field: Schema) -> str:
    """Return what may be written, in words."""
    if "$ref" in field:
        return "mapping"
    if "anyOf" in field:
        return ", ".join(_values(choice) for choice in field["anyOf"])
    if "enum" in field:
        return _words(field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    kind = str(field.get("format", field["type"]))
    if kind in ("number", "integer"):
        return f"{kind}, {_bounds(field)}"
    return {"array": "list", "null": "`null`"}.get(kind, kind)


def _bounds(field: Schema) -> str:
    if "exclusiveMaximum" in field:
        return f"from {field['minimum']}, below {field['exclusiveMaximum']}"
    if "exclusiveMinimum" in field:
        return f"above {field['exclusiveMinimum']}, at most {field['maximum']}"
    return f"{field['minimum']} to {field['maximum']}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _model_name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _words(words: Any) -> str:
    return ", ".join(f"`{word}`" for word in words)
