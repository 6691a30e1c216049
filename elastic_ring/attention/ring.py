"""Ring attention: the hops of a schedule, run through exchange, kernel and merge, as one autograd function.

`RingAttention` is what a trainer holds; `ring_attention` is the same for someone with their own training
loop. Process groups are passed in: none is made, found by environment or torn down here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from elastic_ring.attention.checks import check_group, check_local_length, check_tensors
from elastic_ring.attention.exchange import Group, HopExchange, HopLedger
from elastic_ring.attention.kernels.table import Backend, select
from elastic_ring.attention.layout import Layout, Range, make_layout
from elastic_ring.attention.merge import Accumulator, accumulate_dtype, lse_for_backward
from elastic_ring.attention.pattern import Pattern
from elastic_ring.attention.schedule import Direction, Hop, Schedule, plan

Observer = Callable[[Direction, int, int], None]
"""Called as observer(direction, call_index, hop) just before a hop's kernels run."""


class RingAttention:
    """Exact attention over a sequence whose slices lie on the ranks of a ring (Liu et al. 2023,
    arXiv:2310.01889), pulled by the hops of `schedule`.

    `group` is a process group of exactly the ring's ranks in cp_rank order, or None for cp = 1; every rank
    makes the same calls in the same order. `backend` is a `Backend`, its name, or None for the best that
    passes its self-test. `ledger` counts bytes and waits, `observer` sees every hop. All results are added
    up in a fixed order, so equal calls give equal bits.

    Raises `ValueError` when schedule, cp_rank and group do not belong together. After a call that raised,
    the buffers which the group may still write to are kept until this object is dropped.
    """

    def __init__(
        self,
        schedule: Schedule,
        cp_rank: int,
        group: Group | None,
        *,
        backend: Backend | str | None = None,
        ledger: HopLedger | None = None,
        observer: Observer | None = None,
    ) -> None:
        check_group(schedule, cp_rank, group)
        self.schedule = schedule
        self.cp_rank = cp_rank
        self.ledger = HopLedger() if ledger is None else ledger
        self._group = group
        self._backend = backend
        self._observer = observer
        self._next_call_index = 0
        self._abandoned: list[torch.Tensor] = []

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D).

        `scale` multiplies the scores and is 1/sqrt(D) by default. Raises `ValueError` for tensors that do
        not fit each other or the layout, and whatever the group raises when a peer is lost.
        """
        check_tensors(q, k, v)
        check_local_length(q, self.schedule.layout, self.cp_rank)
        scale = q.size(-1) ** -0.5 if scale is None else scale
        out: torch.Tensor = _RingFunction.apply(q, k, v, self, scale)
        return out

    def reset_calls(self) -> None:
        """Start counting calls from 0 again; all ranks do so at the same place (once a step)."""
        self._next_call_index = 0

    def _run_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        backend = self._backend_for(q)
        call_index = self._next_call_index
        self._next_call_index += 1
        total = Accumulator(q)
        with self._exchange("forward", call_index) as exchange:
            for index, hop in enumerate(self.schedule.hops[self.cp_rank]):
                keys = (k, v) if index == 0 else exchange.take_keys(index)
                exchange.post_keys(index + 1, k, v)
                self._observe("forward", call_index, index)
                for tile in hop.tiles:
                    assert keys is not None
                    tile_k, tile_v = _tile_keys(keys, hop, index, tile.k)
                    rows = slice(*tile.q)
                    part = backend.forward(q[:, rows], tile_k, tile_v, causal=tile.causal, scale=scale)
                    total.add(tile.q, *part)
        return total.out.to(q.dtype), lse_for_backward(total.lse), call_index

    def _run_backward(
        self, dout: torch.Tensor, saved: tuple[torch.Tensor, ...], scale: float, call_index: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, *_ = saved
        dq = torch.zeros(q.shape, dtype=accumulate_dtype(q.dtype), device=q.device)
        own_partials = _empty_partials(k, k.size(1))
        with self._exchange("backward", call_index) as exchange:
            for index, hop in enumerate(self.schedule.hops[self.cp_rank]):
                keys = (k, v) if index == 0 else exchange.take_keys(index)
                exchange.post_keys(index + 1, k, v)
                if index > 0:
                    exchange.expect_partials(index, k)
                self._observe("backward", call_index, index)
                partials = own_partials if index == 0 else _empty_partials(k, hop.num_fetched_tokens)
                if hop.tiles:
                    assert keys is not None
                    self._hop_gradients(index, keys, dout, saved, scale, dq, partials)
                    if index > 0:
                        exchange.send_partials(index, partials)
                # One hop late, so that the reader of hop t - 1 had a hop's time to compute and return it.
                self._add_partials(own_partials, exchange, index - 1)
            self._add_partials(own_partials, exchange, self.schedule.cp - 1)
        return dq.to(q.dtype), own_partials[0].to(k.dtype), own_partials[1].to(v.dtype)

    def _hop_gradients(
        self,
        index: int,
        keys: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        dout: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        scale: float,
        dq: torch.Tensor,
        partials: torch.Tensor,
    ) -> None:
        """Add one hop's share to `dq` (B, S_local, H, D) and to the packed dK, dV in `partials`."""
        q, _, _, out, lse = saved
        backend = self._backend_for(q)
        hop = self.schedule.hops[self.cp_rank][index]
        for tile in hop.tiles:
            tile_k, tile_v = _tile_keys(keys, hop, index, tile.k)
            rows, columns = slice(*tile.q), slice(*_place(hop, index, tile.k))
            share = backend.backward(
                dout[:, rows], q[:, rows], tile_k, tile_v, out[:, rows], lse[:, rows],
                causal=tile.causal, scale=scale,
            )  # fmt: skip
            dq[:, rows] += share[0]
            partials[0][:, columns] += share[1]
            partials[1][:, columns] += share[2]

    def _add_partials(self, own_partials: torch.Tensor, exchange: HopExchange, hop: int) -> None:
        """Add what the reader of `hop` computed for own keys. Called in hop order, the order of sums."""
        partials = exchange.take_partials(hop)
        if partials is None:
            return
        offset = 0
        for start, stop in self.schedule.requested(self.cp_rank, hop):
            end = offset + stop - start
            own_partials[:, :, start:stop] += partials[:, :, offset:end]
            offset = end

    def _backend_for(self, q: torch.Tensor) -> Backend:
        if isinstance(self._backend, Backend):
            return self._backend
        return select(q.device, q.dtype, q.size(-1), True, self._backend)

    @contextmanager
    def _exchange(self, direction: Direction, call_index: int) -> Iterator[HopExchange]:
        exchange = HopExchange(self.schedule, self.cp_rank, self._group, direction, call_index, self.ledger)
        try:
            yield exchange
            exchange.finish()
        except BaseException:
            self._abandoned += exchange.abandon()
            raise

    def _observe(self, direction: Direction, call_index: int, hop: int) -> None:
        if self._observer is not None:
            self._observer(direction, call_index, hop)


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: RingAttention, scale: float
    ) -> torch.Tensor:
        out, lse, ctx.call_index = ring._run_forward(q, k, v, scale)
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A loss such as out.sum() hands over a broadcast scalar, which kernels do not take.
        grads = ctx.ring._run_backward(dout.contiguous(), ctx.saved_tensors, ctx.scale, ctx.call_index)
        return (*grads, None, None)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | Group | None,
    seq_len: int | None = None,
    causal: bool = True,
    layout: str | Layout = "zigzag",
    document_starts: Sequence[int] = (0,),
    scale: float | None = None,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries over the whole sequence that the ranks of `group` share.

    q (B, S_local, H, D), k and v (B, S_local, Hkv, D), H a multiple of Hkv; returns (B, S_local, H, D) and
    is differentiable. Every rank holds what `layout` gives it (`make_layout(layout, seq_len, cp).scatter`);
    queries, keys and any position encoding must follow that order. `group` None is torch.distributed's
    default group. `seq_len` in tokens may be left out when all ranks hold equally many.
    `document_starts` are the positions where packed documents begin; the same for all sequences of a batch.

    Every rank must make the same call. Raises `ValueError` for arguments that do not fit, and the group's
    own error when a peer is lost. What only a comparison between ranks could find, such as different
    `seq_len`s, is not checked: it would cost a collective in every call.
    """
    ring_group = _resolve_group(group)
    check_tensors(q, k, v)
    cp = ring_group.size()
    if isinstance(layout, Layout):
        if layout.cp != cp:
            raise ValueError(f"layout is for cp={layout.cp}, but the group has {cp} ranks; make another")
        if seq_len is not None and seq_len != layout.seq_len:
            raise ValueError(f"seq_len={seq_len}, but layout has {layout.seq_len} tokens; leave seq_len out")
        seq_len = layout.seq_len
    seq_len = q.size(1) * cp if seq_len is None else seq_len
    if seq_len < cp:
        raise ValueError(f"seq_len={seq_len} is shorter than cp={cp}: every rank needs at least one token")
    if isinstance(layout, str):
        layout = make_layout(layout, seq_len, cp)
    schedule = plan(Pattern(causal, tuple(int(start) for start in document_starts)), layout)
    return RingAttention(schedule, ring_group.rank(), ring_group, backend=backend)(q, k, v, scale=scale)


def _resolve_group(group: Any) -> Any:
    if group is None:
        if not dist.is_initialized():
            raise ValueError("group=None: there is no default group; call init_process_group or pass a group")
        return dist.group.WORLD
    if not all(hasattr(group, name) for name in ("send", "recv", "rank", "size")):
        raise ValueError(f"group={group!r}: not a process group that this rank is a member of")
    return group


def _tile_keys(
    keys: torch.Tensor | tuple[torch.Tensor, torch.Tensor], hop: Hop, index: int, k: Range
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = slice(*_place(hop, index, k))
    return keys[0][:, columns], keys[1][:, columns]


def _place(hop: Hop, index: int, k: Range) -> Range:
    """Where source-local keys lie in what the hop computes on: the own slice, or the packed buffer."""
    return k if index == 0 else hop.in_buffer(k)


def _empty_partials(k: torch.Tensor, num_tokens: int) -> torch.Tensor:
    shape = (2, k.size(0), num_tokens, *k.shape[2:])
    return torch.zeros(shape, dtype=accumulate_dtype(k.dtype), device=k.device)
