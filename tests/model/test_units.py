import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtiers.model.units import (
    DURATION_UNITS,
    SIZE_UNITS,
    duration_from,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    size_from,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64GiB", 64 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5TiB", 3 * 2**39),
        ("1KiB", 1024),
        ("1kB", 1000),
        ("2MB", 2_000_000),
        ("5GB", 5_000_000_000),
        ("0.5TB", 500_000_000_000),
        ("17B", 17),
        ("0GiB", 0),
        ("  64 GiB ", 64 * 2**30),
    ],
)
def test_size_is_read_to_the_byte(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5ms", 0.005), ("10s", 10.0), ("2min", 120.0), ("1h", 3600.0), ("250us", 0.00025)],
)
def test_duration_is_read_in_seconds(text, seconds):
    assert parse_duration(text) == seconds


@given(st.integers(0, 2**63 - 1))
@example(0)
@example(2**40)
@example(2**63 - 1)
def test_size_survives_text(nbytes):
    assert parse_size(format_size(nbytes)) == nbytes


@given(st.integers(0, 10**12), st.sampled_from(sorted(DURATION_UNITS)))
def test_duration_that_people_write_survives_text(count, unit):
    seconds = parse_duration(f"{count}{unit}")
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.decimals(0, 10**9, places=6, allow_nan=False), st.sampled_from(sorted(DURATION_UNITS)))
def test_fractional_duration_survives_text(count, unit):
    seconds = parse_duration(f"{count:f}{unit}")
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0B"), (1024, "1KiB"), (3 * 2**39, "1536GiB"), (1500, "1500B"), (16 * 10**9, "16GB")],
)
def test_size_is_shown_in_the_largest_exact_unit(nbytes, text):
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.005, "5ms"), (10.0, "10s"), (120.0, "2min"), (0.1, "100ms")],
)
def test_duration_is_shown_in_the_largest_whole_unit(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (64, "write 64GiB"),
        (5.0, "write 5.0GiB"),
        (0, "write 1GiB"),
        (-3, "write 1GiB"),
        ("64", "write 64GiB"),
        ("64gib", "write 64GiB"),
        ("64G", "write 64GiB or 64GB"),
        ("64Gb", "write 64GB"),
        ("64parsec", "write one of B, kB"),
        ("", "such as 64GiB"),
        ("lots", "such as 64GiB"),
        ("-1GiB", "'-1GiB' is negative; write a number with a unit, such as 64GiB"),
        (68719476736, "write 64GiB, if these are bytes"),
        ("68719476736", "write 64GiB, if these are bytes"),
        (16e9, "write 16GB, if these are bytes"),
        ("5 bytes", "write 5B"),
        ("1e3GiB", "such as 64GiB"),
        ("0.3B", "in a smaller unit"),
        ("9000000TiB", "a smaller size"),
        (True, "write 1GiB"),
        (None, "null is not a size; write 1GiB"),
        (["64GiB"], "write 1GiB"),
        ("٣GiB", "such as 64GiB"),
    ],
)
def test_size_that_is_refused_names_the_remedy(value, remedy):
    with pytest.raises(ValueError, match=remedy):
        size_from(value)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (5, "write 5s or 5ms"),
        (0, "write 0ms"),
        (-5, "write 1s or 1ms"),
        ("5", "write 5s or 5ms"),
        ("5 sec", "write 5s$"),
        ("-5s", "'-5s' is negative"),
        ("5m", "write 5min or 5ms"),
        ("5S", "write 5s"),
        ("5 fortnights", "write one of us, ms"),
        ("soon", "such as 5ms"),
        (False, "false is not a duration; write 1ms"),
    ],
)
def test_duration_that_is_refused_names_the_remedy(value, remedy):
    with pytest.raises(ValueError, match=remedy):
        duration_from(value)


@given(st.text())
def test_no_text_breaks_the_parsers(text):
    for parse, units in ((parse_size, SIZE_UNITS), (parse_duration, DURATION_UNITS)):
        try:
            value = parse(text)
        except ValueError:
            continue
        assert value >= 0
        assert text.strip().endswith(tuple(units))
