import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtiers.model.config import json_schema, load_config, parse_config, parse_mapping
from kvtiers.model.config_values import RESERVED_NAMES
from kvtiers.model.errors import ConfigError

DRAM = "tiers: [{kind: dram, capacity: 1GiB}]\n"


def problems(text: str) -> list[str]:
    """Return the lines of the error that a text raises, without the name of its source."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    lines = str(caught.value).splitlines()
    assert all(line.startswith("f.yaml:") for line in lines)
    return [line.removeprefix("f.yaml:") for line in lines]


def only_problem(text: str) -> str:
    found = problems(text)
    assert len(found) == 1, found
    return found[0]


def dram(**more: object) -> str:
    """Return a file with one tier that has some more keys."""
    return json.dumps({"tiers": [{"kind": "dram", "capacity": "1GiB", **more}]})


# What a wrong file gets: line, key, remedy


def test_every_problem_is_listed_in_the_order_of_the_file():
    found = problems(
        """\
tiers:
  - kind: dram
    capacity: 64
    hihg_watermark: 0.5
  - kind: nvme_
    capacity: 1TiB
  - {kind: memory, capacity: 1gib, write: thru}
polcy: {}
cost: {mode: atuo, margin: 2}
"""
    )
    assert [line.rsplit(": ", 1)[0].split(": ")[0] for line in found] == [
        "3", "4", "5", "7", "7", "8", "9", "9",
    ]  # fmt: skip
    assert found[0] == "3: tiers[0].capacity: 64 has no unit; write 64GiB"
    assert found[1].startswith(
        "4: tiers[0].hihg_watermark: unknown key; did you mean 'high_watermark'?"
    )
    assert "did you mean 'policy'?" in found[5]
    assert found[6] == (
        "9: cost.mode: 'atuo' is not one of auto, always, never, shadow; did you mean 'auto'?"
    )
    assert found[7] == "9: cost.margin: 2 must be below 1; write 'margin: 0.05'"


@pytest.mark.parametrize(
    ("tier", "problem"),
    [
        (
            "kind: nvme, paths: /x, capacity: 1TiB",
            "paths: '/x' is no list of paths; write [/x]",
        ),
        (
            "kind: nvme, paths: [], capacity: 1TiB",
            "paths: [] is no list of paths; write [/mnt/nvme0/kvtiers]",
        ),
        (
            "kind: nvme, paths: [x], capacity: 1TiB",
            "paths: 'x' is no absolute path; write /mnt/nvme0/kvtiers",
        ),
        (
            "kind: nvme, paths: [/x/$USER], capacity: 1TiB",
            "paths: '/x/$USER': variables are not replaced; write the path out, without '$'",
        ),
        (
            "kind: lmdb, path: /x/../y, capacity: 1TiB",
            "path: '/x/../y' goes back by '..'; write /y",
        ),
        (
            "kind: nvme, paths: [/x, /x/], capacity: 1TiB",
            "paths: names a path twice; name each disk's folder once",
        ),
        (
            "kind: nvme, paths: [/x, /x], capacity: 1TiB",
            "paths: names a path twice; name each disk's folder once",
        ),
        (
            "kind: nvme, paths: [/x], capacity: 1TiB, instance: ../x",
            "instance: '../x' is no name of a folder; write letters, digits, '-', '_', '.'",
        ),
        (
            "kind: lmdb, path: 5, capacity: 1TiB",
            "path: 5 is no absolute path; write /mnt/nvme0/kvtiers",
        ),
        (
            "kind: lmdb, path: /x, capacity: 1TiB, instance: a",
            "instance: unknown key; remove it (keys here: kind, name, path, capacity, write, "
            "admit)",
        ),
        ("kind: lmdb, path: /x", "capacity: is missing; add 'capacity: 200GiB'"),
    ],
)
def test_stores_on_disk_say_what_is_wrong_with_them(tier, problem):
    assert only_problem(DRAM.replace("]", f", {{{tier}}}]")) == f"1: tiers[1].{problem}"


@pytest.mark.parametrize("again", ["/b", "/b/", "//b", "/./b"])
def test_two_tiers_in_one_folder_are_refused(again):
    text = DRAM.replace(
        "]",
        ", {kind: nvme, paths: [/a, /b], capacity: 1TiB}, "
        f"{{kind: lmdb, path: {again}, capacity: 1TiB}}]",
    )
    assert only_problem(text) == (
        "1: tiers[2].path: '/b' is a folder of tiers[1] too; write another"
    )


@pytest.mark.parametrize(
    ("tiers", "problem"),
    [
        ("[]", "tiers: is empty; write '- {kind: dram, capacity: 4GiB}'"),
        ("3", "tiers: 3 is not a list; write '- {kind: dram, capacity: 4GiB}'"),
        ("", "tiers: an empty value is not a list; write '- {kind: dram, capacity: 4GiB}'"),
        (
            "[null]",
            "tiers[0]: an empty value is not a mapping; write '{kind: dram, capacity: 4GiB}'",
        ),
        (
            "[{kind: disk}]",
            "tiers[0].kind: 'disk' is not one of dram, memory, nvme, lmdb; write dram",
        ),
        (
            "[{kind: drma}]",
            "tiers[0].kind: 'drma' is not one of dram, memory, nvme, lmdb; did you mean 'dram'?",
        ),
        (
            "[{kind: [dram]}]",
            "tiers[0].kind: ['dram'] is not one of dram, memory, nvme, lmdb; write dram",
        ),
        ("[{capacity: 1GiB}]", "tiers[0].kind: is missing; add one of dram, memory, nvme, lmdb"),
        ("[{kind: dram}]", "tiers[0].capacity: is missing; add 'capacity: 64GiB'"),
        (
            "[{kind: memory, capacity: 1GiB}]",
            "tiers[0]: is memory, but the first tier must be dram; add one before this tier",
        ),
        (
            "[{kind: memory, capacity: 1GiB}, {kind: dram, capacity: 1GiB}]",
            "tiers[0]: is memory, but the first tier must be dram; move the dram tier here",
        ),
        (
            "[{kind: dram, capacity: 1GiB}, {kind: dram, capacity: 1GiB}]",
            "tiers[1]: is a second dram tier after tiers[0]; keep one, with their capacities",
        ),
        (
            "[{kind: dram, capacity: 0GiB}]",
            "tiers[0].capacity: '0GiB' holds no block; write 1GiB, or remove the tier",
        ),
    ],
)
def test_impossible_tier_list_is_refused(tiers, problem):
    assert only_problem(f"# the tiers\ntiers: {tiers}") == f"2: {problem}"


def test_two_stores_of_one_name_are_refused():
    text = """
