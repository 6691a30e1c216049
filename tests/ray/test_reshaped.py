"""Without spares the mesh shrinks and grows back: other bits, the same samples, nearly the same losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ray.conftest import fault_free

Train = Callable[..., dict[str, Any]]
Summary = dict[str, Any]


def assert_same_samples(summary: Summary, reference: Summary, rel: float = 1e-4) -> None:
    assert summary["samples_sha256"] == reference["samples_sha256"]
    assert summary["steps"] == reference["steps"]
    losses, expected = ([float.fromhex(text) for text in s["losses"]] for s in (summary, reference))
    assert losses == pytest.approx(expected, rel=rel)
    assert not summary["exact"]
    assert all(recovery["steps_undone"] == 0 for recovery in summary["recoveries"])


@pytest.fixture
def reference(local_ray: None, undisturbed: dict[tuple[int, int, int], Summary], tmp_path: Path) -> Summary:
    return fault_free(undisturbed, tmp_path)


def test_a_loss_without_a_spare_shrinks_the_mesh_and_it_grows_back(train: Train, reference: Summary) -> None:
    summary = train("shrink", spares=0, steps=12, faults="kill@step=3,phase=backward,rank=3", slow_s=1.5)
    assert_same_samples(summary, reference)
    meshes = [generation["mesh"]["dp"] for generation in summary["generations"]]
    assert meshes == [2, 1, 2]


def test_two_losses_that_leave_no_ring_whole_but_every_shard_held(train: Train, reference: Summary) -> None:
    faults = "kill@step=3,phase=backward,rank=0; kill@step=3,phase=backward,rank=3"
    summary = train("crosswise", spares=0, faults=faults)
    assert_same_samples(summary, reference)
    assert summary["generations"][1]["mesh"] == {"dp": 1, "cp": 2}
    assert summary["recoveries"][0]["survivor_pids_kept"]
