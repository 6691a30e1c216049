"""Triton kernels for a ring's sums and rows: merging (out, lse), weighting gradients, adding partials, gathering rows.

Each kernel reads its operands once and writes its result once, with sums in fp32 registers. The eager versions in
`merge` and `packing` define the results. Imported only for GPU tensors; communication and attention kernels must not
enter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from elastic_ring.attention.layouts.rows import MOST_AT_ONCE


# Arguments that depend on a document's length and position must not be specialized: Triton recompiles when an integer
# becomes 1 or a multiple of 16, or when a pointer's alignment changes.
@triton.jit(
    do_not_specialize=[
        "lse_ptr",
        "one_lse_ptr",
        "two_lse_ptr",
        "three_lse_ptr",
        "num_rows",
        "lse_b",
        "lse_h",
        "one_lse_b",
        "one_lse_h",
        "two_lse_b",
        "two_lse_h",
        "three_lse_b",
        "three_lse_h",
    ]
)
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    lse_ptr,
    one_ptr,
    one_lse_ptr,
    two_ptr,
    two_lse_ptr,
    three_ptr,
    three_lse_ptr,
    num_rows,
    num_heads,
    out_b,
    out_s,
    one_b,
    one_s,
    two_b,
    two_s,
    three_b,
    three_s,
    lse_b,
    lse_s,
    lse_h,
    one_lse_b,
    one_lse_s,
    one_lse_h,
    two_lse_b,
    two_lse_s,
    two_lse_h,
    three_lse_b,
    three_lse_s,
    three_lse_h,
    num_parts: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    lanes = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = lanes < num_rows * num_heads
    row = lanes // num_heads
    head = lanes % num_heads
    dim = tl.arange(0, padded_dim)
    mask = inside[:, None] & (dim < head_dim)[None, :]
    column = head[:, None] * head_dim + dim[None, :]
    lse_at = lse_ptr + batch * lse_b + row * lse_s + head * lse_h
    out_at = out_ptr + batch * out_b + row[:, None] * out_s + column
    lse = tl.load(lse_at, mask=inside, other=0.0)
    out = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    part_lse_at = one_lse_ptr + batch * one_lse_b + row * one_lse_s + head * one_lse_h
    out, lse = _merged(out, lse, one_ptr + batch * one_b + row[:, None] * one_s + column, part_lse_at, mask, inside)
    if num_parts > 1:
        part_lse_at = two_lse_ptr + batch * two_lse_b + row * two_lse_s + head * two_lse_h
        out, lse = _merged(out, lse, two_ptr + batch * two_b + row[:, None] * two_s + column, part_lse_at, mask, inside)
    if num_parts > 2:
        part_lse_at = three_lse_ptr + batch * three_lse_b + row * three_lse_s + head * three_lse_h
        part_at = three_ptr + batch * three_b + row[:, None] * three_s + column
        out, lse = _merged(out, lse, part_at, part_lse_at, mask, inside)
    # Several warps load the same lse and one stores it: without a barrier a late warp occasionally reads the new value
    # and merges 32 rows with wrong weights.
    tl.debug_barrier()
    tl.store(lse_at, lse, mask=inside)
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merged(out, lse, part_at, part_lse_at, mask, inside):  # type: ignore[no-untyped-def]
    part_lse = tl.load(part_lse_at, mask=inside, other=0.0).to(tl.float32)
    part = tl.load(part_at, mask=mask, other=0.0).to(tl.float32)
    nothing = part_lse == float("-inf")
    weight = tl.where(nothing, 0.0, 1.0 / (1.0 + tl.exp(lse - part_lse)))
    high = tl.maximum(lse, part_lse)
    low = tl.minimum(lse, part_lse)
    merged = tl.where(high == float("-inf"), high, high + tl.log(1.0 + tl.exp(low - high)))
    # A part of weight 0 must not change a bit, even if it contains NaN.
    return tl.where(nothing[:, None], out, out + weight[:, None] * (part - out)), merged


@triton.jit
def _add_kernel(  # type: ignore[no-untyped-def]
    total_ptr,
    one_ptr,
    two_ptr,
    three_ptr,
    size,
    total_b,
    one_b,
    two_b,
    three_b,
    num_parts: tl.constexpr,
    block: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < size
    total_at = total_ptr + batch * total_b + at
    total = tl.load(total_at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(one_ptr + batch * one_b + at, mask=mask, other=0.0).to(tl.float32)
    if num_parts > 1:
        total += tl.load(two_ptr + batch * two_b + at, mask=mask, other=0.0).to(tl.float32)
    if num_parts > 2:
        total += tl.load(three_ptr + batch * three_b + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(total_at, total.to(total_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_placed_kernel(  # type: ignore[no-untyped-def]
    total_ptr,
    inbox_ptr,
    places_ptr,
    num_rows,
    total_b,
    inbox_b,
    inbox_s,
    num_hops: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    dim = tl.arange(0, padded_dim)
    inside = row < num_rows
    # Rows without a share, most of them where a ring fetches little, are neither read nor written.
    grown = row < 0
    for hop in tl.static_range(num_hops):
        grown |= tl.load(places_ptr + hop * num_rows.to(tl.int64) + row, mask=inside, other=-1) >= 0
    mask = grown[:, None] & (dim < head_dim)[None, :]
    total_at = total_ptr + batch * total_b + row[:, None] * head_dim + dim[None, :]
    total = tl.load(total_at, mask=mask, other=0.0).to(tl.float32)
    for hop in tl.static_range(num_hops):
        place = tl.load(places_ptr + hop * num_rows.to(tl.int64) + row, mask=inside, other=-1).to(tl.int64)
        present = mask & (place >= 0)[:, None]
        inbox_at = inbox_ptr + batch * inbox_b + place[:, None] * inbox_s + dim[None, :]
        total += tl.load(inbox_at, mask=present, other=0.0).to(tl.float32)
    tl.store(total_at, total.to(total_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gather_rows_kernel(  # type: ignore[no-untyped-def]
    packed_ptr,
    k_ptr,
    v_ptr,
    rows_ptr,
    num_rows,
    packed_row,
    packed_b,
    packed_kind,
    k_b,
    v_b,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    row = tl.load(rows_ptr + at, mask=at < num_rows, other=0).to(tl.int64)
    dim = tl.arange(0, padded_dim)
    mask = (at < num_rows)[:, None] & (dim < head_dim)[None, :]
    source = row[:, None] * head_dim + dim[None, :]
    target = packed_ptr + batch * packed_b + at[:, None] * packed_row + dim[None, :]
    k = tl.load(k_ptr + batch * k_b + source, mask=mask)
    v = tl.load(v_ptr + batch * v_b + source, mask=mask)
    tl.store(target, k, mask=mask)
    tl.store(target + packed_kind, v, mask=mask)


@triton.jit
def _own_gradients_kernel(  # type: ignore[no-untyped-def]
    weighted_ptr,
    dlse_ptr,
    dout_ptr,
    own_ptr,
    own_lse_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    num_heads,
    weighted_b,
    weighted_s,
    dout_b,
    dout_s,
    own_b,
    own_s,
    out_b,
    out_s,
    dlse_b,
    dlse_s,
    dlse_h,
    own_lse_b,
    own_lse_s,
    own_lse_h,
    lse_b,
    lse_s,
    lse_h,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    lanes = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = lanes < num_rows * num_heads
    row = lanes // num_heads
    head = lanes % num_heads
    dim = tl.arange(0, padded_dim)
    mask = inside[:, None] & (dim < head_dim)[None, :]
    column = head[:, None] * head_dim + dim[None, :]
    own_lse = tl.load(own_lse_ptr + batch * own_lse_b + row * own_lse_s + head * own_lse_h, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + batch * lse_b + row * lse_s + head * lse_h, mask=inside, other=0.0)
    dout = tl.load(dout_ptr + batch * dout_b + row[:, None] * dout_s + column, mask=mask, other=0.0).to(tl.float32)
    own = tl.load(own_ptr + batch * own_b + row[:, None] * own_s + column, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + batch * out_b + row[:, None] * out_s + column, mask=mask, other=0.0).to(tl.float32)
    weighted = dout * tl.exp(own_lse - lse)[:, None]
    weighted_at = weighted_ptr + batch * weighted_b + row[:, None] * weighted_s + column
    tl.store(weighted_at, weighted.to(weighted_ptr.dtype.element_ty), mask=mask)
    dlse_at = dlse_ptr + batch * dlse_b + row * dlse_s + head * dlse_h
    tl.store(dlse_at, tl.sum(weighted * (own - out), 1), mask=inside)


def merge_all_(out: torch.Tensor, lse: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """`merge.eager_merge_all_` for `out` (B, n, H, D), `lse` (B, n, H) and up to three such parts on a GPU."""
    batch, num_rows, num_heads, head_dim = out.shape
    if out.numel() == 0:
        return
    assert _is_rows_contiguous(out), "the running out must have contiguous rows"
    assert len(parts) <= MOST_AT_ONCE, f"{len(parts)} parts at once"
    pairs = [(_rows_contiguous(part), part_lse) for part, part_lse in parts]
    pairs += pairs[:1] * (MOST_AT_ONCE - len(parts))
    padded_dim = triton.next_power_of_2(head_dim)
    block = max(1, 2048 // padded_dim)
    grid = (triton.cdiv(num_rows * num_heads, block), batch)
    _merge_kernel[grid](
        out,
        lse,
        *(tensor for pair in pairs for tensor in pair),
        num_rows,
        num_heads,
        *out.stride()[:2],
        *(stride for part, _ in pairs for stride in part.stride()[:2]),
        *lse.stride(),
        *(stride for _, part_lse in pairs for stride in part_lse.stride()),
        num_parts=len(parts),
        head_dim=head_dim,
        padded_dim=padded_dim,
        block=block,
    )


def add_(total: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """`merge.eager_add_` for tensors (B, n, H, D) on a GPU; up to three parts are read in one pass."""
    if total.numel() == 0:
        return
    if len(parts) > MOST_AT_ONCE and total.dtype != torch.float32:
        exact = total.float()
        add_(exact, parts)
        total.copy_(exact)
        return
    assert total[0].is_contiguous(), "the running sum must have contiguous sequences"
    size, block = total[0].numel(), 4096
    for first in range(0, len(parts), MOST_AT_ONCE):
        few = [part if part[0].is_contiguous() else part.contiguous() for part in parts[first : first + MOST_AT_ONCE]]
        padded = [*few, *few[:1] * (MOST_AT_ONCE - len(few))]
        strides = [tensor.stride(0) for tensor in (total, *padded)]
        grid = (triton.cdiv(size, block), total.size(0))
        _add_kernel[grid](total, *padded, size, *strides, num_parts=len(few), block=block)


def add_placed_(total: torch.Tensor, inbox: torch.Tensor, places: torch.Tensor) -> None:
    """`merge.eager_add_placed_` on a GPU, for rows of `total` and `inbox` that are contiguous, with or without gaps
    between rows. Each row of `total` with a share is read and written once; other rows are not accessed."""
    if total.numel() == 0 or places.numel() == 0:
        return
    assert total[0].is_contiguous(), "the running sum must have contiguous rows"
    assert inbox.stride(2) == 1, "each share must be contiguous"
    batch, num_rows, head_dim = total.shape
    padded_dim = triton.next_power_of_2(head_dim)
    block = max(1, 4096 // padded_dim)
    _add_placed_kernel[(triton.cdiv(num_rows, block), batch)](
        total,
        inbox,
        places,
        num_rows,
        total.stride(0),
        *inbox.stride()[:2],
        num_hops=places.size(0),
        head_dim=head_dim,
        padded_dim=padded_dim,
        block=block,
    )


def gather_rows_(packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
    """`packing.eager_gather_rows_` on a GPU, for contiguous k and v and rows of `packed` with or without gaps: each row
    is read and written once, K and V by one kernel."""
    if packed.numel() == 0:
        return
    assert len(packed) == len(rows), (packed.shape, rows.shape)
    assert packed.dtype == k.dtype == v.dtype, (packed.dtype, k.dtype, v.dtype)
    assert k.shape == v.shape, (k.shape, v.shape)
    assert k.is_contiguous(), "rows are counted in contiguous keys"
    assert v.is_contiguous(), "rows are counted in contiguous values"
    assert packed.stride(3) == 1, "each row must be contiguous"
    head_dim = k.size(3)
    padded_dim = triton.next_power_of_2(head_dim)
    block = max(1, 4096 // padded_dim)
    _gather_rows_kernel[(triton.cdiv(rows.numel(), block), k.size(0))](
        packed,
        k,
        v,
        rows,
        rows.numel(),
        *packed.stride()[:3],
        k.stride(0),
        v.stride(0),
        head_dim=head_dim,
        padded_dim=padded_dim,
        block=block,
    )


def own_gradients(
    dout: torch.Tensor, own_out: torch.Tensor, own_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge.eager_own_gradients` for tensors on a GPU; each operand is read once, without intermediate tensors."""
    batch, num_rows, num_heads, head_dim = dout.shape
    wide = dout, own, whole = [_rows_contiguous(x) for x in (dout, own_out, out)]
    weighted, dlse = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device), torch.empty_like(own_lse)
    if dout.numel() == 0:
        return weighted, dlse
    padded_dim = triton.next_power_of_2(head_dim)
    block = max(1, 2048 // padded_dim)
    _own_gradients_kernel[(triton.cdiv(num_rows * num_heads, block), batch)](
        weighted,
        dlse,
        dout,
        own,
        own_lse,
        whole,
        lse,
        num_rows,
        num_heads,
        *(stride for x in (weighted, *wide) for stride in x.stride()[:2]),
        *dlse.stride(),
        *own_lse.stride(),
        *lse.stride(),
        head_dim=head_dim,
        padded_dim=padded_dim,
        block=block,
    )
    return weighted, dlse


def _is_rows_contiguous(x: torch.Tensor) -> bool:
    return x.stride(3) == 1 and (x.size(2) == 1 or x.stride(2) == x.size(3))


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if _is_rows_contiguous(x) else x.contiguous()
