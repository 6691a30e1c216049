"""What a worker keeps of its committed steps: each published once, and all that a coordinator may lack still there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic_ring.control.messages import Vote
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.metrics import StepMetrics
from elastic_ring.runtime.notices import Notice, StepRecord
from elastic_ring.runtime.worker import member_parts
from elastic_ring.runtime.worker.member_parts import StepRecords
from elastic_ring.train.vote import Outcome


def filled(number: int) -> tuple[StepRecords, list[list[int]]]:
    """The records of so many steps, and the steps of each publication."""
    told: list[list[int]] = []

    def publish(ready: Sequence[Notice]) -> None:
        told.append(steps(ready))

    made = StepRecords(publish)
    for step in range(number):
        metrics = StepMetrics(step, 1.0, 1.0, 0.1, 8, 80.0, 0.1, False, 1, Mesh(1, 1), 1)
        made.add(StepRecord(metrics, Outcome(Vote(step, ())), 60.0))
    return made, told


def steps(records: Sequence[Notice]) -> list[int]:
    return [record.metrics.step for record in records if isinstance(record, StepRecord)]


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
    monkeypatch.setattr(member_parts, "KEPT_RECORDS", 3)
    made, _ = filled(5)
    made.send(4)
    assert steps(made.after(-1)) == [2, 3, 4]
    assert steps(made.after(3)) == [4]
