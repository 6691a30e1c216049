"""What is alive on a GPU at the peak of a step, by who allocated it, beside the plan: one GPU, preset 1b or `hf`.

python benchmarks/probes/probe_alive_gpu.py --model 1b --keep
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.distributed import TCPStore

from benchmarks.harness.gpu_runs import HF, GpuRun
from benchmarks.probes.gpu_steps import build, connected, one_step
from benchmarks.probes.probe_steps_gpu import warm
from elastic_ring.model.config import num_parameters
from elastic_ring.model.memory import StepMemory
from elastic_ring.runtime.groups import nccl

GIB = 2**30
MOST_EVENTS = 2_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", choices=("1b", "hf"), default="1b")
    parser.add_argument("--keep", action="store_true", help="layers keep their activations")
    options = parser.parse_args()
    os.environ.update(nccl.ENVIRONMENT)
    device = torch.device("cuda", 0)
    run = GpuRun(HF if options.model == "hf" else options.model, dp=1, cp=1, batch=1, checkpoint=not options.keep)
    warm(run, device, False)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python")
    state = build(run, connected(run, 0, store.port, "0/1", device), device)
    for step in range(2):
        one_step(state, step)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    live = alive_at_peak([event for event in trace if event["action"] in ("alloc", "free_completed")])
    config = run.model
    plan = StepMemory(config, num_parameters(config), 1, run.context, 2)
    print(
        f"{options.model}: {sum(event['size'] for event in live) / GIB:.2f} GiB alive at the peak, torch counted "
        f"{torch.cuda.max_memory_allocated() / GIB:.2f}, planned {plan.device_bytes / GIB:.2f}, in {plan.fullest.name}"
    )
    by: Counter[str] = Counter()
    for event in live:
        by[allocator(event["frames"])] += event["size"]
    for who, size in by.most_common(14):
        print(f"{size / GIB:9.2f} GiB  {who}")


def alive_at_peak(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The allocations that were alive when their sum was largest."""
    alive: dict[int, dict[str, Any]] = {}
    now = most = at = 0
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            now += event["size"]
        elif (freed := alive.pop(event["addr"], None)) is not None:
            now -= freed["size"]
        if now > most:
            most, at = now, index
    alive = {}
    for event in events[: at + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        else:
            alive.pop(event["addr"], None)
    return list(alive.values())


def allocator(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost frame of this package or of Liger, else of torch."""
    own = [frame for frame in frames if "elastic_ring/" in frame["filename"] or "liger" in frame["filename"]]
    if not frames:
        return "unknown"
    frame = (own or frames)[0]
    return f"{frame['filename'].rsplit('/', 1)[-1]}:{frame['name']}:{frame['line']}"


if __name__ == "__main__":
    main()
