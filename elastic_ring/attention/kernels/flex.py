"""FlexAttention's Triton kernels, compiled at the first call of each length: the backend over tiles of one rank, and
what block-sparse tables share of it.

Slower than the hand-written kernels; its use is on devices that these do not know, and where bits must repeat.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from elastic_ring.attention.merge import own_gradients

NUM_VARIANTS = 256
"""More shapes than torch.compile takes by default before it gives up: dense tiles and block-sparse ones count together,
a ring of two alone takes six, each plan of blocks a few."""


@lru_cache(maxsize=1)
def _by_token() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    def flex_attention_by_token(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: Any, scale: float, enable_gqa: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Head by head in here, not outside: what leaves a compiled function in any other than its plain order may have
        # its gradient copied into that one before backward begins.
        out, lse = flex_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            block_mask=block_mask, scale=scale, enable_gqa=enable_gqa, return_lse=True,
        )  # fmt: skip
        return out.transpose(1, 2), lse

    return flex_attention_by_token


@lru_cache(maxsize=2)
def _compiled(fullgraph: bool) -> Any:
    return torch.compile(_by_token(), dynamic=False, fullgraph=fullgraph)


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float, *, or_fail: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, Sq, H, D), k and v (B, Sk, Hkv, D), a BlockMask or None to out (B, Sq, H, D) and natural-log lse
    (B, Sq, H), fp32, both differentiable.

    One shape more than NUM_VARIANTS is an error of torch's with `or_fail`. Without, it runs as it is written: with all
    scores in memory at once, which short tiles can bear, and by the mask's function alone, wrong where lists keep less.
    """
    with torch._dynamo.config.patch(recompile_limit=NUM_VARIANTS):
        out, lse = _compiled(or_fail)(q, k, v, mask, scale, q.size(2) != k.size(2))
    return out, lse.transpose(1, 2)


@lru_cache(maxsize=64)
def _causal_mask(num_rows: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return row >= column

    return create_block_mask(seen, None, None, num_rows, num_rows, device=device)


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return masked(q, k, v, _causal_mask(q.size(1), q.device) if causal else None, scale, or_fail=False)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, Sq, H, D), k and v (B, Sk, Hkv, D) to out (B, Sq, H, D) and natural-log lse (B, Sq, H), fp32."""
    with torch.no_grad():
        return _run(q, k, v, causal, scale)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This tile's share of dq, dk, dv in the inputs' type, from the merged `out` and `lse`.

    FlexAttention's backward normalises by its own forward's lse, so the tile runs again.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        own = _run(leaves[0], leaves[1], leaves[2], causal, scale)
    return gradients_of(own, leaves, dout, out, lse)


def gradients_of(
    own: tuple[torch.Tensor, torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The share of dq, dk, dv of the keys that gave `own` out and lse, from those of all keys."""
    given = own_gradients(dout, own[0].detach(), own[1].detach(), out, lse)
    grads = torch.autograd.grad(own, leaves, given)
    return grads[0], grads[1], grads[2]
