"""Modules, samples and runs of gated attention over rings of threads, and what is compared of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from elastic_ring.attention.layouts.layout import Layout, contiguous, zigzag
from elastic_ring.attention.layouts.placement import striped
from experiments.gated import GatedSparseAttention
from experiments.gated_ring import GatedRing
from tests.unit.attention.attention_rings import in_threads, relative_error

BLOCK, TOP_K, WINDOW, LENGTH, DIM, WIDTH, BATCH = 4, 3, 6, 67, 8, 12, 2
LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": lambda s, c: striped(s, c, unit_tokens=3)}


def make_module(num_heads: int = 4, **sizes: Any) -> GatedSparseAttention:
    """In fp64, with gates that are neither even nor closed."""
    given = {"block": BLOCK, "top_k": TOP_K, "window": WINDOW, **sizes}
    made = GatedSparseAttention(WIDTH, num_heads, **given).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return made


def sample(
    length: int = LENGTH, heads: tuple[int, int] = (4, 2), batch: int = BATCH, seed: int = 0
) -> list[torch.Tensor]:
    """x, q, k, v and the gradient of out, over the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    per_token = [(WIDTH,), (heads[0], DIM), (heads[1], DIM), (heads[1], DIM), (heads[0], DIM)]
    return [torch.randn(batch, length, *own, generator=generator, dtype=torch.float64) for own in per_token]


def step(made: GatedSparseAttention, tensors: list[torch.Tensor], ring: GatedRing | None = None) -> list[torch.Tensor]:
    """out, the gradients of x, q, k, v, and those of the gates."""
    *inputs, dout = tensors
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = made(*leaves, ring=ring)
    wanted = [*leaves, made.gates.weight, made.gates.bias]
    return [out.detach(), *torch.autograd.grad(out, wanted, dout)]


@dataclass
class Found:
    """As `step` over the whole sequence, the gates' gradients summed over ranks; and what each rank used."""

    tensors: list[torch.Tensor]
    rings: list[GatedRing]


def run(
    layout: Layout, groups: list[Any], made: GatedSparseAttention, tensors: list[torch.Tensor], **options: Any
) -> Found:
    def work(cp_rank: int) -> tuple[list[torch.Tensor], GatedRing]:
        ring = GatedRing(layout, cp_rank, groups[cp_rank], **options)
        return step(copy.deepcopy(made), [layout.scatter(tensor, cp_rank, 1) for tensor in tensors], ring), ring

    results = in_threads(layout.cp, work)
    gathered = [layout.gather([found[i] for found, _ in results], 1) for i in range(5)]
    summed = [torch.stack([found[i] for found, _ in results]).sum(0) for i in (5, 6)]
    return Found([*gathered, *summed], [ring for _, ring in results])


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor], limit: float = 1e-12) -> None:
    for name, got, want in zip(("out", "dx", "dq", "dk", "dv", "dweight", "dbias"), found, wanted, strict=True):
        assert relative_error(got, want) <= limit, name
