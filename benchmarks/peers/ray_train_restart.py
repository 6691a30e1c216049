"""Peer (b): Ray Train's own restart. One worker is killed; the controller starts the whole group again.

The workers' checkpoint is a file that rank 0 replaces every few steps, read back after a restart. That is
kinder to Ray Train than `ray.train.report`, which goes through the controller about once in 2 s: few steps
run again, and no upload is waited for. Ray and Ray Train run with their defaults.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.arguments import bench_parser
from benchmarks.peers import common
from benchmarks.peers.ray_train import train_with_kills

CHECKPOINT_EVERY = 10


def train_worker(config: dict[str, Any]) -> None:
    import ray.train

    torch.set_num_threads(1)
    folder = Path(config["folder"])
    record = common.Record(folder)
    worker = ray.train.get_context().get_world_rank()
    record.add("enter", worker)
    model = common.build_model()
    optimizer = common.build_optimizer(model)
    step = restore(folder, model, optimizer)
    parallel = nn.parallel.DistributedDataParallel(model)
    record.add("ready", worker, step)
    while not record.must_stop(step):
        try:
            optimizer.zero_grad()
            common.loss_of(parallel, *common.batch(step, worker)).backward()
        except RuntimeError:
            record.add("error", worker, step)
            raise
        optimizer.step()
        step += 1
        record.add("step", worker, step)
        if worker == 0 and step % CHECKPOINT_EVERY == 0:
            save(folder, model, optimizer, step)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, folder / "checkpoint.partial")
    (folder / "checkpoint.partial").rename(folder / "checkpoint")


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint, if there is one, and returns its number of steps."""
    path = folder / "checkpoint"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def measure(num_kills: int) -> list[dict[str, float]]:
    """Trains on an embedded Ray, kills worker 3 of 4 `num_kills` times; the phases of each recovery.

    Raises RuntimeError when the workers do not come back. `phases` in `common` names what is timed.
    """

    def torch_config() -> Any:
        from ray.train.torch import TorchConfig

        return TorchConfig(backend="gloo")

    return train_with_kills(train_worker, "restart", num_kills, torch_config)


def main() -> None:
    parser = bench_parser("Ray Train's own restart after a SIGKILL, timed.")
    parser.add_argument("--kills", type=int, default=5)
    rows = measure(parser.parse_args().kills)
    print(json.dumps(common.report("ray_train_restart", rows), indent=1))


if __name__ == "__main__":
    main()
