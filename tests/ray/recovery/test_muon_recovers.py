"""A run with Muon that loses workers in and around its update ends with the weights of the undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ray.conftest import bits, finished, tiny_trainer
from tests.ray.recovery.test_copies import keeping

# Of both rings one rank each in step 4: the rest of both computes the update together.
AROUND_THE_UPDATE = (
    "kill@step=2,phase=update,hop=1,rank=1; kill@step=4,phase=update,rank=0; kill@step=4,phase=update,rank=3;"
    "kill@step=6,phase=apply,rank=2; kill@step=8,phase=vote,rank=1; freeze@step=10,phase=update,hop=2,rank=2"
)


def trained(folder: Path, name: str, **options: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_ring_goes_back_to_copies_without_losing_a_bit_and_closes_smaller_with_the_same_weights(
    local_ray, tmp_path
):
    """Its momentum is cut anew with the rows; sums of another ring have other bits. Two rings become one."""
    calm, weights = trained(tmp_path, "muon-ring", dp=1, cp=4, spares=0)
    fault, ring = "kill@step=5,phase=update,hop=1,rank=2", {"dp": 1, "cp": 4, "run": keeping("1")}
    summary, _ = trained(tmp_path, "muon-copies", spares=1, faults=fault, **ring)
    assert [recovery["source"] for recovery in summary["recoveries"]] == ["copy"]
    assert bits(summary) == bits(calm)
    for name, options in (("muon-smaller", ring), ("muon-one-ring", {})):
        summary, other = trained(tmp_path, name, spares=0, faults=fault, **options)
        assert len({(each["mesh"]["dp"], each["mesh"]["cp"]) for each in summary["generations"]}) > 1
        assert summary["samples_sha256"] == calm["samples_sha256"]
        for key, value in weights.items():
            torch.testing.assert_close(other[key], value, rtol=0, atol=1e-4, msg=f"{name} {key}")
