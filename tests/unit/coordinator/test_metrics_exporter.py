"""What the coordinator exports: every metric of the table, from the state that status.json shows, and no other."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.config import CheckpointConfig, OptimConfig, RunConfig, StepConfig
from elastic_ring.control.decisions.detectors import FIRST_INTERVAL_S
from elastic_ring.control.facts import CheckpointWritten, RecoveryEnded
from elastic_ring.control.messages import Build, MemberFailed, SnapshotId, Vote
from elastic_ring.control.pool import Node, Worker
from elastic_ring.control.state import (
    Building,
    Change,
    Closing,
    Forming,
    Incident,
    LostWorker,
    Membership,
    Running,
    State,
)
from elastic_ring.data.source import StdlibText
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.goodput import CLOCK_PARTS
from elastic_ring.monitor.metrics import StepMetrics
from elastic_ring.runtime.agent.health import GPU_KEYS, INFINIBAND_KEYS, NETWORK_KEYS
from elastic_ring.runtime.coordinator import services
from elastic_ring.runtime.coordinator.folds.metrics_table import CAUSES, GPU, LOSSES, NODE, PHASES, TABLE, Reading
from elastic_ring.runtime.coordinator.recorder import RunRecorder
from elastic_ring.runtime.coordinator.run_files import RunFiles
from elastic_ring.runtime.coordinator.services import MetricsExporter, step_flops
from elastic_ring.runtime.notices import Copied, StepRecord, Validated
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.vote import Outcome, Tally
from tests.sim.simulator.options import simulated
from tests.unit.coordinator.builders import change, opened_recorder

STATE = State(
    simulated("measured", 2, 1, 40, spares=2, max_dp=3),
    Running(Membership(1, 2, Mesh(2, 1), ("a", "b"), 0)),
    1,
    2,
    {
        **{name: Worker(name, "node", "ready", 0.0) for name in "abcd"},
        "e": Worker("e", "node", "starting", 9.0),
        "f": Worker("f", "other", "ready", 0.0, draining=True),
        "g": Worker("g", "other", "starting", 9.0, draining=True),
    },
    {"node": Node("node", 8), "other": Node("other", 8, draining=True, start_failures=3)},
)


def change_of(step: int, **more: Any) -> Change:
    """Two of two rings of one are lost."""
    lost = (LostWorker("b", "node", 1, "node lost"), LostWorker("c", "node", 0, "died"))
    own = {"mesh": Mesh(2, 1), "previous_mesh": Mesh(2, 1), "members": ("a", "e"), "survivors": ("a",), "lost": lost}
    times = {"noticed_at": 10.0, "resumed_at": 11.0}
    return change(step, **{**own, **times, "newcomers": (), "cause": "", **more})


def record(step: int, gpu_memory: dict[str, int] | None = None, **changes: Any) -> StepRecord:
    metrics = StepMetrics(
        step=step,
        loss=2.5,
        grad_norm=1.5,
        lr=0.1,
        num_tokens=80,
        tokens_per_s=20.0,
        step_s=4.0,
        skipped=False,
        generation=1,
        mesh=Mesh(2, 1),
        num_members=2,
        hop_bytes=64,
        exposed_hop_wait_s=0.25,
        data_wait_s=0.125,
        expert_load_max=1.25,
        expert_parts=6,
        hop_latency_mean_s=0.125,
        hop_latency_p99_s=0.5,
    )
    outcome = Outcome(Vote(step, Tally().numbers(), (1, 1)), work_s=(0.5, 0.75))
    return StepRecord(replace(metrics, **changes), outcome, FIRST_INTERVAL_S, gpu_memory=gpu_memory or {})


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    made = opened_recorder(tmp_path, now=lambda: 12.5)
    made.steps.begun(0, (1, 1))
    unknown = dict.fromkeys(("exposed_hop_wait_s", "hop_latency_mean_s", "hop_latency_p99_s"))
    skipped = record(1, skipped=True, loss=math.nan, gpu_memory=MEMORY, **unknown)
    made.publish([record(0), skipped, Validated(1, {"val_loss": 2.0, "val_code_loss": 1.5}, 0.125, (1, 1))])
    made.goodput.lost.add("startup", 0.5)
    made.goodput.lost.add("stalled", 0.25)
    made.recoveries.begin(change_of(2), 2, 9.25)
    made.recoveries.committed(2, 12.5)
    made.checkpoint({"step": 2, "path": "somewhere", "bytes": 1024, "blocked_s": 0.25, "total_s": 3.5})
    made.publish([COPIED])
    clock = dict.fromkeys(CLOCK_PARTS, 0.0)
    workers: Any = {
        "a": {"rss_bytes": 5, "peak_rss_bytes": 9, "shared_bytes": 1, "clock": {**clock, "forward": 1.0}},
        "b": {"rss_bytes": 7, "peak_rss_bytes": 8, "shared_bytes": 0, "clock": {**clock, "forward": 2.0}},
        "c": {"clock": {**clock, "forward": 9.0}},
    }  # a spare
    made.recoveries.worker_started("a", 1, {"gpu": "NVIDIA H100 80GB HBM3"})
    pressure: Any = {"some": 0.25, "full": 0.125}
    made.live = replace(made.live, workers=workers, pressure=pressure, health=HEALTH)
    return made


HEALTH: Any = {
    "10.0.0.1": {
        "network": {key: index for index, key in enumerate([*NETWORK_KEYS, *INFINIBAND_KEYS])},
        "gpus": {"0": {key: float(index) for index, key in enumerate(GPU_KEYS)}},
    }
}
MEMORY = {"allocated": 100, "reserved": 160, "fragmented": 30, "peak": 140}


COPIED = Copied(step=20, bytes=512, num_holders=1, blocked_s=0.125, total_s=0.5, skipped=3)


RUN = RunConfig("measured", run_dir="measured", checkpoint_config=CheckpointConfig(every_steps=5))


def reading_of(
    recorder: RunRecorder, state: State = STATE, run: RunConfig = RUN, flops: float | None = 989.4e12, **more: Any
) -> Reading:
    recorder.live = replace(recorder.live, now=20.0, driver_silent_s=3.25, checkpoint_failing_s=7.5)
    return Reading(run, recorder, flops, 1000.0, state, **more)


def exported(recorder: RunRecorder, state: State = STATE, **more: Any) -> dict[tuple[str, str], float | None]:
    """Of the gauges."""
    reading = reading_of(recorder, state, **more)
    pairs = {metric: metric.samples(reading) for metric in TABLE if metric.kind == "gauge"}
    return {(metric.name, value): number for metric in pairs for value, number in pairs[metric]}


def test_every_metric_of_the_table_has_its_values(recorder):
    reading = reading_of(recorder)
    assert len({metric.name for metric in TABLE}) == len(TABLE)
    for metric in TABLE:
        opened = {"the global rank": ["0", "1"], NODE: ["10.0.0.1"], GPU: ["10.0.0.1/0"]}
        if isinstance(metric.values, str):
            values = opened.get(metric.values, ["loss", "code_loss"])
        else:
            values = list(metric.values or [""])
        pairs = metric.samples(reading)
        assert sorted(value for value, _ in pairs) == sorted(values), metric.name
        assert None not in [number for _, number in pairs], metric.name


def test_the_values_are_those_of_the_run(recorder):
    found = exported(recorder)
    told: dict[str, Any] = {
        "committed_steps": 2,
        "planned_steps": 40,
        "skipped_steps": 1,
        "validation_loss": 2.0,
        "tokens_per_second": 20.0,
        "mfu_ratio": 0.125,
        "expert_load_ratio": 1.25,
        "expert_parts": 6,
        "hop_exposed_wait_seconds": 0.25,
        "wanted_spares": 2,
        "failed_starts": 3,
        "rerun_steps": 1,
        "checkpoints": 1,
        "checkpoint_step": 2,
        "checkpoint_size_bytes": 1024,
        "copy_step": 20,
        "copy_size_bytes": 512,
        "copies_skipped": 3,
        "goodput_ratio": 0.4,
        "driver_silent_seconds": 3.25,
        "checkpoint_failing_seconds": 7.5,
        "validation": {"code_loss": 1.5},
        "phase": {"running": 1, "waiting": 0},
        "hop_latency_seconds": {"p99": 0.5},
        "mesh": {"dp": 2},
        "wanted_rings": {"max": 3},
        "workers": {"member": 2, "spare": 2, "starting": 1, "leaving": 2},
        "nodes": {"usable": 2, "draining": 1},
        "recoveries": {"node lost": 1, "died": 0},
        "lost_workers": {"died": 1},
        "recovery_sum_seconds": {"close": 1.0, "rerun": 1.5, "total": 2.5},
        "checkpoint_seconds": {"blocked": 0.25},
        "copy_seconds": {"total": 0.5},
        "worker_memory_bytes": {"rss": 7, "peak": 9, "shared": 1},
        "gpu_memory_bytes": {"fragmented": 30, "peak": 140},
        "memory_pressure_ratio": {"full": 0.125},
        "network_drops": {"10.0.0.1": NETWORK_KEYS.index("drops")},
        "gpu_xid_errors": {"10.0.0.1/0": GPU_KEYS.index("xid_errors")},
        "step_part_mean_seconds": {"forward": 1.5, "data": 0.0},
        "rank_work_seconds": {"1": 0.75},
        "step_part_longest_seconds": {"forward": 2.0},
        "time_seconds": {
            "steps": 8.0,
            "recovery": 0.75,
            "startup": 0.5,
            "waiting": 0.25,
            "validation": 0.125,
            "checkpoint": 0.25,
            "rerun": 0.75,
            "undone": 0.0,
            "resize": 0.0,
            "other": 9.375,
        },
    }
    for name, values in told.items():
        for part, value in values.items() if isinstance(values, dict) else [("", values)]:
            assert found[f"elastic_ring_{name}", part] == value, (name, part)
    assert math.isnan(found["elastic_ring_loss", ""] or 0.0)


def test_a_coordinator_that_starts_anew_exports_the_same(recorder, tmp_path):
    RunFiles(replace(RUN, run_dir=str(tmp_path)), recorder).write_status(STATE)
    again = opened_recorder(tmp_path, now=lambda: 12.5)
    again.recall(RecoveryEnded(recorder.recoveries.records[0].to_json(), closes=True), ())
    again.publish([COPIED])
    again.recoveries.worker_started("a", 1, {"gpu": "NVIDIA H100 80GB HBM3"})
    again.live = recorder.live  # read again soon
    assert recorder.totals.checkpoint_unix_s is not None
    again.recall(CheckpointWritten(recorder.totals.checkpoints[0], recorder.totals.checkpoint_unix_s), ())
    before, after = exported(recorder), exported(again)
    assert math.isnan(before.pop(("elastic_ring_loss", "")) or 0.0)
    assert math.isnan(after.pop(("elastic_ring_loss", "")) or 0.0)
    assert after == before


def test_before_the_first_step_the_clock_of_progress_begins_at_the_start(tmp_path):
    fresh = opened_recorder(tmp_path, now=lambda: 0.0)
    found = exported(fresh, replace(STATE, phase=Forming(0.0), workers={}))
    assert found["elastic_ring_last_commit_timestamp_seconds", ""] == 1000.0
    assert found["elastic_ring_mesh", "dp"] == 0
    assert found["elastic_ring_loss", ""] is None


@pytest.mark.parametrize(
    ("failures", "more", "kind"),
    [
        ((), {}, "node lost"),
        ((), {"lost": (), "drained": ("b",)}, "drained"),
        (("peer",), {"lost": ()}, "peer"),
        (("peer", "user"), {"lost": ()}, "user"),
    ],
)
def test_a_recovery_has_one_cause(tmp_path, failures, more, kind):
    recorder = opened_recorder(tmp_path, now=lambda: 12.5)
    for failure in failures:
        recorder.recoveries.member_failed(MemberFailed("", "a", 1, 1, failure, 2, "text"))
    recorder.recoveries.begin(change_of(2, **more), 2, 0.0)
    recorder.recoveries.committed(2, 12.5)
    recorder.coordinator_back()
    found = exported(recorder)
    assert {cause for cause in CAUSES if found["elastic_ring_recoveries", cause]} == {kind, "coordinator"}


class FakeMetric:
    """Of Ray: keeps what it gets."""

    def __init__(self, name: str, *_: Any) -> None:
        self.values: list[tuple[dict[str, str], float]] = []
        EXPORTED[name.removeprefix("elastic_ring_")] = self.values

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values.append((tags, value))

    observe = set


EXPORTED: dict[str, list[tuple[dict[str, str], float]]] = {}


def test_the_exporter_gives_ray_each_finite_number_each_recovery_once_and_the_end_last(recorder, monkeypatch):
    monkeypatch.setattr(services, "Gauge", FakeMetric)
    monkeypatch.setattr(services, "Histogram", FakeMetric)
    exporter = MetricsExporter(RUN, recorder)
    recorder.recoveries.records.append(replace(recorder.recoveries.records[0], total_s=8.0))
    for silent_s, failed in ((0.0, None), (1.0, None), (2.0, True), (3.0, None)):  # the second is too early
        recorder.live = replace(recorder.live, driver_silent_s=silent_s)
        exporter.export(STATE, failed=failed)
    assert EXPORTED["driver_silent_seconds"] == [({"run": "measured"}, 0.0), ({"run": "measured"}, 2.0)]
    durations = EXPORTED["recovery_duration_seconds"]
    assert [s for tags, s in durations if tags == {"run": "measured", "part": "total"}] == [8.0]
    assert EXPORTED["loss"] == EXPORTED["mfu_ratio"] == []  # nan, and None
    assert [number for _, number in EXPORTED["failed"]] == [0.0, 1.0]
    ended = EXPORTED["phase"][-len(PHASES) :]
    assert [tags["part"] for tags, number in ended if number] == ["ended"]


def test_a_defect_of_the_exporter_is_logged_and_does_not_reach_the_run(recorder, caplog):
    exporter = MetricsExporter(RunConfig("measured", run_dir="measured"), recorder)
    broken: Any = {"step": 1}
    recorder.recoveries.records.append(broken)
    exporter.export(STATE)
    exporter.export(STATE, failed=False)
    assert [line.message for line in caplog.records] == ["metrics are not exported any more"]


def test_every_reason_of_a_loss_is_a_cause():
    assert set(LOSSES) == set(CAUSES) - {"drained", "peer", "user", "memory", "corrupt", "coordinator"}


def test_utilisation_is_known_by_the_gpus_name_or_the_setting_and_not_with_a_pattern(recorder):
    task = partial(TrainingTask, data=StdlibText(8), step=StepConfig(global_batch=3), optim=OptimConfig(), flops=2e12)
    assert step_flops(task(model=nn.Identity)) == 6e12
    assert step_flops(task(model=nn.Identity, pattern=parse_pattern("window:4"))) is None
    assert reading_of(recorder, flops=6e12).utilisation() == 6e12 / (4.0 * 2 * 989.4e12)
    assert reading_of(recorder, flops=None).utilisation() is None
    run = replace(RUN, peak_tflops=4.0)
    assert reading_of(recorder, run=run, flops=6e12).utilisation() == 6e12 / (4.0 * 2 * 4e12)
    recorder.recoveries.worker_started("a", 1, {"gpu": "some CPU"})
    assert reading_of(recorder, flops=6e12).utilisation() is None
    assert reading_of(recorder, run=run, flops=6e12).utilisation() is not None
    with pytest.raises(ValueError, match="peak_tflops=0"):
        RunConfig("measured", peak_tflops=0.0)


def test_workers_with_different_gpus_have_no_peak(recorder):
    assert recorder.recoveries.bits.gpu() == "NVIDIA H100 80GB HBM3"
    recorder.recoveries.worker_started("b", 2, {"gpu": "NVIDIA A100-SXM4-80GB"})
    assert recorder.recoveries.bits.gpu() == ""


def test_time_that_no_step_got_is_counted_by_its_cause(tmp_path):
    clock = [0.0]
    recorder = opened_recorder(tmp_path, now=lambda: clock[0])
    incident = Incident("c", 0.0, None)
    membership = Membership(1, 2, Mesh(2, 1), ("a", "b"), 0)
    order: Any = None
    known = replace(STATE, nodes={"node": Node("node", 1)})
    for clock[0], state in (
        (0.0, replace(known, phase=Forming(0.0))),  # no room for two workers
        (4.0, replace(STATE, phase=Forming(0.0))),
        (6.0, replace(STATE, phase=Building(membership, order, incident, 9.0, 9.0))),
        (7.0, STATE),
        (20.0, replace(STATE, phase=Closing(membership, incident, 9.0, waiting="workers"))),
        (23.0, STATE),
        (30.0, STATE),
        (31.0, replace(STATE, last_change=change_of(2, planned=True, noticed_at=30.5, resumed_at=31.0, lost=()))),
    ):
        recorder.look(state)
    lost_s = {"startup": 3.0, "waiting": 4.0, "stalled": 3.0, "resize": 0.5}
    assert recorder.goodput.lost.lost_s == {"frozen": 0.0, "validation": 0.0, "undone": 0.0, **lost_s}
    recorder.steps.begun(0, (1, 1))
    recorder.publish([record(0), record(1)])
    recorder.begin_build(
        [Build("b", "a", 1, 3, Mesh(2, 1), ("a", "b"), 1, None, (), False, step_back=SnapshotId(1, (1, 1)))]
    )
    assert recorder.goodput.lost.lost_s["undone"] == 4.0
    recorder.metrics.table.close()  # a build that does not go back reads no steps
    assert recorder.begin_build([Build("b", "a", 1, 4, Mesh(2, 1), ("a", "b"), 1, None, (), False)]) is not None


def test_every_key_of_a_nodes_reading_has_its_metric(recorder):
    (node,) = HEALTH.values()
    for values, counters in ((NODE, node["network"]), (GPU, node["gpus"]["0"])):
        numbers = [m.samples(reading_of(recorder))[0][1] for m in TABLE if m.values == values]
        assert sorted(numbers) == sorted(counters.values())
