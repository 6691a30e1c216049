"""Peer (d): Ray Train with checkpoints reported to its storage, submitted again under the same name after a power cut.

As Ray Train's documentation has it: rank 0 saves a folder, every worker calls `ray.train.report`, and a run of the same
name and storage path begins at the newest checkpoint by itself. Ray and Ray Train run with their defaults.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peers import common

CHECKPOINT_NAME = "state.pt"


def train_worker(config: dict[str, Any]) -> None:
    import ray.train

    torch.set_num_threads(1)
    record = common.Record(Path(config["folder"]))
    worker = ray.train.get_context().get_world_rank()
    record.add("enter", worker)
    model = common.build_model()
    optimizer = common.build_optimizer(model)
    step = restore(model, optimizer)
    parallel = nn.parallel.DistributedDataParallel(model)
    record.add("ready", worker, step)
    while True:
        optimizer.zero_grad()
        loss = common.loss_of(parallel, *common.batch(step, worker))
        loss.backward()
        optimizer.step()
        step += 1
        record.add("step", worker, step)
        if step % config["checkpoint_every"] == 0:
            save(worker, model, optimizer, step, loss.item())


def save(worker: int, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: float) -> None:
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        if worker:
            ray.train.report({"loss": loss})
            return
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, Path(folder, CHECKPOINT_NAME))
        ray.train.report({"loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def restore(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint, if there is one, and returns its number of steps."""
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, CHECKPOINT_NAME), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def run(folder: Path, name: str, checkpoint_every: int) -> None:
    """Train on an embedded Ray until somebody kills this process; the record of steps is in `folder`."""
    import ray
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init("local", num_cpus=common.NUM_WORKERS, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        train_worker,
        train_loop_config={"folder": str(folder), "checkpoint_every": checkpoint_every},
        scaling_config=ScalingConfig(num_workers=common.NUM_WORKERS),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(name=name, storage_path=str(folder), checkpoint_config=CheckpointConfig(num_to_keep=2)),
    ).fit()
