"""What the peers reach outside this bench, to print beside what it measures: a peer far below is driven badly here."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.attention_systems import Problem

_TWO_H200 = """2 x H200, torch 2.11: torch's context parallel alone, context entered once, tensors in its own layout"""
_FOUR_H200 = """4 x H200, torch 2.11, 8:8 heads of 128, causal bf16, both passes: each peer alone, before this bench"""
_K = 1024


@dataclass(frozen=True)
class Reference:
    tflops: float
    source: str


_ALLTOALL, _ALLGATHER = "torch context_parallel cuDNN alltoall", "torch context_parallel cuDNN allgather"
_FIGURES: dict[str, dict[tuple[int, int], float]] = {
    # system: {(GPUs, tokens): TFLOP/s per GPU}
    _ALLTOALL: {(2, 64 * _K): 488, (2, 128 * _K): 513, (4, 128 * _K): 480, (4, 512 * _K): 522, (4, 1024 * _K): 528},
    _ALLGATHER: {(2, 64 * _K): 482, (2, 128 * _K): 514, (4, 128 * _K): 489, (4, 512 * _K): 522, (4, 1024 * _K): 525},
    "ring-flash-attn zigzag": {(4, 128 * _K): 291, (4, 512 * _K): 318, (4, 1024 * _K): 321},
    "Ulysses cudnn": {(4, 128 * _K): 520, (4, 512 * _K): 509, (4, 1024 * _K): 508},
    "Ulysses flash-attn-4": {(4, 128 * _K): 598, (4, 512 * _K): 615, (4, 1024 * _K): 616},
}


def reference_of(system: str, problem: Problem) -> Reference | None:
    """The figure for these GPUs, tokens and heads, or None. The GPUs' kind is in the source: compare with care."""
    if (problem.num_heads, problem.num_kv_heads, problem.head_dim) != (8, 8, 128):
        return None
    figures = next((found for name, found in _FIGURES.items() if system.startswith(name)), {})
    tflops = figures.get((problem.cp, problem.num_tokens))
    return None if tflops is None else Reference(tflops, _TWO_H200 if problem.cp == 2 else _FOUR_H200)
