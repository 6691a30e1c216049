"""Copies in peers' memory on real Ray: what no live member holds any more comes from there, bit for bit."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_ring import CheckpointConfig, OptimConfig
from elastic_ring.runtime.worker.copies import StoredCopy
from elastic_ring.train.optim import learning_rate
from tests.ray.conftest import Heard, bits, events, fault_free
from tests.ray.recovery.test_checkpoints import run

NO_CHECKPOINTS = CheckpointConfig(every_steps=0)
PHASES = ("forward", "backward", "reduce", "vote", "apply")


def keeping(copies: str, **others: Any) -> dict[str, Any]:
    """A run config with copies every second step and without checkpoints, unless others say so."""
    return {"copies": copies, "copy_every_steps": 2, "checkpoint_config": NO_CHECKPOINTS, **others}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("copies", "shift"),
    [
        pytest.param(copies, shift, marks=() if (copies, shift) == ("parity:2", 3) else pytest.mark.soak)
        for copies in ("1", "parity:2")
        for shift in range(len(PHASES))
    ],
)
def test_one_ring_that_loses_any_rank_in_any_phase_goes_back_to_the_copies_and_loses_no_bit(
    local_ray, undisturbed, tmp_path, copies, shift
):
    """Each rank dies once, in another phase; over all shifts each rank dies in each phase."""
    reference = fault_free(undisturbed, tmp_path, dp=1, cp=4)
    phases = [PHASES[(rank + shift) % len(PHASES)] for rank in range(4)]
    faults = "; ".join(f"kill@step={3 + 2 * rank},phase={phase},rank={rank}" for rank, phase in enumerate(phases))
    heard, name = Heard(), f"one-ring-{shift}-{copies[0]}"
    summary = run(tmp_path, name, dp=1, cp=4, spares=4, faults=faults, run=keeping(copies), callbacks=(heard,))
    assert [recovery["source"] for recovery in summary["recoveries"]] == ["copy"] * 4
    assert all(recovery["steps_undone"] <= 4 for recovery in summary["recoveries"]), "twice the steps between copies"
    assert all(recovery["survivor_pids_kept"] and recovery["exact"] for recovery in summary["recoveries"])
    assert bits(summary) == bits(reference)
    assert [step for step, _ in heard.losses] == list(range(12)), "steps that run again are told once"


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pairs", [((0, 1), (1, 3), (2, 3)), ((0, 2), (1, 2), (0, 3))])
def test_one_ring_with_two_copies_may_lose_any_two_ranks_at_once(local_ray, undisturbed, tmp_path, pairs):
    reference = fault_free(undisturbed, tmp_path, dp=1, cp=4)
    faults = "; ".join(
        f"kill@step={3 + 3 * index},phase=backward,rank={rank}" for index, pair in enumerate(pairs) for rank in pair
    )
    summary = run(tmp_path, "two-at-once", dp=1, cp=4, spares=6, faults=faults, run=keeping("2"))
    assert {recovery["source"] for recovery in summary["recoveries"]} == {"copy"}
    assert sum(len(recovery["faults"]) for recovery in summary["recoveries"]) == 6
    assert bits(summary) == bits(reference)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("copies", "role"), [("1", "spare"), ("parity:2", "spare"), ("2", "donor")])
def test_who_dies_while_a_copy_heals_a_newcomer_and_one_more_rank_cost_no_bit(
    local_ray, undisturbed, tmp_path, copies, role
):
    reference = fault_free(undisturbed, tmp_path, dp=1, cp=4)
    faults = f"kill@step=7,phase=backward,rank=1; kill@step=4,phase=heal,role={role}; kill@step=10,phase=vote,rank=3"
    settings = keeping(copies, copy_every_steps=4)
    summary = run(tmp_path, f"in-heal-{copies[0]}", dp=1, cp=4, spares=4, faults=faults, run=settings)
    assert [len(recovery["faults"]) for recovery in summary["recoveries"]] == [2, 1]
    assert {recovery["source"] for recovery in summary["recoveries"]} == {"copy"}
    assert bits(summary) == bits(reference)


def flipping_schedule(marker: Path, optim: OptimConfig, step: int) -> float:
    """The usual rate. In step 4 each worker flips a byte of each copy that it holds, once."""
    mine = marker.with_suffix(f".{os.getpid()}")
    if step == 4 and not mine.exists():
        for held in [copy for copy in gc.get_objects() if type(copy) is StoredCopy]:
            held.data[held.data.numel() // 2] ^= 1
            mine.touch()
    return learning_rate(step, optim, None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_flipped_byte_in_a_copy_is_named_and_the_checkpoint_is_taken(local_ray, undisturbed, tmp_path, caplog):
    """Copies of step 4 and a checkpoint of step 3: the copy comes first, and does not verify."""
    reference = fault_free(undisturbed, tmp_path, dp=1)
    optim = OptimConfig(peak_lr=1e-2, min_lr=1e-3, warmup_steps=2, total_steps=12)
    settings = {"copies": "1", "copy_every_steps": 4, "checkpoint_config": CheckpointConfig(every_steps=3)}
    schedule, fault = partial(flipping_schedule, tmp_path / "flipped", optim), "kill@step=5,phase=backward,rank=1"
    summary = run(tmp_path, "flipped", dp=1, faults=fault, run=settings, slow_s=0.2, lr_schedule=schedule)
    assert "copies=1 on one node: they go to other processes of this node" in caplog.text
    assert len(list(tmp_path.glob("flipped.*"))) >= 2
    assert [recovery["source"] for recovery in summary["recoveries"]] == ["checkpoint"]
    told = [event["detail"] for event in events(tmp_path / "flipped") if event["type"] == "BuildFailed"]
    assert any("the copy of cp_rank 1 of step 4" in detail and "has digest" in detail for detail in told), told
    assert bits(summary) == bits(reference)
