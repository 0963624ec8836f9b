"""Sizes and times as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfopt.units import GIB, MIB, format_bytes, format_energy, format_percent, format_rate, format_seconds, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GiB", 24 * GIB), ("24 gb", 24 * GIB), ("512 MiB", 512 * MIB), ("0.5G", GIB // 2), ("1024", 1024), ("7b", 7), ("1T", 1 << 40)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_a_bare_number_takes_the_default_unit() -> None:
    assert parse_bytes("24", default_unit="GiB") == 24 * GIB


@pytest.mark.parametrize("text", ["", "many", "-3GiB", "3 apples", "1e9"])
def test_a_bad_size_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="24GiB"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=1 << 45))
def test_a_printed_size_reads_back_closely(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.01, abs=600_000 if count > MIB else 600)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2e-5, "20 µs"), (0.0123, "12.3 ms"), (1.25, "1.2 s"), (95, "1 min 35 s"), (7300, "2 h 1 min"), (200_000, "2 d 7 h")],
)
def test_times_are_printed_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rates_and_shares() -> None:
    assert format_rate(1234.5, "samples") == "1,234 samples/s"
    assert format_rate(12.34, "samples") == "12.3 samples/s"
    assert format_rate(1.234, "tokens") == "1.23 tokens/s"
    assert format_percent(0.512) == "51.2 %"
    assert (format_energy(0.19), format_energy(0.0049), format_energy(0.094)) == ("0.19 kWh", "4.9 Wh", "94 Wh")


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("400Gbit/s", 50e9),
        ("100Gb/s", 12.5e9),
        ("25GB/s", 25e9),
        (" 1.5 tbit ", 187.5e9),
        ("900 MByte/s", 9e8),
        ("10Gbps", 1.25e9),
        ("8B/s", 8),
    ],
)
def test_rates_of_links_are_read(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["", "fast", "25", "-1GB/s", "25GB/h"])
def test_a_bad_rate_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="400Gbit/s"):
        parse_rate(text)
