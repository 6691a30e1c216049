"""Backends for the packages flash-attn 2 (FlashAttention-2, Dao 2023, arXiv:2307.08691) and flash-attn-4 (Zadouri et
al. 2026; CuTe-DSL kernels), the latter also over block tables. Other packages must not enter.

The first call imports the package, and for flash-attn-4 its compiler. Each of its variants is compiled once per
process, which takes seconds and holds the GIL.

The variant depends on (`compile_key` in flash_attn.cute.interface, 4.0.0b36): architecture, dtype, head dim, query
heads per K/V head, causal, deterministic, and three comparisons of lengths. Forward: whether the queries, times the
query heads per K/V head, fit into one tile (or two, on sm_100). Backward: whether the queries fit into one tile, and
whether the keys do. Packed documents give tiles of any length, so a run needs all of these variants. Documents that lie
end to end go into one call, whose variants depend on whether there are more than 256 of them. Batch size, number of
heads, strides and given gradient tensors do not matter.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, BlockLists, BlockTables
from elastic_ring.attention.kernels.kernel import Documents, Grads, Pair, native_inputs

TILE_TOKENS = (48, 64, 80, 96, 128, 192, 256)
"""Tile sizes of flash-attn-4's forward and backward kernels (`_tile_size_fwd_sm90`, `_tile_size_bwd_sm90`; 128 on
sm_100), and 256 for two tiles of 128."""

# ------------------------------------------------------------ flash-attn 2


@lru_cache(maxsize=1)
def _flash2() -> Any:
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def flash2_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, softcap: float = 0.0
) -> Pair:
    defaults = {"softcap": softcap, "alibi_slopes": None, "return_softmax": False}
    out, lse = _flash2()._flash_attn_forward(
        q, k, v, 0.0, scale, causal=causal, window_size_left=-1, window_size_right=-1, **defaults
    )[:2]
    return out, lse.transpose(1, 2)


def flash2_backward(
    *inputs: torch.Tensor,
    causal: bool,
    scale: float,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    deterministic: bool = False,
    softcap: float = 0.0,
) -> Grads:
    tensors = native_inputs(inputs)
    q, k, v = tensors[1:4]
    dq = torch.empty_like(q)
    dk, dv = torch.empty_like(k) if dk is None else dk, torch.empty_like(v) if dv is None else dv
    window, alibi_slopes = (-1, -1), None
    _flash2()._flash_attn_backward(
        *tensors, dq, dk, dv, 0.0, scale, causal, *window, softcap, alibi_slopes, deterministic
    )
    return dq, dk, dv


flash2_deterministic_backward = partial(flash2_backward, deterministic=True)

# ------------------------------------------------------------ flash-attn-4


@lru_cache(maxsize=1)
def _flash4() -> Any:
    from flash_attn.cute import interface

    return interface


def _capped(softcap: float) -> dict[str, float]:
    return {"softcap": softcap} if softcap else {}


def flash4_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    documents: Documents | None = None,
    softcap: float = 0.0,
) -> Pair:
    call = partial(_flash4()._flash_attn_fwd, softmax_scale=scale, causal=causal, return_lse=True, **_capped(softcap))
    if documents is not None:
        out, lse = call(q[0], k[0], v[0], **_varlen_arguments(documents))[:2]
        return out[None], lse.t()[None]
    out, lse = call(q, k, v)[:2]
    return out, lse.transpose(1, 2)


def _varlen_arguments(documents: Documents) -> dict[str, torch.Tensor | int]:
    """With `longest` above every tile size: a bound is enough, and the lengths enter `compile_key` by it alone."""
    longest, cuts = max(documents.longest, 2 * TILE_TOKENS[-1]), documents.cuts
    return {"cu_seqlens_q": cuts, "cu_seqlens_k": cuts, "max_seqlen_q": longest, "max_seqlen_k": longest}


def flash4_backward(
    *inputs: torch.Tensor,
    causal: bool,
    scale: float,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    deterministic: bool = False,
    documents: Documents | None = None,
    softcap: float = 0.0,
) -> Grads:
    """Of scores with a softcap it has no call for packed documents (4.0.0b36)."""
    dout, q, k, v, out, lse = native_inputs(inputs, documents)
    options = {"softmax_scale": scale, "causal": causal, "deterministic": deterministic, **_capped(softcap)}
    call = partial(_flash4()._flash_attn_bwd, **options)
    if documents is None:
        grads: Grads = call(q, k, v, out, dout, lse, dk=dk, dv=dv)[:3]
        return grads
    dk, dv = (x if x is None else x[0] for x in (dk, dv))
    dq, dk, dv = call(q, k, v, out, dout, lse, **_varlen_arguments(documents), dk=dk, dv=dv)[:3]
    return dq[None], dk[None], dv[None]


flash4_deterministic_backward = partial(flash4_backward, deterministic=True)

# ------------------------------------------------------------ flash-attn-4 over block tables


@lru_cache(maxsize=1)
def _sparse_types() -> tuple[Any, Any, Any]:
    """flash-attn-4's table type, and mask functions compiled for it: causal, and of numbered masks."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils
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

    return BlockSparseTensorsTorch, causal, numbered


def _sparse_arguments(tables: BlockTables, own: BlockLists, full: BlockLists, num_heads: int) -> dict[str, Any]:
    """Table arguments of one kernel call, for one direction."""
    tensors_type, causal, numbered = _sparse_types()
    lists = tensors_type(
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


def sparse_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float, softcap: float = 0.0
) -> Pair:
    arguments = _sparse_arguments(tables, tables.own, tables.full, q.size(2))
    arguments |= _capped(softcap)
    out, lse = _flash4()._flash_attn_fwd(q, k, v, softmax_scale=scale, return_lse=True, **arguments)[:2]
    return out, lse.transpose(1, 2)


def sparse_backward(
    *inputs: torch.Tensor,
    tables: BlockTables,
    scale: float,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> Grads:
    dout, q, k, v, out, lse = native_inputs(inputs)
    arguments = _sparse_arguments(tables, tables.own_by_key, tables.full_by_key, q.size(2))
    call = partial(_flash4()._flash_attn_bwd, softmax_scale=scale, dk=dk, dv=dv, **arguments, **_capped(softcap))
    grads: Grads = call(q, k, v, out, dout, lse)[:3]
    return grads
