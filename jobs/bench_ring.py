"""Ring attention against its peers, on the GPUs of this host: one process each, all systems in one run.

    python -m jobs.bench_ring --heads 8:8 --tokens 128K,512K --out benchmarks/ring.json
    python -m jobs.bench_ring --tokens 10M --heads 1:1 --systems ours --repeats 1 --warm-ups 0 --watched 0
    python -m jobs.bench_ring --check --heads 8:8,10:2 --tokens 8K

Causal, bf16, forward and backward. Repeats are interleaved in a new order each, so that a chip that warms up
slows all systems alike; a time is the slowest rank's, and every figure the median over repeats. The ceiling is
the ring's own kernel on one rank's tokens alone, without autograd, through which all others are driven, as by a model.
A system that cannot run a problem is named with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):  # run from a checkout, where jobs is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from elastic_ring.attention.kernels.table import BACKENDS, Backend, select
from elastic_ring.attention.layout import make_layout
from jobs.peers.attention_systems import IN_A_ROW, Pass, Problem, System, at_least_one, one_backward_thread
from jobs.ring_systems import CEILING, Ours, make_systems


@dataclass
class Result:
    """Of one system on one problem. `share` is of the ceiling; times in seconds, memory as torch counts it."""

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


def measure(problem: Problem, systems: list[System], options: argparse.Namespace, cp_rank: int) -> list[Result]:
    """Warm up, then interleaved repeats of every system that can run the problem. Same on all ranks."""
    group = dist.group.WORLD
    q, k, v, dout = _tensors(problem, cp_rank)
    results: list[Result] = []
    passes: dict[str, Pass] = {}
    for system in systems:
        result = Result(problem.name, system.name, refusal=system.refusal(problem))
        results.append(result)
        if result.refusal is None:
            result.refusal, run = _warm(system, problem, cp_rank, group, (q, k, v, dout), options.warm_ups)
            if run is not None:
                passes[system.name] = run
    for repeat in range(options.repeats):
        # In another order each time: after a light pass a chip has power to spare for the next.
        order = random.Random(repeat).sample(list(zip(systems, results, strict=True)), len(systems))
        for system, result in order:
            if result.refusal is None:
                torch.cuda.empty_cache() if options.lean else None
                kept = _kept_bytes(system)
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                result.times_s.append(_timed(passes[result.system], (q, k, v, dout), options.in_a_row))
                # Of this system alone: what others keep between their passes is taken out again.
                own = torch.cuda.max_memory_allocated() - before + sum(x.nbytes for x in (q, k, v, dout))
                result.peak_bytes = max(result.peak_bytes, own + kept)
    for system, result in zip(systems, results, strict=True):
        if isinstance(system, Ours):
            # No replay leaves events.
            if result.refusal is None and problem.cp > 1 and options.watched and not system.graphed:
                _watch_hops(system, passes[result.system], (q, k, v, dout), result, options.watched)
            system.close()
    _finish(problem, results)
    return results


def _kept_bytes(system: System) -> int:
    return system.kept_bytes() if isinstance(system, Ours) else 0


def _tensors(problem: Problem, cp_rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(cp_rank)
    length, heads = problem.num_tokens // problem.cp, (problem.num_heads, problem.num_kv_heads)

    def draw(num_heads: int) -> Tensor:
        shape = (1, length, num_heads, problem.head_dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return draw(heads[0]), draw(heads[1]), draw(heads[1]), draw(heads[0])


def _warm(
    system: System,
    problem: Problem,
    cp_rank: int,
    group: Any,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    warm_ups: int,
) -> tuple[str | None, Pass | None]:
    """Kernels are compiled, connections made, memory taken. An error is a refusal if all ranks have it."""
    error = None
    run = None
    try:
        run = system.prepare(problem, cp_rank, group)
        for _ in range(warm_ups):
            run(*tensors)
        torch.cuda.synchronize()
    except (RuntimeError, ImportError, TypeError, ValueError, AssertionError, AttributeError) as caught:
        error = f"{type(caught).__name__}: {caught}"[:300]
    return error, run


def _timed(run: Pass, tensors: tuple[Tensor, Tensor, Tensor, Tensor], num_passes: int = 1) -> float:
    """A pass, of so many in a row that are started together; the slowest rank's seconds."""
    flag = torch.zeros(1, device="cuda")
    dist.all_reduce(flag)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(num_passes):
        run(*tensors)
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor([begin.elapsed_time(end) / 1e3 / num_passes], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def _watch_hops(
    system: Ours, run: Pass, tensors: tuple[Tensor, Tensor, Tensor, Tensor], result: Result, passes: int
) -> None:
    """Apart from the timed repeats, so that watching costs them nothing."""
    system.ledger.clear()
    system.ledger.keep_events = True
    for _ in range(passes):
        _timed(run, tensors)
    events = list(system.ledger.events)
    system.ledger.keep_events = False
    latencies = sorted(event.latency_s() for event in events)
    exposed = torch.tensor([sum(event.exposed_s() for event in events) / passes], device="cuda")
    dist.all_reduce(exposed, dist.ReduceOp.MAX)
    result.exposed_s = exposed.item()
    if latencies:
        result.hop_mean_s = statistics.fmean(latencies)
        result.hop_p99_s = latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))]


