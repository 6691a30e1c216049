"""The page on tests has every test file in one row; few parameter sets cover all values."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from tests.conftest import covering, pairs

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests"


def table() -> list[list[str]]:
    """The cells of each row of "What is shown where"."""
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8").split("\n| promise |", 1)[1]
    lines = text.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_test_file_stands_in_one_row() -> None:
    """In the row that names it, else in the one that names its folder."""
    named = [place for row in table() for place in re.findall(r"`([\w./]+)`", row[1])]
    assert len(named) == len(set(named)), "no place stands in two rows"
    assert [place for place in named if not (TESTS / place).exists()] == []
    files = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    assert len(files) > 100
    places = set(named)
    lost = [str(file) for file in files if not places & {str(file), *(str(folder) for folder in file.parents)}]
    assert lost == []


def test_few_parameter_sets_have_each_value_and_more_of_them_each_two_values() -> None:
    every = [set(zip("abc", each, strict=True)) for each in product((0, 1), (0, 1, 2), (0, 1, 2))]
    once = covering(every)
    assert len(once) == 3
    assert set().union(*(every[index] for index in once)) == set().union(*every)
    twice = covering([pairs(each) for each in every], start=once)
    assert once <= twice
    assert len(twice) < len(every) - 5
    both = {(x, y) for index in twice for x in every[index] for y in every[index]}
    assert both == {(x, y) for each in every for x in each for y in each}
    assert len(covering(every, 1)) == 1
