"""Full garbage collections come when all ranks make one, and at no other time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_ring.runtime.worker import garbage

OBJECTS = 200_000


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of each collection; everything is as before afterwards."""
    seen: list[int] = []
    threshold = gc.get_threshold()

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.set_threshold(*threshold)
    gc.unfreeze()


def test_young_objects_are_collected_and_old_ones_only_when_it_is_due(collections: list[int]) -> None:
    kept = [[] for _ in range(OBJECTS)]
    if sys.version_info < (3, 14):  # later ones collect bit by bit
        assert 2 in collections, "Python begins a full one by itself"
    garbage.settle()
    collections.clear()
    more = [[] for _ in range(OBJECTS)]
    assert {0, 1} <= set(collections)
    assert 2 not in collections
    garbage.collect_if_due(garbage.COLLECT_EVERY_STEPS - 1)
    assert 2 not in collections
    garbage.collect_if_due(2 * garbage.COLLECT_EVERY_STEPS)
    assert 2 in collections
    assert len(kept) == len(more) == OBJECTS
