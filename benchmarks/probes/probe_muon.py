"""What Muon costs: its update and its apply beside the rest of the step, and beside AdamW's apply. A ring of one.

    python benchmarks/probes/probe_muon.py                               on a CPU: a tiny model, in seconds
    python benchmarks/probes/probe_muon.py --device cuda --preset 1b --context 32768 --batches 1,8

On one H200 with `1b` at 32 K Muon's share of a step (update and apply, less AdamW's apply, over AdamW's step) must be
at most 12 % with one sequence and 3 % with eight: else the exit code is 1. Milliseconds are medians. `state` is the
memory of the optimizer's state in bytes a parameter.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.distributed import TCPStore

from benchmarks.harness import results
from benchmarks.harness.arguments import bench_parser, list_of, num_tokens
from benchmarks.harness.gpu_runs import GpuRun
from benchmarks.probes.gpu_steps import build, connected, synchronize
from elastic_ring.model.config import ModelConfig
from elastic_ring.runtime.gpu.device import be_deterministic, kernel_cache
from elastic_ring.runtime.groups import nccl
from elastic_ring.train.passes import compute
from elastic_ring.train.startup.layouts import attention_shapes
from elastic_ring.train.startup.warm import warm_up_device
from elastic_ring.train.transaction import Transaction
from elastic_ring.train.update import exchange_update

BOUNDS = {1: 0.12, 8: 0.03}
PARTS = ("compute", "vote", "update", "apply")


@dataclass(frozen=True)
class TinyRun(GpuRun):
    """A model that a CPU trains in seconds."""

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(257, 4, 256, 4, 2, 64, 704)


def one_step(state: Transaction) -> dict[str, float]:
    """Milliseconds by part; the device is waited for after each."""
    step, spans, begun = state.applied, dict[str, float](), time.perf_counter()

    def mark(part: str) -> None:
        nonlocal begun
        synchronize(state.device)
        spans[part], begun = 1e3 * (time.perf_counter() - begun), time.perf_counter()

    local = compute(state, step)
    state.reduce(step)
    mark("compute")
    outcome = state.vote(step, local, boundary=False)
    mark("vote")
    exchange_update(state, outcome)
    mark("update")
    state.apply(outcome)
    mark("apply")
    return spans


def measured(run: GpuRun, device: torch.device, steps: int) -> dict[str, float]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    state = build(run, connected(run, 0, store.port, f"{run.optimizer}{run.batch}/1", device), device)
    rows = [one_step(state) for _ in range(steps + 2)][2:]  # kernels are chosen and memory is taken in the first two
    found = {part: statistics.median(row[part] for row in rows) for part in PARTS}
    assert state.shard is not None
    params = state.shard.params.values()
    states = (value for entry in state.shard.optimizer.state.values() for value in entry.values())
    num_bytes = sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.numel() > 1)
    state.leave()
    return {**found, "step": sum(found.values()), "state": num_bytes / sum(param.numel() for param in params)}


def main(argv: list[str]) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--preset", default="1b", help="of GPUs")
    parser.add_argument("--context", type=num_tokens, default=256)
    parser.add_argument("--batches", type=list_of(int), default=[1, 8], help="sequences of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args(argv)
    device, rows, found = torch.device(asked.device), list[list[Any]](), list[dict[str, Any]]()
    kind = GpuRun if device.type == "cuda" else TinyRun
    run = kind(asked.preset, context=asked.context, cp=1, dp=1)
    if device.type == "cuda":
        os.environ.update(nccl.ENVIRONMENT)
        task = run.trainer(Path("/tmp"), "probe", 1000).task
        be_deterministic(task)
        warm_up_device(task, device, attention_shapes(task), 1, kernel_cache(), {})
    is_late = False
    for batch in asked.batches:
        adamw, muon = (
            measured(replace(run, batch=batch, optimizer=name), device, asked.steps) for name in ("adamw", "muon")
        )
        share = (muon["update"] + muon["apply"] - adamw["apply"]) / adamw["step"]
        is_late = is_late or (device.type == "cuda" and share > BOUNDS.get(batch, 1.0))
        for name, row in (("AdamW", adamw), ("Muon", muon)):
            rows.append([f"{batch} x {asked.context}, {name}", *row.values(), share if row is muon else None])
        found.append({"batch": batch, "adamw": adamw, "muon": muon, "share": share})
    results.show(results.table(("ms", *PARTS, "step", "state", "share"), rows))
    results.write_json(asked.out, {"run": str(run), "rows": found})
    return int(is_late)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
