"""Which tests `make test` runs, which only `make test-all` and `make soak` do, and which share the machine.

`make test` leaves out what has the mark `slow`. Of a test with the mark `thinned` it runs the fewest parameter sets
that together have each value of each parameter, at most `num` of them if given. `make test-all` runs as many more at
most, so that together they have each two values of two parameters; these become `slow`, the rest `soak`.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.object_store.store import object_store  # noqa: F401  a fixture for all

# Every Ray of the tests asks for this token, and what the tests start inherits it; the user's own stays out of it.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))

CLUSTERS = "tests/ray/clusters/"


def scope_of(nodeid: str) -> str:
    """What one of pytest-xdist's processes runs, test after test: a file, whose fixtures are then made once; all on the
    shared Ray, and all with clusters of their own, as three of them at a time would starve each other on two cores; all
    that measure or fill a GPU; one test of attention on GPUs, most of whose time is the compilation of its kernels."""
    if nodeid.startswith("tests/gpu/attention/"):
        return nodeid
    if nodeid.startswith(CLUSTERS):
        return CLUSTERS
    folder = "/".join(nodeid.split("/")[:2])
    return folder if folder in ("tests/ray", "tests/gpu") else nodeid.split("::")[0]


class Scheduling(LoadScopeScheduling):
    """Hands out scopes in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_tests = Counter(scope_of(item.nodeid) for item in items)

    def order(item: pytest.Item) -> tuple[int, bool, int]:
        """What takes longest begins first; the tests of the shared Ray follow each other, so that it starts once.
        Clusters of their own come last, when cores have become free; of these, those that use the shared Ray too come
        at the end."""
        own = "local_ray" not in getattr(item, "fixturenames", ())
        ray, clusters = (item.nodeid.startswith(folder) for folder in ("tests/ray/", CLUSTERS))
        return 2 if clusters else 0 if ray else 1, own != clusters, -num_tests[scope_of(item.nodeid)]

    items.sort(key=order)
    thin(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """One process runs tests on Ray, then others, some of which start a Ray themselves: the shared one ends between."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized() and not item.nodeid.startswith(("tests/ray/", "tests/gpu/")):
        ray.shutdown()


def thin(items: list[pytest.Item]) -> None:
    """Give the marks `slow` and `soak` to what `thinned` leaves out."""
    thinned = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("thinned"):
            num = mark.kwargs.get("num", mark.args[0] if mark.args else None)
            thinned[item.nodeid.split("[")[0], num].append(item)
    for (_, num), variants in thinned.items():
        sets = [values(item) for item in variants]
        kept = covering(sets, num)
        paired = covering([pairs(each) for each in sets], 2 * len(kept), start=kept)
        for index, item in enumerate(variants):
            if index not in kept:
                item.add_marker(pytest.mark.slow if index in paired else pytest.mark.soak)


def values(item: pytest.Item) -> set[tuple[str, str]]:
    """A test's parameters, by name and value."""
    assert isinstance(item, pytest.Function)
    assert hasattr(item, "callspec"), f"{item.nodeid} is thinned and has no parameters"
    return {(name, repr(value)) for name, value in item.callspec.params.items()}


def pairs(of: set[tuple[str, str]]) -> set[Hashable]:
    """Each value, and each two of them: a fault needs seldom more than two together."""
    return {*of, *combinations(sorted(of), 2)}


def covering(sets: Sequence[set[Any]], num: int | None = None, start: Collection[int] = ()) -> set[int]:
    """Indices of few sets, `start` among them, `num` at most, that together have every element (a greedy choice)."""
    missing, kept = set[Any]().union(*sets).difference(*(sets[index] for index in start)), set(start)
    while missing and (num is None or len(kept) < num):
        best = max(range(len(sets)), key=lambda index: len(sets[index] & missing))  # the first of equals
        kept.add(best)
        missing -= sets[best]
    return kept
