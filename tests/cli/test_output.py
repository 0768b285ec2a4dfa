"""What commands print: sizes, ranks and tables for people, and nothing that steers their terminal."""

from __future__ import annotations

import pytest

from tierckpt.cli.output import clean, compact, count, size, spans, table


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (5200, "5.2 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (12_345_678_901, "12.3 GB"),
        (10**18, "1e+03 PB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_ranks_are_shown_as_ranges() -> None:
    assert spans([0, 1, 2, 3, 8]) == "0-3, 8"
    assert spans([0, 2, 4, 6, 8, 10], most=2) == "0, 2, …"
    assert spans([]) == ""


def test_counts() -> None:
    assert (count(1, "link"), count(0, "link"), count(2000, "link")) == ("1 link", "0 links", "2,000 links")


def test_hostile_text_becomes_one_harmless_line() -> None:
    assert clean("größer ✓") == "größer ✓"
    assert clean("a\nb\x1b[2J\x9b\udc80\u202e") == "a\\nb\\x1b[2J\\x9b\\udc80\\u202e"


def test_compact_values_are_cut() -> None:
    assert compact({"a": [1, "ü"]}) == '{"a": [1, "ü"]}'
    assert compact("x" * 20, 10) == '"xxxxxxxx…'


def test_a_table_in_a_pipe_is_neither_cut_nor_padded(capsys: pytest.CaptureFixture[str]) -> None:
    table(("name", "n"), [("[bold]" + "x" * 300, "1"), ("b\x1bc", "23")], right=("n",))
    assert capsys.readouterr().out.splitlines() == [
        "name" + " " * 305 + "n",
        "[bold]" + "x" * 300 + "   1",
        "b\\x1bc" + " " * 300 + "  23",
    ]