def _finish(problem: Problem, results: list[Result]) -> None:
    peaks = torch.tensor([result.peak_bytes for result in results], device="cuda")
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    for result, peak in zip(results, peaks.tolist(), strict=True):
        result.peak_bytes = peak
        if result.times_s:
            # The ceiling works on one rank's tokens: a cp-th of the flops that a rank of the ring has.
            flops = problem.flops_per_rank / (problem.cp if result.system == CEILING else 1)
            result.tflops_per_gpu = flops / statistics.median(result.times_s) / 1e12
    speed = {result.system: result.tflops_per_gpu for result in results}
    for result in results:
        if result.tflops_per_gpu:
            result.share_of_ceiling = result.tflops_per_gpu / speed.get(CEILING, 0.0) if speed.get(CEILING) else 0.0
            result.ours_over_this = speed.get("ours", 0.0) / result.tflops_per_gpu


def check(problem: Problem, systems: list[System], cp_rank: int) -> list[str]:
    """out, dq, dk and dv of every system against fp64 over the whole sequence, and the single kernel's error."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads = (problem.num_heads, problem.num_kv_heads, problem.num_kv_heads, problem.num_heads)
    whole = [
        torch.randn(1, problem.num_tokens, n, problem.head_dim, generator=generator, device="cuda").bfloat16()
        for n in heads
    ]
    for tensor in whole:
        dist.broadcast(tensor, 0)
    reference = next(b for b in BACKENDS if b.name == "reference")
    backend = select("cuda", torch.bfloat16, problem.head_dim, False, group=heads[0] // heads[1])
    want, alone = _whole(reference, whole), _whole(backend, whole)
    lines = [
        f"{problem.name:24s} {backend.name + ' alone':34s} "
        + " ".join(f"{_error(a, w):.3e}" for a, w in zip(alone, want, strict=True))
    ]
    for system in systems:
        refusal = system.refusal(problem)
        if refusal is None and system.name != CEILING:
            layout = make_layout(system.layout, problem.num_tokens, problem.cp)
            local = [layout.scatter(x, cp_rank, 1).contiguous() for x in whole]
            try:
                found = system.prepare(problem, cp_rank, dist.group.WORLD)(local[0], local[1], local[2], local[3])
            except Exception as caught:
                lines.append(f"{problem.name:24s} {system.name:34s} {type(caught).__name__}: {caught}"[:400])
                continue
            finally:
                if isinstance(system, Ours):
                    system.close()
            ratios = []
            for ours, single, exact in zip(found, alone, want, strict=True):
                parts = [torch.empty_like(ours.contiguous()) for _ in range(problem.cp)]
                dist.all_gather(parts, ours.contiguous())
                error = _error(layout.gather(parts, 1), exact)
                ratios.append(f"{error:.3e} ({error / _error(single, exact):.3f}x)")
            lines.append(f"{problem.name:24s} {system.name:34s} " + " ".join(ratios))
    return lines


def _whole(backend: Backend, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    q, k, v, dout = tensors
    out, lse = backend.forward(q, k, v, causal=True, scale=q.size(-1) ** -0.5)
    return out, *backend.backward(dout, q, k, v, out, lse, causal=True, scale=q.size(-1) ** -0.5)


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _rank(cp_rank: int, cp: int, store: str, options: argparse.Namespace) -> None:
    torch.cuda.set_device(cp_rank)
    one_backward_thread()
    device = torch.device("cuda", cp_rank)
    # Hops must get multiprocessors while a long kernel is running: its blocks end at different times.
    nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, cp), rank=cp_rank, world_size=cp, device_id=device, pg_options=nccl
    )
    done: list[Result] = []
    for heads in options.heads:
        for head_dim in options.head_dims:
            group = heads[0] // heads[1]
            backend = select("cuda", torch.bfloat16, head_dim, options.deterministic, options.kernel, group=group)
            systems = make_systems(options.systems, backend, options.kernel, options.deterministic)
            for num_tokens in options.tokens:
                problem = Problem(num_tokens, heads[0], heads[1], head_dim, cp)
                if options.check:
                    lines = check(problem, systems, cp_rank)
                    print("\n".join(lines), flush=True) if cp_rank == 0 else None
                    continue
                begun = time.monotonic()
                results = measure(problem, systems, options, cp_rank)
                torch.cuda.empty_cache()
                done += results
                if cp_rank == 0:
                    _show(results, time.monotonic() - begun)
                    _write(done, options, cp)
    dist.destroy_process_group()


def _show(results: list[Result], took_s: float) -> None:
    print(f"\n{results[0].problem}  ({took_s:.0f} s)")
    print(f"{'system':38s} {'TFLOP/s':>8s} {'ceiling':>8s} {'ours/it':>8s} {'GiB':>6s}  exposed   hop mean, p99")
    for r in results:
        if r.refusal is not None:
            print(f"{r.system:38s} not run: {r.refusal}")
            continue
        hops = ""
        if r.exposed_s is not None:
            hops = f"{1e3 * r.exposed_s:6.2f} ms  {1e3 * (r.hop_mean_s or 0):.2f}, {1e3 * (r.hop_p99_s or 0):.2f} ms"
        print(
            f"{r.system:38s} {r.tflops_per_gpu:8.1f} {r.share_of_ceiling:8.3f} {r.ours_over_this:8.3f}"
            f" {r.peak_bytes / 2**30:6.1f}  {hops}"
        )
    print(flush=True, end="")


def _write(results: list[Result], options: argparse.Namespace, cp: int) -> None:
    if options.out is None:
        return
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "host": f"{cp} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "backends": {b.name: b.version() for b in BACKENDS if "cuda" in b.devices},
        "in_a_row": options.in_a_row,
        "deterministic": options.deterministic,
        "results": [asdict(result) for result in results],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _tokens(text: str) -> int:
    units = {"K": 2**10, "M": 2**20}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="32K,128K", type=lambda t: [_tokens(x) for x in t.split(",")])
    parser.add_argument(
        "--heads",
        default="8:8",
        help="query:K/V heads, comma-separated",
        type=lambda t: [_heads(x) for x in t.split(",")],
    )
    parser.add_argument("--head-dims", default="128", type=lambda t: [int(x) for x in t.split(",")])
    parser.add_argument(
        "--systems", default="ours,ceiling,ulysses-fa4,ulysses-cudnn,torch-cp,ring-flash-attn",
        type=lambda t: t.split(","),
    )  # fmt: skip
    parser.add_argument("--repeats", default=5, type=int)
    parser.add_argument("--in-a-row", default=1, type=at_least_one, metavar="N", help=IN_A_ROW)
    parser.add_argument("--warm-ups", default=2, type=int)
    parser.add_argument("--watched", default=3, type=int, help="more passes of ours in which hops are timed")
    parser.add_argument("--ranks", default=0, type=int, help="GPUs to use; 0: all of this host")
    parser.add_argument("--kernel", default=None, help="pin our ring's backend")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--lean", action="store_true", help="give memory back between systems (slower, truer peaks)")
    parser.add_argument("--check", action="store_true", help="errors against fp64 instead of times")
    parser.add_argument("--out", default=None, type=Path)
    return parser.parse_args(arguments)


def _heads(text: str) -> tuple[int, int]:
    query, _, keys = text.partition(":")
    return int(query), int(keys or query)


def main() -> None:
    options = parse()
    cp = options.ranks or torch.cuda.device_count()
    if not cp:
        raise SystemExit("bench_ring needs at least one CUDA device")
    # One host: NVLink multicast is not what is measured, and where hosts are shared it may have to stay off.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(cp, f"{folder}/store", options), nprocs=cp)


if __name__ == "__main__":
    main()