tiers:
  - {kind: dram, capacity: 1GiB}
  - {kind: memory, capacity: 1GiB}
  - {kind: memory, capacity: 1GiB}
"""
    assert only_problem(text) == (
        "5: tiers[2].name: is 'memory' here and in tiers[1]; add 'name: memory2'"
    )
    named = text.replace("1GiB}\n", "1GiB, name: cold}\n").replace(
        "dram, capacity: 1GiB, name: cold", "dram, capacity: 1GiB"
    )
    assert only_problem(named) == (
        "5: tiers[2].name: 'cold' is the name of tiers[1] too; write another name"
    )


def test_kind_below_dram_is_one_of_a_store():
    text = DRAM.replace("]", ", {kind: ssd, paths: [/x], capacity: 1TiB}]")
    assert only_problem(text) == (
        "1: tiers[1].kind: 'ssd' is not one of memory, nvme, lmdb; write nvme for a local disk"
    )


@pytest.mark.parametrize("name", [*RESERVED_NAMES, "", "a b", "7", "a>b", "ü", None, 5])
def test_name_that_metrics_could_not_carry_is_refused(name):
    tiers = [{"kind": "dram", "capacity": "1GiB"}, {"kind": "memory", "capacity": "1GiB"}]
    tiers[1]["name"] = name
    assert ": tiers[1].name: " in only_problem(json.dumps({"tiers": tiers}))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"low_watermark": 0.99}, "low_watermark: 0.99 is above high_watermark 0.95"),
        ({"high_watermark": 0.5}, "low_watermark: 0.9 is above high_watermark 0.5"),
        ({"high_watermark": 1.5}, "high_watermark: 1.5 must be at most 1"),
        ({"low_watermark": 0}, "low_watermark: 0 must be above 0; write 'low_watermark: 0.9'"),
        ({"high_watermark": 0}, "high_watermark: 0 must be above 0; write 'high_watermark: 0.95'"),
        ({"high_watermark": "most"}, "high_watermark: 'most' is not a number"),
        ({"high_watermark": True}, "high_watermark: true is not a number"),
        ({"pin": True}, "pin: true is not one of auto, on, off; write on"),
        ({"pin": "no"}, "pin: 'no' is not one of auto, on, off; write off"),
        ({"capacity": "8191B"}, "capacity: '8191B' holds no block; write 1GiB"),
        ({"capacity": 2**36}, "capacity: 68719476736 has no unit; write 64GiB, if these are"),
        ({"capacity": None}, "capacity: null is not a size; write 1GiB"),
        ({"capacity": 5.0}, "capacity: 5.0 has no unit; write 5.0GiB"),
        ({"capacity": "5.0"}, "capacity: '5.0' has no unit; write 5.0GiB"),
        ({"write": "back"}, "write: unknown key"),
    ],
)
def test_wrong_value_in_a_tier_is_refused(keys, problem):
    assert only_problem(dram(**keys)).startswith(f"1: tiers[0].{problem}")


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("policy:", "policy: an empty value is not a mapping; write keys under it"),
        ("policy: lru", "policy: 'lru' is not a mapping; write keys under it (keys here: evict,"),
        (
            "policy: {evict: mru}",
            "policy.evict: 'mru' is not one of adaptive, arc, cost, lru, s3-fifo, w-tinylfu; "
            "did you mean 'lru'?",
        ),
        ("cost: {margin: -0.1}", "cost.margin: -0.1 must be at least 0"),
        ("cost: {margin: .nan}", "cost.margin: '.nan' is not a number"),
        ("cost: {decision_log: 5}", "cost.decision_log: 5 is no path"),
        ("cost: {decision_log: ~/x}", "cost.decision_log: '~/x' is no path"),
        ("reload: {deadline: 10}", "reload.deadline: 10 has no unit; write 10s or 10ms"),
        ("reload: {sync_below: 0}", "reload.sync_below: 0 has no unit; write 0ms"),
        ("reload: {layer_ranges: 8.0}", "reload.layer_ranges: 8.0 is not a whole number; write"),
        ("cost: {decision_log: /x/$A}", "cost.decision_log: '/x/$A': variables are not replaced"),
        ("reload: {deadline: 0s}", "reload.deadline: '0s' leaves no time at all"),
        (
            "reload: {sync_below: 5m}",
            "reload.sync_below: '5m' has the unknown unit 'm'; write 5min",
        ),
        ("copy: {threads: 0}", "copy.threads: 0 is no number of threads; write auto or 1 to 256"),
        ("copy: {threads: true}", "copy.threads: true is no number of threads"),
        ("copy: {threads: '4'}", "copy.threads: '4' is no number of threads"),
        ("integrity: al", "integrity: 'al' is not one of auto, all; did you mean 'all'?"),
        ("copying: {}", "copying: unknown key; did you mean 'copy'?"),
        ("1: x", "1: unknown key; remove it (keys here: tiers, policy,"),
    ],
)
def test_wrong_value_in_a_section_is_refused(section, problem):
    assert only_problem(DRAM + section).startswith(f"2: {problem}")


@given(st.from_regex(r"[a-z_]{1,20}", fullmatch=True))
def test_unknown_key_never_passes(key):
    known = json_schema()["$defs"]["DramTier"]["properties"]
    if key not in known:
        assert only_problem(dram(**{key: 1})).startswith(f"1: tiers[0].{key}: unknown key; ")


def test_problem_is_one_line_whatever_the_key_holds():
    assert only_problem(DRAM + '"a\\nb": 1').startswith("2: 'a\\nb': unknown key")


# What is no configuration at all


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1: is empty; write at least 'tiers: [{kind: dram, capacity: 4GiB}]'"),
        ("# nothing\n", "1: is empty"),
        ("- kind: dram\n", "1: is a list, not a mapping; start with 'tiers:'"),
        ("hello", "1: is 'hello', not a mapping"),
        ("{}", "1: tiers: is missing; add 'tiers: ["),
        ("tiers:\n\t- kind: dram\n", "2: is not YAML: found character '\\t'"),
        ("a: 1\nb: [\n", "3: is not YAML: "),
        ("tiers: []\n---\ntiers: []\n", "2: is not YAML: holds more than one document; keep one"),
        ("a: 1\nb: \x07\n", "2: character U+0007 is not allowed in YAML; remove it"),
        ("[" * 5000, "1: is nested too deeply"),
    ],
)
def test_text_that_is_no_configuration_is_refused_with_its_line(text, problem):
    assert only_problem(text).startswith(problem)


def test_tabs_get_their_remedy():
    assert only_problem("tiers:\n\t- a").endswith("indent with spaces, not tabs")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tiers:\n- {kind: dram\n", "with '}' or ']' what begins on line 2"),
        ("tiers:\n  - kind: dram\n   capacity: 1GiB\n", "line up with what begins on line 2"),
        ("tiers: *size\n", "write the value out, or quote a text that begins with '*'"),
    ],
)
def test_what_is_no_yaml_is_named_with_the_line_where_it_begins(text, problem):
    assert problem in only_problem(text)


def test_key_without_a_colon_is_named_with_its_own_line():
    assert only_problem("tiers:\n- kind: dram\n  capacity 1GiB\n  pin: on\n") == (
        "3: is not YAML: a key without ':' and a value; write 'key: value', with a space after "
        "the colon"
    )


def test_colon_without_a_space_is_named():
    found = problems("tiers:\n- {kind:dram, capacity:1GiB}\n")
    assert found[0] == "2: tiers[0]: 'kind:dram' has no space after ':'; write 'kind: dram'"


def test_merge_key_is_refused_by_name():
    text = "tiers:\n- &a {kind: dram, capacity: 1GiB}\n- {<<: *a, kind: memory}\n"
    assert problems(text)[0] == "3: tiers[1]: '<<' does not merge here; write the keys out"


def test_duplicate_key_is_refused():
    text = DRAM + "cost: {mode: auto}\ncost: {mode: never}\n"
    assert only_problem(text) == "3: cost: is given twice, first on line 2; keep one"


def test_duplicate_key_in_a_tier_is_refused():
    text = "tiers:\n- kind: dram\n  capacity: 1GiB\n  capacity: 2GiB\n"
    assert only_problem(text) == ("4: tiers[0].capacity: is given twice, first on line 3; keep one")


def test_tag_is_refused():
    found = problems(DRAM + "integrity: !!python/name:os.system x\n")
    assert found[0].startswith("2: integrity: has the tag ")


def test_alias_that_contains_itself_is_refused():
    assert "contains itself" in problems("tiers: &a [*a]")[0]


def test_alias_bomb_is_refused():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert only_problem("\n".join(lines)).endswith(
        "has more than 10000 values; write fewer aliases"
    )


def test_complex_key_is_refused():
    assert problems(DRAM + "? [a]\n: b\n")[0] == (
        "2: a key is a list or mapping; write a plain word"
    )


@given(st.text(max_size=40))
def test_no_text_escapes_as_another_exception(text):
    with contextlib.suppress(ConfigError):
        parse_config(text)


def test_more_stores_than_an_order_can_name_are_refused():
    tiers = [{"kind": "dram", "capacity": "1GiB"}]
    tiers += [{"kind": "memory", "name": f"m{i}", "capacity": "1GiB"} for i in range(9)]
    with pytest.raises(ConfigError, match=r"tiers\[9\]: is tier 10; at most 8 may lie below dram"):
        parse_mapping({"tiers": tiers})
    parse_mapping({"tiers": tiers[:-1]})


def test_words_of_the_messages_are_no_names():
    tiers = [{"kind": "dram", "capacity": "1GiB"}]
    tiers += [{"kind": "memory", "name": "released", "capacity": "1GiB"}]
    with pytest.raises(ConfigError, match="'released' is reserved"):
        parse_mapping({"tiers": tiers})


def test_a_file_that_is_far_too_long_is_not_parsed(tmp_path):
    path = tmp_path / "kvtiers.yaml"
    path.write_text("tiers: [" + "x," * (1 << 19) + "]")
    with pytest.raises(ConfigError, match="that is no configuration"):
        load_config(path)
