"""Bad input and the user's own errors: refused or stopped with words that help, and nothing left behind."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import StdlibText, TextFiles, open_source
from elastic_ring.errors import CrashLoop, FaultNeverFired, RunFailed, TooManySkipped, UserCodeFailed
from elastic_ring.model.init import Initialiser
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer
from elastic_ring.monitor.metrics import write_json
from elastic_ring.runtime.driver.cluster import left_behind
from tests.ray.conftest import ALONE, TINY, tiny_trainer


class FailingLoss:
    """A mistake of the user's that shows after a few sequences, and then every time."""

    def __init__(self, num_good: int) -> None:
        self.num_left = num_good

    def __call__(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        self.num_left -= 1
        if self.num_left < 0:
            raise KeyError("no such feature: colour")
        return language_model_loss(model, batch)


def nan_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    loss, num_tokens = language_model_loss(model, batch)
    return loss * float("nan"), num_tokens


class PlainAttention(nn.Module):
    """A model that forgets the ring: each rank attends to its own slice only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transformer(TINY)

    def forward(self, tokens: Any, **options: Any) -> Any:
        options["attention"] = self.slice_only
        return self.inner(tokens, **options)

    @staticmethod
    def slice_only(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


def trainer(folder: Path, name: str, **changes: Any) -> ElasticRingTrainer:
    options: dict[str, Any] = {
        "model": partial(Transformer, TINY),
        "data": StdlibText(96),
        "initial": Initialiser(0, 2),
        "step_config": StepConfig(steps=6, global_batch=4, context_tokens=96, check_model=False),
        "optim_config": OptimConfig(total_steps=6, max_skipped=2),
        "scaling_config": ScalingConfig(dp=2, cp=2, spares=0),
        "run_config": RunConfig(name=name, run_dir=str(folder / name), progress=False),
        **changes,
    }
    return ElasticRingTrainer(options.pop("model"), options.pop("data"), **options)


def test_a_mesh_larger_than_the_cluster_says_what_is_there_and_what_is_missing(local_ray, tmp_path):
    step = StepConfig(steps=6, global_batch=9, context_tokens=96)
    with pytest.raises(ValueError, match=r"mesh dp=9 x cp=5 needs 45 workers .* has CPU: 32 .* 13 missing"):
        trainer(tmp_path, "large", scaling_config=ScalingConfig(dp=9, cp=5), step_config=step).fit()
    assert left_behind("large") == []


def test_data_that_cannot_be_read_is_refused_before_anything_starts(local_ray, tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        trainer(tmp_path, "unread", data=TextFiles(96, (str(tmp_path / "nowhere" / "*.txt"),))).fit()
    assert not (tmp_path / "unread").exists()


class OnlyHere:
    """A model factory that works in this process and nowhere else, as with a module that the nodes do not have."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __call__(self) -> nn.Module:
        if os.getpid() != self.pid:
            raise ModuleNotFoundError("No module named 'mine'")
        return Transformer(TINY)


def no_such_width() -> nn.Module:
    return nn.Linear(-1, 4)


def test_a_model_that_cannot_be_built_or_sent_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match=r"no_such_width.* cannot be built"):
        trainer(tmp_path, "unbuilt", model=no_such_width).fit()
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot be sent to workers .*lock"):
        trainer(tmp_path, "unsent", loss=partial(language_model_loss, lock)).fit()
    assert not (tmp_path / "unbuilt").exists()
    assert not (tmp_path / "unsent").exists()


@pytest.mark.soak
def test_workers_may_reserve_memory_and_what_ray_gives_no_actor_is_refused(local_ray, tmp_path):
    trainer = tiny_trainer(tmp_path, "memory", steps=2, resources_per_worker={"CPU": 1, "memory": 2**20}, **ALONE)
    assert trainer.fit().summary["steps"] == 2
    with pytest.raises(ValueError, match="object_store_memory"):
        tiny_trainer(tmp_path, "store", resources_per_worker={"CPU": 1, "object_store_memory": 2**20})


@pytest.mark.slow
def test_workers_that_all_fail_to_start_end_the_run_with_their_own_error(local_ray, tmp_path):
    with pytest.raises(RunFailed, match=r"no worker starts(.|\n)*No module named 'mine'"):
        trainer(tmp_path, "nowhere-else", model=OnlyHere(), initial=None).fit()
    assert left_behind("nowhere-else") == []


