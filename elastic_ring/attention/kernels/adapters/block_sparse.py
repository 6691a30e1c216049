"""Block-sparse kernels on one GPU: flash-attn-4 and FlexAttention over the same tables, causal on diagonal blocks.

`*_forward` and `*_backward` process any subset of the keys; gradients use `out` and `lse` merged over all keys.
Packages are imported lazily; each variant is compiled once. No hops in this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional

from elastic_ring.attention.kernels.adapters.flex import gradients_of, masked, result_of
from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, BlockLists, BlockMasks, BlockTables
from elastic_ring.attention.kernels.kernel import Grads, Pair

# ------------------------------------------------------------ flash-attn-4


@lru_cache(maxsize=1)
def _flash() -> tuple[Any, Any, Any, Any]:
    """flash-attn-4's interface, its table type, and mask functions compiled for it: causal, and of numbered masks."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import interface, utils
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def causal(batch, head, row, column, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return row >= column

    @cute.jit
    def numbered(batch, head, row, column, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        numbers, masks = aux_tensors[0], aux_tensors[1]
        number = numbers[head[0], row[0] // BLOCK_TOKENS, column[0] // BLOCK_TOKENS]
        word = masks[number, row[0] % BLOCK_TOKENS, column[0] % BLOCK_TOKENS // 32]
        seen = (word >> (column[0] % 32)) & cutlass.Int32(1)
        return utils.scalar_to_ssa(seen, cutlass.Int32) > utils.scalar_to_ssa(cutlass.Int32(0), cutlass.Int32)

    return interface, BlockSparseTensorsTorch, causal, numbered


def _flash_call(tables: BlockTables, own: BlockLists, full: BlockLists, num_heads: int) -> dict[str, Any]:
    """Table arguments of one kernel call, for one direction."""
    _, kind, causal, numbered = _flash()
    lists = kind(
        mask_block_cnt=own.counts,
        mask_block_idx=own.indices,
        full_block_cnt=full.counts,
        full_block_idx=full.indices,
        block_size=(BLOCK_TOKENS, BLOCK_TOKENS),
    )
    if tables.masks is None:
        return {"block_sparse_tensors": lists, "mask_mod": causal}
    numbers = tables.masks.numbers.expand(num_heads, -1, -1)
    return {"block_sparse_tensors": lists, "mask_mod": numbered, "aux_tensors": [numbers, tables.masks.masks]}


def flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float) -> Pair:
    out, lse = _flash()[0]._flash_attn_fwd(
        q, k, v, softmax_scale=scale, return_lse=True, **_flash_call(tables, tables.own, tables.full, q.size(2))
    )[:2]
    return out, lse.transpose(1, 2)


def flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tables: BlockTables,
    scale: float,
    *,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
) -> Grads:
    grads: Grads = _flash()[0]._flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse.transpose(1, 2).contiguous(),
        softmax_scale=scale,
        dk=dk,
        dv=dv,
        **_flash_call(tables, tables.own_by_key, tables.full_by_key, q.size(2)),
    )[:3]
    return grads


# ------------------------------------------------------------ FlexAttention

LEAST = 64
"""Blocks each way, and different masks, that FlexAttention is told of at least. Up to 8 K tokens a rank then take one
kernel, whatever the documents; each one less saves seconds of a start."""
MOST_COLUMNS = 256
"""Up to so many columns lists are as wide as all of them: a quarter of a MiB for each list of a head."""


def _causal(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return row >= column


def _padded_masks(tables: BlockTables) -> BlockMasks:
    """Numbers are padded as blocks are, masks to a power of four: kernels are compiled for both."""
    assert tables.masks is not None
    if "masks" not in tables.made:
        if tables.whole is not None:
            whole, first = tables.whole
            tables.made["masks"] = _padded_masks(whole).of_heads(first, first + tables.num_heads)
        else:
            (num_q, num_k), numbers, masks = padded_blocks(tables), tables.masks.numbers, tables.masks.masks
            numbers = functional.pad(numbers, (0, num_k - numbers.size(2), 0, num_q - numbers.size(1)))
            missing = _power_of_four(len(masks), LEAST) - len(masks)
            tables.made["masks"] = BlockMasks(numbers, functional.pad(masks, (0, 0, 0, 0, 0, missing)))
    made: BlockMasks = tables.made["masks"]
    return made


def _by_masks(tables: BlockTables) -> Any:
    """The mask function of blocks kept in part."""
    if tables.masks is None:
        return _causal
    padded = _padded_masks(tables)
    numbers, masks, per_head = padded.numbers, padded.masks, int(len(padded.numbers) > 1)

    def seen(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        number = numbers[head * per_head, row // BLOCK_TOKENS, column // BLOCK_TOKENS]
        word = masks[number, row % BLOCK_TOKENS, column % BLOCK_TOKENS // 32]
        return (word >> (column % 32)) & 1 == 1

    return seen


def flex_mask(tables: BlockTables) -> Any:
    """The tables as FlexAttention's BlockMask, cached in `tables.made`; a subset of heads gets a view of the full mask.

    Queries and keys are padded to `padded_blocks`. List widths are rounded up to a power of four, because kernels are
    compiled per width, or to all columns where these are few.
    """
    if "flex" not in tables.made:
        if tables.whole is not None:
            tables.made["flex"] = _of_heads(flex_mask(tables.whole[0]), tables)
        else:
            tables.made["flex"] = _make_flex_mask(tables)
    return tables.made["flex"]


_LISTS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


def _make_flex_mask(tables: BlockTables) -> Any:
    num_q, num_k = padded_blocks(tables)
    own, full = _padded_lists((tables.own, tables.full), num_q, num_k)
    by_key, full_by_key = _padded_lists((tables.own_by_key, tables.full_by_key), num_k, num_q)
    lists = [x for each in (own, full, by_key, full_by_key) for x in (each.counts, each.indices)]
    return _block_mask((num_q * BLOCK_TOKENS, num_k * BLOCK_TOKENS), _by_masks(tables), zip(_LISTS, lists, strict=True))


def _of_heads(mask: Any, tables: BlockTables) -> Any:
    if mask.kv_num_blocks.size(1) == 1:
        return mask
    assert tables.whole is not None
    heads = slice(tables.whole[1], tables.whole[1] + tables.num_heads)
    return _block_mask(mask.seq_lengths, _by_masks(tables), ((name, getattr(mask, name)[:, heads]) for name in _LISTS))


def _block_mask(seq_lengths: tuple[int, int], seen: Any, lists: Iterable[tuple[str, Any]]) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask(seq_lengths=seq_lengths, BLOCK_SIZE=(BLOCK_TOKENS, BLOCK_TOKENS), mask_mod=seen, **dict(lists))


def padded_blocks(tables: BlockTables) -> tuple[int, int]:
    """(query blocks, key blocks) after padding. Kernels are compiled per number, so few numbers are one, and those that
    vary between plans are rounded up to a power of two or 1.5 times one."""
    return _rounded(tables.num_q_blocks, tables.all_rows), _rounded(tables.num_k_blocks, tables.all_keys)


def _rounded(num_blocks: int, is_fixed: bool) -> int:
    if is_fixed and num_blocks > LEAST:
        return num_blocks
    power = 1 << (max(num_blocks, LEAST) - 1).bit_length()
    return power * 3 // 4 if power > LEAST and power * 3 // 4 >= num_blocks else power


def _width(both: tuple[BlockLists, BlockLists], num_columns: int) -> int:
    if num_columns <= MOST_COLUMNS:
        return num_columns
    return min(num_columns, _power_of_four(max(lists.indices.size(-1) for lists in both), 16))


def _power_of_four(number: int, least: int) -> int:
    return 1 << 2 * -(-(max(number, least) - 1).bit_length() // 2)


def _padded_lists(both: tuple[BlockLists, BlockLists], num_rows: int, num_columns: int) -> tuple[BlockLists, ...]:
    """Pad the lists of blocks kept in part and of those kept whole with zeros, to one width: FlexAttention's kernels
    (torch 2.11) find the rows of both by the first's strides. Returns lists unchanged that have the padded size."""
    width = _width(both, num_columns)

    def padded(lists: BlockLists) -> BlockLists:
        rows, columns = num_rows - lists.counts.size(-1), width - lists.indices.size(-1)
        if not rows and not columns:
            return lists
        return BlockLists(functional.pad(lists.counts, (0, rows)), functional.pad(lists.indices, (0, columns, 0, rows)))

    return tuple(map(padded, both))


def _padded(x: torch.Tensor, num_blocks: int) -> torch.Tensor:
    missing = num_blocks * BLOCK_TOKENS - x.size(1)
    return functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float) -> Pair:
    """As `flex_forward`, with `out` and `lse` differentiable."""
    num_q, num_k = padded_blocks(tables)
    wide_q, wide_k, wide_v = (_padded(x, num) for x, num in ((q, num_q), (k, num_k), (v, num_k)))
    out, lse = masked(wide_q, wide_k, wide_v, flex_mask(tables), scale, or_fail=True)
    return out[:, : q.size(1)], lse[:, : q.size(1)]


def flex_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float) -> Pair:
    out, lse = result_of(partial(flex, tables=tables, scale=scale), (q, k, v))
    if padded_blocks(tables)[0] * BLOCK_TOKENS > q.size(1):  # a layer keeps them, and with views it kept the padding
        out, lse = out.clone(), lse.transpose(1, 2).clone().transpose(1, 2)
    return out, lse


def flex_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tables: BlockTables,
    scale: float,
) -> Grads:
    return gradients_of(partial(flex, tables=tables, scale=scale), (q, k, v), dout, out, lse)
