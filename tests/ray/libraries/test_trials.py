"""A trial on a mesh is a run: a killed one goes on with it, and what Ray Tune stops leaves nothing."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import ray
from ray import tune

from elastic_ring import CheckpointConfig
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.config import Timeouts
from elastic_ring.data.source import open_source
from elastic_ring.monitor.metrics import read_metrics
from elastic_ring.runtime.driver.cluster import NAMESPACE, actor_name, left_behind
from elastic_ring.tuning.mesh_trial import remove_stopped, run_of
from elastic_ring.tuning.report import NUM_REPORTS, REJECTED_LOSS
from elastic_ring.tuning.trial import pattern_trainable
from tests.ray.conftest import ALONE, tiny_trainer


class KillOnce(tune.Callback):
    """Kills the process of the first trial that has half its reports, or the coordinator of its run for good."""

    pid = 0

    def __init__(self, *, coordinator: bool = False) -> None:
        self.coordinator = coordinator

    def on_trial_result(self, *, result: dict[str, Any], **info: Any) -> None:
        if len(result["losses"]) == NUM_REPORTS // 2 and not self.pid:
            self.pid = result["pid"]
            if self.coordinator:
                name = actor_name(f"trial-{result['trial_id']}", "coordinator")
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
            else:
                os.kill(self.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_trial_on_a_mesh_is_a_run_with_which_a_killed_one_goes_on_and_tune_may_stop_it(local_ray, tmp_path):
    on_ring = {"dp": 1, "cp": 2, "spares": 0, "steps": 8, "val_every_steps": 2}
    trainable = pattern_trainable(tiny_trainer(tmp_path, "asked", **on_ring), runs=str(tmp_path / "runs"))
    kills, run = KillOnce(), tune.RunConfig(name="search", storage_path=str(tmp_path / "tune"), verbose=0)
    run.callbacks, run.failure_config = [kills], tune.FailureConfig(max_failures=1)
    run.stop = lambda _, result: result["pattern"] == "window:8" and len(result["losses"]) == 1
    found = tune.Tuner(
        trainable,
        param_space={"pattern": tune.grid_search(["window:4", "window:8"])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
        run_config=run,
    ).fit()
    assert found.num_errors == 0
    whole, stopped = (one.metrics for one in found)
    assert kills.pid
    assert whole["pid"] != kills.pid
    assert (len(whole["losses"]), len(stopped["losses"])) == (NUM_REPORTS, 1)
    assert whole["bytes"] > 0
    plain = tiny_trainer(tmp_path, "plain", **on_ring)
    folders = [path for path in (tmp_path / "runs").iterdir()]
    assert {path.name for path in folders} == {f"trial-{one['trial_id']}" for one in (whole, stopped)}
    left = tiny_trainer(tmp_path, "left", **on_ring)  # Tune has killed its trial, and its run lives
    left.run_config = run_of(plain.run_config, str(tmp_path / "runs"), "left")
    assert left.submission().find_or_start(open_source(left.task.data).fingerprint) is not None
    ids = [whole["trial_id"], stopped["trial_id"], "left"]
    remove_stopped(plain.run_config, str(tmp_path / "runs"), ids)
    assert left_behind("trial-left") == []
    folders = [*(tmp_path / "runs").iterdir()]
    assert [path.name for path in folders] == [f"trial-{whole['trial_id']}"], "a stopped trial leaves nothing"
    assert not any(folders[0].glob("attempt-*")), "the run went on while the trial was away"
    assert left_behind(folders[0].name) == left_behind(f"trial-{stopped['trial_id']}") == []
    assert not any(folders[0].glob("*.safetensors"))
    plain.task = replace(plain.task, pattern=parse_pattern("window:4"))
    plain.fit()
    told = [line["val_loss"] for line in read_metrics(tmp_path / "plain") if line.get("val_loss") is not None]
    assert told == whole["losses"], "bit for bit what the run with that pattern has"


@pytest.mark.slow
def test_a_trial_on_a_mesh_resumes_when_its_coordinator_is_gone_and_loses_when_it_diverges(local_ray, tmp_path):
    def trial(name: str, *callbacks: tune.Callback, **options: Any) -> dict[str, Any]:
        run = {"checkpoint_config": CheckpointConfig(every_steps=2), "timeouts": Timeouts(lease_s=10.0)}
        asked = tiny_trainer(tmp_path, name, steps=8, val_every_steps=2, run=run, **ALONE)
        asked.task = replace(asked.task, optim=replace(asked.task.optim, **options))
        (found,) = tune.Tuner(
            pattern_trainable(asked, runs=str(tmp_path / name)),
            param_space={"pattern": "window:4"},
            run_config=tune.RunConfig(
                name="search",
                storage_path=str(tmp_path / f"{name}-tune"),
                verbose=0,
                callbacks=list(callbacks),
                failure_config=tune.FailureConfig(max_failures=1),
            ),
        ).fit()
        assert found.error is None
        assert left_behind(f"trial-{found.metrics['trial_id']}") == []
        return dict(found.metrics)

    kills = KillOnce(coordinator=True)
    again, calm = trial("gone", kills), trial("calm")
    assert kills.pid
    assert again["losses"] == calm["losses"]
    assert len(again["losses"]) == NUM_REPORTS
    (folder,) = (tmp_path / "gone").iterdir()
    resumed = json.loads((folder / "summary.json").read_text())["resumed_from"]
    assert resumed, "it went on from its checkpoint"
    lost = trial("wild", peak_lr=1e17)
    assert lost["rejected"].startswith("diverged: the loss of the validation after step ")
    assert (lost["losses"], lost["loss"], lost["done"]) == ([], REJECTED_LOSS, True)
    assert not list((tmp_path / "wild").iterdir())
