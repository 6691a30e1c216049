"""Backend for torch's built-in FlashAttention-2 (Dao 2023, arXiv:2307.08691)."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from threading import Lock

import torch

from elastic_ring.attention.kernels.kernel import Documents, Grads, Pair

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, documents: Documents | None = None
) -> Pair:
    if documents is not None:
        cuts, longest = documents.cuts, documents.longest
        out, lse = _forward(q[0], k[0], v[0], cuts, cuts, longest, longest, 0.0, causal, False, scale=scale)[:2]
        return out[None], lse.t()[None]
    result = _forward(q, k, v, None, None, q.size(1), k.size(1), 0.0, causal, False, scale=scale)
    return result[0], result[1].transpose(1, 2)


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
    deterministic: bool = False,
    documents: Documents | None = None,
) -> Grads:
    with _REPEATABLE if deterministic else nullcontext():
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)
        if documents is not None:
            cuts, longest = documents.cuts, documents.longest
            given, lse = (x[0] for x in (dout, q, k, v, out)), lse[0].t().contiguous()
            found = _backward(*given, lse, cuts, cuts, longest, longest, 0.0, causal, random, random, scale=scale)
            return found[0][None], found[1][None], found[2][None]
        grads: Grads = _backward(
            dout,
            q,
            k,
            v,
            out,
            lse.transpose(1, 2).contiguous(),
            None,
            None,
            q.size(1),
            k.size(1),
            0.0,
            causal,
            random,
            random,
            scale=scale,
        )
    return grads


deterministic_backward = partial(backward, deterministic=True)


class _Repeatable:
    """While any thread is inside, aten's backward takes its repeatable form.

    The op has no argument for it: up to torch 2.13 it reads the process-wide flag, on the calling thread's host, and
    only without `warn_only`. So the first thread in sets that flag and the last one out restores it, whatever their
    order. Other threads see the flag for the host's time of a call: an operator that has no deterministic form would
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


_REPEATABLE = _Repeatable()
"""One for the process, as torch's flag is."""
