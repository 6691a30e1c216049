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
    """Milliseconds of a step by kind of kernel; `idle`: between its kernels; `num_kernels`; the 25 longest by name;
    `gaps`, the longest idle times by the kernels before and after: milliseconds a step, and how many. Taken without a
    record of the host, which would slow it: `step_ms` is close to that of an unwatched step."""
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
        spans.append((event.start_ns(), event.start_ns() + event.duration_ns(), event.name()))
        by_kind[kind_of(event.name())] += event.duration_ns()
        found = by_name[event.name()]
        found[0] += event.duration_ns()
        found[1] += 1

    def per_step(ns: float) -> float:
        return round(ns / num_steps / 1e6, 2)

    gaps, covered_ns = _gaps(sorted(spans))
    longest = sorted(by_name.items(), key=lambda item: -item[1][0])[:25]
    return {
        "step_ms": per_step(wall_ns),
        "idle": per_step(wall_ns - covered_ns),
        "num_kernels": len(spans) // num_steps,
        **{kind: per_step(ns) for kind, ns in sorted(by_kind.items(), key=lambda item: -item[1])},
        "longest": [(name[:110], per_step(ns), round(count / num_steps)) for name, (ns, count) in longest],
        "gaps": [
            (before[:60], after[:60], per_step(sum(found)), round(len(found) / num_steps))
            for (before, after), found in sorted(gaps.items(), key=lambda item: -sum(item[1]))[:12]
        ],
    }


def _gaps(spans: list[tuple[int, int, str]]) -> tuple[dict[tuple[str, str], list[int]], int]:
    """Idle times in nanoseconds by the kernels before and after, and how long any kernel of the sorted `spans` ran."""
    gaps, covered_ns, end, before = defaultdict[tuple[str, str], list[int]](list), 0, 0, ""
    for first, last, name in spans:
        if before and first > end:
            gaps[before, name].append(first - end)
        covered_ns += max(0, last - max(first, end))
        if last > end:
            end, before = last, name
    return gaps, covered_ns
