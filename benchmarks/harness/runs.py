"""What the recovery benches share: a small model under elastic_ring, watching a run from outside, and signals.

A bench trains with `fit()` on the main thread while another thread watches the run's folder and sends signals to its
processes by PID, as a failing machine would: nothing in the run knows that it is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.results import ROOT
from benchmarks.peers import common
from deploy.drills.watcher import Watcher as Watcher
from deploy.drills.watcher import WatchFailed
from deploy.drills.watcher import train_while as train_while
from elastic_ring import Batch, ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.config import Timeouts
from elastic_ring.data.packing import Sample
from elastic_ring.monitor.metrics import SUMMARY_NAME
from elastic_ring.train.task import LossFunction

DP, CP = 2, 2
SEQUENCES = common.NUM_WORKERS * common.SEQUENCES_PER_WORKER

# ------------------------------------------------------------ the small model, as the peers train it


@dataclass(frozen=True)
class PeersBytes:
    """The random bytes that the peers train on, each of their sequences once."""

    context_tokens: int = common.CONTEXT_TOKENS
    vocab_size: int = common.VOCAB
    num_sequences: int = SEQUENCES * 4096
    fingerprint: str = "random bytes"

    def open(self) -> PeersBytes:
        return self

    def read(self, sample_id: int) -> Sample:
        index, row = divmod(sample_id, common.SEQUENCES_PER_WORKER)
        tokens, targets = common.batch(*divmod(index, common.NUM_WORKERS))
        return Sample(np.append(tokens[row].numpy(), int(targets[row, -1])), (0,))


def small_model() -> nn.Module:
    return common.ByteModel()


def whole_model(model: nn.Module) -> tuple[nn.Module, ...]:
    """FSDP2 gathers so small a model in one piece, as the peers' DDP reduces it."""
    return ()


def small_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The peers' loss, with the blocks' attention over the whole ring."""
    for block in model.blocks:
        block.attention = batch.attention
    logits, targets = model(batch.tokens, batch.positions).flatten(0, 1), batch.targets.flatten()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), int((targets != -100).sum())


def small_trainer(
    folder: Path,
    name: str,
    *,
    steps: int,
    spares: int = 1,
    loss: LossFunction = small_loss,
    check_model: bool = True,
    timeouts: Timeouts | None = None,
    scaling: ScalingConfig | None = None,
) -> ElasticRingTrainer:
    """The peers' model, optimizer and sequences a step, on rings of 2 x 2 where `scaling` says nothing else."""
    rate = common.LEARNING_RATE
    return ElasticRingTrainer(
        small_model,
        PeersBytes(),
        loss=loss,
        step_config=StepConfig(
            steps=steps, global_batch=SEQUENCES, context_tokens=common.CONTEXT_TOKENS, check_model=check_model
        ),
        optim_config=OptimConfig(peak_lr=rate, min_lr=rate, total_steps=steps, weight_decay=0.01, betas=(0.9, 0.999)),
        scaling_config=scaling or ScalingConfig(dp=DP, cp=CP, spares=spares, resources_per_worker={"CPU": 0.25}),
        run_config=RunConfig(
            name,
            run_dir=str(folder / name),
            timeouts=timeouts or Timeouts(),
            progress=False,
            grow_cost_s=0.0,  # these runs are short, and grow all the same
        ),
        units=whole_model,
    )


# ------------------------------------------------------------ its processes


def first_step_of(run: Watcher, newer_than: int, timeout_s: float = 120.0) -> dict[str, Any]:
    """Wait for the first committed step of a generation above `newer_than`."""

    def found() -> dict[str, Any] | None:
        return next((line for line in run.steps() if line["generation"] > newer_than), None)

    return run.until(f"a step of a generation above {newer_than}", found, timeout_s)


def inject(pid: int, number: signal.Signals) -> float:
    """Send the signal to a process of Ray's; the monotonic time just before. Raises WatchFailed for any other."""
    title = " ".join(psutil.Process(pid).cmdline())
    if not title.startswith("ray::"):
        raise WatchFailed(f"pid {pid} is {title!r}, no process of the run: no signal is sent")
    at_s = time.monotonic()
    os.kill(pid, number)
    return at_s


def actor_pids(kind: str) -> list[int]:
    """Live processes of this driver's own Ray that hold an actor of class `kind`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            if title.startswith(f"ray::{kind}") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


# ------------------------------------------------------------ running it


@contextmanager
def local_ray(num_cpus: int = 8) -> Iterator[None]:
    """A Ray of this process's own, whose workers find this repository."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    import ray

    from elastic_ring.runtime.driver import access
    from elastic_ring.runtime.driver.cluster import NAMESPACE

    access.start(num_cpus=num_cpus, namespace=NAMESPACE, include_dashboard=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


def summary_of(trainer: ElasticRingTrainer) -> dict[str, Any]:
    """What a run that trained to its end left as its summary."""
    return dict(json.loads((trainer.run_config.folder / SUMMARY_NAME).read_text()))


def keep_logs(folder: Path, target: Path) -> None:
    """Copy the journals, metrics and logs of the runs in `folder` and of this process's Ray into `target`."""
    import ray

    node = ray._private.worker._global_node
    logs = Path(node.get_logs_dir_path()) if node is not None else None
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.rglob("*.json*")):
        shutil.copy(path, target / f"{path.parent.name}-{path.name}")
    for path in sorted(logs.glob("worker-*")) if logs is not None else []:
        if path.stat().st_size:
            shutil.copy(path, target / path.name)


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder for a bench's runs."""
    with tempfile.TemporaryDirectory(prefix="elastic_ring_bench_") as folder:
        yield Path(folder)
