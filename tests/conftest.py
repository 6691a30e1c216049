"""Which tests `make test` runs and which only `make test-all` does, and which of them share the machine.

`make test` leaves out what has the mark `slow`. Of a test with the mark `thinned` it runs the fewest parameter sets
that together have each value of each parameter, at most `num` of them if given; the rest becomes `slow`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.object_store.store import object_store  # noqa: F401  a fixture for all

# A Ray cluster and a GPU are for one test at a time: one of pytest-xdist's processes runs all of these.
SERIAL = ("tests/ray/", "tests/gpu/")


class Scheduling(LoadScopeScheduling):
    """Any process takes any test, but one takes all that are in `SERIAL`, from the beginning."""

    def _split_scope(self, nodeid: str) -> str:
        return "serial" if nodeid.startswith(SERIAL) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "local_ray" not in getattr(item, "fixturenames", ()))  # the shared Ray starts once
    thin(items)


def thin(items: list[pytest.Item]) -> None:
    """Give the mark `slow` to what `thinned` leaves out."""
    thinned = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("thinned"):
            num = mark.kwargs.get("num", mark.args[0] if mark.args else None)
            thinned[item.nodeid.split("[")[0], num].append(item)
    for (_, num), variants in thinned.items():
        kept = covering([values(item) for item in variants], num)
        for index, item in enumerate(variants):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


def values(item: pytest.Item) -> set[tuple[str, str]]:
    """A test's parameters, by name and value."""
    assert isinstance(item, pytest.Function)
    assert hasattr(item, "callspec"), f"{item.nodeid} is thinned and has no parameters"
    return {(name, repr(value)) for name, value in item.callspec.params.items()}


def covering(sets: Sequence[set[tuple[str, str]]], num: int | None = None) -> set[int]:
    """Indices of few sets, `num` at most, that together have every element (or as many as a greedy choice finds)."""
    missing, kept = set().union(*sets), set()
    while missing and (num is None or len(kept) < num):
        best = max(range(len(sets)), key=lambda index: len(sets[index] & missing))  # the first of equals
        kept.add(best)
        missing -= sets[best]
    return kept
