"""Backend for FlexAttention's Triton kernels (Dong et al. 2024, arXiv:2412.05496), compiled once per length.

Slower than the hand-written kernels; used on devices that these do not support, and where results must be bitwise
repeatable. The block-sparse kernels reuse `masked` and `gradients_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

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
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: Any, scale: float, enable_gqa: bool
    ) -> Pair:
        # Not `return_lse`: torch warns of it once, which changes what it guards, and compiles the first length again.
        # Transpose inside the compiled function: for an output that is not contiguous, the gradient may be copied to
        # contiguous order before backward.
        out, found = flex_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            block_mask=block_mask,
            scale=scale,
            enable_gqa=enable_gqa,
            return_aux=AuxRequest(lse=True),
        )
        assert found.lse is not None
        return out.transpose(1, 2), found.lse

    return flex_attention_by_token


@lru_cache(maxsize=2)
def _compiled(fullgraph: bool) -> Any:
    return torch.compile(_by_token(), dynamic=False, fullgraph=fullgraph)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float, *, or_fail: bool) -> Pair:
    """q (B, Sq, H, D), k and v (B, Sk, Hkv, D), a BlockMask or None to out (B, Sq, H, D) and natural-log lse
    (B, Sq, H), fp32, both differentiable.

    With `or_fail`, torch raises an error beyond NUM_VARIANTS shapes. Without it, further shapes run uncompiled: the
    whole score matrix is in memory, and only the mask function applies, which is wrong if the block lists keep less.
    """
    with torch._dynamo.config.patch(recompile_limit=NUM_VARIANTS):
        out, lse = _compiled(or_fail)(q, k, v, mask, scale, q.size(2) != k.size(2))
    return out, lse.transpose(1, 2)


def _make_causal_mask(num_rows: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return row >= column

    return create_block_mask(seen, None, None, num_rows, num_rows, device=device)


def _mask_bytes(mask: Any) -> int:
    return sum(x.nbytes for x in vars(mask).values() if isinstance(x, torch.Tensor))


_causal_mask = SizedLRU(_make_causal_mask, MASK_BYTES, _mask_bytes)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Pair:
    return masked(q, k, v, _causal_mask(q.size(1), q.device) if causal else None, scale, or_fail=False)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float) -> Pair:
    return result_of(partial(_run, causal=causal, scale=scale), (q, k, v))


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
) -> Grads:
    return gradients_of(partial(_run, causal=causal, scale=scale), (q, k, v), dout, out, lse)


def result_of(run: Callable[..., Pair], inputs: tuple[torch.Tensor, ...]) -> Pair:
    """`run` of the `inputs` q, k, v, without a graph. It is run as `gradients_of` runs it: torch compiles a function
    once for tensors that need gradients and once for others."""
    # With hooks of its own: inside a checkpointed layer its tensors would count as those that the layer saves.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        out, lse = run(*_leaves(inputs))
    return out.detach(), lse.detach()


def _leaves(inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [x.detach().requires_grad_() for x in inputs]


def gradients_of(
    run: Callable[..., Pair], inputs: tuple[torch.Tensor, ...], dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> Grads:
    """A tile's contribution to dq, dk, dv, from `out` and `lse` merged over all keys. Reruns its forward, `run` of the
    `inputs` q, k, v, because FlexAttention's backward normalises by the lse of its own forward."""
    with torch.enable_grad():
        leaves = _leaves(inputs)
        own = run(*leaves)
    given = own_gradients(dout, own[0].detach(), own[1].detach(), out, lse)
    grads = torch.autograd.grad(own, leaves, given)
    return grads[0], grads[1], grads[2]
