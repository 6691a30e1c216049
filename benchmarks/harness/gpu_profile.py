"""Where a GPU spent a step: kernels by kind, and how long none ran."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS = (
    ("nccl", r"nccl"),
    ("attention", r"flash|cutlass_flash|fmha|FlashAttention|attention|cudnn.*(fprop|bprop)"),
    ("optimizer", r"adam|Adam"),
    ("products", r"gemm|nvjet|cutlass|sm90_xmma|cublas|splitKreduce"),
    ("copies", r"Memcpy|Memset|copy_kernel|direct_copy"),
    ("loss", r"softmax|SoftMax|cross_entropy|scatter|gather|logsumexp|nll"),
    ("sums and norms", r"reduce_kernel|norm|Norm"),
)
"""The first that a kernel's name matches; all others are elementwise."""


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "elementwise")


def profiled(step: Callable[[], object], num_steps: int = 3) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel; `idle`: between its kernels; `num_kernels`; the 25 longest by name.
    Taken without a record of the host, which would slow it: `step_ms` is close to that of an unwatched step."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        begun = time.perf_counter()
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
        wall_ns = (time.perf_counter() - begun) * 1e9
    spans, by_kind, by_name = [], defaultdict[str, float](float), defaultdict[str, list[float]](lambda: [0.0, 0])
    for event in seen.profiler.kineto_results.events():
        if event.device_type() != DeviceType.CUDA or not event.duration_ns():
            continue
        spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        by_kind[kind_of(event.name())] += event.duration_ns()
        found = by_name[event.name()]
        found[0] += event.duration_ns()
        found[1] += 1

    def per_step(ns: float) -> float:
        return round(ns / num_steps / 1e6, 2)

    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:25]
    return {
        "step_ms": per_step(wall_ns),
        "idle": per_step(wall_ns - _covered(spans)),
        "num_kernels": len(spans) // num_steps,
        **{kind: per_step(ns) for kind, ns in sorted(by_kind.items(), key=lambda item: -item[1])},
        "longest": [(name[:110], per_step(ns), round(count / num_steps)) for name, (ns, count) in longest],
    }


def _covered(spans: list[tuple[int, int]]) -> float:
    total, end = 0, 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return float(total)
