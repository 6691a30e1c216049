"""Measure block-sparse attention on one GPU: forward and backward against dense in the same kernel family.

    python benchmarks/attention/pattern_speed_gpu.py [--tokens N] [--heads N] [--densities 0.5,0.1] [--json FILE]

"static" is a pattern of half a window and half random blocks whose tables are made once; "content" chooses as
many blocks anew in every call, routing and tables included. "of 1/density" is the speed-up over the dense causal
call of the same family, over its ideal. Device time between events, the median of `--repeats`, and the least; the host
is `AHEAD_MS` ahead at the first event, as in a training step, whose kernels wait in the GPU's queue.
`--memory-tokens` adds one call of that length, dense and sparse, for the allocator's peak above inputs and outputs.
`--profile` prints for each row the kernels that its time went to: what of it moves dQ's sums does not shrink with
density.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.arguments import bench_parser
from benchmarks.harness.results import write_json
from elastic_ring.attention.kernels.adapters import flash_attn
from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import covering
from elastic_ring.attention.kernels.verify import self_test
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.rules import Dense
from elastic_ring.attention.patterns.sparse import SparsePattern
from experiments.block_sparse import BlockSparseAttention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

AHEAD_MS = 20
"""Longer than the host needs to launch one call."""
CYCLES_PER_MS = 2_000_000
"""Of a GPU's clock; H100s and H200s run at most at 1,980 MHz."""
NUM_SHOWN = 8
"""Kernels of a row: the rest together take less than a percent."""


class _DenseFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = flash_attn.flash4_forward(q, k, v, causal=True, scale=q.size(-1) ** -0.5)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = ctx.saved_tensors[0]
        return flash_attn.flash4_backward(dout, *ctx.saved_tensors, causal=True, scale=q.size(-1) ** -0.5)


def dense_of(kernel: Kernel) -> Attend:
    """Dense causal attention in the kernel's family: flash-attn-4's own, or all blocks through FlexAttention."""
    if kernel.name.startswith("flash"):
        return _DenseFlash.apply
    return BlockSparseAttention(SparsePattern((Dense(),)), kernel=kernel.name, deterministic=False)


