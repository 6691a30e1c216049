"""What a decoder computes for one sequence, and what GPUs have and compute, by type: for plans and for the utilisation
(MFU). No torch in here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from elastic_ring.model.config import ModelConfig, active_parameters

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


def gpu_type(name: str) -> str | None:
    """A type of `GPU_GIB` by its name in CUDA or Ray; None for others, parts of a GPU (MIG) too. An A100 of unknown
    size counts as the smaller one."""
    match = re.search(r"\b(A100|H100|H200|B200)\b", name)
    if match is None or "MIG" in name:
        return None
    sizes = {"A100": "A100-80" if re.search("80 ?G", name) else "A100-40", "H100": "H100-80"}
    kind = sizes.get(match[0], match[0])
    return kind if kind in GPU_GIB else None


def model_flops(config: ModelConfig, context_tokens: int, density: float = 1.0, num_active: int | None = None) -> float:
    """6 for each parameter and token that are multiplied (rows of a table that is only read are not), and 6 S^2 H D for
    each layer: the causal half of attention, forward + backward as 1 + 2, of which a pattern keeps the share
    `density`. `num_active`: the parameters of a token, where the config does not say all of them."""
    table = 0 if config.tie_embeddings else config.vocab_size * config.width
    dense = 6.0 * ((num_active or active_parameters(config)) - table) * context_tokens
    return dense + density * 6.0 * context_tokens**2 * config.num_heads * config.head_dim * config.num_layers


def flops_of(model: Any, context_tokens: int) -> float | None:
    """FLOP of one sequence of a factory of the built-in decoder, `partial(Transformer, config)`; None for others."""
    given = model.args if isinstance(model, partial) else ()
    configs = [one for one in given if isinstance(one, ModelConfig)]
    return model_flops(configs[0], context_tokens) if len(configs) == 1 else None
