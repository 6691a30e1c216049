"""One training step on static process groups, for `probe_steps_gpu` and `broken_steps`."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.harness.gpu_runs import GpuRun
from elastic_ring.data.loader import Loader
from elastic_ring.data.sampling.order import Order
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.gpu.device import kernel_cache
from elastic_ring.runtime.groups.groups import Connector, Groups, Rendezvous
from elastic_ring.state.device_sums import device_digests
from elastic_ring.train.generation import Watch
from elastic_ring.train.passes import compute
from elastic_ring.train.transaction import Transaction, TransactionOptions
from elastic_ring.train.update import exchange_update


def connected(run: GpuRun, rank: int, port: int, prefix: str, device: torch.device) -> Groups:
    where = Rendezvous("127.0.0.1", port, prefix, "127.0.0.1", 120.0, 900.0)
    return Connector(where, device).connect(Mesh(run.dp, run.cp), rank)


def ignored(phase: str, step: int, hop: int | None = None) -> None:
    """Watches nothing."""


def build(run: GpuRun, groups: Groups, device: torch.device, watch: Watch = ignored) -> Transaction:
    task = run.trainer(Path("/tmp"), "probe", 1000).task
    source = task.data.open()
    state = Transaction(
        task,
        Loader(source),
        Order(task.step.seed, task.step.global_batch, source.num_sequences),
        watch,
        TransactionOptions(kernel_cache=kernel_cache(), cpu_offload=run.cpu_offload),
    )
    state.use(device)
    state.enter(groups, (1, 1), keep=False)
    state.initialise()
    return state


def one_step(
    state: Transaction,
    step: int,
    spans: dict[str, float] | None = None,
    losses: list[float] | None = None,
    host_s: dict[str, float] | None = None,
) -> tuple[float, str]:
    """(seconds, digest of the gradient). `host_s` gets when, in seconds from the start, the host had launched or done
    each part."""

    def mark(part: str) -> None:
        if host_s is not None:
            host_s[part] = time.monotonic() - begun

    begun = time.monotonic()
    local = compute(state, step)
    mark("compute")
    if spans is not None:
        synchronize(state.device)
        spans["compute_s"] = time.monotonic() - begun
    state.reduce(step)
    mark("reduce")
    gradient = device_digests([state.held.gradient.flat])[0].hex() if spans is not None else ""
    outcome = state.vote(step, local, boundary=False)
    mark("vote")
    exchange_update(state, outcome)
    mark("update")
    state.apply(outcome)
    mark("apply")
    synchronize(state.device)
    mark("all")
    if losses is not None:
        losses.append(outcome.loss)
    return time.monotonic() - begun, gradient


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
