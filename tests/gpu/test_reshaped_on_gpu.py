"""`tests/ray/recovery/test_reshaped.py` on two GPUs: a ring without a spare goes, and comes back with its GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import runs
from benchmarks.harness.gpu_runs import GpuRun
from elastic_ring.runtime.driver.cluster import left_behind
from tests.ray.conftest import held_loss
from tests.ray.recovery.test_reshaped import assert_same_samples

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

STEPS = 80
"""Slow ones for as long as a worker takes to start, with time to spare."""
RUN = GpuRun("100m", context=1024, batch=4, cp=1, dp=2, spares=0, kernel="aten-flash")
ROUNDING = 1e-3
"""Of a loss, after steps whose gradients were added up in another order and rounded to bf16. Random tokens teach
little, so that this catches gross errors only; that a newcomer has the right shard is told by its digests."""


def rings_in_turn(lines: list[dict[str, Any]]) -> list[int]:
    """How many the mesh had, each as often as it changed."""
    counts = [line["mesh"]["dp"] for line in lines]
    return [now for before, now in zip([0, *counts], counts, strict=False) if now != before]


def fit(folder: Path, name: str, faults: str = "") -> dict[str, Any]:
    """The summary. With faults, steps are slow until both rings are back."""
    trainer = RUN.trainer(folder, name, STEPS, faults)
    gate = folder / "whole again"
    trainer.task = replace(trainer.task, loss=partial(held_loss, gate, 0.3))

    def open_when_whole(run: runs.Watcher) -> None:
        if faults:
            run.until("two rings, one, two", lambda: rings_in_turn(run.steps()) == [2, 1, 2] or None)
        gate.touch()

    gate.unlink(missing_ok=True)
    runs.train_while(trainer, open_when_whole, to_the_end=True)
    assert left_behind(name) == []
    return runs.summary_of(trainer)


def test_a_loss_without_a_spare_shrinks_the_mesh_and_it_grows_back(tmp_path):
    with runs.local_ray(num_cpus=8):
        reference = fit(tmp_path, "calm")
        summary = fit(tmp_path, "shrink", "kill@step=3,phase=backward,rank=1")
    assert_same_samples(summary, reference, ROUNDING)
    assert rings_in_turn(summary["generations"]) == [2, 1, 2]
    assert reference["recoveries"] == []
