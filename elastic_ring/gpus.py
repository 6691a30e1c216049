"""GPUs by type: spec sheets, memory, and names in CUDA, for plans, forecasts and the utilisation (MFU).

Figures are the vendors', but for memory, which is what CUDA shows. Measured rates do not belong here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

GB = 1e9
RESERVE = 0.25
"""Memory that torch's allocator holds beside the tensors, as a share of their peak: 20 to 40 % measured, 23 % of the
largest peak (110 GiB, benchmarks/results/gpu_runs/2026-11-21-second-run-H200.json). It gives some back if needed."""
CONTEXT_BYTES = int(0.8 * 2**30)
"""GPU memory of a warm process: four more standbys took 3.2 GiB on each of four H200s
(benchmarks/results/training/2026-11-21-training-4xH200.json)."""


@dataclass(frozen=True)
class Gpu:
    """The spec sheet of a type: GiB of memory, dense bf16 FLOP/s, memory and links in bytes/s one way, watts of its
    share of a host."""

    name: str
    arch: str
    gib: float
    peak_flops: float
    hbm_bytes_s: float
    nvlink_bytes_s: float
    nic_bytes_s: float
    pcie_bytes_s: float
    host_watts: float


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40", "ampere", 39.4, 312e12, 1.555e12, 300 * GB, 25 * GB, 25 * GB, 812),
        Gpu("A100-80", "ampere", 79.2, 312e12, 2.039e12, 300 * GB, 25 * GB, 25 * GB, 812),
        Gpu("H100-80", "hopper", 79.1, 989.4e12, 3.35e12, 450 * GB, 50 * GB, 55 * GB, 1275),
        Gpu("H200", "hopper", 139.8, 989.4e12, 4.8e12, 450 * GB, 50 * GB, 55 * GB, 1275),
        Gpu("B200", "blackwell", 178.3, 2250e12, 8.0e12, 900 * GB, 50 * GB, 55 * GB, 1790),
    )
}
"""The types that a plan compares with, the smallest first."""
_PEAK_FLOPS = (
    (r"\bGB[23]00\b", 2500e12),
    (r"\bB200\b", GPUS["B200"].peak_flops),
    (r"\bH[12]00 NVL\b", 835e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\b(H100|H200|GH200)\b", GPUS["H200"].peak_flops),
    (r"\bA100\b", GPUS["A100-80"].peak_flops),
    (r"\bL40S\b", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA10\b", 125e12),
)
"""By a part of the GPU's name in CUDA; the first match counts."""


def peak_flops(gpu: str) -> float | None:
    """Peak FLOP/s of one GPU by its name in CUDA; None if unknown."""
    return next((peak for pattern, peak in _PEAK_FLOPS if re.search(pattern, gpu)), None)


def gpu_type(name: str) -> str | None:
    """A type of `GPUS` by its name in CUDA or Ray; None for others, parts of a GPU (MIG) too. An A100 of unknown size
    counts as the smaller one."""
    match = re.search(r"\b(A100|H100|H200|B200)\b", name)
    if match is None or "MIG" in name:
        return None
    return {"A100": "A100-80" if re.search("80 ?G", name) else "A100-40", "H100": "H100-80"}.get(match[0], match[0])
