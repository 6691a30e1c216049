"""A run with Muon that loses workers in and around its update ends with the weights of the undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elastic_ring import CheckpointConfig
from tests.ray.conftest import bits, finished, tiny_trainer
from tests.ray.recovery.test_copies import keeping
from tests.ray.recovery.test_reshaped import shrunk_and_grown

# Of both rings one rank each in step 4: the rest of both computes the update together.
AROUND_THE_UPDATE = (
    "kill@step=2,phase=update,hop=1,rank=1; kill@step=4,phase=update,rank=0; kill@step=4,phase=update,rank=3;"
    "kill@step=6,phase=apply,rank=2; kill@step=8,phase=vote,rank=1; freeze@step=10,phase=update,hop=2,rank=2"
)


Weights = dict[str, torch.Tensor]


def trained(folder: Path, name: str, **options: Any) -> tuple[dict[str, Any], Weights]:
    """(summary, weights) of a run with Muon."""
    result = finished(tiny_trainer(folder, name, optimizer="muon", **options))
    return result.summary, load_file(result.weights)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_in_each_phase_around_the_update_change_no_bit(local_ray, tmp_path):
    calm, _ = trained(tmp_path, "muon-calm", spares=0)
    summary, _ = trained(tmp_path, "muon-kills", spares=7, faults=AROUND_THE_UPDATE)
    assert bits(summary) == bits(calm)
    assert [len(recovery["faults"]) for recovery in summary["recoveries"]] == [1, 2, 1, 1, 1]
    assert all(recovery["exact"] and recovery["steps_undone"] == 0 for recovery in summary["recoveries"])


def assert_same_weights(other: tuple[dict[str, Any], Weights], calm: tuple[dict[str, Any], Weights]) -> None:
    """Sums in another order have other bits."""
    assert other[0]["samples_sha256"] == calm[0]["samples_sha256"]
    for name, value in calm[1].items():
        torch.testing.assert_close(other[1][name], value, rtol=0, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_ring_goes_back_to_copies_without_losing_a_bit_and_goes_on_smaller_with_the_same_weights(
    local_ray, tmp_path
):
    """Momentum is in copies and checkpoints, and cut anew with the rows."""
    calm = trained(tmp_path, "muon-ring", dp=1, cp=4, spares=0)
    fault = "kill@step=5,phase=update,hop=1,rank=2"
    settings = keeping("1", checkpoint_config=CheckpointConfig(every_steps=4, keep_last=3))
    summary, _ = trained(tmp_path, "muon-copies", dp=1, cp=4, spares=1, faults=fault, run=settings)
    assert [recovery["source"] for recovery in summary["recoveries"]] == ["copy"]
    assert bits(summary) == bits(calm[0])
    path = next(saved["path"] for saved in summary["checkpoints"] if saved["step"] == 8)
    assert_same_weights(trained(tmp_path, "muon-half", dp=1, cp=2, spares=0, run={"resume": path}), calm)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_rings_of_which_one_dies_in_the_update_end_with_the_weights_of_two(local_ray, tmp_path):
    gate, folder = tmp_path / "gate", tmp_path / "muon-shrinks"
    calm = trained(tmp_path, "muon-two", spares=0)
    options: dict[str, Any] = {"faults": "kill@step=3,phase=update,rank=3", "gate": gate, "gate_s": 1.0}
    trainer = tiny_trainer(tmp_path, "muon-shrinks", optimizer="muon", spares=0, **options)
    result = shrunk_and_grown(trainer, gate, folder)
    assert [each["mesh"]["dp"] for each in result.summary["generations"]] == [2, 1, 2]
    assert_same_weights((result.summary, load_file(result.weights)), calm)
