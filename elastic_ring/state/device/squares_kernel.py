"""The fp64 sum of squares of fp32 numbers in one pass over memory, as a Triton kernel; `device_squares` has the eager
form. Imported only for tensors on a GPU.

Deterministic: each program adds the same numbers in the same order, and so does the sum over programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ELEMENTS = 1024
PROGRAM_BLOCKS = 16


@triton.jit(do_not_specialize=["num_elements"])
def _squares_kernel(  # type: ignore[no-untyped-def]
    flat_ptr, partials_ptr, num_elements, block: tl.constexpr, num_blocks: tl.constexpr
):
    begin = tl.program_id(0).to(tl.int64) * block * num_blocks
    total = tl.zeros((block,), dtype=tl.float64)
    for index in range(num_blocks):
        places = begin + index * block + tl.arange(0, block).to(tl.int64)
        values = tl.load(flat_ptr + places, mask=places < num_elements, other=0.0).to(tl.float64)
        total += values * values
    tl.store(partials_ptr + tl.program_id(0), tl.sum(total, axis=0))


def squares(flat: Tensor) -> Tensor:
    """The fp64 sum of squares, 0-dim, of a contiguous, non-empty fp32 tensor."""
    num_programs = triton.cdiv(flat.numel(), BLOCK_ELEMENTS * PROGRAM_BLOCKS)
    partials = torch.empty(num_programs, dtype=torch.float64, device=flat.device)
    with torch.cuda.device(flat.device):
        _squares_kernel[(num_programs,)](flat, partials, flat.numel(), block=BLOCK_ELEMENTS, num_blocks=PROGRAM_BLOCKS)
    return partials.sum()
