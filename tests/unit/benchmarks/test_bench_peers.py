"""Peers of `bench_ring` compute dense attention and prepare outside the clock: real ranks over gloo."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name

from benchmarks.attention.ring_rank import Result, compare, summary
from benchmarks.attention.ring_systems import OURS_NCCL
from benchmarks.peers import attention_torch_cp
from benchmarks.peers.attention_systems import Prepared, Problem, System
from benchmarks.peers.attention_torch_cp import TorchContextParallel
from benchmarks.peers.attention_ulysses import Ulysses
from benchmarks.peers.reference_figures import reference_of
from elastic_ring.attention.kernels.adapters import reference
from elastic_ring.attention.kernels.registry import named
from elastic_ring.attention.layouts.layout import make_layout

CP = 2
PROBLEM = Problem(64, 4, 4, 8, CP)
GROUPED = Problem(64, 4, 2, 8, CP)
ENTERS_CONTEXT = "torch.Tensor.resize_"
"""What `context_parallel` does to each of its buffers when it is entered."""
PREPARES = (
    ENTERS_CONTEXT,
    *(f"torch.Tensor.{name}" for name in ("clone", "transpose", "contiguous", "requires_grad_")),
)
IN_RING = {"torch.Tensor.contiguous"}
"""torch's own ring calls it on K and V."""
ATEN = torch.ops.aten


def systems() -> dict[str, tuple[System, Problem]]:
    backend = named("reference")
    return {
        "ulysses": (Ulysses(backend), GROUPED),
        "alltoall": (TorchContextParallel("alltoall"), PROBLEM),
        "allgather": (TorchContextParallel("allgather"), PROBLEM),
        "grouped": (TorchContextParallel("alltoall"), GROUPED),
    }


def whole(problem: Problem) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (problem.num_heads, problem.num_kv_heads, problem.num_kv_heads, problem.num_heads)
    return [torch.randn(1, 64, num, 8, generator=generator, dtype=torch.float64) for num in heads]


def give_cpus_a_ring_kernel() -> Any:
    """torch's rings run over three attention operators, none of which has a CPU kernel: give one the CPU's flash."""
    library = torch.library.Library("aten", "IMPL")

    def forward(
        q: Any,
        k: Any,
        v: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        debug: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, scale=scale)
        seed, unused = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
        return out, lse, None, None, q.size(2), k.size(2), seed, unused, torch.empty(0)

    def backward(
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        cum_q: Any,
        cum_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        seed: Any,
        offset: Any,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        return ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, dropout_p, is_causal, scale=scale
        )

    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")

    def scaled_dot_product_attention(q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
        return ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    F.scaled_dot_product_attention = attention_torch_cp._PLAIN_ATTENTION = scaled_dot_product_attention
    return library


class Calls(TorchFunctionMode):
    """Counts the calls of torch's Python functions by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[resolve_name(func) or str(func)] += 1
        return func(*args, **(kwargs or {}))


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    library = give_cpus_a_ring_kernel()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", CP), rank=rank, world_size=CP)
    found: dict[str, Any] = {}
    prepared: dict[str, Prepared] = {}
    preparing: dict[str, Counter[str]] = {}
    with ExitStack() as closing:
        for name, (system, problem) in systems().items():
            layout = make_layout(system.layout, problem.num_tokens, CP)
            q, k, v, dout = (layout.scatter(x, rank, 1).contiguous() for x in whole(problem))
            with Calls() as calls:
                prepared[name] = system.prepare(problem, rank, dist.group.WORLD, (q, k, v, dout))
            closing.callback(prepared[name].close)
            preparing[name] = calls.counts
        for name, one in prepared.items():
            one.select()
            with Calls() as timed:
                results = one.run()
            found[name] = [x.contiguous() for x in one.results(results)], preparing[name], timed.counts
    assert F.scaled_dot_product_attention is attention_torch_cp._PLAIN_ATTENTION
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    del library


@pytest.mark.slow
def test_peers_through_autograd_are_dense_attention_and_prepare_nothing_in_a_timed_pass(tmp_path):
    mp.get_context("forkserver").set_forkserver_preload(["torch", "torch.distributed.tensor", __name__])
    mp.start_processes(rank_main, args=(str(tmp_path),), nprocs=CP, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(CP)]
    for name, (system, problem) in systems().items():
        q, k, v, dout = whole(problem)
        out, lse = reference.forward(q, k, v, causal=True, scale=8**-0.5)
        wanted = (out, *reference.backward(dout, q, k, v, out, lse, causal=True, scale=8**-0.5))
        layout = make_layout(system.layout, problem.num_tokens, CP)
        # torch merges in fp32, whatever the tensors' type.
        tolerance = 1e-12 if name == "ulysses" else 2e-6
        for number, want in enumerate(wanted):
            got = layout.gather([found[name][0][number] for found in ranks], 1)
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for name in ("alltoall", "allgather"):
        _, preparing, timed = ranks[0][name]
        assert [call for call in PREPARES if not preparing[call]] == [], "the spy sees what preparing does"
        assert [call for call in PREPARES if timed[call] and call not in IN_RING] == []


def test_ratios_of_a_ring_are_of_ours_through_nccl():
    problem = Problem(65536, 8, 8, 128, CP)
    second = problem.flops_per_rank / 1e14  # at 100 TFLOP/s
    speeds = {"ours": 6.0, "torch context_parallel cuDNN alltoall": 4.0, OURS_NCCL: 5.0, "not run": 0.0}
    results = [Result(problem.name, name, times_s=[second / speed] if speed else []) for name, speed in speeds.items()]
    for result in results:
        result.reference = reference_of(result.system, problem)
    compare(problem, results)
    assert [round(result.ours_over_this, 3) for result in results] == [0.833, 1.25, 1.0, 0.0]
    lines = summary(results).splitlines()
    assert [OURS_NCCL in line for line in lines[1:4]] == [True, False, False]
    assert "400" in lines[3]
    assert "488 [1]" in lines[3]
    assert lines[4].startswith("[1] 2 x H200")
