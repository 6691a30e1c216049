"""What the coordinator exports: every metric of the table, from the state that status.json shows, and no other."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.config import RunConfig
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.state import Change, Forming, LostWorker, Membership, Node, Running, State, Worker
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.metrics_table import CAUSES, LOSSES, PHASES, by_name
from elastic_ring.runtime.coordinator.metrics_exporter import MetricsExporter, of_end, samples
from elastic_ring.runtime.coordinator.recorder import RunRecorder

OF_OTHERS = {
    "elastic_ring_driver_silent_seconds", "elastic_ring_driver_lease_seconds",
    "elastic_ring_checkpoint_failing_seconds", "elastic_ring_last_checkpoint_timestamp_seconds",
}  # fmt: skip
"""Known to neither recorder nor state; tests/ray/test_metrics.py sees them."""
STATE = State(
    ControlOptions("measured", 2, 1, 40, spares=2, max_dp=3),
    Running(Membership(1, 2, Mesh(2, 1), ("a", "b"), 0)), 1, 2,
    {**{name: Worker(name, "node", "ready", 0.0) for name in "abcd"}, "e": Worker("e", "node", "starting", 9.0),
     "f": Worker("f", "other", "ready", 0.0, draining=True), "g": Worker("g", "other", "starting", 9.0, draining=True)},
    {"node": Node("node", 8), "other": Node("other", 8, draining=True, start_failures=3)},
)  # fmt: skip


def change(step: int, **more: Any) -> Change:
    fields: dict[str, Any] = {
        "term": 1, "generation": 2, "mesh": Mesh(2, 1), "previous_mesh": Mesh(2, 1), "members": ("a", "e"),
        "step": step, "cause": "", "action": "spare took its place", "promise": "bit-exact", "reason": "",
        "lost": (LostWorker("b", "node", 1, "node lost"), LostWorker("c", "node", 0, "died")), "drained": (),
        "newcomers": (), "survivors": ("a",), "rolled_forward": None, "step_rerun": step, "planned": False,
        "noticed_at": 10.0, "closed_at": 10.5, "resumed_at": 11.0, **more,
    }  # fmt: skip
    return Change(**fields)


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "loss": 2.5, "grad_norm": 1.5, "lr": 0.1, "num_tokens": 80, "samples": [1.0, 0.0, 2.0, 0.0],
        "skipped": False, "step_s": 4.0, "generation": 1, "dp": 2, "cp": 1, "hop_bytes": 64, "hop_wait_s": 0.25,
        "data_wait_s": 0.125,
        "hop_latency_mean_s": 0.125, "hop_latency_p99_s": 0.5, "committed_monotonic_s": 1.0, "vote": [1.0],
        "membership_id": [1, 1], **more,
    }  # fmt: skip


@pytest.fixture
def recorder(tmp_path: Path) -> RunRecorder:
    made = RunRecorder(RunConfig("measured", run_dir=str(tmp_path)), lambda note: None, lambda: 12.5)
    made.open(0.0)
    made.begun(0, (1, 1))
    made.publish([record(0), record(1, skipped=True, loss=math.nan, hop_wait_s=None, hop_latency_mean_s=None,
                                    hop_latency_p99_s=None, gpu_memory=GPU), {"step": 1, "val_loss": 2.0}])  # fmt: skip
    made.recoveries.begin(change(2), 2)
    made.recoveries.committed(2, 12.5)
    made.checkpoint({"step": 2, "path": "somewhere", "bytes": 1024, "blocked_s": 0.25, "total_s": 3.5})
    made.publish([COPIED])
    sizes = {"a": {"rss_bytes": 5, "peak_rss_bytes": 9, "shared_bytes": 1},
             "b": {"rss_bytes": 7, "peak_rss_bytes": 8, "shared_bytes": 0}}  # fmt: skip
    made.progress = lambda worker: sizes.get(worker, {})
    made.pressure = lambda: {"some": 0.25, "full": 0.125}
    return made


GPU = {"allocated": 100, "reserved": 160, "fragmented": 30, "peak": 140}


COPIED = {"step": 20, "copied": {"step": 20, "bytes": 512, "num_holders": 1, "blocked_s": 0.125, "total_s": 0.5,
                                 "skipped": 3}}  # fmt: skip


def exported(recorder: RunRecorder, state: State = STATE) -> dict[tuple[str, str], float | None]:
    found = list(samples(state, recorder, 20.0, 1000.0))
    assert len({(name, value) for name, value, _ in found}) == len(found), "a sample is set twice"
    return {(name, value): number for name, value, number in found}


def test_every_gauge_of_the_table_has_its_values_and_there_is_no_other(recorder: RunRecorder) -> None:
    found = exported(recorder)
    assert all(number is not None for number in found.values())
    gauges = {metric.name: metric for metric in by_name().values() if metric.kind == "gauge"}
    assert {name for name, _ in found} | OF_OTHERS == set(gauges)
    for name, metric in gauges.items():
        if name not in OF_OTHERS:
            assert sorted(value for known, value in found if known == name) == sorted(metric.values or [""])


def test_the_values_are_those_of_the_run(recorder: RunRecorder) -> None:
    found = exported(recorder)
    told = {
        ("elastic_ring_committed_steps", ""): 2, ("elastic_ring_planned_steps", ""): 40,
        ("elastic_ring_skipped_steps", ""): 1, ("elastic_ring_validation_loss", ""): 2.0,
        ("elastic_ring_phase", "running"): 1, ("elastic_ring_phase", "waiting"): 0,
        ("elastic_ring_tokens_per_second", ""): 20.0, ("elastic_ring_hop_exposed_wait_seconds", ""): 0.25,
        ("elastic_ring_hop_latency_seconds", "p99"): 0.5, ("elastic_ring_mesh", "dp"): 2,
        ("elastic_ring_wanted_rings", "max"): 3, ("elastic_ring_wanted_spares", ""): 2,
        ("elastic_ring_workers", "member"): 2, ("elastic_ring_workers", "spare"): 2,
        ("elastic_ring_workers", "starting"): 1, ("elastic_ring_workers", "leaving"): 2,
        ("elastic_ring_nodes", "usable"): 2, ("elastic_ring_nodes", "draining"): 1,
        ("elastic_ring_failed_starts", ""): 3, ("elastic_ring_recoveries", "node lost"): 1,
        ("elastic_ring_recoveries", "died"): 0, ("elastic_ring_lost_workers", "died"): 1,
        ("elastic_ring_recovery_sum_seconds", "close"): 1.0, ("elastic_ring_recovery_sum_seconds", "rerun"): 1.5,
        ("elastic_ring_recovery_sum_seconds", "total"): 2.5, ("elastic_ring_rerun_steps", ""): 1,
        ("elastic_ring_checkpoints", ""): 1, ("elastic_ring_checkpoint_step", ""): 2,
        ("elastic_ring_checkpoint_seconds", "blocked"): 0.25, ("elastic_ring_checkpoint_size_bytes", ""): 1024,
        ("elastic_ring_copy_step", ""): 20, ("elastic_ring_copy_seconds", "total"): 0.5,
        ("elastic_ring_copy_size_bytes", ""): 512, ("elastic_ring_copies_skipped", ""): 3,
        ("elastic_ring_worker_memory_bytes", "rss"): 7, ("elastic_ring_worker_memory_bytes", "peak"): 9,
        ("elastic_ring_worker_memory_bytes", "shared"): 1, ("elastic_ring_gpu_memory_bytes", "fragmented"): 30,
        ("elastic_ring_gpu_memory_bytes", "peak"): 140, ("elastic_ring_memory_pressure_ratio", "full"): 0.125,
        ("elastic_ring_time_seconds", "steps"): 8.0, ("elastic_ring_time_seconds", "recovery"): 1.0,
        ("elastic_ring_time_seconds", "other"): 11.0, ("elastic_ring_goodput_ratio", ""): 0.4,
    }  # fmt: skip
    assert {key: found[key] for key in told} == told
    assert math.isnan(found["elastic_ring_loss", ""] or 0.0)


def test_a_coordinator_that_starts_anew_exports_the_same(recorder: RunRecorder, tmp_path: Path) -> None:
    again = RunRecorder(RunConfig("measured", run_dir=str(tmp_path)), lambda note: None, lambda: 12.5)
    again.open(0.0)
    again.recall({"note": "recovery", "recovery": recorder.recoveries.records[0], "closes": True})
    again.publish([COPIED])
    again.progress, again.pressure, again.gpu_memory = recorder.progress, recorder.pressure, GPU  # told again soon
    again.recall({"note": "checkpoint", "checkpoint": recorder.checkpoints[0], "unix_s": recorder.checkpoint_unix_s})
    assert again.checkpoint_unix_s == recorder.checkpoint_unix_s is not None
    before, after = exported(recorder), exported(again)
    assert math.isnan(before.pop(("elastic_ring_loss", "")) or 0.0)
    assert math.isnan(after.pop(("elastic_ring_loss", "")) or 0.0)
    assert after == before


def test_before_the_first_step_the_clock_of_progress_begins_at_the_start(tmp_path: Path) -> None:
    fresh = RunRecorder(RunConfig("measured", run_dir=str(tmp_path)), lambda note: None, lambda: 0.0)
    fresh.open(0.0)
    found = exported(fresh, replace(STATE, phase=Forming(0.0), workers={}))
    assert found["elastic_ring_last_commit_timestamp_seconds", ""] == 1000.0
    assert found["elastic_ring_mesh", "dp"] == 0
    assert ("elastic_ring_loss", "") not in found


@pytest.mark.parametrize(
    ("failures", "more", "kind"),
    [
        ((), {}, "node lost"),
        ((), {"lost": (), "drained": ("b",)}, "drained"),
        (("peer",), {"lost": ()}, "peer"),
        (("peer", "user"), {"lost": ()}, "user"),
    ],
)
def test_a_recovery_has_one_cause(tmp_path: Path, failures: tuple[str, ...], more: dict[str, Any], kind: str) -> None:
    recorder = RunRecorder(RunConfig("measured", run_dir=str(tmp_path)), lambda note: None, lambda: 12.5)
    recorder.open(0.0)
    for failure in failures:
        recorder.recoveries.trouble("a", failure, 2, "text")
    recorder.recoveries.begin(change(2, **more), 2)
    recorder.recoveries.committed(2, 12.5)
    recorder.coordinator_back(13.0)
    found = exported(recorder)
    assert {cause for cause in CAUSES if found["elastic_ring_recoveries", cause]} == {kind, "coordinator"}


def test_an_end_is_the_last_thing_that_is_told() -> None:
    told = {(name, value): number for name, value, number in of_end(failed=True)}
    assert told.pop(("elastic_ring_failed", "")) == 1.0
    assert [phase for phase in PHASES if told["elastic_ring_phase", phase]] == ["ended"]


def test_a_defect_of_the_exporter_is_logged_and_does_not_reach_the_run(
    recorder: RunRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = MetricsExporter(RunConfig("measured", run_dir="measured"), recorder, lambda: 0.0)
    recorder.recoveries.records.append({"step": 1})  # no duration in it
    exporter.export(STATE, 0.0, 20.0)
    exporter.close(STATE, 0.0, 20.0, failed=False)
    assert [line.message for line in caplog.records] == ["metrics are not exported any more"]


def test_every_reason_of_a_loss_is_a_cause() -> None:
    assert set(LOSSES) == set(CAUSES) - {"drained", "peer", "user", "memory", "corrupt", "coordinator"}
