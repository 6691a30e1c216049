"""What each rank of `bench_ring` does: prepare, time and check the systems, and print the tables."""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.ring_systems import CEILING, OURS_NCCL, Ours, make_systems
from benchmarks.harness.gpu_ranks import interleaved, maximum, timed_s
from benchmarks.harness.results import show, table, write_json
from benchmarks.peers.attention_systems import Prepared, Problem, System, Tensors
from benchmarks.peers.reference_figures import Reference, reference_of
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.kernels.registry import covering, named, select
from elastic_ring.attention.layouts.layout import make_layout


@dataclass
class Result:
    """One system on one problem. Times in seconds, memory as torch counts it.

    `share_of_ceiling` is of the ring's own kernel alone; `ours_over_this` is the headline system's speed over this
    one's: our ring through NCCL, which training uses, or by copy engines where only that was measured.
    """

    problem: str
    system: str
    refusal: str | None = None
    times_s: list[float] = field(default_factory=list)
    tflops_per_gpu: float = 0.0
    share_of_ceiling: float = 0.0
    ours_over_this: float = 0.0
    peak_bytes: int = 0
    exposed_s: float | None = None
    hop_mean_s: float | None = None
    hop_p99_s: float | None = None
    reference: Reference | None = None


def run_rank(cp_rank: int, cp: int, options: argparse.Namespace) -> None:
    done: list[Result] = []
    for heads in options.heads:
        for head_dim in options.head_dims:
            ratio = heads[0] // heads[1]
            backend = select("cuda", torch.bfloat16, head_dim, options.deterministic, options.kernel, head_ratio=ratio)
            systems = make_systems(options.systems, backend, options.kernel, options.deterministic)
            for num_tokens in options.tokens:
                problem = Problem(num_tokens, heads[0], heads[1], head_dim, cp)
                if options.check:
                    lines = check(problem, systems, cp_rank)
                    show("\n".join(lines)) if cp_rank == 0 else None
                    continue
                began_s = time.monotonic()
                results = measure(problem, systems, options, cp_rank)
                torch.cuda.empty_cache()
                done += results
                if cp_rank == 0:
                    show_problem(results, time.monotonic() - began_s)
                    write_json(options.out, _record(done, options))
    if cp_rank == 0 and done:
        show("\n" + summary(done))


def measure(problem: Problem, systems: list[System], options: argparse.Namespace, cp_rank: int) -> list[Result]:
    """Warm up, then time every system that can run the problem, interleaved. Results are the same on all ranks."""
    tensors = draw_tensors(problem, cp_rank)
    results = {system.name: Result(problem.name, system.name, system.refusal(problem)) for system in systems}
    prepared: dict[str, Prepared] = {}
    with ExitStack() as closing:
        for system in systems:
            result = results[system.name]
            result.reference = reference_of(system.name, problem)
            if result.refusal is None:
                result.refusal, found = _warm(system, problem, cp_rank, tensors, options.warm_ups)
                if found is not None:
                    closing.callback(found.close)
                    prepared[system.name] = found
        able = [system for system in systems if results[system.name].refusal is None]
        for system in interleaved(able, options.repeats):
            torch.cuda.empty_cache() if options.lean else None
            _time(prepared[system.name], system, results[system.name], tensors, options.in_a_row)
        for system in able:
            if isinstance(system, Ours) and problem.cp > 1 and options.watched:
                _watch_hops(system, prepared[system.name], results[system.name], options.watched)
    found_results = list(results.values())
    for result in found_results:
        result.peak_bytes = int(maximum(float(result.peak_bytes)))
    compare(problem, found_results)
    return found_results


def draw_tensors(problem: Problem, cp_rank: int) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(cp_rank)

    def draw(num_heads: int) -> Tensor:
        shape = (1, problem.num_tokens // problem.cp, num_heads, problem.head_dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return draw(problem.num_heads), draw(problem.num_kv_heads), draw(problem.num_kv_heads), draw(problem.num_heads)


def _warm(
    system: System, problem: Problem, cp_rank: int, tensors: Tensors, warm_ups: int
) -> tuple[str | None, Prepared | None]:
    """Compile kernels, connect and allocate. An error refuses the system; every rank is expected to meet the same."""
    prepared = None
    try:
        prepared = system.prepare(problem, cp_rank, dist.group.WORLD, tensors)
        prepared.select()
        for _ in range(warm_ups):
            prepared.run()
        torch.cuda.synchronize()
    except (RuntimeError, ImportError, TypeError, ValueError, AssertionError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"[:300], prepared
    return None, prepared


def _time(prepared: Prepared, system: System, result: Result, tensors: Tensors, in_a_row: int) -> None:
    kept = system.kept_bytes() if isinstance(system, Ours) else 0
    prepared.select()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result.times_s.append(timed_s(prepared.run, in_a_row))
    # This system alone: what the others keep between their passes is subtracted.
    own = torch.cuda.max_memory_allocated() - before + sum(x.nbytes for x in tensors)
    result.peak_bytes = max(result.peak_bytes, own + kept)


def _watch_hops(system: Ours, prepared: Prepared, result: Result, passes: int) -> None:
    """Time the hops of further passes, so that recording costs the timed ones nothing."""
    system.ledger.clear()
    system.ledger.keep_events = True
    prepared.select()
    for _ in range(passes):
        timed_s(prepared.run)
    events = list(system.ledger.events)
    system.ledger.keep_events = False
    latencies = sorted(event.latency_s() for event in events)
    result.exposed_s = maximum(sum(event.exposed_s() for event in events) / passes)
    if latencies:
        result.hop_mean_s = statistics.fmean(latencies)
        result.hop_p99_s = latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))]


