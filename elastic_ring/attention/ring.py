"""Ring attention: one loop over the stages of a rank's plan, forward and backward, as one autograd function.

The plan (`lowering`) has everything that differs between dense and sparse patterns, CPUs and GPUs: the calls, their
keys, the order of sums, and the traffic. Process groups are passed in: this module neither creates nor destroys any.
`RingAttention` serves a trainer; `api.ring_attention` is the same for other training loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from elastic_ring.attention.comm.exchange import HopExchange
from elastic_ring.attention.comm.messages import Group
from elastic_ring.attention.kernels.kernel import CoverKind, Kernel
from elastic_ring.attention.kernels.registry import select
from elastic_ring.attention.layouts.rows import Rows
from elastic_ring.attention.lowering.blocks import lower_blocks
from elastic_ring.attention.lowering.call_plan import Call, CallPlan, Op, OwnPart, Program, RingPlans
from elastic_ring.attention.lowering.keys import Latents, Source
from elastic_ring.attention.lowering.rectangles import hops_together, lower_rectangles, lower_tiles
from elastic_ring.attention.merge import (
    Accumulator,
    GradientSum,
    KeyGradients,
    accumulate_dtype,
    lse_for_backward,
    sinks_gradient,
    with_sinks,
)
from elastic_ring.attention.options import RingOptions, check_group, check_local_length, check_tensors
from elastic_ring.attention.plan.rank_plan import rank_plan
from elastic_ring.attention.plan.schedule import Direction, Schedule
from elastic_ring.attention.plan.traffic import two_level
from elastic_ring.attention.recomputation import RecomputableRing, Result


class RingAttention(RecomputableRing):
    """Exact attention over a sequence that is sharded over the ranks of a ring (Liu et al. 2023, arXiv:2310.01889).

    `schedule`: of `plan` for dense attention, of `plan_sparse` for patterns. `group`: a process group of exactly the
    ring's ranks in cp_rank order, or None for cp = 1; every rank makes the same calls in the same order. A query that
    sees no key gives 0. Results are summed in a fixed order. Rings with equal schedule, cp_rank and options may share
    `plans`. `first_call_index` numbers the first call; tags are made from it.

    Raises `ValueError` when schedule, cp_rank and group do not belong together.
    """

    def __init__(
        self,
        schedule: Schedule,
        cp_rank: int,
        group: Group | None,
        options: RingOptions | None = None,
        *,
        plans: RingPlans | None = None,
        first_call_index: int = 0,
    ) -> None:
        self.options = RingOptions() if options is None else options
        check_group(schedule, cp_rank, group, self.options.hosts)
        self.schedule, self.cp_rank, self.group = schedule, cp_rank, group
        self.ledger = self.options.ledger
        # Not in a cache keyed by the schedule, which takes long to hash.
        self._plans = RingPlans(schedule) if plans is None else plans
        self._next_call_index = first_call_index

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D).

        `scale` multiplies the scores and is 1/sqrt(D) by default. `sinks` (H,): scores of a key of value 0. With `up`,
        k and v are the halves (B, S_local, 1, .) of each token's latent and rotated key (`Latents`). Raises
        `ValueError` for tensors that do not fit each other or the schedule, `RunFailed` if no kernel passes its
        self-test, and whatever the group raises when a peer is lost.
        """
        self.check_call(q, k, v, latent=up is not None)
        scale = q.size(-1) ** -0.5 if scale is None else scale
        if q.is_cuda or self._in_blocks(q):
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out: torch.Tensor = _RingFunction.apply(q, k, v, sinks, up, self, scale)
        return out

    def documents(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `positions`: those counted from the start of each token's document, and the tokens of that document."""
        begin, length = self.schedule.layout.documents(self.cp_rank, self.schedule.pattern.document_starts)
        return begin.to(positions.device).view_as(positions), length.to(positions.device).view_as(positions)

    def reset_calls(self, first_call_index: int = 0) -> None:
        """Number calls from `first_call_index` on; all ranks do so between the same calls (once a step)."""
        self._next_call_index = first_call_index

    @property
    def takes_latents(self) -> bool:
        """Whether hops may carry latents instead of K and V."""
        return self.schedule.cp > 1

    def check_call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, latent: bool = False) -> None:
        """Raise the errors of a call with these tensors, before anything is sent."""
        check_tensors(q, k, v, latent=latent)
        check_local_length(q, self.schedule.layout, self.cp_rank)
        if not self.schedule.is_dense:
            if (q.size(2), k.size(2)) != (self.schedule.num_heads, self.schedule.num_kv_heads):
                raise ValueError(
                    f"q has {q.size(2)} heads and k {k.size(2)}, the schedule is for {self.schedule.num_heads} and"
                    f" {self.schedule.num_kv_heads}; plan for these"
                )
            self.call_plan(q, k, latent=latent)

    def shapes(self, k: torch.Tensor) -> frozenset[object]:
        """Passes with equal shapes use the same compiled kernels. `k` (B, S_local, Hkv, D) stands for the keys.

        Dense passes: (number of queries, number of keys, causal) of each kernel call. Other passes: this rank.
        """
        if not self.schedule.is_dense:
            return frozenset((self.cp_rank,))
        together = hops_together(self.schedule, k, self.options.hops_per_stage)
        stages = rank_plan(self.schedule, self.cp_rank, together).stages
        tiles = (tile for stage in stages for tile in (*stage.by_rows, *stage.by_keys))
        return frozenset((tile.q[1] - tile.q[0], tile.k[1] - tile.k[0], tile.causal) for tile in tiles)

    # ------------------------------------------------------------ the loop

    def run_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, up: torch.Tensor | None = None
    ) -> Result:
        plan = self._plans.of_call(self.call_plan(q, k, latent=up is not None))
        latents = None if up is None else Latents(up, q, k)
        call_index = self._next_call_index
        self._next_call_index += 1
        if plan.alone is not None:  # as the loop below computes it, whose objects would keep the host longer
            self._observe("forward", call_index, plan.stages[0].hops)
            out, lse = plan.kernel.attend(q, k, v, plan.alone.cover, scale)
            lse = lse.to(accumulate_dtype(q.dtype))
            return Result(_alike(out, q), lse if plan.every_row_sees else lse_for_backward(lse), call_index)
        q, k, v = _inner(plan, q, k, v)
        attend, sums, kept = plan.kernel.attend, plan.sums, None
        total = Accumulator(q, sums.out, by_rows=sums.by_rows, at_once=sums.at_once)
        with self._exchange("forward", call_index, k, plan) as exchange:
            exchange.begin(k, v)
            for index, stage in enumerate(plan.stages, start=-1):
                keys_of_stage = None if index < 0 else exchange.take_keys(index)
                self._observe("forward", call_index, stage.hops)
                source: Source = (k, v) if keys_of_stage is None else _taken_apart(plan, keys_of_stage)
                for rows, keys, cover in stage.forward:
                    pair = keys.of(source) if latents is None else latents.keys(keys.of(source), rows)
                    total.add(rows, *attend(rows.take(q), *pair, cover, scale))
                exchange.free_keys(index)
                if plan.keeps:
                    kept = keys_of_stage
        # Skipped where the schedule gives every row a key: no lse is -inf then.
        lse = total.lse if plan.every_row_sees else lse_for_backward(total.lse)
        out, lse = _outer(plan, total.out.to(q.dtype), lse)
        return Result(out, lse, call_index, kept)

    def run_backward(
        self,
        dout: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        scale: float,
        call_index: int,
        fetched: torch.Tensor | None = None,
        latents: Latents | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv with the shapes of q, k, v. `saved`: (q, k, v, out, lse); `fetched`: keys that forward kept; the
        bits are the same without."""
        plan = self._plans.of_call(self.call_plan(*saved[:2], latent=latents is not None))
        if plan.alone is not None:
            self._observe("backward", call_index, plan.stages[0].hops)
            q, k, v, out, lse = saved
            grads = plan.kernel.gradients(dout, q, k, v, out, lse, plan.alone.cover, scale)
            return _alike(grads[0], q), _alike(grads[1], k), _alike(grads[2], v)
        program = plan.backward if fetched is None else plan.backward_kept
        assert program is not None
        q, k, v, out, lse, dout = _inner(plan, *saved, dout)
        with self._exchange("backward", call_index, k, plan) as exchange:
            if program.fetches:
                exchange.begin(k, v)
            tensors = _Tensors(dout, q, k, v, out, lse)
            observe = partial(self._observe, "backward", call_index)
            dq, dkv = _Backward(plan, program, exchange, tensors, scale, observe, fetched, latents).run()
        dq, dk, dv = _outer(plan, dq, *dkv.unbind(0))
        return dq, dk, dv

    def _observe(self, direction: Direction, call_index: int, hops: tuple[int, ...]) -> None:
        if self.options.observer is not None:
            for hop in hops:
                self.options.observer(direction, call_index, hop)

    @contextmanager
    def _exchange(
        self, direction: Direction, call_index: int, k: torch.Tensor, plan: CallPlan
    ) -> Iterator[HopExchange]:
        exchange = self._open_exchange(direction, call_index, k, plan)
        try:
            yield exchange
            exchange.finish()
        except BaseException:
            self.options.abandoned.extend(exchange.abandon())
            raise

    def _open_exchange(self, direction: Direction, call_index: int, k: torch.Tensor, plan: CallPlan) -> HopExchange:
        return HopExchange(
            plan.exchange,
            plan.frame,
            self.group,
            direction,
            call_index,
            self.ledger,
            self.options.buffers,
            k,
            plan.partial_dtype,
            pack=plan.pack,
            keep=plan.keeps and direction == "forward",
            wire=self.options.kv_wire,
        )

    # ------------------------------------------------------------ plans and kernels

    def call_plan(self, q: torch.Tensor, k: torch.Tensor, *, latent: bool = False) -> CallPlan:
        """The plan of calls with tensors like q (B, S_local, H, D) and k (B, S_local, Hkv, D)."""

        def planned() -> CallPlan:
            seen = q if latent else k  # K as kernels see it
            schedule, rank, kernel = self.schedule, self.cp_rank, self.kernel_for(q, seen.size(2))
            if schedule.is_dense:
                plan = lower_rectangles(schedule, rank, q, k, kernel, self.options, seen)
            elif not self._in_blocks(q):
                plan = lower_tiles(schedule, rank, k, kernel, ahead=self.options.ahead)
            else:
                latent_width = k.size(3) if latent else 0
                options = (kernel, self.options, self._plans.tables, latent_width)
                plan = lower_blocks(schedule, self._plans.in_blocks, rank, q, *options)
            return self._between_hosts(plan, k.is_cuda)

        return self._plans.calls.get((k.device, k.dtype, k.shape, q.size(2), latent), planned)

    def _between_hosts(self, plan: CallPlan, on_gpu: bool) -> CallPlan:
        """The plan with `two_level` traffic, if the keys of a stage have arrived when the next stage forwards them."""
        in_order = on_gpu if plan.exchange.late else plan.exchange.ahead == 1
        if self.options.hosts is None or not in_order:
            return plan
        hops = [stage.hops for stage in plan.stages[1:]]
        run = self._plans.in_blocks if "tables" in plan.kernel.covers else self.schedule
        return replace(plan, exchange=two_level(plan.exchange, hops, run, self.cp_rank, self.options.hosts))

    def _in_blocks(self, q: torch.Tensor) -> bool:
        return not self.schedule.is_dense and (q.is_cuda or self.options.kernel is not None)

    def kernel_for(self, q: torch.Tensor, num_kv_heads: int) -> Kernel:
        """The kernel of calls with such queries, self-tested where it is selected here."""
        cover: CoverKind = "causal"
        if not self.schedule.is_dense:
            cover = "mask"
            if self._in_blocks(q):
                cover = "masked_tables" if self._plans.in_blocks.in_part else "tables"
        option = {"causal": self.options.backend, "mask": None}.get(cover, self.options.kernel)
        if isinstance(option, Kernel):
            if cover not in option.covers:
                raise ValueError(f"kernel {option.name} covers {', '.join(option.covers)}, not {cover}; leave it out")
            return option.capped(self.options.softcap)
        kind = (q.device, q.dtype, q.size(-1), q.size(2) // num_kv_heads)
        if kind not in self._plans.kernels:
            self._plans.kernels[kind] = select(
                q.device,
                q.dtype,
                q.size(-1),
                self.options.deterministic,
                option,
                cover=cover,
                head_ratio=kind[3],
                softcap=self.options.softcap,
                cache_dir=self.options.cache_dir,
            )
        return self._plans.kernels[kind]


class _Tensors(NamedTuple):
    """The tensors of one backward pass, heads in the plan's order: dout, q, out (B, S_local, H, D) and lse (B, S_local,
    H), out and lse the merged ones; k and v (B, S_local, Hkv, D)."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class _Backward:
    """One backward pass: runs the operations of a plan's program in order, and has the sums that they fill."""

    def __init__(
        self,
        plan: CallPlan,
        program: Program,
        exchange: HopExchange,
        tensors: _Tensors,
        scale: float,
        observe: Callable[[tuple[int, ...]], None],
        kept: torch.Tensor | None,
        latents: Latents | None,
    ) -> None:
        self._plan, self._program, self._exchange = plan, program, exchange
        self._tensors, self._scale, self._observe, self._kept = tensors, scale, observe, kept
        self._latents = latents
        self._writes = plan.kernel.writes_gradients and latents is None
        self._dq = GradientSum(tensors.q, plan.sums.dq, by_rows=plan.sums.by_rows, at_once=plan.sums.at_once)
        self._dkv: KeyGradients | None = None
        self._held: list[tuple[Rows, torch.Tensor]] = []

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dq (B, S_local, H, D), and dK and dV (2, B, S_local, Hkv, D)."""
        dtype = self._tensors.q.dtype
        for op in self._program.ops:
            if op.kind == "own":
                self._own(self._program.own[op.first], added=op.first > 0 and self._plan.sums.zeroed)
            elif op.kind == "add":
                self._plan.returns.add(self._grads.total, self._exchange, op.first, op.last)
            elif op.kind == "release":
                for rows, share in self._held:
                    self._dq.add(rows, share)
            else:
                self._fetched(op)
        return self._dq.total.to(dtype), self._grads.total.to(dtype)

    @property
    def _grads(self) -> KeyGradients:
        """dK and dV of this rank's keys. Allocated late: before its first kernel, or when a peer's part arrives."""
        if self._dkv is None:
            self._dkv = KeyGradients(self._tensors.k, self._plan.sums.dkv, zeroed=self._plan.sums.zeroed)
        return self._dkv

    def _own(self, part: OwnPart, *, added: bool) -> None:
        first = part is self._program.own[0]
        if first:
            self._observe(self._plan.stages[0].hops)
        k, v, heads = self._tensors.k, self._tensors.v, part.kv_heads
        if heads is not None:
            k, v = (x.narrow(2, heads[0], heads[1] - heads[0]) for x in (k, v))
        into = self._grads.of_heads(heads)
        kernel = self._plan.kernel
        rounded = k.dtype if kernel.keeps_type else accumulate_dtype(k.dtype)
        if part.once and not self._writes:
            self._calls(part.calls, (k, v), into, into.unbind(0), once=True, added=added)
        elif not added and (into.dtype == rounded or (part.once and into.dtype == k.dtype)):
            self._calls(part.calls, (k, v), into, into.unbind(0), once=part.once)
        else:
            share = torch.empty(into.shape, dtype=rounded, device=into.device)
            self._calls(part.calls, (k, v), share, share.unbind(0), once=part.once)
            into.add_(share) if added else into.copy_(share)
        if first and self._program.fetches:
            self._exchange.free_keys(-1)

    def _fetched(self, op: Op) -> None:
        index, exchange, stage = op.first, self._exchange, self._plan.stages[op.first + 1]
        keys = exchange.take_keys(index) if self._kept is None else self._kept
        self._observe(stage.hops)
        partials = exchange.partials_buffer(index)
        if stage.backward:
            source, into = _taken_apart(self._plan, keys), _taken_apart(self._plan, partials)
            self._calls(stage.backward, source, partials, into, once=stage.once, hold=op.kind == "hold")
        elif not stage.once:
            partials.zero_()
        if self._kept is None:
            exchange.free_keys(index)
        exchange.swap_partials(index, partials)

    def _calls(
        self,
        calls: Sequence[Call],
        source: Source,
        buffer: torch.Tensor,
        into: Source,
        *,
        once: bool,
        added: bool = False,
        hold: bool = False,
    ) -> None:
        """Add the calls' gradients to dq, and write or add dK and dV to `into`, the parts of `buffer`."""
        kernel, tensors = self._plan.kernel, self._tensors
        if not once and not added:
            buffer.zero_()
        for rows, keys, cover in calls:
            halves = keys.of(source)
            k, v = halves if self._latents is None else self._latents.keys(halves, rows)
            take = rows.take
            dout, q, out, lse = take(tensors.dout), take(tensors.q), take(tensors.out), take(tensors.lse)
            places = keys.places(into) if once and not added and self._writes else None
            if places is not None and places[0].dtype == k.dtype:
                dk, dv = places
                share = kernel.gradients(dout, q, k, v, out, lse, cover, self._scale, dk=dk, dv=dv)[0]
            else:
                share, dk, dv = kernel.gradients(dout, q, k, v, out, lse, cover, self._scale)
                pair = (dk, dv) if self._latents is None else self._latents.gradients(halves, dk, dv, rows)
                keys.put(into, pair, added=added or not once)
            if hold:
                self._held.append((rows, share))
            else:
                self._dq.add(rows, share)


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        up: torch.Tensor | None,
        ring: RingAttention,
        scale: float,
    ) -> torch.Tensor:
        # Detached here and below: messages are views, a view keeps its base alive, and an aborted group never frees
        # what it was sending. An attached base would keep the autograd graph and the module.
        detached = (q.detach(), k.detach(), v.detach(), scale, None if up is None else up.detach())
        out, lse, ctx.call_index, fetched = ring._forward(*detached)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks.detach())
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(q, k, v, out, lse, sinks, fetched, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # out.sum() passes an expanded scalar as dout, which kernels do not accept.
        *kept, sinks, fetched, up = ctx.saved_tensors  # once: checkpointing recomputes at each look
        saved: tuple[torch.Tensor, ...] = tuple(tensor.detach() for tensor in kept)
        dout = dout.contiguous()
        latents = None if up is None else Latents(up.detach(), *saved[:2], needs_grad=ctx.needs_input_grad[4])
        grads = ctx.ring.run_backward(dout, saved, ctx.scale, ctx.call_index, fetched, latents)
        dsinks = None if sinks is None else sinks_gradient(dout, saved[3], saved[4], sinks.detach())
        return (*grads, dsinks, None if latents is None else latents.gradient(), None, None)


def _alike(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`x` in the type of `like`, and on a GPU contiguous, as kernels there require."""
    x = x.to(like.dtype)
    return x.contiguous() if x.is_cuda else x


def _taken_apart(plan: CallPlan, buffer: torch.Tensor) -> Source:
    return buffer.unbind(0) if plan.pairs else buffer


def _ordered(order: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if order is None else x.index_select(2, order)


def _inner(plan: CallPlan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Reorder tokens and heads of q, k, v (B, S_local, ...), and of out, lse and dout if present, to the plan's
    order."""
    if plan.places is not None:
        tensors = tuple(map(plan.places.put, tensors))
    if plan.heads is None:
        return tensors
    q, kv = plan.heads.inner, plan.heads.inner_kv
    return tuple(map(_ordered, (q, kv, kv, q, q, q), tensors))


def _outer(plan: CallPlan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Undo that order, for out and lse, or for dq, dk and dv."""
    if plan.heads is not None:
        q, kv = plan.heads.outer, plan.heads.outer_kv
        tensors = tuple(map(_ordered, (q, q) if len(tensors) == 2 else (q, kv, kv), tensors))
    return tensors if plan.places is None else tuple(map(plan.places.take, tensors))
