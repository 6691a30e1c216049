"""Without spares the mesh shrinks and grows back: other bits, the same samples of a mixture, nearly the same losses."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic_ring import CheckpointConfig, ElasticRingTrainer, Result
from elastic_ring.data.source import PreparedTokens
from elastic_ring.monitor.metrics import read_metrics
from elastic_ring.runtime.driver.cluster import left_behind
from tests.ray.conftest import ALONE, EXPERTS, check_records, status, tiny_trainer, wait_for

Train = Callable[..., dict[str, Any]]
Summary = dict[str, Any]


def assert_same_samples(summary: Summary, reference: Summary, rel: float = 1e-4) -> None:
    assert summary["samples_sha256"] == reference["samples_sha256"]
    assert summary["steps"] == reference["steps"]
    losses, expected = ([float.fromhex(text) for text in s["losses"]] for s in (summary, reference))
    assert losses == pytest.approx(expected, rel=rel)
    assert not summary["exact"]
    assert all(recovery["steps_undone"] == 0 for recovery in summary["recoveries"])


def shrunk_and_grown(trainer: ElasticRingTrainer, gate: Path, folder: Path) -> Result:
    """The result of a run whose passes wait at the gate until its third generation trains."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        wait_for((folder / "status.json").exists, lambda: status(folder)["generation"] == 3)
        gate.touch()
        return run.result()


@pytest.fixture(scope="module")
def reference(local_ray: None, mixture: PreparedTokens, tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """On one worker: samples come from the manifest, whatever the mesh."""
    return tiny_trainer(tmp_path_factory.mktemp("alone"), "alone", **ALONE, data=mixture).fit().summary


def test_a_loss_without_a_spare_shrinks_the_mesh_and_it_grows_back(reference, mixture, tmp_path):
    gate, folder = tmp_path / "gate", tmp_path / "shrink"
    faults = "kill@step=1,phase=backward,rank=3"
    trainer = tiny_trainer(tmp_path, "shrink", spares=0, faults=faults, gate=gate, gate_s=1.0, data=mixture)
    result = shrunk_and_grown(trainer, gate, folder)
    check_records(trainer, result)
    assert left_behind("shrink") == []
    assert_same_samples(result.summary, reference)
    assert [generation["mesh"]["dp"] for generation in result.summary["generations"]] == [2, 1, 2]


@pytest.mark.slow
def test_with_experts_a_mesh_shrinks_and_grows_and_checkpoints_go_on_in_rings_that_gather_them_and_send_again(
    train, mixture, tmp_path
):
    """Five experts: tokens are sent to them in rings of two, their weights gathered in one of four."""
    settings: dict[str, Any] = {"model": EXPERTS, "data": mixture, "spares": 0}
    alone = train("experts-alone", **{**settings, **ALONE})
    kept: dict[str, Any] = {"checkpoint_config": CheckpointConfig(every_steps=4, keep_last=3)}
    gate, folder = tmp_path / "gate", tmp_path / "experts-shrink"
    faults = "kill@step=2,phase=dispatch,hop=2,rank=3"
    settings |= {"gate": gate, "gate_s": 1.0}  # a run that goes on has the same loss
    trainer = tiny_trainer(tmp_path, "experts-shrink", faults=faults, experts="send", run=kept, **settings)
    shrunk = shrunk_and_grown(trainer, gate, folder).summary
    assert_same_samples(shrunk, alone, rel=1e-3)
    assert [generation["mesh"]["dp"] for generation in shrunk["generations"]] == [2, 1, 2]
    loads = [line["expert_load_max"] for line in read_metrics(folder) if line["expert_load_max"] is not None]
    assert len(loads) > 6, "only a step that another rank's result completed has none"
    assert all(1 <= load <= 5 for load in loads)
    before = shrunk
    for name, step, mesh in (
        ("experts-other", 4, {"dp": 1, "cp": 4, "experts": "gather"}),
        ("experts-back", 8, {"dp": 2, "cp": 2, "experts": "send"}),
    ):
        path = next(one["path"] for one in before["checkpoints"] if one["step"] == step)
        other = train(name, run={"resume": path, **kept}, **settings, **mesh)
        assert other["resumed_from"][-1] == {"step": step, "path": path}
        assert other["losses"][:step] == before["losses"][:step]
        assert_same_samples(other, alone, rel=1e-3)
        before = other


@pytest.mark.slow
def test_two_losses_that_leave_no_ring_whole_but_every_shard_held(train, reference, mixture):
    faults = "kill@step=3,phase=backward,rank=0; kill@step=3,phase=backward,rank=3"
    summary = train("crosswise", spares=0, faults=faults, data=mixture)
    assert_same_samples(summary, reference)
    assert summary["generations"][1]["mesh"] == {"dp": 1, "cp": 2}
    assert summary["recoveries"][0]["survivor_pids_kept"]
