"""Scales of rows and columns and numbers in e4m3, in one pass each, as Triton kernels. Imported only for GPUs.

`fp8.eager_rows` is the reference; a maximum and a division by a power of two have no rounding of their own, so both
give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3 = torch.float8_e4m3fn
MOST_BLOCK = 8192
TILE = 64


@triton.jit
def _scale(largest):  # type: ignore[no-untyped-def]
    """As `fp8.scale_of`: `/` may be two units in the last place off."""
    needed = tl.maximum(tl.div_rn(largest, 448.0), 7.888609052210118e-31)
    bits = needed.to(tl.int32, bitcast=True)
    return (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _rows_kernel(x_ptr, out_ptr, scale_ptr, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((block,), dtype=tl.float32)
    for begin in range(0, width, block):
        at = begin + tl.arange(0, block)
        x = tl.load(x_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = _scale(tl.max(largest, axis=0))
    tl.store(scale_ptr + row, scale)
    for begin in range(0, width, block):
        at = begin + tl.arange(0, block)
        x = tl.load(x_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * width + at, (x / scale).to(tl.float8e4nv), mask=at < width)


@triton.jit
def _columns_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, largest_ptr, scale_ptr, num_rows, width, tile: tl.constexpr
):
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = (row[:, None] < num_rows) & (column[None, :] < width)
    places = row[:, None].to(tl.int64) * width + column[None, :]
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    scale = _scale(tl.load(largest_ptr + column, mask=column < width, other=1.0).to(tl.float32))
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + column, scale, mask=column < width)
    turned = tl.trans((x / scale[None, :]).to(tl.float8e4nv))
    places = column[:, None].to(tl.int64) * num_rows + row[None, :]
    tl.store(out_ptr + places, turned, mask=(column[:, None] < width) & (row[None, :] < num_rows))


def rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `fp8.rows`; x is contiguous."""
    num_rows, width = x.shape
    out, scale = torch.empty_like(x, dtype=E4M3), x.new_empty((num_rows, 1), dtype=torch.float32)
    block = min(MOST_BLOCK, triton.next_power_of_2(width))
    with torch.cuda.device(x.device):
        _rows_kernel[(num_rows,)](x, out, scale, width, block=block, num_warps=8 if block >= 4096 else 4)
    return out, scale


def columns(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As `fp8.columns`; weight is contiguous."""
    num_rows, width = weight.shape
    out = weight.new_empty((width, num_rows), dtype=E4M3)
    scale = weight.new_empty((width, 1), dtype=torch.float32)
    largest = torch.linalg.vector_norm(weight, ord=torch.inf, dim=0)
    grid = (triton.cdiv(num_rows, TILE), triton.cdiv(width, TILE))
    with torch.cuda.device(weight.device):
        _columns_kernel[grid](weight, out, largest, scale, num_rows, width, tile=TILE)
    return out, scale
