"""What a decoder computes for one sequence, and what GPUs compute at most, for the utilisation (MFU). No torch in here.

The peaks are the vendor's figures for dense bfloat16 on tensor cores, in TFLOP/s.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from elastic_ring.model.config import ModelConfig, num_parameters

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
"""By the GPU's name as CUDA tells it; the first that is found counts."""


def model_flops(config: ModelConfig, context_tokens: int) -> float:
    """6 for each parameter and token (rows of a table that is only read are not multiplied), and 6 S^2 H D for each
    layer: the causal half of attention, forward + backward as 1 + 2."""
    table = 0 if config.tie_embeddings else config.vocab_size * config.width
    dense = 6.0 * (num_parameters(config) - table) * context_tokens
    return dense + 6.0 * context_tokens**2 * config.num_heads * config.head_dim * config.num_layers


def flops_of(model: Any, context_tokens: int) -> float | None:
    """FLOP of one sequence of a factory of the built-in decoder, `partial(Transformer, config)`; None for others."""
    given = model.args if isinstance(model, partial) else ()
    configs = [one for one in given if isinstance(one, ModelConfig)]
    return model_flops(configs[0], context_tokens) if len(configs) == 1 else None


def peak_tflops(gpu: str) -> float | None:
    """Of one GPU by its name; None where it is not known."""
    return next((peak for pattern, peak in PEAK_TFLOPS if re.search(pattern, gpu)), None)
