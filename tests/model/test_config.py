from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvtiers.model.config import (
    DEFAULTS,
    ENVIRONMENT_VARIABLE,
    INLINE,
    Config,
    CopyConfig,
    default_config,
    dump_yaml,
    json_schema,
    load_config,
    parse_config,
    parse_mapping,
    resolve_config,
)
from kvtiers.model.config_tiers import DramTier, LmdbTier, MemoryTier, NvmeTier
from kvtiers.model.config_values import MAX_THREADS, RESERVED_NAMES, SMALLEST_FRAME_NBYTES
from kvtiers.model.errors import ConfigError
from kvtiers.model.units import DURATION_UNITS

DRAM = "tiers: [{kind: dram, capacity: 1GiB}]\n"
COMPLETE = """\
tiers:
  - {kind: dram, capacity: 64GiB, pin: on, high_watermark: 0.9, low_watermark: 0.8}
  - {kind: memory, name: cold, capacity: 200GB, write: back, admit: second_touch}
  - kind: nvme
    name: disk
    paths: [/mnt/a, /mnt/b/kv]
    capacity: 1TiB
    io: uring
    direct: on
    write_budget: 500GiB
    instance: replica-1
  - {kind: lmdb, path: /mnt/a.lmdb, capacity: 200GiB, admit: cost}
policy: {evict: lru, offload: lazy}
cost: {mode: shadow, objective: balanced, margin: 0, decision_log: /var/log/decisions.jsonl}
reload: {deadline: 2min, sync_below: 0ms, lookup_deadline: 1.5s}
copy: {threads: 2, native: off}
integrity: all
"""


# What a right file means


def test_every_key_reaches_the_program():
    config = parse_config(COMPLETE)
    assert config.dram == DramTier.model_validate(
        {
            "kind": "dram",
            "capacity": "64GiB",
            "pin": "on",
            "high_watermark": 0.9,
            "low_watermark": 0.8,
        }
    )
    cold, disk, shared = config.stores
    assert isinstance(cold, MemoryTier)
    assert isinstance(disk, NvmeTier)
    assert isinstance(shared, LmdbTier)
    assert (disk.name, disk.paths) == ("disk", (Path("/mnt/a"), Path("/mnt/b/kv")))
    assert (disk.capacity, disk.io, disk.direct, disk.instance) == (
        2**40, "uring", "on", "replica-1",
    )  # fmt: skip
    assert (disk.write_budget, shared.admit) == (500 * 2**30, "cost")
    assert (shared.name, shared.path, shared.write) == ("lmdb", Path("/mnt/a.lmdb"), "through")
    assert (cold.name, cold.capacity, cold.write, cold.admit) == (
        "cold",
        200 * 10**9,
        "back",
        "second_touch",
    )
    assert (config.policy.evict, config.policy.offload) == ("lru", "lazy")
    assert (config.cost.mode, config.cost.margin) == ("shadow", 0.0)
    assert config.cost.objective == "balanced"
    assert config.cost.decision_log == Path("/var/log/decisions.jsonl")
    reload = config.reload
    assert (reload.deadline, reload.sync_below, reload.lookup_deadline) == (120.0, 0.0, 1.5)
    assert (config.copying.threads, config.copying.native) == (2, "off")
    assert config.integrity == "all"


def test_defaults_are_those_documented():
    config = default_config()
    assert config.dram.capacity == 4 * 2**30
    assert config.stores == ()
    assert (config.dram.high_watermark, config.dram.low_watermark) == (0.95, 0.90)
    assert config.cost.objective == "ttft"
    assert (config.cost.mode, config.cost.margin, config.cost.decision_log) == ("auto", 0.05, None)
    assert (config.reload.deadline, config.reload.sync_below) == (10.0, 0.005)
    assert config.reload.lookup_deadline == 0.05
    assert config == parse_config("tiers: [{kind: dram, capacity: 4GiB}]")


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_on_and_off_need_no_quotes(word):
    text = f"tiers: [{{kind: dram, capacity: 1GiB, pin: {word}}}]\ncopy: {{native: {word}}}"
    config = parse_config(text)
    assert (config.dram.pin, config.copying.native) == (word, word)


def test_anchors_are_followed():
    text = """
tiers:
  - {kind: dram, capacity: &size 2GiB}
  - {kind: memory, capacity: *size}
"""
    assert [tier.capacity for tier in parse_config(text).tiers] == [2**31, 2**31]


def test_byte_order_mark_is_no_part_of_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + DRAM.encode())
    assert load_config(path).config.dram.capacity == 2**30


def test_auto_threads_are_at_most_four():
    assert [CopyConfig().num_threads(cores) for cores in (1, 3, 64)] == [1, 3, 4]
    assert CopyConfig(threads=7).num_threads(2) == 7


def test_config_is_immutable():
    config = default_config()
    with pytest.raises(ValidationError, match="frozen"):
        config.integrity = "all"  # type: ignore[misc]


def test_schema_has_28_names_at_most():
    """Decisions 21, 22: what a user has to learn; what several kinds of tier share counts once."""
    schema = json_schema()
    models = [model["properties"] for model in schema["$defs"].values()]
    names = {name for model in models for name in model if name != "kind"}
    assert len(names) + 1 <= 28  # integrity is the one leaf at the top


def test_every_field_is_described():
    schema = json_schema()
    for model in (schema, *schema["$defs"].values()):
        assert model["description"]
        for name, field in model["properties"].items():
            assert field.get("description"), name


