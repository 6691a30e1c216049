"""Block-sparse kernels on one GPU: flash-attn-4 and FlexAttention over the same tables, causal on own blocks.

Whole sequences only, no hops: out and gradients of one rank's attention. Imported lazily; each variant is compiled
once. Choosing and testing are in `attention.block_sparse`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, BlockLists, BlockTables

# ------------------------------------------------------------ flash-attn-4


@lru_cache(maxsize=1)
def _flash() -> tuple[Any, Any, Any]:
    """Its interface, its type for tables, and the causal mask of a block as one of its own functions."""
    from cutlass import cute
    from flash_attn.cute import interface
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def causal(batch, head, row, column, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return row >= column

    return interface, BlockSparseTensorsTorch, causal


def _flash_tables(kind: Any, own: BlockLists, full: BlockLists) -> Any:
    return kind(
        mask_block_cnt=own.counts, mask_block_idx=own.indices, full_block_cnt=full.counts, full_block_idx=full.indices,
        block_size=(BLOCK_TOKENS, BLOCK_TOKENS),
    )  # fmt: skip


class _FlashFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        interface, kind, causal = _flash()
        out, lse = interface._flash_attn_fwd(
            q, k, v, softmax_scale=scale, mask_mod=causal, return_lse=True,
            block_sparse_tensors=_flash_tables(kind, tables.own, tables.full),
        )[:2]  # fmt: skip
        ctx.tables, ctx.scale = tables, scale
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        interface, kind, causal = _flash()
        q, k, v, out, lse = ctx.saved_tensors
        grads = interface._flash_attn_bwd(
            q, k, v, out, dout.contiguous(), lse, softmax_scale=ctx.scale, mask_mod=causal,
            block_sparse_tensors=_flash_tables(kind, ctx.tables.own, ctx.tables.full_by_key),
        )[:3]  # fmt: skip
        return (*grads, None, None)


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, S, H, D), k and v (B, S, Hkv, D) to out (B, S, H, D), differentiable, and natural-log lse (B, S, H)."""
    out, lse = _FlashFunction.apply(q, k, v, tables, scale)
    return out, lse.transpose(1, 2)


# ------------------------------------------------------------ FlexAttention


@lru_cache(maxsize=1)
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _causal(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return row >= column


def flex_mask(tables: BlockTables) -> Any:
    """The tables as FlexAttention's BlockMask. Its lists are as wide as the sequence has blocks."""
    from torch.nn.attention.flex_attention import BlockMask

    wide = [_widened(lists, tables.num_blocks) for lists in (tables.own, tables.full)]
    return BlockMask.from_kv_blocks(
        wide[0].counts, wide[0].indices, wide[1].counts, wide[1].indices, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=_causal
    )


def _widened(lists: BlockLists, width: int) -> BlockLists:
    missing = width - lists.indices.size(-1)
    return BlockLists(lists.counts, torch.nn.functional.pad(lists.indices, (0, missing)))


def flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `flash`."""
    wide = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _flex()(
        *wide, block_mask=flex_mask(tables), scale=scale, enable_gqa=q.size(2) != k.size(2), return_lse=True
    )
    return out.transpose(1, 2), lse.detach().transpose(1, 2)
