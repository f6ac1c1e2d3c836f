"""The configuration: one strict schema, read from one YAML file."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from kvtiers.model.config_problems import TIER_LIST, schema_problems, tier_list_problems
from kvtiers.model.config_tiers import DramTier, Section, StoreTier, Tier
from kvtiers.model.config_values import MAX_THREADS, Deadline, Duration, LogPath, Threads, as_tuple
from kvtiers.model.config_yaml import Document, Problem, path_text, read_yaml, write_yaml
from kvtiers.model.errors import ConfigError
from kvtiers.model.units import as_written, format_duration

ENVIRONMENT_VARIABLE: Final = "KVTIERS_CONFIG"
INLINE: Final = "<inline>"
DEFAULTS: Final = "<defaults>"
MAX_FILE_NBYTES: Final = 1 << 20  # a hundred times a long one; parsing more takes minutes
DEFAULT_DRAM_CAPACITY: Final = "4GiB"  # fits any server; a real installation writes its own


class PolicyConfig(Section):
    """What is kept."""

    evict: Literal["adaptive", "arc", "cost", "lru", "s3-fifo", "w-tinylfu"] = Field(
        default="lru",
        description="Replacement rule of every private tier: which chain tail leaves next. "
        "`cost`: by the seconds that a block saves and its chance of reuse; `adaptive`: whichever "
        "of the others had the most hits of late.",
    )
    offload: Literal["eager", "lazy"] = Field(
        default="eager",
        description="`eager`: a block is offloaded as soon as it is full; `lazy`: when its "
        "request is preempted or finishes.",
    )


class CostConfig(Section):
    """Whether to reload or to recompute."""

    mode: Literal["auto", "always", "never", "shadow"] = Field(
        default="auto",
        description="`auto`: reload what the model predicts to be faster; `always`: reload every "
        "hit; `never`: recompute; `shadow`: reload every hit and log what `auto` would do.",
    )
    objective: Literal["ttft", "throughput", "balanced"] = Field(
        default="ttft",
        description="What `auto` minimises. `ttft`: the time to the first token, with the delay "
        "that it causes others; `throughput`: the time of the busiest of device and links; "
        "`balanced`: the mean of both.",
    )
    margin: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Recompute unless reload is predicted to be faster by at least this share.",
    )
    decision_log: LogPath = Field(
        default=None,
        description="JSONL file to which each decision is appended, with prediction and outcome, "
        "some 0.5 kB a request; rotate it with `copytruncate`. `null`: none.",
        examples=["/var/log/kvtiers/decisions.jsonl"],
    )
    calibration: LogPath = Field(
        default=None,
        description="File that `kvtiers probe` has written on this machine: what its links take, "
        "until the engine's own loads have been measured; `null`: built-in figures.",
        examples=["/etc/kvtiers/calibration.json"],
    )


class ReloadConfig(Section):
    """How long a request may wait for its blocks."""

    deadline: Deadline = Field(
        default=10.0,
        description="Blocks of a request not loaded by then are recomputed; `cost.mode: auto` "
        "gives up earlier, once a load takes longer than computing would have.",
        examples=["10s"],
    )
    sync_below: Duration = Field(
        default=0.005,
        description="A load from the slab alone runs within the engine step that needs it, if it "
        "is predicted to take less than this; others run between steps. `0ms`: never. Without "
        "effect with `integrity: all`, and where the engine cannot wait within a step.",
        examples=["5ms"],
    )
    lookup_deadline: Duration = Field(
        default=0.05,
        description="How long any request may wait for a store to say what it holds; then that is "
        "a miss. A request waits longer, up to `deadline`, if the answer may save it more: for a "
        "tenth of the time saved. It does not wait for a store that was silent that long already.",
        examples=["50ms"],
    )
    prefetch: Literal["auto", "off"] = Field(
        default="auto",
        description="`auto`: while a request waits in the engine's queue, bring what it would "
        "reload from stores to the slab, in at most a quarter of its slots.",
    )
    layer_ranges: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Ranges of layers that a block is stored and loaded in, so that a load may run "
        "within the step that computes the rest of a prompt; 1: blocks are loaded whole.",
        examples=[4],
    )


class CopyConfig(Section):
    """The machinery that moves bytes."""

    threads: Threads = Field(
        default="auto",
        description=f"Host copy threads of one rank, 1 to {MAX_THREADS}; `auto`: min(4, cores).",
        examples=["auto"],
    )
    native: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Use the compiled module, for KV on a CUDA device with its kernels and DMA. "
        "`auto`: where they can be used, else numpy or torch, with a warning that says why; `on`: "
        "fail at start instead; `off`: numpy or torch.",
    )

    def num_threads(self, num_cores: int) -> int:
        """Return the copy threads of one rank on a machine with some usable cores."""
        return min(4, num_cores) if self.threads == "auto" else self.threads


class Config(Section):
    """Everything that a user may choose."""

    tiers: Annotated[tuple[Tier, ...], BeforeValidator(as_tuple)] = Field(
        description="The tiers below HBM, fastest first: one `dram` tier, then any others.",
        examples=[[{"kind": "dram", "capacity": "64GiB"}]],
    )
    policy: PolicyConfig = Field(
        default=PolicyConfig(), description="What is kept, and when it is offloaded."
    )
    cost: CostConfig = Field(default=CostConfig(), description="When a reload is worth it.")
    reload: ReloadConfig = Field(default=ReloadConfig(), description="How long a request may wait.")
    # BaseModel has a method `copy`, so the attribute is the one that differs from its key.
    copying: CopyConfig = Field(
        default=CopyConfig(), alias="copy", description="How bytes are moved."
    )
    integrity: Literal["auto", "all"] = Field(
        default="auto",
        description="`auto`: verify every frame that arrives from below DRAM; `all`: also those "
        "that stayed in DRAM.",
    )

    @field_validator("tiers")
    @classmethod
    def _tiers_are_in_order(cls, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
        problems = tier_list_problems([tier.model_dump() for tier in tiers])
        if problems:
            lines = [f"{path_text(('tiers', *path))}: {text}" for path, text in problems]
            raise PydanticCustomError(TIER_LIST, "{lines}", {"lines": "\n".join(lines)})
        return tiers

    @property
    def dram(self) -> DramTier:
        """The slab."""
        return next(tier for tier in self.tiers if isinstance(tier, DramTier))

    @property
    def stores(self) -> tuple[StoreTier, ...]:
        """The tiers below the slab, in order."""
        return tuple(tier for tier in self.tiers if not isinstance(tier, DramTier))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and where it came from.

    Attributes:
        source: a path, `INLINE`, `DEFAULTS`, or ``KVTIERS_CONFIG=<path>``.
        text: of the file, "" where there is none.
    """

    config: Config
    source: str
    text: str = ""

    def where(self, path: tuple[str | int, ...]) -> str:
        """Return where a key stands, as in the messages of `ConfigError`."""
        return f"{self.at(path)}: {path_text(path)}"

    def at(self, path: tuple[str | int, ...]) -> str:
        """Return the file, and the line of a key in it where there is one."""
        line = read_yaml(self.text).line_of(path) if self.text else None
        return self.source if line is None else f"{self.source}:{line}"


