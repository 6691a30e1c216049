"""The records of a run in Ray Train: steps that are undone, recoveries, submissions, the summary."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from elastic_ring.integrations.ray_train.run_records import Attempt, Records
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.metrics import StepMetrics, Summary


def line(step: int, loss: float = 1.0, generation: int = 1) -> StepMetrics:
    return StepMetrics(step, loss, 1.0, 0.1, 100, 100.0, 0.01, False, generation, Mesh(1, 2), 2, samples=f"{step:032x}")


def attempt(step: int, resumed_from: str = "") -> Attempt:
    return {"step": step, "mesh": {"dp": 1, "cp": 2}, "reason": "test", "resumed_from": resumed_from}


def begin(records: Records, step: int, resumed_from: str = "") -> int:
    for rank in (1, 0):
        records.join(rank, 100 + rank, "host")
    return records.begin(attempt(step, resumed_from))


def test_steps_after_the_checkpoint_are_undone_and_a_loss_is_one_recovery(tmp_path: Path) -> None:
    records = Records(tmp_path)
    assert begin(records, 0) == 1
    for step in range(4):
        records.step(line(step))
    records.checkpoint(2, "there/checkpoint-2")
    records.failed("rank 1: it died")
    records.failed("rank 0: told twice")
    assert begin(records, 2, "there/checkpoint-2") == 2
    for step in range(2, 5):
        records.step(line(step, loss=0.5 if step == 3 else 1.0, generation=2))
    summary = records.finish("digest", peak_gpu_bytes=7)
    assert list(summary) == [key.name for key in fields(Summary)]
    assert [float.fromhex(loss) for loss in summary["losses"]] == [1.0, 1.0, 1.0, 0.5, 1.0]
    (recovery,) = summary["recoveries"]
    assert (recovery["step"], recovery["cause"], recovery["steps_undone"]) == (2, "rank 1: it died", 2)
    assert recovery["total_s"] >= recovery["rerun_s"] >= 0.0
    assert [each["generation"] for each in summary["generations"]] == [1, 2]
    assert summary["resumed_from"] == [{"path": "there/checkpoint-2", "step": 2}]
    assert summary["checkpoints"] == [{"path": "there/checkpoint-2", "step": 2}]
    assert summary["lost_workers"] == {"worker group failed": 1}
    assert summary["peak_gpu_bytes"] == 7
    assert (summary["exact"], summary["mesh_changed"]) == (None, False)


def test_a_submission_that_goes_on_is_no_recovery(tmp_path: Path) -> None:
    first = Records(tmp_path)
    begin(first, 0)
    for step in range(2):
        first.step(line(step))
    first.finish("first")
    second = Records(tmp_path)
    assert begin(second, 2, "there/checkpoint-2") == 2
    second.step(line(2, generation=2))
    summary = second.finish("second")
    assert (summary["steps"], summary["recoveries"], summary["weights_sha256"]) == (3, [], "second")
    assert summary["exact"]
