"""What a worker keeps of its committed steps: each published once, and all that a coordinator may lack still there."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_ring.runtime.worker import step_records
from elastic_ring.runtime.worker.step_records import StepRecords


def filled(number: int) -> tuple[StepRecords, list[list[int]]]:
    """The records of so many steps, and the steps of each publication."""
    told: list[list[int]] = []

    def publish(ready: list[dict[str, Any]]) -> None:
        told.append([record["step"] for record in ready])

    made = StepRecords(publish)
    for step in range(number):
        made.add({"step": step})
    return made, told


def steps(found: list[dict[str, Any]]) -> list[int]:
    return [record["step"] for record in found]


def test_each_step_is_published_once_and_no_further_than_asked() -> None:
    made, told = filled(4)
    for through in (-1, 1, 1, 2):
        made.send(through)
    assert told == [[0, 1], [2]]
    assert steps(made.unsent()) == [3]


def test_what_another_rank_has_published_is_not_sent_again() -> None:
    made, told = filled(4)
    made.mark_published(2)
    made.mark_published(0)  # older news of the same
    made.send(3)
    assert told == [[3]]


def test_a_new_coordinator_that_knows_less_is_sent_the_rest_again() -> None:
    made, told = filled(3)
    made.send(2)
    made.rewind(0)
    assert steps(made.unsent()) == [1, 2]
    made.send(2)
    assert told == [[0, 1, 2], [1, 2]]


def test_the_newest_are_kept_whoever_has_published_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_records, "KEPT_RECORDS", 3)
    made, _ = filled(5)
    made.send(4)
    assert steps(made.after(-1)) == [2, 3, 4]
    assert steps(made.after(3)) == [4]
