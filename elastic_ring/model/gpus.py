"""What GPUs have and compute, by type: for plans and for the utilisation (MFU). No torch in here.

Memory is what CUDA shows a process of the card, in GiB. Peaks are the vendor's figures for dense bfloat16 on tensor
cores, in TFLOP/s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

GPU_GIB: Mapping[str, float] = {"A100-40": 39.4, "A100-80": 79.2, "H100-80": 79.1, "H200": 139.8, "B200": 178.3}
"""The types that a plan compares with, the smallest first."""
RESERVE = 0.25
"""What torch's allocator holds beside the tensors, as a share of their peak. 20 to 40 % were measured, 23 % of the
largest peak (110 GiB, benchmarks/results/gpu_runs/2026-11-21-second-run-H200.json); what is needed it gives back."""
CONTEXT_BYTES = int(0.8 * 2**30)
"""What a process takes of a GPU that it is warm on: four standbys more made 3.2 GiB on each of four H200s
(benchmarks/results/training/2026-11-21-training-4xH200.json)."""
PEAK_TFLOPS = (
    (r"\bGB[23]00\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bH[12]00 NVL\b", 835.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\b(H100|H200|GH200)\b", 989.4),
    (r"\bA100\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bA10\b", 125.0),
)
"""By a part of the GPU's name in CUDA; the first match counts."""


def peak_tflops(gpu: str) -> float | None:
    """Peak of one GPU by its name; None if unknown."""
    return next((peak for pattern, peak in PEAK_TFLOPS if re.search(pattern, gpu)), None)