def compare(problem: Problem, results: list[Result]) -> None:
    """Fill in the speed of each result, its share of the ceiling, and the headline system's speed over it."""
    for result in results:
        if result.times_s:
            # The ceiling works on one rank's tokens: a cp-th of the flops that a rank of the ring has.
            flops = problem.flops_per_rank / (problem.cp if result.system == CEILING else 1)
            result.tflops_per_gpu = flops / statistics.median(result.times_s) / 1e12
    speed = {result.system: result.tflops_per_gpu for result in results}
    headline, ceiling = speed.get(OURS_NCCL, 0.0), speed.get(CEILING, 0.0)
    for result in results:
        if result.tflops_per_gpu:
            result.share_of_ceiling = result.tflops_per_gpu / ceiling if ceiling else 0.0
            result.ours_over_this = headline / result.tflops_per_gpu


def show_problem(results: list[Result], took_s: float) -> None:
    rows: list[list[object]] = []
    for r in results:
        if r.refusal is None:
            milliseconds = [None if s is None else f"{1e3 * s:.2f}" for s in (r.exposed_s, r.hop_mean_s, r.hop_p99_s)]
            rows.append(
                [
                    r.system,
                    f"{r.tflops_per_gpu:.1f}",
                    r.share_of_ceiling,
                    r.ours_over_this,
                    f"{r.peak_bytes / 2**30:.1f}",
                    *milliseconds,
                ]
            )
    head = ["system", "TFLOP/s", "of kernel", "ours/it", "GiB", "exposed ms", "hop ms", "p99 ms"]
    refused = [f"{r.system}: not run: {r.refusal}" for r in results if r.refusal is not None]
    show(f"\n{results[0].problem}  ({took_s:.0f} s)\n" + "\n".join([table(head, rows), *refused]))


def summary(results: list[Result]) -> str:
    """The headline ring first, then how much faster it is than each other system, problem by problem."""
    problems = list(dict.fromkeys(r.problem for r in results))
    rows, sources, first = [], list[str](), OURS_NCCL
    for problem in problems:
        own = sorted((r for r in results if r.problem == problem and r.tflops_per_gpu), key=lambda r: r.system != first)
        for r in own:
            reference = None
            if r.reference is not None:
                sources += [r.reference.source] if r.reference.source not in sources else []
                reference = f"{r.reference.tflops:.0f} [{sources.index(r.reference.source) + 1}]"
            share = r.share_of_ceiling or None
            rows.append([problem, r.system, f"{r.tflops_per_gpu:.0f}", share, r.ours_over_this or None, reference])
    head = ["summary", "system", "TFLOP/s per GPU", "of own kernel", f"{first!r} / it", "elsewhere"]
    notes = [f"[{number}] {source}" for number, source in enumerate(sources, 1)]
    return "\n".join([table(head, rows), *notes])


def _record(results: list[Result], options: argparse.Namespace) -> dict[str, object]:
    return {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "backends": {b.name: b.version() for b in covering("causal") if "cuda" in b.devices},
        "in_a_row": options.in_a_row,
        "deterministic": options.deterministic,
        "headline": OURS_NCCL,
        "results": [asdict(result) for result in results],
    }


def check(problem: Problem, systems: list[System], cp_rank: int) -> list[str]:
    """Relative errors of out, dq, dk and dv of every system against fp64 over the whole sequence.

    In brackets: as a multiple of the single kernel's error.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    heads = (problem.num_heads, problem.num_kv_heads, problem.num_kv_heads, problem.num_heads)
    whole = [
        torch.randn(1, problem.num_tokens, n, problem.head_dim, generator=generator, device="cuda").bfloat16()
        for n in heads
    ]
    for tensor in whole:
        dist.broadcast(tensor, 0)
    reference = named("reference")
    backend = select("cuda", torch.bfloat16, problem.head_dim, False, head_ratio=heads[0] // heads[1])
    want, alone = _whole(reference, whole), _whole(backend, whole)
    lines = [
        f"{problem.name:24s} {backend.name + ' alone':34s} "
        + " ".join(f"{_error(a, w):.3e}" for a, w in zip(alone, want, strict=True))
    ]
    for system in systems:
        if system.refusal(problem) is None and system.name != CEILING:
            errors = _check_one(system, problem, cp_rank, whole, want, alone)
            lines.append(f"{problem.name:24s} {system.name:34s} {errors}")
    return lines


def _check_one(
    system: System, problem: Problem, cp_rank: int, whole: list[Tensor], want: Tensors, alone: Tensors
) -> str:
    layout = make_layout(system.layout, problem.num_tokens, problem.cp)
    q, k, v, dout = (layout.scatter(x, cp_rank, 1).contiguous() for x in whole)
    prepared = None
    try:
        prepared = system.prepare(problem, cp_rank, dist.group.WORLD, (q, k, v, dout))
        prepared.select()
        found = prepared.results(prepared.run())
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:400]
    finally:
        prepared.close() if prepared is not None else None
    ratios = []
    for ours, single, exact in zip(found, alone, want, strict=True):
        parts = [torch.empty_like(ours.contiguous()) for _ in range(problem.cp)]
        dist.all_gather(parts, ours.contiguous())
        off = _error(layout.gather(parts, 1), exact)
        ratios.append(f"{off:.3e} ({off / _error(single, exact):.3f}x)")
    return " ".join(ratios)


def _whole(backend: Kernel, tensors: list[Tensor]) -> Tensors:
    q, k, v, dout = tensors
    scale = q.size(-1) ** -0.5
    out, lse = backend.forward(q, k, v, causal=True, scale=scale)
    dq, dk, dv = backend.backward(dout, q, k, v, out, lse, causal=True, scale=scale)
    return out, dq, dk, dv


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
