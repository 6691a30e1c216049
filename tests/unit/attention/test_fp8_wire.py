"""Keys and values that cross in 8 bits: the named error, the same on each pass, and the planned bytes."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import torch

from elastic_ring.attention.comm import packing
from elastic_ring.attention.comm.exchange import token_frame
from elastic_ring.attention.layouts.layout import zigzag
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.rules import Dense, Sinks, Window
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from tests.unit.attention.attention_rings import check_close, run_ring
from tests.unit.sparse.block_cases import BlockCase
from tests.unit.sparse.pattern_cases import SparseCase


def crossed(x: torch.Tensor) -> torch.Tensor:
    wire = torch.empty(*x.shape[:-1], packing.row_bytes(x.size(-1)), dtype=torch.uint8)
    packing.encode_(wire, x)
    found = torch.empty_like(x)
    packing.decode_(found, wire)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", [1, 7, 64])
def test_each_element_is_off_by_at_most_what_the_bounds_say(dtype, head_dim):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 50, head_dim, generator=generator, dtype=torch.float64)
    x *= torch.rand(x.shape, generator=generator, dtype=torch.float64).pow(8)
    x = (x * torch.logspace(-20, 20, 50, dtype=torch.float64)[:, None]).to(dtype)
    x[0, 0] = 0
    found, exact, largest = crossed(x).double(), x.double(), x.double().abs().amax(-1, keepdim=True)
    rounding = largest * torch.finfo(dtype).eps  # of the result to the type of x
    bound = torch.maximum(exact.abs() * packing.RELATIVE_BOUND, largest * packing.ABSOLUTE_BOUND)
    bound = bound.clamp(min=packing.SMALLEST_SCALE * 2**-10)
    assert ((found - exact).abs() <= bound * (1 + 1e-6) + rounding).all()
    assert not found[0, 0].any()
    wire = torch.empty(*x.shape[:-1], packing.row_bytes(head_dim), dtype=torch.uint8)
    packing.encode_(wire, x)
    error = packing.measure_wire_error(x, wire)
    assert head_dim == 1 or 0 < error.rms <= error.worst * math.sqrt(head_dim) <= math.sqrt(head_dim) / 28 + 1e-6


def test_what_is_not_finite_stays_so():
    for wrong in (math.nan, math.inf):
        assert not crossed(torch.tensor([[1.0, wrong, 2.0]])).isfinite().all()


def straight_through(case: SparseCase) -> list[torch.Tensor]:
    """out, dq, dk, dv of one masked softmax for each rank, whose own keys are exact and all others have crossed."""
    q, k, v, dout = case.tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask, sharing = case.mask(), case.num_heads // case.num_kv_heads
    out = torch.zeros_like(q)
    for rank in range(case.layout.cp):
        own = case.layout.positions(rank)
        keys = []
        for x in (k, v):
            change = crossed(x.detach()) - x.detach()
            change[:, own] = 0
            keys.append((x + change).repeat_interleave(sharing, dim=2))
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, own], keys[0]) / math.sqrt(case.head_dim)
        weights = scores.masked_fill(~mask[:, own], -math.inf).softmax(-1)
        out = out.index_copy(1, torch.as_tensor(own), torch.einsum("bhqk,bkhd->bqhd", weights, keys[1]))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


SPARSE = SparseCase((Sinks(3) | Window(9),), (lambda q, k: k < 3 or q - k < 9,), zigzag(67, 3), (0, 22))
DENSE = SparseCase((Dense(),), (lambda q, k: True,), zigzag(67, 3), (0, 22))
BLOCKS = BlockCase((BigBird(2, 1, 1),), (), zigzag(128 * 6, 3), block=128)


@pytest.mark.parametrize(("kind", "case"), [("dense", DENSE), ("sparse", SPARSE), ("blocks", BLOCKS)])
def test_a_ring_attends_to_crossed_keys_the_same_on_each_pass_and_counts_their_bytes(rings, kind, case, caplog):
    layout = case.layout
    schedule = plan(Pattern(True, case.document_starts), layout) if kind == "dense" else case.schedule
    how: dict[str, Any] = {"dense": {"backend": "reference"}, "blocks": {"kernel": "reference-sparse"}}.get(kind, {})
    caplog.set_level(logging.INFO)
    first, second = (run_ring(case, rings.groups(layout.cp), schedule=schedule, kv_wire="fp8", **how) for _ in range(2))
    assert all(map(torch.equal, first.tensors, second.tensors))
    check_close(first.tensors, straight_through(case))
    assert sum("keys cross as fp8: worst error 0.0" in line for line in caplog.messages) == 2 * layout.cp
    options: dict[str, Any] = {"side": "sent", "wire_row_bytes": packing.row_bytes(case.head_dim)}
    options |= {"batch": case.tensors()[0].size(0), "kv_heads": case.num_kv_heads}
    for rank, ledger in enumerate(first.ledgers):
        assert ledger.wire_error is not None
        assert 0 < ledger.wire_error.rms < ledger.wire_error.worst <= 1 / 28 + 1e-6
        for direction, hop in itertools.product(("forward", "backward"), range(1, layout.cp)):
            planned = schedule.hop_bytes(rank, hop, case.head_dim, 8, direction, **options)  # type: ignore[arg-type]
            assert ledger.sent_bytes.get((direction, hop), 0) == planned  # type: ignore[call-overload]


def test_the_frame_of_the_wire_has_a_scale_for_each_head():
    k = torch.empty(2, 5, 3, 8)
    assert packing.wire_frame(token_frame(k, 8)).shape(4) == (2, 2, 4, 3, 12)
