"""Peer (c): Ray Train's replica-group replacement: `TorchftConfig`, with torchft's quorum, vote and healing.

Each worker is a replica group of its own. One is killed; the others keep their processes, Ray Train's
controller starts one new worker in its place, and torchft heals it from a peer. By default a step commits
only with all workers' samples in it, as in the other systems; with `min_workers` lower the survivors may go
on with fewer. `DEFAULT` are the settings of Ray's own example for torchft, under which a dead worker counts
as alive for 5 s without a heartbeat; `SHORT_HEARTBEAT` makes that 1 s, which lets survivors go on sooner
where fewer suffice, and where all are needed keeps them busy trying. Needs the extra `bench`, which is
torchft-nightly.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.arguments import bench_parser
from benchmarks.peers import common
from benchmarks.peers.ray_train import train_with_kills

PEER_TIMEOUT = timedelta(seconds=30)
MANAGER_TIMEOUT = timedelta(seconds=60)
DEFAULT: dict[str, int] = {"min_replicas": 1}
# torchft's managers beat every 100 ms.
SHORT_HEARTBEAT: dict[str, int] = {
    **DEFAULT,
    "join_timeout_ms": 1000,
    "quorum_tick_ms": 20,
    "heartbeat_timeout_ms": 1000,
}


def train_worker(config: dict[str, Any]) -> None:
    import ray.train
    from torchft import DistributedDataParallel

    torch.set_num_threads(1)
    record = common.Record(Path(config["folder"]))
    worker = ray.train.get_context().get_world_rank()
    record.add("enter", worker)
    model = common.build_model()
    optimizer = common.build_optimizer(model)
    manager = build_manager(worker, config["min_workers"], model, optimizer)
    parallel = DistributedDataParallel(manager, model)
    record.add("ready", worker)
    while not record.must_stop(manager.current_step()):
        # torchft's Optimizer written out: its step() does not say whether it committed.
        manager.start_quorum()
        optimizer.zero_grad()
        common.loss_of(parallel, *common.batch(manager.current_step(), worker)).backward()
        if manager.should_commit():
            optimizer.step()
            record.add("step", worker, manager.current_step(), manager.num_participants())
        else:
            record.add("skip", worker, manager.current_step())
    manager.shutdown()


def build_manager(worker: int, min_workers: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """torchft's manager for a replica group of one rank; gloo between the groups, healing over the same."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    group = ProcessGroupGloo(timeout=PEER_TIMEOUT)
    transport: Any = PGTransport(group, timeout=PEER_TIMEOUT, device=torch.device("cpu"))
    return Manager(
        pg=group,
        min_replica_size=min_workers,
        load_state_dict=load,
        state_dict=state_dict,
        world_size=1,
        rank=0,
        replica_id=f"worker_{worker}",
        timeout=MANAGER_TIMEOUT,
        checkpoint_transport=transport,
    )


def measure(
    num_kills: int, min_workers: int = common.NUM_WORKERS, lighthouse: Mapping[str, int] | None = None
) -> list[dict[str, float]]:
    """Trains on an embedded Ray, kills worker 3 of 4 `num_kills` times; the phases of each recovery.

    `lighthouse`: the settings of torchft's lighthouse, by default those of Ray's example.
    Raises ImportError where torchft is not installed, RuntimeError when the killed worker does not come back.
    `phases` in `common` names what is timed.
    """
    importlib.import_module("torchft")

    def torch_config() -> Any:
        from ray.train.v2.torch.torchft_config import TorchftConfig

        return TorchftConfig(lighthouse_kwargs=dict(lighthouse or DEFAULT), backend="gloo")

    # One CPU more than workers: the lighthouse is an actor of its own.
    return train_with_kills(
        train_worker, "replica", num_kills, torch_config, extra_cpus=1, config={"min_workers": min_workers}
    )


def main() -> None:
    parser = bench_parser("Ray Train's replica-group replacement after a kill, timed.")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--min-workers", type=int, default=common.NUM_WORKERS)
    parser.add_argument("--short-heartbeat", action="store_true", help="give the dead up after 1 s")
    arguments = parser.parse_args()
    lighthouse = SHORT_HEARTBEAT if arguments.short_heartbeat else DEFAULT
    rows = measure(arguments.kills, arguments.min_workers, lighthouse)
    print(json.dumps(common.report("ray_train_replica", rows), indent=1))


if __name__ == "__main__":
    main()
