"""The records of a run in Ray Train: steps that are undone, recoveries, submissions, the summary."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayError

from elastic_ring import StepConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.integrations.ray_train import Zero3Trainer
from elastic_ring.integrations.ray_train.run_records import Attempt, Records
from elastic_ring.mesh import Mesh
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.metrics import StepMetrics, Summary


def line(step: int, loss: float = 1.0, generation: int = 1) -> StepMetrics:
    return StepMetrics(step, loss, 1.0, 0.1, 100, 100.0, 0.01, False, generation, Mesh(1, 2), 2, samples=f"{step:032x}")


def attempt(step: int, resumed_from: str = "") -> Attempt:
    return {"step": step, "mesh": {"dp": 1, "cp": 2}, "reason": "test", "resumed_from": resumed_from}


def begin(records: Records, step: int, resumed_from: str = "", stored: Sequence[str] = ()) -> int:
    for rank in (1, 0):
        records.join(rank, 100 + rank, "host")
    return records.begin(attempt(step, resumed_from), stored)


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


def test_a_group_is_newer_than_all_in_the_storage_though_the_records_are_gone(tmp_path: Path) -> None:
    """As with s3:// after /tmp was cleaned or on another head: an old group's checkpoint would pass for the newest."""
    stored = ["checkpoint-000000020-6", "checkpoint-000000030-7", "weights"]
    records = Records(tmp_path)
    assert begin(records, 30, "there/checkpoint-000000030-7", stored) == 8
    assert begin(records, 30, "there/checkpoint-000000030-7", stored) == 9, "also if the one before has saved nothing"
    assert begin(Records(tmp_path), 30, "there/checkpoint-000000030-7") == 10


def test_the_console_begins_where_the_group_does_and_outlives_a_slow_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    earlier = Records(tmp_path)
    begin(earlier, 0)
    for step in range(4):
        earlier.step(line(step))
    earlier.finish("earlier")
    records, has_ended, num_asked = Records(tmp_path), threading.Event(), 0

    def news(last: int) -> Any:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            raise GetTimeoutError("the driver is busy")
        if num_asked == 3:
            begin(records, 2)
            records.step(line(2, generation=2))
        if num_asked == last:
            has_ended.set()
            raise RayError("the actor is gone")
        return records.news()

    step_config = StepConfig(steps=4, global_batch=2, context_tokens=64)
    trainer = Zero3Trainer(
        partial(Transformer, ModelConfig(257, 2, 16, 2, 1, 8, 23)), StdlibText(64), step_config=step_config
    )
    trainer._show(partial(news, 5), has_ended)
    assert capsys.readouterr().err.startswith("step 3/4  loss 1.0000"), "it was hidden, as an earlier submission had it"
    assert "no more steps are shown: the actor is gone" in caplog.text
