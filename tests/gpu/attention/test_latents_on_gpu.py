"""Hops that carry latents on a GPU: exact to bf16, in equal bits, latents alone move. Dense at widths of DeepSeek-V3,
over blocks with keys of 64, because kernels over blocks take a head_dim of 64 or 128."""

from __future__ import annotations

import pytest
import torch

from elastic_ring.attention.kernels.registry import select
from elastic_ring.attention.layouts.layout import contiguous, zigzag
from elastic_ring.attention.patterns.families import BigBird
from elastic_ring.attention.patterns.sparse import Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from tests.gpu.gpu_rings import run_latents_on
from tests.unit.attention.attention_rings import relative_error

HEADS, ROTATED, VALUE, RANK = 8, 64, 128, 512


@pytest.mark.parametrize(("sparse", "key"), [(False, 128), (True, 64)], ids=["dense", "blocks"])
def test_a_ring_on_latents_is_as_exact_as_a_ring_of_one_and_repeats(sparse: bool, key: int) -> None:
    torch.manual_seed(0)
    shapes = [(1, 2048, HEADS, key + ROTATED), (1, 2048, 1, RANK + ROTATED), (HEADS * (key + VALUE), RANK)]
    values = [torch.randn(shape) * scale for shape, scale in zip([*shapes, shapes[0]], (1, 1, 0.05, 1), strict=True)]
    values[3][..., VALUE:] = 0  # of values' padding
    tensors = [x.bfloat16() for x in values]
    kernel = select(torch.device("cuda"), torch.bfloat16, key + ROTATED, True, cover="tables") if sparse else None

    def run(cp: int) -> tuple[list[torch.Tensor], int]:
        layout = zigzag(2048, cp) if cp > 1 else contiguous(2048, 1)
        pattern = SparsePattern((BigBird(3, 1, 0),), 128)
        schedule = plan_sparse(pattern, layout, HEADS, 1) if sparse else plan(Pattern(), layout)
        found, ledgers = run_latents_on("cuda", schedule, tensors, kernel=kernel)
        received = sum(size for (way, _), size in ledgers[0].received_bytes.items() if way == "forward")
        assert received == schedule.received_bytes(0, (RANK + ROTATED) // 2, 2, kv_heads=1)
        return found, received

    alone, _ = run(1)
    (found, received), (again, _) = run(4), run(4)
    assert received > 0
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
    assert all(relative_error(got, want) < 0.02 for got, want in zip(found, alone, strict=True))
