"""Backend for FlexAttention's Triton kernels (Dong et al. 2024, arXiv:2412.05496), dense and over block tables.
Compiled once per length. Other packages' kernels must not enter.

Slower than the hand-written kernels; used on devices that these do not support, and where results must be bitwise
repeatable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional

from elastic_ring.attention.kernels.block_tables import BLOCK_TOKENS, BlockLists, BlockMasks, BlockTables
from elastic_ring.attention.kernels.kernel import Grads, Pair
from elastic_ring.attention.merge import own_gradients
from elastic_ring.attention.patterns.caches import SizedLRU

MASK_BYTES = 1 << 27
"""Device memory, in bytes, that the masks of causal tiles may take; packed documents give tiles of any length."""

NUM_VARIANTS = 256
"""Recompile limit for torch.compile, above its default. Dense and block-sparse tiles share it: a ring of two needs six
shapes, each block-sparse plan a few."""


@lru_cache(maxsize=1)
def _by_token() -> Any:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def flex_attention_by_token(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_mask: Any,
        scale: float,
        enable_gqa: bool,
        score: Any = None,
    ) -> Pair:
        # Not `return_lse`: torch warns of it once, which changes a guard, and the first length would compile again.
        # Transpose inside the compiled function: for an output that is not contiguous, the gradient may be copied to
        # contiguous order before backward.
        out, aux = flex_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=score,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=enable_gqa,
            return_aux=AuxRequest(lse=True),
        )
        assert aux.lse is not None
        return out.transpose(1, 2), aux.lse

    return flex_attention_by_token


@lru_cache(maxsize=2)
def _compiled(fullgraph: bool) -> Any:
    return torch.compile(_by_token(), dynamic=False, fullgraph=fullgraph)


@lru_cache(maxsize=8)
def _capped_score(softcap: float) -> Any:
    """The function of scores; None for no softcap."""

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped if softcap else None


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float, softcap: float = 0.0, *, or_fail: bool
) -> Pair:
    """q (B, Sq, H, D), k and v (B, Sk, Hkv, D), a BlockMask or None to out (B, Sq, H, D) and natural-log lse
    (B, Sq, H), fp32, both differentiable.

    With `or_fail`, torch raises an error beyond NUM_VARIANTS shapes. Without it, further shapes run uncompiled: the
    whole score matrix is in memory, and only the mask function applies, which is wrong if the block lists keep less.
    """
    with torch._dynamo.config.patch(recompile_limit=NUM_VARIANTS):
        out, lse = _compiled(or_fail)(q, k, v, mask, scale, q.size(2) != k.size(2), _capped_score(softcap))
    return out, lse.transpose(1, 2)


def _make_causal_mask(num_rows: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_causal, None, None, num_rows, num_rows, device=device)


def _causal(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return row >= column


_causal_mask = SizedLRU(
    _make_causal_mask,
    MASK_BYTES,
    lambda mask: sum(x.nbytes for x in vars(mask).values() if isinstance(x, torch.Tensor)),
)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, softcap: float) -> Pair:
    return masked(q, k, v, _causal_mask(q.size(1), q.device) if causal else None, scale, softcap, or_fail=False)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, softcap: float = 0.0
) -> Pair:
    return result_of(partial(_run, causal=causal, scale=scale, softcap=softcap), (q, k, v))


def backward(*inputs: torch.Tensor, causal: bool, scale: float, softcap: float = 0.0) -> Grads:
    return gradients_of(partial(_run, causal=causal, scale=scale, softcap=softcap), *inputs)


def result_of(run: Callable[..., Pair], inputs: tuple[torch.Tensor, ...]) -> Pair:
    """`run` of the `inputs` q, k, v, without a graph. It runs on leaves that need gradients, as in `gradients_of`:
    torch compiles a function once for tensors that need gradients and once for others."""
    # Own hooks: a checkpointed layer would count these tensors among those that it saves.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        out, lse = run(*(x.detach().requires_grad_() for x in inputs))
    return out.detach(), lse.detach()


def gradients_of(
    run: Callable[..., Pair],
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Grads:
    """A tile's contribution to dq, dk, dv, from `out` and `lse` merged over all keys. Reruns its forward, `run` of q, k
    and v, because FlexAttention's backward normalises by the lse of its own forward."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        own_out, own_lse = run(*leaves)
    upstream = own_gradients(dout, own_out.detach(), own_lse.detach(), out, lse)
    dq, dk, dv = torch.autograd.grad((own_out, own_lse), leaves, upstream)
    return dq, dk, dv


# ------------------------------------------------------------ over block tables

LEAST = 64
"""The least number of blocks each way, and of masks, after padding. Up to 8 K tokens a rank then take one kernel,
whatever the documents; each kernel less saves seconds of a start."""
MOST_COLUMNS = 256
"""Up to this number of columns a list is as wide as all of them: a quarter of a MiB for each list of a head."""


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