def default_config() -> Config:
    """Return the configuration that needs no file: a slab of 4 GiB, nothing below it."""
    return Config.model_validate({"tiers": [{"kind": "dram", "capacity": DEFAULT_DRAM_CAPACITY}]})


def parse_config(text: str, source: str = "<string>") -> Config:
    """Return the configuration that a YAML text holds.

    Raises:
        ConfigError: one line for every problem, with its line and remedy.
    """
    return _validate(read_yaml(text), source)


def parse_mapping(mapping: Mapping[str, Any], source: str = INLINE) -> Config:
    """Return the configuration that plain data holds, such as an engine's own options.

    Raises:
        ConfigError: one line for every problem, with its remedy.
    """
    return _validate(Document(dict(mapping)), source)


def load_config(path: str | os.PathLike[str]) -> Loaded:
    """Read one YAML file.

    Raises:
        ConfigError: the file cannot be read, or one line for every problem in it.
    """
    return _load(os.fspath(path), os.fspath(path))


def resolve_config(explicit: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> Loaded:
    """Return the configuration in force: explicit, else ``KVTIERS_CONFIG``, else the defaults.

    Args:
        explicit: a path, or the configuration itself as plain data.

    Raises:
        ConfigError: see `load_config`.
    """
    if isinstance(explicit, Mapping):
        return Loaded(parse_mapping(explicit), INLINE)
    if explicit is not None:
        return load_config(explicit)
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    if path is None:
        return Loaded(default_config(), DEFAULTS)
    if not path:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: is empty; write a path, or unset it")
    return _load(path, f"{ENVIRONMENT_VARIABLE}={path}")


def dump_yaml(config: Config) -> str:
    """Return the complete configuration as canonical YAML; `parse_config` reads it back equal."""
    return write_yaml(config.model_dump(mode="json", by_alias=True))


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the file, for editors."""
    schema = Config.model_json_schema()
    for model in schema["$defs"].values():
        for field in model["properties"].values():
            if field.get("format") == "duration" and "default" in field:
                field["default"] = format_duration(field["default"])
    return schema


def _validate(document: Document, source: str) -> Config:
    problems = list(document.problems)
    config = None
    if isinstance(document.data, dict):
        try:
            config = Config.model_validate(document.data)
        except ValidationError as error:
            problems += schema_problems(error, document, Config)
        for path, message in tier_list_problems(document.data.get("tiers")):
            full = ("tiers", *path)
            problems.append(Problem(full, message, document.line_of(full)))
    elif not problems:
        found = "a list" if isinstance(document.data, list) else as_written(document.data)
        problems.append(Problem((), f"is {found}, not a mapping; start with 'tiers:'", 1))
    if config is not None and not problems:
        return config
    problems.sort(key=lambda problem: problem.line or 0)
    raise ConfigError("\n".join(problem.render(source) for problem in problems))


def _load(path: str, source: str) -> Loaded:
    text = _read_text(path, source)
    return Loaded(parse_config(text, source), source, text)


def _read_text(path: str, source: str) -> str:
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise ConfigError(  # to open a pipe would wait for a writer
                f"{source}: is a pipe or a device, not a regular file; write the YAML to a file"
            )
        if found.st_size > MAX_FILE_NBYTES:
            raise ConfigError(f"{source}: has {found.st_size} bytes, that is no configuration")
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file; write it, or correct the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{source}: is a directory; name the YAML file in it") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        at = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise ConfigError(f"{source}:{line}: is not UTF-8 ({at}); save it as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{source}: cannot be read ({reason}); check path and rights") from error
