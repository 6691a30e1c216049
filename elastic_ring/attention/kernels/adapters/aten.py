"""Backends inside torch: CPU flash attention, FlashAttention-2 (Dao 2023, arXiv:2307.08691) and cuDNN, called through
aten. Kernels of other packages must not enter."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from threading import Lock

import torch

from elastic_ring.attention.kernels.kernel import Documents, Grads, Pair, native_inputs
from elastic_ring.attention.merge import accumulate_dtype

_cpu_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash_forward_op = torch.ops.aten._flash_attention_forward
_flash_backward_op = torch.ops.aten._flash_attention_backward


def _heads_first(x: torch.Tensor, group: int = 1) -> torch.Tensor:
    """(B, S, H, D) to (B, H * group, S, D), each head repeated `group` times: these kernels have no grouped heads."""
    return (x.repeat_interleave(group, dim=2) if group > 1 else x).transpose(1, 2)


def _tokens_first(grads: Grads, group: int) -> Grads:
    """The inverse for dq, dk, dv. The gradients of query heads that share a K/V head are summed in the accumulation
    type."""
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    if group == 1:
        return dq, dk, dv
    exact = accumulate_dtype(dk.dtype)
    dk, dv = (x.unflatten(2, (-1, group)).sum(3, dtype=exact).to(x.dtype) for x in (dk, dv))
    return dq, dk, dv


# ------------------------------------------------------------ CPU


def cpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, mask: torch.Tensor | None = None
) -> Pair:
    """Computes and returns fp32 (fp64 for fp64 inputs), so that bf16 results are rounded only once, after the merge.

    `mask` (Sq, Sk) bool, not with `causal`, is True where a query sees a key, at least once in every row.
    """
    exact, group = accumulate_dtype(q.dtype), q.size(2) // k.size(2)
    wide = (_heads_first(x.to(exact), heads) for x, heads in ((q, 1), (k, group), (v, group)))
    out, lse = _cpu_forward_op(*wide, 0.0, causal, attn_mask=_bias(mask, exact), scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def cpu_backward(*inputs: torch.Tensor, causal: bool, scale: float, mask: torch.Tensor | None = None) -> Grads:
    dout, q, k, v, out, lse = native_inputs(inputs)
    exact, group = accumulate_dtype(q.dtype), q.size(2) // k.size(2)
    wide = (_heads_first(x.to(exact), heads) for x, heads in ((dout, 1), (q, 1), (k, group), (v, group), (out, 1)))
    return _tokens_first(_cpu_backward_op(*wide, lse, 0.0, causal, attn_mask=_bias(mask, exact), scale=scale), group)


def _bias(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


# ------------------------------------------------------------ FlashAttention-2


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, documents: Documents | None = None
) -> Pair:
    if documents is not None:
        cuts, most = documents.cuts, documents.longest
        out, lse = _flash_forward_op(q[0], k[0], v[0], cuts, cuts, most, most, 0.0, causal, False, scale=scale)[:2]
        return out[None], lse.t()[None]
    out, lse = _flash_forward_op(q, k, v, None, None, q.size(1), k.size(1), 0.0, causal, False, scale=scale)[:2]
    return out, lse.transpose(1, 2)


def flash_backward(
    *inputs: torch.Tensor,
    causal: bool,
    scale: float,
    deterministic: bool = False,
    documents: Documents | None = None,
) -> Grads:
    dout, q, k, v, out, lse = native_inputs(inputs, documents)
    cuts, lengths = None, (q.size(-3), k.size(-3))
    if documents is not None:
        cuts, lengths = documents.cuts, (documents.longest, documents.longest)
    with _DETERMINISTIC if deterministic else nullcontext():
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads: Grads = _flash_backward_op(
            dout, q, k, v, out, lse, cuts, cuts, *lengths, 0.0, causal, random, random, scale=scale
        )
    return grads if documents is None else (grads[0][None], grads[1][None], grads[2][None])


flash_deterministic_backward = partial(flash_backward, deterministic=True)


class _DeterministicMode:
    """Makes aten's backward deterministic while any thread is inside.

    The op has no argument for it: up to torch 2.13 it reads the process-wide flag, on the calling thread's host, and
    only without `warn_only`. So the first thread that enters sets that flag and the last that leaves restores it.
    Other threads see the flag for the host's time of a call: an operator that has no deterministic form would
    raise there. torch.compile's own setting, which `use_deterministic_algorithms` changes too, stays as it is.
    """

    def __init__(self) -> None:
        self._lock, self._num_inside, self._before = Lock(), 0, (False, False)

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
                self._before = (torch.are_deterministic_algorithms_enabled(), warn_only)
                torch._C._set_deterministic_algorithms(True, warn_only=False)
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                torch._C._set_deterministic_algorithms(self._before[0], warn_only=self._before[1])


_DETERMINISTIC = _DeterministicMode()
"""One per process, as torch's flag."""


# ------------------------------------------------------------ cuDNN


def cudnn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float) -> Pair:
    group = q.size(2) // k.size(2)
    wide = (_heads_first(q), _heads_first(k, group), _heads_first(v, group))
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(*wide, None, True, 0.0, causal, False, scale=scale)[
        :2
    ]
    return out.transpose(1, 2), lse.squeeze(-1).transpose(1, 2)


def cudnn_backward(*inputs: torch.Tensor, causal: bool, scale: float) -> Grads:
    dout, q, k, v, out, lse = native_inputs(inputs)
    group = q.size(2) // k.size(2)
    wide = (_heads_first(dout), _heads_first(q), _heads_first(k, group), _heads_first(v, group), _heads_first(out))
    random = torch.zeros((), dtype=torch.int64, device=q.device)
    lengths, absent = (q.size(1), k.size(1)), (None, None, None)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *wide, lse.unsqueeze(-1), random, random, *absent, *lengths, 0.0, causal, scale=scale
    )
    return _tokens_first(grads, group)
