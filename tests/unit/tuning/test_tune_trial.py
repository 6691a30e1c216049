"""A trial trains what a run trains, goes on from its checkpoint with equal bits, rejects what it cannot train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ring.attention.kernels import verify
from elastic_ring.attention.kernels.kernel import Grads
from elastic_ring.attention.kernels.registry import select
from elastic_ring.config import OptimConfig, ScalingConfig
from elastic_ring.train.startup import kernels, warm
from elastic_ring.tuning.report import NUM_REPORTS, REJECTED_LOSS
from elastic_ring.tuning.space import SearchTask
from elastic_ring.tuning.trial import PatternTrial
from tests.unit.train import tiny_task
from tests.unit.train.tiny_task import MODEL, POISON, STEP, make_task


@pytest.fixture(scope="module")
def trial() -> Iterator[PatternTrial]:
    POISON.on = False
    task = make_task(step=replace(STEP, val_every_steps=8, num_val_sequences=2))
    made = object.__new__(PatternTrial)  # its own constructor wants an actor of Ray
    made.setup({"pattern": "dense"}, search=SearchTask(task, ScalingConfig(cp=2), str(Path.cwd())))
    yield made
    made.cleanup()


def trained(trial: PatternTrial, pattern: str, seed: int = 0) -> list[float]:
    assert trial.reset_config({"pattern": pattern, "seed": seed})
    results = [trial.step() for _ in range(NUM_REPORTS)]
    assert [one["done"] for one in results] == [False] * (NUM_REPORTS - 1) + [True]
    assert results[-1]["tokens"] == STEP.steps * STEP.global_batch * STEP.context_tokens
    assert results[-1]["pattern"] == pattern
    return results[-1]["losses"]


def test_patterns_and_seeds_decide_what_a_trial_learns(trial: PatternTrial) -> None:
    dense = trained(trial, "dense")
    assert trained(trial, "dense") == dense
    assert trained(trial, "window:2") != dense
    assert trained(trial, "dense", seed=1)[0] != dense[0]


def test_a_trial_goes_on_from_its_checkpoint_with_the_same_bits(trial: PatternTrial, tmp_path: Path) -> None:
    undisturbed = trained(trial, "window:4")
    trial.reset_config({"pattern": "window:4"})
    for _ in range(2):
        assert trial.step()["should_checkpoint"]
    trial.save_checkpoint(str(tmp_path))
    trial.reset_config({"pattern": "dense"})
    trial.reset_config({"pattern": "window:4"})
    trial.load_checkpoint(str(tmp_path))
    results = [trial.step() for _ in range(2)]
    assert results[-1]["losses"] == undisturbed
    assert results[-1]["done"]
    assert not results[-1]["should_checkpoint"]


def test_what_cannot_be_trained_is_rejected_and_the_next_one_trains(trial: PatternTrial) -> None:
    trial.reset_config({"pattern": "window:4;dense@7"})
    found = trial.step()
    assert found["done"]
    assert found["loss"] == REJECTED_LOSS
    assert "layer 7: the model has layers 0 to 1" in found["rejected"]
    optim = replace(tiny_task.OPTIM, max_skipped=2)
    assert isinstance(optim, OptimConfig)
    trial._search = replace(trial._search, task=replace(trial._search.task, optim=optim))
    trial.reset_config({"pattern": "window:4"})
    POISON.on = True
    try:
        results = [trial.step()]
        while not results[-1]["done"]:
            results.append(trial.step())
    finally:
        POISON.on = False
    assert results[-1]["rejected"].startswith(("TooManySkipped", "ElasticRingError"))
    assert results[-1]["losses"] == []
    assert len(trained(trial, "window:4")) == NUM_REPORTS


def test_a_kernel_is_tested_before_a_trial_trains_and_a_wrong_one_trains_nothing(
    trial: PatternTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested: list[tuple[Any, ...]] = []

    def recorded(kernel: Any, *case: Any) -> str | None:
        failure = verify.warm_up_kernels(kernel, *case)
        tested.append((kernel.name, *case, failure))
        return failure

    monkeypatch.setattr(warm, "warm_up_kernels", recorded)
    trial.reset_config({"pattern": "dense"})
    head_ratio = MODEL.num_heads // MODEL.num_kv_heads
    assert tested == [("aten-cpu", "cpu", torch.float32, MODEL.head_dim, head_ratio, None)]

    def with_wrong_backward(*call: Any, **options: Any) -> Any:
        right = select(*call, **options)

        def backward(*given: Any, **how: Any) -> Grads:
            dq, dk, dv = right.backward(*given, **how)
            return dq, dk, 1.5 * dv

        return replace(right, backward=backward)

    monkeypatch.setattr(kernels, "select", with_wrong_backward)
    trial.reset_config({"pattern": "dense"})
    found = trial.step()
    assert found["done"]
    assert found["loss"] == REJECTED_LOSS
    assert "dv differs by" in found["rejected"]
    assert found["rejected"].startswith("RunFailed: cpu: attention kernel aten-cpu")
