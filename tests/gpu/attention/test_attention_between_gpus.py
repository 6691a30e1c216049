"""A ring of one process for each GPU moves the planned bytes and repeats its bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.ring import RingAttention
from tests.unit.attention.attention_rings import Case
from tests.unit.attention.test_attention_bytes import check_ledger
from tests.unit.sparse.block_cases import block_case, check_bytes, masked_reference

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def spawn(work: Any, folder: Path, *arguments: Any) -> None:
    cp = min(4, torch.cuda.device_count())
    mp.spawn(_connected, args=(cp, str(folder / "store"), work, arguments), nprocs=cp)


def _connected(cp_rank: int, cp: int, store: str, work: Any, arguments: tuple[Any, ...]) -> None:
    torch.cuda.set_device(cp_rank)
    device = torch.device("cuda", cp_rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, cp), rank=cp_rank, world_size=cp, device_id=device)
    try:
        work(cp_rank, cp, *arguments)
    finally:
        dist.destroy_process_group()


def _run(case: Case, cp_rank: int, ledger: HopLedger, **options: Any) -> list[torch.Tensor]:
    q, k, v, dout = (case.layout.scatter(x, cp_rank, 1).cuda() for x in case.tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ring = RingAttention(case.schedule, cp_rank, dist.group.WORLD, RingOptions(ledger=ledger, **options))
    out = ring(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def repeat_exchanges(cp_rank: int, cp: int, heads: tuple[int, int], starts: tuple[int, ...]) -> None:
    case = Case(cp, 4096, True, "zigzag", starts, *heads, head_dim=128, dtype=torch.bfloat16)
    for hops_per_stage in (None, 1, 2):
        calls, ledgers = [], []
        for _ in range(2):
            ledgers.append(HopLedger())
            calls.append(_run(case, cp_rank, ledgers[-1], hops_per_stage=hops_per_stage, deterministic=True))
            check_ledger(case, cp_rank, ledgers[-1], partial_itemsize=2)
        assert all(torch.equal(a, b) for a, b in zip(*calls, strict=True)), hops_per_stage


@pytest.mark.parametrize(("heads", "starts"), [((8, 8), (0,)), ((10, 2), (0,)), ((8, 2), (0, 100, 1500))])
def test_a_dense_ring_between_gpus_moves_the_planned_bytes_and_repeats_its_bits(tmp_path, heads, starts):
    spawn(repeat_exchanges, tmp_path, heads, starts)


def run_sparse_ring(cp_rank: int, cp: int, kernel: str, deterministic: bool) -> None:
    """Each case twice: right, the planned bytes, and the same bits where they were asked for; and hop by hop."""
    for family, layout in SPARSE_CASES:
        case = block_case(family, cp, layout, head_dim=128, dtype=torch.bfloat16)
        want = [case.layout.scatter(x.cpu(), cp_rank, 1) for x in masked_reference(case, "cuda")]
        calls = []
        for options in ({"stage_bytes": 1}, {}, {}):
            q, k, v, dout = (case.layout.scatter(x, cp_rank, 1).cuda() for x in case.tensors())
            leaves = [x.requires_grad_() for x in (q, k, v)]
            made = RingOptions(kernel=kernel, deterministic=deterministic, **options)
            ring = RingAttention(case.schedule, cp_rank, dist.group.WORLD, made)
            out = ring(*leaves)
            calls.append([x.cpu() for x in (out.detach(), *torch.autograd.grad(out, leaves, dout))])
        for by_hops, got, again, exact in zip(*calls, want, strict=True):
            for found in (by_hops, got):
                assert (found.double() - exact).norm() <= 6e-3 * max(exact.norm(), 1.0), (family, layout)
            assert not deterministic or torch.equal(got, again), (family, layout)
        ledgers: list[Any] = [None] * cp
        dist.all_gather_object(ledgers, ring.ledger)
        check_bytes(case, ledgers, 2)


SPARSE_CASES = (
    ("bigbird", "zigzag"),
    ("longnet with rows that see nothing", "contiguous"),
    ("heads in turn", "zigzag"),
    ("segments, nothing beyond", "contiguous"),
    ("window", "contiguous"),
)
"""Of the fourth no rank sends anything, of the last not every rank sends and receives."""


@pytest.mark.parametrize(("kernel", "deterministic"), [("flash-attn-4-sparse", False), ("flex-sparse", True)])
@pytest.mark.filterwarnings("default")
def test_a_sparse_ring_between_gpus_agrees_with_the_masked_softmax(tmp_path, kernel, deterministic):
    if torch.cuda.device_count() == 3:
        pytest.skip("needs 2 or 4 devices")
    spawn(run_sparse_ring, tmp_path, kernel, deterministic)
