"""The kernels of a backward pass, stage by stage, and the sums over them that stay on this rank.

Knows tiles, kernels and accumulators; what moves between ranks is the exchange's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastic_ring.attention.kernels.backend import Backend
from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.merge import GradientSum, accumulate_dtype, add_
from elastic_ring.attention.plan.rank_plan import Sum
from elastic_ring.attention.plan.stages import Stage

Keys = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""K and V: one packed (2, B, n, Hkv, D) or two (B, n, Hkv, D)."""


def partial_dtype(backend: Backend, k: torch.Tensor) -> torch.dtype:
    """The type in which dK and dV are sent: the kernel's own, since widening rounded values only adds bytes."""
    return k.dtype if backend.keeps_type else accumulate_dtype(k.dtype)


def running_dtype(backend: Backend, x: torch.Tensor, num_parts: int) -> torch.dtype:
    """The type of a running sum of `num_parts`. Two already rounded parts are summed in registers and rounded
    once, which an accumulator of the accumulation type would do as well, at more than twice the memory."""
    return x.dtype if backend.keeps_type and num_parts <= 2 else accumulate_dtype(x.dtype)


def part(x: torch.Tensor, rows: Range, heads: Range | None = None) -> torch.Tensor:
    """Some rows, and some heads, of x (B, S, H, ...): itself for all, as a view costs the host microseconds."""
    start, stop = rows
    if stop - start < x.size(1):
        x = x.narrow(1, start, stop - start)
    return x if heads is None else x.narrow(2, heads[0], heads[1] - heads[0])


_HALVED_FLOPS = 1e12
"""Where the own tile has fewer than these (two milliseconds of an H100), one launch more costs more than it hides."""


class Gradients:
    """dQ of a pass in `dq`, and dK, dV of each stage's keys where the caller wants them.

    dout, q, out (B, S, H, D) and lse (B, S, H) are the rank's own; out and lse the merged ones. `num_row_visits` is in
    how many tiles the most visited query lies.
    """

    def __init__(
        self,
        backend: Backend,
        scale: float,
        dout: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        num_row_visits: int,
    ) -> None:
        self.dq = GradientSum(q, running_dtype(backend, q, num_row_visits))
        self._backend = backend
        self._scale = scale
        self._dout, self._q, self._out, self._lse = dout, q, out, lse

    def run(self, stage: Stage, keys: Keys, partials: torch.Tensor, kv_heads: Range | None = None) -> None:
        """Add one stage's share to `dq`, and leave that of its keys in `partials` (2, B, n, Hkv, D).

        With `kv_heads` only these K/V heads, and the query heads that share them; `partials` is then theirs.
        """
        k, v = keys.unbind(0) if isinstance(keys, torch.Tensor) else keys
        dk, dv = partials.unbind(0)
        group, own_heads = self._q.size(2) // k.size(2), None
        if kv_heads is not None and kv_heads != (0, k.size(2)):
            own_heads = (group * kv_heads[0], group * kv_heads[1])
        else:
            kv_heads = None
        once = stage.keys_once
        if not once:
            partials.zero_()
        for tile in stage.by_keys:
            places = {"dk": part(dk, tile.k), "dv": part(dv, tile.k)}
            into = places if once and self._backend.writes_gradients else {}
            dout, q, out, lse = (part(x, tile.q, own_heads) for x in (self._dout, self._q, self._out, self._lse))
            share = self._backend.backward(
                dout, q, part(k, tile.k, kv_heads), part(v, tile.k, kv_heads), out, lse,
                causal=tile.causal, scale=self._scale, **into,
            )  # fmt: skip
            self.dq.add(tile.q, share[0], slice(None) if own_heads is None else slice(*own_heads))
            if not into:
                for place, found in zip(places.values(), share[1:], strict=True):
                    place.copy_(found) if once else place.add_(found)


class OwnGradients:
    """dK and dV of the rank's own keys in `total` (2, B, S, Hkv, D).

    On a GPU, where there are hops to hide, half of the own heads run before the stages, behind the first
    keys' arrival, and half after them, behind the last partials' return.
    """

    def __init__(self, backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_stages: int) -> None:
        self._keys = (k, v)
        self._rounded = partial_dtype(backend, k)
        self._early_sums = num_stages > 2
        num_heads = k.size(2)
        halved = k.is_cuda and num_stages > 1 and num_heads > 1 and 5 * q.numel() * q.size(1) >= _HALVED_FLOPS
        self._first = num_heads // 2 if halved else num_heads
        make = torch.zeros if self._early_sums and self._first < num_heads else torch.empty
        self.total = make((2, *k.shape), dtype=running_dtype(backend, k, num_stages), device=k.device)

    def run_first_part(self, tiles: Gradients, stage: Stage) -> None:
        self._run(tiles, stage, (0, self._first), added=False)

    def run_last_part(self, tiles: Gradients, stage: Stage) -> None:
        if self._first < self._keys[0].size(2):
            self._run(tiles, stage, (self._first, self._keys[0].size(2)), added=self._early_sums)

    def add(self, sums: tuple[Sum, ...], inboxes: Mapping[int, torch.Tensor]) -> None:
        """Add what came back to own keys, each key rounded once: by `sums`, out of `inboxes[hop]` (2, B, n, Hkv, D),
        dK and dV in one go."""
        total = self.total.flatten(0, 1)
        flat = {hop: inbox.flatten(0, 1) for hop, inbox in inboxes.items()}
        for (start, stop), shares in sums:
            length = stop - start
            add_(part(total, (start, stop)), [part(flat[hop], (at, at + length)) for hop, at in shares])

    def _run(self, tiles: Gradients, stage: Stage, kv_heads: Range, added: bool) -> None:
        some = self.total if kv_heads == (0, self.total.size(3)) else self.total[:, :, :, slice(*kv_heads)]
        if not added and some.dtype == self._rounded:
            tiles.run(stage, self._keys, some, kv_heads)
            return
        share = torch.empty(some.shape, dtype=self._rounded, device=some.device)
        tiles.run(stage, self._keys, share, kv_heads)
        some.add_(share) if added else some.copy_(share)