@pytest.mark.slow
def test_a_coordinator_that_cannot_begin_says_why_at_the_first_try(local_ray, tmp_path, monkeypatch):
    """Ray runs already, perhaps with an environment of its own: what workers can import shows there."""
    (tmp_path / "er_nowhere.py").write_text("def loss(model, batch):\n    raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    loss = importlib.import_module("er_nowhere").loss
    begun = time.monotonic()
    told = (
        r"^the coordinator of run nowhere cannot begin: on [\d.]+: ModuleNotFoundError: No module named 'er_nowhere'$"
    )
    with pytest.raises(RunFailed, match=told):
        trainer(tmp_path, "nowhere", loss=loss).fit()
    assert time.monotonic() - begun < 20.0
    assert left_behind("nowhere") == []


def test_a_folder_that_another_cluster_writes_to_is_refused(local_ray, tmp_path):
    elsewhere = tiny_trainer(tmp_path, "busy", steps=2)
    elsewhere.run_config.folder.mkdir(parents=True)
    over = threading.Event()

    def write() -> None:  # as a coordinator does that this cluster does not know
        while not over.wait(0.2):
            status = {"run": "busy", "ended": False, "updated_unix_s": time.time()}
            write_json(elsewhere.run_config.folder / "status.json", status)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        time.sleep(0.5)
        with pytest.raises(ValueError, match="is being written to by run 'busy' on another Ray cluster"):
            elsewhere.fit()
    finally:
        over.set()
        writer.join()
    assert left_behind("busy") == []


@pytest.mark.slow
def test_a_run_that_was_abandoned_starts_anew_when_submitted_again(local_ray, tmp_path):
    run = tiny_trainer(tmp_path, "again", steps=3, **ALONE)
    corpse: Any = run.submission().find_or_start(open_source(run.task.data).fingerprint)
    corpse.abandon.remote("no driver")
    while ray.get(corpse.follow.remote(-1))["ended"] is None:
        time.sleep(0.1)
    result = run.fit()
    assert result.summary["steps"] == 3
    assert left_behind("again") == []
    assert [path.name for path in run.run_config.folder.glob("attempt-*")] == ["attempt-001"]


def test_an_exception_of_the_users_stops_the_run_the_second_time_with_their_traceback_first(local_ray, tmp_path):
    with pytest.raises(UserCodeFailed, match="no such feature: colour") as caught:
        trainer(tmp_path, "mistake", loss=FailingLoss(4), scaling_config=ScalingConfig(dp=2, cp=1, spares=0)).fit()
    assert str(caught.value).startswith("Traceback")
    assert "__call__" in str(caught.value)
    assert "The batch of that step is sequences " in str(caught.value)
    assert left_behind("mistake") == []


class FailingOptimizer(torch.optim.SGD):
    """A mistake of the user's that is raised in the middle of an apply, on every rank."""

    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError("no such momentum")


def failing_optimizer(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    return FailingOptimizer([tensor for _, tensor in named], lr=0.1)


@pytest.mark.slow
def test_an_exception_in_the_users_optimizer_ends_the_run_with_their_traceback(local_ray, tmp_path):
    with pytest.raises(UserCodeFailed, match=r"(?s)Traceback.*no such momentum"):
        trainer(tmp_path, "optimizer", optimizer=failing_optimizer, scaling_config=ScalingConfig(2, 1, 0)).fit()
    assert left_behind("optimizer") == []


@pytest.mark.slow
def test_a_node_that_ray_does_not_know_is_not_drained(local_ray):
    """What runs before a machine goes would let it go."""
    command = [sys.executable, "-m", "elastic_ring", "drain", "--node-id", 56 * "a"]
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"node-id='{56 * 'a'}': Ray lists no such node" in done.stderr


def test_too_many_skipped_steps_stop_the_run(local_ray, tmp_path):
    with pytest.raises(TooManySkipped, match="3 steps in a row"):
        trainer(tmp_path, "nan", loss=nan_loss, scaling_config=ScalingConfig(**ALONE)).fit()


@pytest.mark.slow
def test_a_model_that_attends_to_its_own_slice_is_refused_at_the_start(local_ray, tmp_path):
    step = StepConfig(steps=6, global_batch=4, context_tokens=96)
    own = {"model": PlainAttention, "initial": None, "step_config": step}
    with pytest.raises(RunFailed, match=r"it must attend through batch\.attention"):
        trainer(tmp_path, "plain", scaling_config=ScalingConfig(1, 2, 0), **own).fit()


@pytest.mark.slow
def test_a_step_that_kills_members_three_times_stops_the_run_and_names_it(local_ray, tmp_path):
    faults = ";".join(f"kill@step=2,phase=backward,rank={rank}" for rank in (0, 0, 0))
    # One after the other: each kills the worker that has taken the place of rank 0.
    with pytest.raises(CrashLoop, match=r"step 2(.|\n)*SIGKILL(.|\n)*The batch of that step is sequences \d+"):
        tiny_trainer(tmp_path, "loop", faults=faults, cp=1, spares=3).fit()
    assert left_behind("loop") == []


@pytest.mark.slow
def test_a_fault_that_never_fired_fails_the_run(local_ray, tmp_path):
    with pytest.raises(FaultNeverFired, match="role=spare"):
        tiny_trainer(tmp_path, "unfired", faults="kill@step=2,phase=heal,role=spare", steps=4, cp=1).fit()


def test_a_finished_name_says_so_and_another_config_is_refused(local_ray, tmp_path):
    first = tiny_trainer(tmp_path, "done", steps=3, **ALONE).fit()
    again = tiny_trainer(tmp_path, "done", steps=3, **ALONE).fit()
    assert again.summary == first.summary
    with pytest.raises(
        ValueError, match=r"'done' is taken by a run with other settings .*steps: 3 there, 4 here.*resume="
    ):
        tiny_trainer(tmp_path, "done", steps=4, **ALONE).fit()
    assert (tmp_path / "done" / "weights.safetensors").stat().st_mode == (tmp_path / "done" / "loss.png").stat().st_mode
    assert (tmp_path / "done").stat().st_mode & 0o777 == 0o700
