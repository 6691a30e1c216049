"""Block-sparse attention of whole sequences: tables from a mask on the device, and gradients, without a GPU."""

from __future__ import annotations

import pytest
import torch

from elastic_ring.attention.kernels.adapters import reference
from elastic_ring.attention.kernels.adapters.reference import seen_by, seen_by_key
from elastic_ring.attention.kernels.registry import select
from elastic_ring.attention.kernels.verify import as_tokens
from experiments.block_sparse import attend, choose_on_device, tables_of


@pytest.mark.parametrize("width", [None, 2])
def test_blocks_that_content_chose_are_attended_with_their_gradients(width: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 128 * 5, heads, 16) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    kept = choose_on_device(q, k, 3)
    tables, seen = tables_of(kept, width=width), as_tokens(kept | torch.eye(5, dtype=torch.bool))
    assert torch.equal(seen_by(tables), seen)
    assert torch.equal(seen_by_key(tables), seen)
    kernel = select("cpu", torch.float64, 16, True, "reference-sparse", cover="tables")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(kernel, *leaves, tables, 0.25)
    grads = torch.autograd.grad(out, leaves, dout)
    wanted = reference.attention(q, k, v, dout, seen, 0.25)
    for got, want in zip((out, *grads), (wanted[0], *wanted[2:]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
