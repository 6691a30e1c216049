"""Steps whose process groups are aborted at random moments, repeatedly, and the memory that each leaves allocated.

Run by `benchmarks.probes.probe_steps_gpu` as `broken`.
"""

from __future__ import annotations

import argparse
import gc
import random
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.harness.gpu_runs import GpuRun
from benchmarks.probes.gpu_steps import build, connected, one_step
from elastic_ring.errors import GroupAborted, PeerFailed
from elastic_ring.runtime.gpu.device import empty_cache
from elastic_ring.runtime.groups.groups import Connector, forget_groups
from elastic_ring.runtime.groups.transport import translated
from elastic_ring.train.transaction import Transaction


def broken(run: GpuRun, rank: int, ports: list[int], device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """One rank's part: allocated memory at the start of each generation, and what remains at the end."""
    if args.trace:
        torch.cuda.memory._record_memory_history(max_entries=10, stacks="python")
    state: Transaction | None = None
    rows: list[dict[str, Any]] = []
    old: Connector | None = None
    for generation in range(1, args.generations + 1):
        if old is not None:
            old.close()
        groups = connected(run, rank, ports[0], f"1/{generation}", device)
        if state is None:
            state = build(run, groups, device)
        else:
            state.enter(groups, (1, generation), keep=True)
        empty_cache(device)
        rows.append(in_memory(device))
        old = groups.connector
        steps_until_aborted(state, old, random.Random(100 * generation + rank).uniform(0.1, args.break_s))
        state.leave()
        del groups
        forget_groups()
    return {"rows": rows, "holders": holders(), "blocks": blocks_left() if args.trace else []}


def blocks_left() -> list[str]:
    """MiB, count and allocation site of what is still allocated on the GPU, the largest first."""
    sums: dict[str, list[int]] = {}
    for segment in torch.cuda.memory._snapshot()["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                frames = [f"{Path(f['filename']).name}:{f['line']}" for f in block.get("frames", [])][:7]
                total = sums.setdefault(" < ".join(frames), [0, 0])
                total[0] += block["size"]
                total[1] += 1
    largest = sorted(sums.items(), key=lambda item: -item[1][0])[:14]
    return [f"{size >> 20} MiB in {number}: {where}" for where, (size, number) in largest]


def steps_until_aborted(state: Transaction, connector: Connector, after_s: float) -> None:
    stopped = threading.Event()

    def abort() -> None:
        time.sleep(after_s)
        connector.abort_until(stopped, 60.0)

    aborter = threading.Thread(target=abort)
    aborter.start()
    try:
        with translated(connector):
            while True:
                one_step(state, state.applied)
    except (GroupAborted, PeerFailed):
        pass
    stopped.set()
    aborter.join()


def in_memory(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "gpu_mib": torch.cuda.memory_allocated(device) >> 20 if on_gpu else 0,
        "host_mib": psutil.Process().memory_info().rss >> 20,
        "modules": len(modules_left()),
    }


def modules_left() -> list[Any]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), FSDPModule)]


def holders() -> list[str]:
    """What keeps the remaining modules alive: the types of each one's referrers' referrers."""
    found: list[str] = []
    for thing in modules_left()[:3]:
        for one in gc.get_referrers(thing):
            above = [type(two).__name__ for two in gc.get_referrers(one)][:8]
            found.append(f"{type(thing).__name__} < {type(one).__name__} < {above}")
    return found[:24]