def test_durations_in_the_schema_have_defaults_as_text():
    assert json_schema()["$defs"]["ReloadConfig"]["properties"]["deadline"]["default"] == "10s"


# Files


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_config(tmp_path / "none.yaml")


def test_directory_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)


def test_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"# tiers\ntiers: \xff\n")
    with pytest.raises(
        ConfigError, match=r"c\.yaml:2: is not UTF-8 .byte 0xff at offset 15.; save it as UTF-8"
    ):
        load_config(path)


def test_unreadable_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text(DRAM)

    def refuse(_self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(
        ConfigError, match=r"cannot be read .Permission denied.; check path and rights"
    ):
        load_config(path)


def test_path_with_a_file_as_directory_is_refused(tmp_path):
    (tmp_path / "c.yaml").write_text(DRAM)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "c.yaml" / "d.yaml")


# Which configuration is in force


def test_explicit_path_wins_over_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text(DRAM)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "other.yaml"))
    loaded = resolve_config(str(path))
    assert (loaded.source, loaded.config.dram.capacity) == (str(path), 2**30)


def test_inline_mapping_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "missing.yaml")
    loaded = resolve_config({"tiers": [{"kind": "dram", "capacity": "2GiB"}]})
    assert (loaded.source, loaded.config.dram.capacity) == (INLINE, 2**31)


def test_inline_problem_names_the_path_without_a_line():
    with pytest.raises(ConfigError) as caught:
        parse_mapping({"tiers": [{"kind": "dram", "capacity": 5}], 7: 1})  # type: ignore[dict-item]
    assert "<inline>: tiers[0].capacity: 5 has no unit; write 5GiB" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


def test_environment_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text(DRAM)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    assert resolve_config().source == f"{ENVIRONMENT_VARIABLE}={path}"


def test_environment_that_names_a_missing_file_never_falls_back(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "missing.yaml")
    with pytest.raises(ConfigError, match=r"^KVTIERS_CONFIG=missing\.yaml: no such file"):
        resolve_config()


def test_problem_of_the_file_in_the_environment_says_who_named_it(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_text(DRAM + "cost: {mode: fast}\n")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    with pytest.raises(ConfigError) as caught:
        resolve_config()
    assert str(caught.value).startswith(f"{ENVIRONMENT_VARIABLE}={path}:2: cost.mode: 'fast'")


def test_empty_environment_variable_never_falls_back(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    with pytest.raises(ConfigError, match="write a path, or unset it"):
        resolve_config()


def test_defaults_are_in_force_without_any_choice(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    loaded = resolve_config()
    assert (loaded.source, loaded.config) == (DEFAULTS, default_config())


# Configurations made in a program


def test_order_of_tiers_holds_without_a_file_too():
    store = MemoryTier.model_validate({"kind": "memory", "capacity": "1GiB"})
    with pytest.raises(ValidationError, match="the first tier must be dram"):
        Config(tiers=(store,))


# Text and back

shares = st.floats(0.01, 1, allow_nan=False)
capacities = st.integers(SMALLEST_FRAME_NBYTES, 2**50).map(lambda nbytes: f"{nbytes}B")
durations = st.builds(
    lambda count, unit: f"{count}{unit}",
    st.integers(1, 10**6),
    st.sampled_from(sorted(DURATION_UNITS)),
)
names = st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,12}", fullmatch=True).filter(
    lambda name: name not in RESERVED_NAMES
)
paths = st.text(min_size=1).filter(
    lambda path: path.isprintable() and "$" not in path and ".." not in path.split("/")
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    high, low = sorted((draw(shares), draw(shares)), reverse=True)
    slab = {
        "kind": "dram",
        "capacity": draw(capacities),
        "pin": draw(st.sampled_from(["auto", "on", "off"])),
        "high_watermark": high,
        "low_watermark": low,
    }
    kinds = {
        "memory": lambda _: {},
        "lmdb": lambda i: {"path": f"/{i}/{draw(paths)}"},
        "nvme": lambda i: {
            "paths": [f"/{i}/{n}{draw(paths)}" for n in range(draw(st.integers(1, 2)))],
            "io": draw(st.sampled_from(["auto", "native", "uring", "aiofiles"])),
            "direct": draw(st.sampled_from(["auto", "on", "off"])),
            "instance": draw(st.none() | names),
            "write_budget": draw(st.none() | capacities),
        },
    }
    stores = [
        {
            "kind": (kind := draw(st.sampled_from(sorted(kinds)))),
            **kinds[kind](i),
            "name": name,
            "capacity": draw(capacities),
            "write": draw(st.sampled_from(["through", "back"])),
            "admit": draw(st.sampled_from(["always", "second_touch", "cost"])),
        }
        for i, name in enumerate(draw(st.lists(names, unique=True, max_size=3)))
    ]
    log = draw(st.none() | paths.map(lambda path: f"/{path}"))
    return parse_mapping(
        {
            "tiers": [slab, *stores],
            "policy": {"offload": draw(st.sampled_from(["eager", "lazy"]))},
            "cost": {"margin": draw(st.floats(0, 1, exclude_max=True)), "decision_log": log},
            "reload": {"deadline": draw(durations), "sync_below": draw(durations)},
            "copy": {"threads": draw(st.just("auto") | st.integers(1, MAX_THREADS))},
            "integrity": draw(st.sampled_from(["auto", "all"])),
        }
    )


@given(configs())
def test_dump_parses_back_to_the_equal_config(config):
    assert parse_config(dump_yaml(config)) == config


@given(configs())
def test_dump_is_canonical(config):
    text = dump_yaml(config)
    assert dump_yaml(parse_config(text)) == text
