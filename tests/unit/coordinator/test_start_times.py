"""Where the seconds of a start went is a table of its stages."""

from __future__ import annotations

from elastic_ring.control.facts import StartStage, fact_of, line_of
from elastic_ring.monitor.goodput import Stages, build_stages, process_unix_s, start_table


def table(*stages: StartStage) -> list[str]:
    return start_table(fact_of(line_of(stage)) for stage in stages)


def test_the_worker_that_the_others_waited_for_is_shown_in_the_order_of_time():
    lines = table(
        StartStage("driver", "imports", 100.0, 3.0),
        StartStage("w1", "imports", 104.0, 9.0),
        StartStage("w0", "imports", 104.0, 2.0),
        StartStage("w0", "wraps the model", 113.5, 0.2),
        StartStage("w1", "wraps the model", 113.5, 0.7),
        StartStage("w1", "takes its device", 113.4, 0.001),
        StartStage("w2", "imports", 104.0, 60.0),  # a spare, which nobody waits for
        StartStage("run", "first step", 114.2, 1.0),
    )
    rows = [line.split(maxsplit=3) for line in lines[1:-1]]
    assert [tuple(row[:3]) for row in rows] == [
        ("0.0", "3.0", "driver"),
        ("4.0", "9.0", "w1"),
        ("13.5", "0.7", "w1"),
        ("14.2", "1.0", "run"),
    ]
    assert lines[-1] == "2 other worker(s) beside it"


def test_a_run_of_before_has_no_stages_and_says_so():
    assert table() == ["no stage of this run's start is on record"]


def test_stages_follow_each_other_without_a_gap_from_the_beginning_of_the_process():
    stages = Stages("imports")
    stages.begin("works")
    stages.begin("")
    stages.begin("")
    (first, since_s, took_s), (second, then_s, _) = stages.ended
    assert (first, second, since_s) == ("imports", "works", process_unix_s())
    assert abs(since_s + took_s - then_s) < 1e-3
    timings = {"begun_unix_s": 10.0, "meet_s": 2.0, "world_s": 0.0, "heal_s": 1.0}
    assert build_stages(timings) == [("meets the others", 10.0, 2.0), ("heals", 12.0, 1.0)]
