"""Rings as CUDA graphs give what the rings themselves give, bit for bit, whatever comes between."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.ring import RingAttention
from elastic_ring.errors import PeerFailed
from experiments.cuda_graphs import GraphedRing, make_graphed
from tests.gpu.attention.test_attention_between_gpus import spawn
from tests.unit.attention.attention_rings import Case
from tests.unit.sparse.block_cases import block_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

Tensors = list[torch.Tensor]


def _draw(case: Any, cp_rank: int, seed: int) -> Tensors:
    """q, k, v, dout of one rank."""
    found = [case.layout.scatter(x, cp_rank, 1).cuda() for x in case.tensors()]
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, device="cuda", dtype=x.dtype) for x in found]


def _both(attend: Any, tensors: Tensors) -> Tensors:
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = attend(*leaves)
    # What graphs return lies in their own memory: kept here beyond the next call.
    return [x.clone() for x in (out.detach(), *torch.autograd.grad(out, leaves, tensors[3]))]


@contextmanager
def _agreeing(ring: Any, case: Any, cp_rank: int, allowed: float = 0.0) -> Iterator[GraphedRing]:
    """After several replays, with other calls of the same ring between them: the same bits, or gradients as near as
    those of two calls of a kernel that adds up in any order."""
    inputs = [_draw(case, cp_rank, seed) for seed in range(3)]
    with make_graphed(ring, *inputs[0][:3]) as graphed:
        for each in (*inputs, inputs[0]):
            want, found = _both(ring, each), _both(graphed, each)
            assert torch.equal(found[0], want[0])
            for got, exact in zip(found[1:], want[1:], strict=True):
                assert (got.double() - exact.double()).norm() <= allowed * exact.double().norm()
        yield graphed


def dense_rings(cp_rank: int, cp: int) -> None:
    for heads, hops in (((8, 8), None), ((10, 2), 1)):
        case = Case(
            cp=cp,
            seq_len=4096,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=128,
            document_starts=(0, 1000),
            dtype=torch.bfloat16,
        )
        ring = RingAttention(
            case.schedule, cp_rank, dist.group.WORLD, RingOptions(deterministic=True, hops_per_stage=hops)
        )
        with _agreeing(ring, case, cp_rank):
            pass


def sparse_rings(cp_rank: int, cp: int) -> None:
    for family, layout, options in (
        ("bigbird", "zigzag", {}),
        ("bigbird", "contiguous", {"stage_bytes": 1}),
        ("longnet with rows that see nothing", "contiguous", {}),
        ("segments, nothing beyond", "contiguous", {}),
        ("window", "contiguous", {"keep_keys": True}),
    ):
        case = block_case(family, cp, layout, head_dim=128, dtype=torch.bfloat16)
        ring = RingAttention(case.schedule, cp_rank, dist.group.WORLD, RingOptions(deterministic=False, **options))
        with _agreeing(ring, case, cp_rank, allowed=3e-3):
            pass


def deterministic_sparse_ring(cp_rank: int, cp: int) -> None:
    case = block_case("bigbird", cp, "zigzag", head_dim=128, dtype=torch.bfloat16)
    ring = RingAttention(case.schedule, cp_rank, dist.group.WORLD, RingOptions(deterministic=True))
    with _agreeing(ring, case, cp_rank):
        pass


def layers_in_turn(cp_rank: int, cp: int) -> None:
    """Forward through three layers and back through them, by one ring, with keys that are leaves of all."""
    case = Case(
        cp=cp, seq_len=4096, num_heads=8, num_kv_heads=8, head_dim=128, document_starts=(0,), dtype=torch.bfloat16
    )
    ring = RingAttention(case.schedule, cp_rank, dist.group.WORLD, RingOptions(deterministic=True))
    tensors = _draw(case, cp_rank, 0)

    def through(attends: Sequence[Any]) -> Any:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for layer in attends:
                q = layer(q, k, v)
            return q

        return attend

    with ExitStack() as stack:
        layers = [stack.enter_context(make_graphed(ring, *tensors[:3])) for _ in range(3)]
        for _ in range(2):
            for got, want in zip(_both(through(layers), tensors), _both(through([ring] * 3), tensors), strict=True):
                assert torch.equal(got, want)


def in_place(cp_rank: int, cp: int) -> None:
    """Arguments written where graphs read them, gradients taken up where they leave them, on a stream of its own."""
    case = block_case("bigbird", cp, "zigzag", head_dim=128, dtype=torch.bfloat16)
    ring = RingAttention(case.schedule, cp_rank, dist.group.WORLD, RingOptions(deterministic=False))
    inputs = [_draw(case, cp_rank, seed) for seed in range(3)]
    with make_graphed(ring, *inputs[0][:3], copy_grads=False) as graphed, torch.cuda.stream(torch.cuda.Stream()):
        for each in inputs:
            want = _both(ring, each)
            for own, given in zip(graphed.inputs, each[:3], strict=True):
                own.copy_(given)
            leaves = [x.requires_grad_() for x in graphed.inputs]
            out = graphed(*leaves)
            found = [out.detach(), *torch.autograd.grad(out, leaves, each[3])]
            assert torch.equal(found[0], want[0])
            for got, exact in zip(found[1:], want[1:], strict=True):
                assert (got.double() - exact.double()).norm() <= 3e-3 * exact.double().norm()


def larger_ones_between(cp_rank: int, cp: int) -> None:
    """Another ring of the same buffers asks for larger ones: the graphs go on in theirs."""
    buffers = HopBuffers()
    small, large = (
        Case(cp=cp, seq_len=n, num_heads=8, num_kv_heads=8, head_dim=128, document_starts=(0,), dtype=torch.bfloat16)
        for n in (2048, 8192)
    )
    rings = [
        RingAttention(case.schedule, cp_rank, dist.group.WORLD, RingOptions(deterministic=True, buffers=buffers))
        for case in (small, large)
    ]
    with _agreeing(rings[0], small, cp_rank) as graphed:
        before = {x.data_ptr() for x in buffers.shared_buffers()}
        tensors = _draw(small, cp_rank, 7)
        want = _both(rings[0], tensors)
        _both(rings[1], _draw(large, cp_rank, 8))
        assert not before & {x.data_ptr() for x in buffers.shared_buffers()}
        # Whoever gets memory that was let go of would be written to by a replay that does not hold it.
        fills = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
        for got, exact in zip(_both(graphed, tensors), want, strict=True):
            assert torch.equal(got, exact)
        assert all(bool((fill == 7.0).all()) for fill in fills)


def aborted_while_a_replay_waits(cp_rank: int, cp: int) -> None:
    """The abort lets the replay go, and its own end waits for the graphs: so both at once."""
    case = Case(
        cp=cp, seq_len=2048, num_heads=8, num_kv_heads=8, head_dim=128, document_starts=(0,), dtype=torch.bfloat16
    )
    group: Any = dist.new_group(backend="nccl")
    ring = RingAttention(case.schedule, cp_rank, group, RingOptions(deterministic=True))
    tensors = _draw(case, cp_rank, 0)
    graphed = make_graphed(ring, *tensors[:3])
    _both(graphed, tensors)
    torch.cuda.synchronize()
    dist.barrier()
    if cp_rank > 0:  # rank 0 sends nothing, and some rank's keys never come
        graphed(*tensors[:3])
        if cp_rank == 1:
            with pytest.raises(PeerFailed, match="a rank did not replay with this one"):
                graphed.close(timeout_s=0.5)
    control = threading.Thread(target=group._get_backend(torch.device("cuda", cp_rank)).abort, daemon=True)
    control.start()
    graphed.close()
    control.join(60)
    assert not control.is_alive()
    with pytest.raises(ValueError, match="closed"):
        graphed(*tensors[:3])
    with _agreeing(
        RingAttention(case.schedule, cp_rank, dist.group.WORLD, RingOptions(deterministic=True)), case, cp_rank
    ):
        pass


WORKS = (
    dense_rings,
    sparse_rings,
    layers_in_turn,
    in_place,
    larger_ones_between,
    aborted_while_a_replay_waits,
    deterministic_sparse_ring,
)


@pytest.mark.parametrize("work", WORKS)
def test_a_graphed_ring_gives_what_the_ring_gives(tmp_path: Path, work: Any) -> None:
    if torch.cuda.device_count() == 3:
        pytest.skip("needs 2 or 4 devices")
    spawn(work, tmp_path)