def flex_mask(tables: BlockTables) -> Any:
    """The tables as FlexAttention's BlockMask, cached in `tables.derived`; a subset of heads gets a view of the full
    mask.

    Queries and keys are padded to `padded_blocks`. List widths are rounded up to a power of four, because kernels are
    compiled per width, or to all columns where these are few.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if "flex" not in tables.derived:
        whole = None if tables.whole is None else flex_mask(tables.whole[0])
        if whole is None:
            num_q, num_k = padded_blocks(tables)
            own, full = _padded_lists((tables.own, tables.full), num_q, num_k)
            by_key, full_by_key = _padded_lists((tables.own_by_key, tables.full_by_key), num_k, num_q)
            lists = [x for each in (own, full, by_key, full_by_key) for x in (each.counts, each.indices)]
            seq_lengths = (num_q * BLOCK_TOKENS, num_k * BLOCK_TOKENS)
        elif whole.kv_num_blocks.size(1) == 1:
            return tables.derived.setdefault("flex", whole)
        else:
            assert tables.whole is not None
            heads = slice(tables.whole[1], tables.whole[1] + tables.num_heads)
            lists, seq_lengths = [getattr(whole, name)[:, heads] for name in _LISTS], whole.seq_lengths
        named_lists: Any = dict(zip(_LISTS, lists, strict=True))
        tables.derived["flex"] = BlockMask(
            seq_lengths=seq_lengths,
            BLOCK_SIZE=(BLOCK_TOKENS, BLOCK_TOKENS),
            mask_mod=_mask_function(tables),
            **named_lists,
        )
    return tables.derived["flex"]


def _mask_function(tables: BlockTables) -> Any:
    """The mask function of partial blocks."""
    if tables.masks is None:
        return _causal
    padded = _padded_masks(tables)
    numbers, masks, per_head = padded.numbers, padded.masks, int(len(padded.numbers) > 1)

    def seen(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        number = numbers[head * per_head, row // BLOCK_TOKENS, column // BLOCK_TOKENS]
        word = masks[number, row % BLOCK_TOKENS, column % BLOCK_TOKENS // 32]
        return (word >> (column % 32)) & 1 == 1

    return seen


def _padded_masks(tables: BlockTables) -> BlockMasks:
    """The masks, padded to a power of four, and their numbers, padded as blocks: kernels are compiled for both."""
    assert tables.masks is not None
    if "masks" not in tables.derived:
        if tables.whole is not None:
            whole, first = tables.whole
            tables.derived["masks"] = _padded_masks(whole).of_heads(first, first + tables.num_heads)
        else:
            (num_q, num_k), numbers, masks = padded_blocks(tables), tables.masks.numbers, tables.masks.masks
            numbers = functional.pad(numbers, (0, num_k - numbers.size(2), 0, num_q - numbers.size(1)))
            missing = _power_of_four(len(masks), LEAST) - len(masks)
            tables.derived["masks"] = BlockMasks(numbers, functional.pad(masks, (0, 0, 0, 0, 0, missing)))
    padded: BlockMasks = tables.derived["masks"]
    return padded


def padded_blocks(tables: BlockTables) -> tuple[int, int]:
    """(query blocks, key blocks) after padding. Kernels are compiled per number, so small numbers become LEAST, and
    numbers that vary between plans are rounded up to a power of two or 1.5 times one."""
    return _rounded(tables.num_q_blocks, tables.all_rows), _rounded(tables.num_k_blocks, tables.all_keys)


def _rounded(num_blocks: int, is_fixed: bool) -> int:
    if is_fixed and num_blocks > LEAST:
        return num_blocks
    power = 1 << (max(num_blocks, LEAST) - 1).bit_length()
    return power * 3 // 4 if power > LEAST and power * 3 // 4 >= num_blocks else power


def _padded_lists(both: tuple[BlockLists, BlockLists], num_rows: int, num_columns: int) -> tuple[BlockLists, ...]:
    """Pad the lists of partial and of whole blocks with zeros, to one width: FlexAttention's kernels (torch 2.11) find
    the rows of both by the first's strides. Returns lists unchanged that have the padded size."""
    width = _width(both, num_columns)

    def padded(lists: BlockLists) -> BlockLists:
        rows, columns = num_rows - lists.counts.size(-1), width - lists.indices.size(-1)
        if not rows and not columns:
            return lists
        return BlockLists(functional.pad(lists.counts, (0, rows)), functional.pad(lists.indices, (0, columns, 0, rows)))

    return tuple(map(padded, both))


def _width(both: tuple[BlockLists, BlockLists], num_columns: int) -> int:
    if num_columns <= MOST_COLUMNS:
        return num_columns
    return min(num_columns, _power_of_four(max(lists.indices.size(-1) for lists in both), 16))


def _power_of_four(number: int, least: int) -> int:
    return 1 << 2 * -(-(max(number, least) - 1).bit_length() // 2)


def _run_sparse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float, softcap: float
) -> Pair:
    """As `sparse_forward`, with `out` and `lse` differentiable."""
    padded = []
    for x, num_blocks in zip((q, k, v), (*padded_blocks(tables), padded_blocks(tables)[1]), strict=True):
        missing = num_blocks * BLOCK_TOKENS - x.size(1)
        padded.append(functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x)
    wide_q, wide_k, wide_v = padded
    out, lse = masked(wide_q, wide_k, wide_v, flex_mask(tables), scale, softcap, or_fail=True)
    return out[:, : q.size(1)], lse[:, : q.size(1)]


def sparse_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: BlockTables, scale: float, softcap: float = 0.0
) -> Pair:
    out, lse = result_of(partial(_run_sparse, tables=tables, scale=scale, softcap=softcap), (q, k, v))
    if padded_blocks(tables)[0] * BLOCK_TOKENS > q.size(1):  # a layer keeps them, and views would keep the padding
        out, lse = out.clone(), lse.transpose(1, 2).clone().transpose(1, 2)
    return out, lse


def sparse_backward(*inputs: torch.Tensor, tables: BlockTables, scale: float, softcap: float = 0.0) -> Grads:
    return gradients_of(partial(_run_sparse, tables=tables, scale=scale, softcap=softcap), *inputs)
