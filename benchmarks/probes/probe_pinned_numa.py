"""Copies between a GPU and pinned host memory, allocated by a thread that is bound to the CPUs of one NUMA node.

    python benchmarks/probes/probe_pinned_numa.py

Without numactl: `os.sched_setaffinity` binds the allocating thread, and the kernel gives a page to the node that
touches it first. One line a node of the machine, and one without a binding: GB/s to the GPU and back, and both at once,
medians of five copies of 2 GiB. Where a machine has one node all lines say the same, and binding gains nothing.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

NUM_BYTES, REPEATS = 2 << 30, 5
NODES = Path("/sys/devices/system/node")


def cpus_of(node: Path) -> set[int]:
    """The CPUs of a NUMA node that this process may use."""
    found: set[int] = set()
    for part in (node / "cpulist").read_text().strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1)) if part else set()
    return found & os.sched_getaffinity(0)


def rates() -> dict[str, float]:
    """With memory that is allocated here."""
    torch._C._host_emptyCache()  # else the memory of the binding before
    there, back = (torch.empty(NUM_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    on_gpu = [torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    aside = torch.cuda.Stream()
    found: dict[str, list[float]] = {"to_gpu": [], "to_host": [], "both": []}
    for _ in range(1 + REPEATS):
        for name in found:
            torch.cuda.synchronize()
            begun = time.monotonic()
            if name != "to_host":
                on_gpu[0].copy_(there, non_blocking=True)
            if name != "to_gpu":
                with torch.cuda.stream(aside):
                    back.copy_(on_gpu[1], non_blocking=True)
            torch.cuda.synchronize()
            found[name].append(NUM_BYTES * (2 if name == "both" else 1) / (time.monotonic() - begun) / 1e9)
    return {f"{name}_gb_s": round(median(seen[1:]), 1) for name, seen in found.items()}


def main() -> None:
    allowed = os.sched_getaffinity(0)
    nodes = sorted(NODES.glob("node[0-9]*"))
    gpu: Any = torch.cuda.get_device_properties(0)
    bus = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    near = Path(f"/sys/bus/pci/devices/{bus}/numa_node")
    print(
        json.dumps({"gpu": gpu.name, "nodes": len(nodes), "near": near.read_text().strip() if near.exists() else "?"})
    )
    print(json.dumps({"bound_to": None, **rates()}), flush=True)
    for node in nodes:
        if cpus := cpus_of(node):
            os.sched_setaffinity(0, cpus)
            print(json.dumps({"bound_to": node.name, "cpus": len(cpus), **rates()}), flush=True)
            os.sched_setaffinity(0, allowed)


if __name__ == "__main__":
    main()