def pattern_of(density: float, seq_len: int) -> SparsePattern:
    num_kept = max(2, round(density * seq_len / BLOCK_TOKENS / 2))
    return SparsePattern((BigBird(window=(num_kept + 1) // 2, globals=0, randoms=num_kept // 2),))


def content_density(top_k: int, seq_len: int) -> float:
    num_blocks = seq_len // BLOCK_TOKENS
    earlier = sum(min(top_k - 1, row) for row in range(num_blocks))
    pairs = earlier * BLOCK_TOKENS**2 + num_blocks * BLOCK_TOKENS * (BLOCK_TOKENS + 1) // 2
    return pairs / (seq_len * (seq_len + 1) / 2)


def inputs(seq_len: int, heads: int, head_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (1, seq_len, heads, head_dim)
    return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def once(attend: Attend, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    return torch.autograd.grad(attend(leaves[0], leaves[1], leaves[2]), leaves, tensors[3])


def device_ms(attend: Attend, tensors: list[torch.Tensor], repeats: int) -> tuple[float, float]:
    """(median, least) milliseconds of forward and backward."""
    for _ in range(3):
        once(attend, tensors)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_MS * CYCLES_PER_MS)
        start.record()
        once(attend, tensors)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), min(times)


def peak_mib(attend: Attend, tensors: list[torch.Tensor]) -> float:
    """What the allocator held at most in one call, above what was held before and the gradients after."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = once(attend, tensors)
    torch.cuda.synchronize()
    kept = sum(grad.nbytes for grad in grads)
    return (torch.cuda.max_memory_allocated() - before - kept) / 2**20


def kernel_times(attend: Attend, tensors: list[torch.Tensor]) -> list[tuple[float, int, str]]:
    """(milliseconds, launches, name) of the device's kernels in one forward and backward, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        once(attend, tensors)
        torch.cuda.synchronize()
    found = [(event.self_device_time_total / 1000, event.count, event.key) for event in seen.key_averages()]
    return sorted((each for each in found if each[0] > 0), reverse=True)


def measure(kernel: Kernel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one kernel family, dense first."""
    tensors = inputs(options.tokens, options.heads, options.head_dim)
    rows: list[dict[str, Any]] = []

    def add(kind: str, density: float, attend: Attend) -> None:
        median, least = device_ms(attend, tensors, options.repeats)
        row = {"kernel": kernel.name, "kind": kind, "density": density, "ms": median, "least_ms": least}
        row["peak_mib"] = peak_mib(attend, tensors)
        row["of_ideal"] = rows[0]["ms"] / median * density if rows else 1.0
        first, second = (once(attend, tensors) for _ in range(2))
        row["repeats_bits"] = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        rows.append(row)
        print(
            f"{kernel.name:<20} {kind:<8} {density:>8.4f} {median:>9.3f} {least:>9.3f} {row['of_ideal']:>8.1%}"
            f" {row['peak_mib']:>9.1f} {row['repeats_bits']!s:>6}",
            flush=True,
        )
        if options.profile:
            row["kernels"] = kernels = kernel_times(attend, tensors)
            for milliseconds, count, name in kernels[:NUM_SHOWN]:
                print(f"    {milliseconds:>9.3f} ms in {count}  {name[:90]}", flush=True)

    add("dense", 1.0, dense_of(kernel))
    for wanted in options.densities:
        pattern = pattern_of(wanted, options.tokens)
        static = BlockSparseAttention(pattern, kernel=kernel.name, deterministic=False)
        add("static", pattern.density(options.tokens), static)
        top_k = max(2, round(wanted * options.tokens / BLOCK_TOKENS / 2))
        content = BlockSparseAttention(top_k=top_k, kernel=kernel.name, deterministic=False)
        add("content", content_density(top_k, options.tokens), content)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="length of the sequence (32768)")
    parser.add_argument("--heads", type=int, default=16, help="query and K/V heads (16)")
    parser.add_argument("--head-dim", type=int, default=128, help="(128)")
    parser.add_argument("--densities", default="0.5,0.25,0.1,0.03", help="(0.5,0.25,0.1,0.03)")
    parser.add_argument("--repeats", type=int, default=20, help="(20)")
    parser.add_argument("--kernels", help="comma-separated; default: all")
    parser.add_argument("--memory-tokens", type=int, default=0, help="one more length for the peak of memory (none)")
    parser.add_argument("--profile", action="store_true", help="the kernels of each row and their times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args(arguments)
    options.densities = [float(density) for density in options.densities.split(",")]
    if not torch.cuda.is_available():
        print(
            "pattern_speed_gpu: no GPU here; pattern_speed.py measures on a CPU",
            file=sys.stderr,
        )
        return 2
    print(
        f"{torch.cuda.get_device_name()}, {options.tokens:,} tokens, {options.heads} heads of {options.head_dim}, bf16,"
        " both passes"
    )
    rows: list[dict[str, Any]] = []
    names = f"{'ms':>9} {'least':>9} {'of ideal':>8} {'peak MiB':>9} {'bits':>6}"
    print(f"{'kernel':<20} {'kind':<8} {'density':>8} {names}")
    for kernel in covering("tables"):
        if options.kernels is not None and kernel.name not in options.kernels.split(","):
            continue
        failure = kernel.refusal("cuda", torch.bfloat16, options.head_dim, False)
        failure = failure or self_test(
            kernel, device="cuda", dtype=torch.bfloat16, head_dim=options.head_dim, head_ratio=1
        )
        if failure is not None:
            print(f"{kernel.name}: {failure}")
            continue
        rows += measure(kernel, options)
        rows += long_call(kernel, options) if options.memory_tokens else []
        write_json(options.json, {"rows": rows})
    return 0 if rows else 1


def long_call(kernel: Kernel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One dense and one sparse call of `memory_tokens`, after one to compile and make tables."""
    seq_len = options.memory_tokens
    tensors = inputs(seq_len, options.heads, options.head_dim)
    pattern = pattern_of(min(options.densities), seq_len)
    sparse = BlockSparseAttention(pattern, kernel=kernel.name, deterministic=False)
    rows = []
    density = pattern.density(seq_len)
    for kind, kept, attend in (("static", density, sparse), ("dense", 1.0, dense_of(kernel))):
        once(attend, tensors)
        median, _ = device_ms(attend, tensors, 1) if kind == "static" else (float("nan"), 0.0)
        rows.append(
            {
                "kernel": kernel.name,
                "kind": kind,
                "tokens": seq_len,
                "density": kept,
                "ms": median,
                "peak_mib": peak_mib(attend, tensors),
                "driver_mib": _driver_mib(),
            }
        )
        print(
            f"{kernel.name:<20} {kind:<8} {seq_len:,} tokens, density {kept:.4f}, {median:.1f} ms, peak"
            f" {rows[-1]['peak_mib']:,.0f} MiB above inputs and gradients, driver {rows[-1]['driver_mib']:,.0f} MiB",
            flush=True,
        )
    return rows


def _driver_mib() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


if __name__ == "__main__":
    sys.exit(main())
