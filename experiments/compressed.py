"""Softmax attention of many queries over few keys, where each query sees a prefix of the keys.

Made for block means: the S x num_blocks scores are computed strip by strip, and again in backward, and never stored.
Single process: communication must not enter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from elastic_ring.attention.merge import accumulate_dtype, lse_for_backward

STRIP_SCORES = 1 << 21
"""Maximum number of scores computed at a time, but at least one row: 16 MiB in fp64."""


def attend_to_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """q (B, S, H, D), k and v (B, n, Hkv, D) to out (B, S, H, D) in q's dtype; query i sees the first `num_seen[i]`
    keys.

    `num_seen` is int64 (S,), ascending, at most n. A query that sees no key gives 0.
    """
    assert num_seen.numel() == q.size(1), (num_seen.shape, q.shape)
    out: torch.Tensor = _AttendToFirst.apply(q, k, v, num_seen, scale)
    return out


@dataclass(frozen=True)
class _Strip:
    """A range of queries and the keys that any of them sees; `hidden` (rows, num_keys) marks the pairs to mask."""

    rows: slice
    num_keys: int
    hidden: torch.Tensor


def _strips(q: torch.Tensor, num_seen: torch.Tensor) -> Iterator[_Strip]:
    if not num_seen.numel():
        return
    num_rows = max(1, STRIP_SCORES // (q.size(0) * q.size(2) * max(1, int(num_seen[-1]))))
    for start in range(0, q.size(1), num_rows):
        own = num_seen[start : start + num_rows]
        num_keys = int(own[-1])
        if num_keys:
            hidden = torch.arange(num_keys)[None, :] >= own[:, None]
            yield _Strip(slice(start, start + len(own)), num_keys, hidden)


class _AttendToFirst(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_seen: torch.Tensor, scale: float
    ) -> torch.Tensor:
        exact = accumulate_dtype(q.dtype)
        num_kv = k.size(2)
        out = torch.zeros(q.shape, dtype=exact)
        lse = torch.full(q.shape[:3], math.inf, dtype=exact)
        keys, values = (x.detach().to(exact).transpose(1, 2) for x in (k, v))
        for strip in _strips(q, num_seen):
            scores = _scores(_by_keys(q.detach()[:, strip.rows].to(exact), num_kv), keys, strip, scale)
            own = lse_for_backward(scores.logsumexp(-1, keepdim=True))
            found = scores.sub_(own).exp_() @ values[:, :, : strip.num_keys]
            out[:, strip.rows] = _by_tokens(found, strip)
            lse[:, strip.rows] = _by_tokens(own, strip).squeeze(-1)
        ctx.scale = scale
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, num_seen, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, num_seen, out, lse = (x.detach() for x in ctx.saved_tensors)
        exact, num_kv = lse.dtype, k.size(2)
        keys, values = (x.to(exact).transpose(1, 2) for x in (k, v))
        dq = torch.zeros(q.shape, dtype=exact)
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        for strip in _strips(q, num_seen):
            seen = slice(0, strip.num_keys)
            queries, down, own = (_by_keys(x[:, strip.rows].to(exact), num_kv) for x in (q, dout, lse.unsqueeze(-1)))
            row_sums = (down * _by_keys(out[:, strip.rows].to(exact), num_kv)).sum(-1, keepdim=True)
            shares = _scores(queries, keys, strip, ctx.scale).sub_(own).exp_()
            dv[:, :, seen] += shares.transpose(2, 3) @ down
            dscores = (down @ values[:, :, seen].transpose(2, 3)).sub_(row_sums).mul_(shares).mul_(ctx.scale)
            dq[:, strip.rows] = _by_tokens(dscores @ keys[:, :, seen], strip)
            dk[:, :, seen] += dscores.transpose(2, 3) @ queries
        return dq.to(q.dtype), dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype), None, None


def _scores(queries: torch.Tensor, keys: torch.Tensor, strip: _Strip, scale: float) -> torch.Tensor:
    """(B, Hkv, sharing * rows, num_keys), -inf where hidden."""
    scores = (queries @ keys[:, :, : strip.num_keys].transpose(2, 3)).mul_(scale)
    scores.unflatten(2, (-1, len(strip.hidden))).masked_fill_(strip.hidden, -math.inf)
    return scores


def _by_keys(x: torch.Tensor, num_kv: int) -> torch.Tensor:
    """(B, rows, H, D) to (B, Hkv, sharing * rows, D): the query heads of a K/V head are stacked along the rows."""
    return x.unflatten(2, (num_kv, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_tokens(x: torch.Tensor, strip: _Strip) -> torch.Tensor:
    """The inverse of `_by_keys`."""
    return x.unflatten(2, (-1, len(strip.hidden))).permute(0, 3, 1, 2, 4).flatten(2, 3)
