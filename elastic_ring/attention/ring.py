"""Ring attention: the hops of a schedule, run through exchange, kernel and merge, as one autograd function.

`RingAttention` serves a trainer; `ring_attention` is the same for other training loops. Process groups are passed in:
this module neither creates nor destroys any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from elastic_ring.attention.checks import check_captured, check_group, check_local_length, check_options, check_tensors
from elastic_ring.attention.comm.exchange import (
    Frame,
    Group,
    HopBuffers,
    HopExchange,
    HopLedger,
    HopMemory,
    Pack,
    token_frame,
)
from elastic_ring.attention.comm.packing import gather_ranges_, parts_of_hops
from elastic_ring.attention.gradients import Gradients, OwnGradients, part, partial_dtype, running_dtype
from elastic_ring.attention.kernels.registry import Backend, select
from elastic_ring.attention.layouts.layout import Layout, make_layout
from elastic_ring.attention.merge import Accumulator, lse_for_backward
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.plan.plan_cache import LRUCache
from elastic_ring.attention.plan.rank_plan import RankPlan, rank_plan, traffic
from elastic_ring.attention.plan.schedule import Direction, Schedule, plan
from elastic_ring.attention.plan.sparse_tiles import num_tokens
from elastic_ring.attention.plan.stages import Stage, choose_hops_per_stage
from elastic_ring.attention.plan.traffic import ExchangePlan
from elastic_ring.attention.recomputation import RecomputableRing, Result

Observer = Callable[[Direction, int, int], None]
"""Called as observer(direction, call_index, hop) just before a hop's kernels run."""

NUM_CALL_PLANS = 16
"""Shapes of K and V whose call plans are kept for each schedule."""

NUM_PLANS = 8
"""Schedules whose plans are kept between calls, for each group or worker generation."""

GATHER_LIMIT_BYTES = 3 << 29
"""On a GPU, hops share one round of kernels while their K and V together stay below this on every rank."""


@dataclass(frozen=True, eq=False)
class _CallPlan:
    """How calls with keys of one shape and type run."""

    plan: RankPlan
    exchange: ExchangePlan
    frame: Frame
    pack: Pack | None
    by_copies: bool


@dataclass(eq=False)
class DensePlans:
    """What a rank derived from one schedule; shared by rings with the same schedule, cp_rank and options."""

    calls: LRUCache = field(default_factory=lambda: LRUCache(NUM_CALL_PLANS))
    backends: dict[tuple[torch.device, torch.dtype, int, int], Backend] = field(default_factory=dict)


class RingAttention(RecomputableRing):
    """Exact attention over a sequence that is sharded over the ranks of a ring (Liu et al. 2023, arXiv:2310.01889).

    `group`: a process group of exactly the ring's ranks in cp_rank order, or None for cp = 1; every rank makes the same
    calls in the same order. `backend`: a `Backend`, its name, or None for the first that passes its self-test;
    `cache_dir` stores the test result for later processes. `deterministic` selects bitwise repeatable kernels, which
    are slower on a GPU; results are summed in a fixed order either way. `hops_per_stage`: how many hops share one round
    of kernels (None: 1 on a CPU; on a GPU as many as fit into `GATHER_LIMIT_BYTES`), equal on all ranks. `ledger`
    counts bytes and waits; `observer` is called for every hop; `buffers` may be shared by rings used one after another.
    `memory` opens the exchanges of passes instead of `group`, as `contrib.peer_memory` does with copy engines; discard
    it after a call raised. `coalesced` posts the messages of a stage as one operation (None: on a GPU). `plans` may be
    shared by rings with equal schedule, cp_rank and options. `first_call_index` numbers the first call; tags are made
    from it.

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
        deterministic: bool = True,
        hops_per_stage: int | None = None,
        cache_dir: Path | None = None,
        ledger: HopLedger | None = None,
        observer: Observer | None = None,
        buffers: HopBuffers | None = None,
        memory: HopMemory | None = None,
        coalesced: bool | None = None,
        plans: DensePlans | None = None,
        first_call_index: int = 0,
    ) -> None:
        check_group(schedule, cp_rank, group)
        if hops_per_stage is not None and hops_per_stage < 1:
            raise ValueError(f"hops_per_stage={hops_per_stage}: a stage is at least one hop; leave it out")
        self.schedule = schedule
        self.cp_rank = cp_rank
        self.ledger = HopLedger() if ledger is None else ledger
        self._group = group
        self._backend = backend
        self._deterministic = deterministic
        self._hops_per_stage = hops_per_stage
        self._cache_dir = cache_dir
        self._observer = observer
        self._buffers = HopBuffers() if buffers is None else buffers
        self._memory = memory
        self._coalesced = coalesced
        # Not in a cache keyed by the schedule, which takes long to hash.
        self._plans = DensePlans() if plans is None else plans
        self._next_call_index = first_call_index
        self._abandoned: list[torch.Tensor] = []

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D).

        `scale` multiplies the scores and is 1/sqrt(D) by default. Raises `ValueError` for tensors that do
        not fit each other or the layout, and whatever the group raises when a peer is lost.
        """
        self.check_call(q, k, v)
        scale = q.size(-1) ** -0.5 if scale is None else scale
        if q.is_cuda:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out: torch.Tensor = _RingFunction.apply(q, k, v, self, scale)
        return out

    def reset_calls(self, first_call_index: int = 0) -> None:
        """Number calls from `first_call_index` on; all ranks do so between the same calls (once a step)."""
        self._next_call_index = first_call_index

    def check_call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raises `ValueError` as a call does."""
        check_tensors(q, k, v)
        check_local_length(q, self.schedule.layout, self.cp_rank)

    def check_graphable(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Raises `ValueError` where replaying a CUDA graph of such calls would differ from making them."""
        check_captured(self._observer, self.ledger, self._group, q.device)
        if self._memory is not None:
            raise ValueError("the ring has a memory, whose flags count messages and so fit one pass; leave memory out")
        backend = self._backend_for(q, k)
        if not backend.graphable:
            raise ValueError(
                f"kernel {backend.name} keeps tensors of its own that it forgets, while a graph would still read them;"
                " take another kernel, or tensors of another type"
            )

    def shared_buffers(self) -> list[torch.Tensor]:
        """The buffers that calls share; replaced when a call needs larger ones."""
        return self._buffers.shared_buffers()

    def shapes(self, k: torch.Tensor) -> frozenset[tuple[int, int, bool]]:
        """(queries, keys, causal) of the kernel calls of a pass over keys like `k` (B, S_local, Hkv, D)."""
        tiles = (tile for stage in self._call_plan(k).plan.stages for tile in (*stage.by_rows, *stage.by_keys))
        return frozenset((tile.q[1] - tile.q[0], tile.k[1] - tile.k[0], tile.causal) for tile in tiles)

    def run_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
        backend, call_plan = self._backend_for(q, k), self._call_plan(k)
        call_index = self._next_call_index
        self._next_call_index += 1
        total = Accumulator(q, running_dtype(backend, q, call_plan.plan.row_visits[0]))
        with self._exchange("forward", call_index, k, backend, call_plan) as exchange:
            exchange.begin(k, v)
            for index, stage in enumerate(call_plan.plan.stages, start=-1):
                keys = (k, v) if index < 0 else exchange.take_keys(index)
                self._observe("forward", call_index, stage)
                if stage.by_rows:
                    own_k, own_v = keys.unbind(0) if isinstance(keys, torch.Tensor) else keys
                for tile in stage.by_rows:
                    found = backend.forward(
                        part(q, tile.q), part(own_k, tile.k), part(own_v, tile.k), causal=tile.causal, scale=scale
                    )
                    total.add(tile.q, *found)
                exchange.free_keys(index)
        # Skipped where the schedule gives every row a key: no lse is -inf then.
        lse = total.lse if call_plan.plan.every_row_sees else lse_for_backward(total.lse)
        return Result(total.out.to(q.dtype), lse, call_index)

    def run_backward(
        self,
        dout: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        scale: float,
        call_index: int,
        fetched: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert fetched is None, "every pass of a dense ring fetches its keys"
        q, k, v, out, lse = saved
        backend, call_plan = self._backend_for(q, k), self._call_plan(k)
        plan_ = call_plan.plan.stages
        tiles = Gradients(backend, scale, dout, q, out, lse, call_plan.plan.row_visits[1])
        # Own queries contribute to own keys once; other ranks' contributions arrive as the stages' partials.
        own = OwnGradients(backend, q, k, v, len(plan_))
        with self._exchange("backward", call_index, k, backend, call_plan) as exchange:
            exchange.begin(k, v)
            self._observe("backward", call_index, plan_[0])
            own.run_first_part(tiles, plan_[0])
            exchange.free_keys(-1)
            for index, stage in enumerate(plan_[1:]):
                keys = exchange.take_keys(index)
                self._observe("backward", call_index, stage)
                partials = exchange.partials_buffer(index)
                if stage.num_tokens:
                    tiles.run(stage, keys, partials)
                exchange.free_keys(index)
                exchange.swap_partials(index, partials)
                # One stage late, which gives the ranks that use own keys time to return their partials.
                self._add_partials(own, exchange, call_plan, index - 1)
            own.run_last_part(tiles, plan_[0])
            self._add_partials(own, exchange, call_plan, len(plan_) - 2)
        total = own.total.to(k.dtype)
        return tiles.dq.total.to(q.dtype), total[0], total[1]

    def _add_partials(self, own: OwnGradients, exchange: HopExchange, call_plan: _CallPlan, index: int) -> None:
        """Add the partials of stage `index` to own keys' gradients, in hop order, which decides the bits."""
        if index < 0:
            return
        returned, parts = exchange.take_partials(index), call_plan.exchange.stages[index].inbox
        if parts:
            own.add(call_plan.plan.sums[index + 1], parts_of_hops(returned, parts, call_plan.frame))

    def _backend_for(self, q: torch.Tensor, k: torch.Tensor) -> Backend:
        if isinstance(self._backend, Backend):
            return self._backend
        kind = (q.device, q.dtype, q.size(-1), q.size(2) // k.size(2))
        backends = self._plans.backends
        if kind not in backends:
            backends[kind] = select(
                q.device, q.dtype, q.size(-1), self._deterministic, self._backend,
                head_ratio=kind[3], cache_dir=self._cache_dir,
            )  # fmt: skip
        return backends[kind]

    def _call_plan(self, k: torch.Tensor) -> _CallPlan:
        return self._plans.calls.get((k.device, k.dtype, k.shape), lambda: self._make_call_plan(k))

    def _make_call_plan(self, k: torch.Tensor) -> _CallPlan:
        memory, coalesced = self._memory, k.is_cuda if self._coalesced is None else self._coalesced
        by_copies = memory is not None and self.schedule.cp > 1 and k.device.type == memory.device.type
        plan_ = rank_plan(self.schedule, self.cp_rank, self._hops(k))
        packed = not (coalesced or by_copies)
        exchange = ExchangePlan(
            self.schedule.cp, traffic(plan_, k.size(0), k.size(2) * k.size(3), packed=packed), packed=packed,
            coalesced=not packed, most=plan_.most_tokens if by_copies else (0, 0),
        )  # fmt: skip
        frame = token_frame(k)
        return _CallPlan(plan_, exchange, frame, partial(_pack, plan_, frame) if packed else None, by_copies)

    def _hops(self, k: torch.Tensor) -> int:
        """How many hops share a stage: equal on all ranks, since their K and V differ in length only."""
        if self._hops_per_stage is not None:
            return self._hops_per_stage
        if not k.is_cuda:
            return 1
        bytes_per_token = 2 * k.size(0) * k.size(2) * k.size(3) * k.element_size()
        return choose_hops_per_stage(self.schedule, bytes_per_token, GATHER_LIMIT_BYTES)

    @contextmanager
    def _exchange(
        self, direction: Direction, call_index: int, k: torch.Tensor, backend: Backend, call_plan: _CallPlan
    ) -> Iterator[HopExchange]:
        arguments = (
            call_plan.exchange, call_plan.frame, self._group, direction, call_index, self.ledger, self._buffers, k,
            partial_dtype(backend, k),
        )  # fmt: skip
        exchange: HopExchange
        if call_plan.by_copies:
            assert self._memory is not None
            exchange = self._memory.open_exchange(arguments)
        else:
            exchange = HopExchange(*arguments, pack=call_plan.pack)
        try:
            yield exchange
            exchange.finish()
        except BaseException:
            self._abandoned += exchange.abandon()
            raise

    def _observe(self, direction: Direction, call_index: int, stage: Stage) -> None:
        if self._observer is not None:
            for hop in stage.hops:
                self._observer(direction, call_index, hop)


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: RingAttention, scale: float
    ) -> torch.Tensor:
        # Detached here and below: messages are views, a view keeps its base alive, and an aborted group never frees
        # what it was sending. An attached base would keep the autograd graph and the module.
        out, lse, ctx.call_index, _ = ring._forward(q.detach(), k.detach(), v.detach(), scale)
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # out.sum() passes an expanded scalar as dout, which kernels do not accept.
        saved = tuple(tensor.detach() for tensor in ctx.saved_tensors)
        grads = ctx.ring.run_backward(dout.contiguous(), saved, ctx.scale, ctx.call_index)
        return (*grads, None, None)


def _pack(plan: RankPlan, frame: Frame, index: int, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Gather what others fetch in stage `index`: one part for each hop."""
    asked = {hop: plan.schedule.requested(plan.cp_rank, hop) for hop in plan.stages[index + 1].hops}
    sizes = tuple((hop, num_tokens(ranges)) for hop, ranges in asked.items() if ranges)
    for hop, part_ in parts_of_hops(packed, sizes, frame).items():
        gather_ranges_(part_, k, v, asked[hop])


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
    deterministic: bool = True,
) -> torch.Tensor:
    """Attention of this rank's queries over the whole sequence that the ranks of `group` share.

    q (B, S_local, H, D), k and v (B, S_local, Hkv, D), H a multiple of Hkv; returns (B, S_local, H, D) and
    is differentiable. Every rank holds what `layout` gives it (`make_layout(layout, seq_len, cp).scatter`);
    queries, keys and any position encoding must follow that order. `group` None is torch.distributed's
    default group. `seq_len` in tokens may be left out when all ranks hold equally many.
    `document_starts` are the positions where packed documents begin; the same for all sequences of a batch.
    `deterministic` False lets a GPU's kernels add up in any order, which is faster.

    Every rank must make the same calls on a group, failed ones included: calls are numbered, so that a retry takes no
    message of the call before. Raises `ValueError` for arguments that do not fit, and the group's
    own error when a peer is lost. What only a comparison between ranks could find, such as different
    `seq_len`s, is not checked: it would cost a collective in every call.
    """
    ring_group = _resolve_group(group)
    calls = _calls_of(ring_group)
    call_index = calls.num_calls
    calls.num_calls += 1  # before any check, so that a call that one rank refuses counts on all ranks
    check_tensors(q, k, v)
    check_options(causal, seq_len, scale)
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
    pattern = Pattern(causal, tuple(int(start) for start in document_starts))
    ring = RingAttention(
        plan(pattern, layout), ring_group.rank(), ring_group, backend=backend, deterministic=deterministic,
        plans=calls.plans.get((pattern, layout, backend, deterministic), DensePlans), first_call_index=call_index,
    )  # fmt: skip
    ring._abandoned = calls.abandoned
    return ring(q, k, v, scale=scale)


@dataclass(eq=False)
class _GroupCalls:
    """What the calls of `ring_attention` over one group share. Must not hold the group: it is the key."""

    num_calls: int = 0
    plans: LRUCache = field(default_factory=lambda: LRUCache(NUM_PLANS))
    abandoned: list[torch.Tensor] = field(default_factory=list)  # the group may still write to them


_CALLS: WeakKeyDictionary[Any, _GroupCalls] = WeakKeyDictionary()
_CALLS_LOCK = Lock()


def _calls_of(group: Any) -> _GroupCalls:
    with _CALLS_LOCK:
        return _CALLS.setdefault(group, _GroupCalls())


def _resolve_group(group: Any) -> Any:
    if group is None:
        if not dist.is_initialized():
            raise ValueError("group=None: there is no default group; call init_process_group or pass a group")
        return dist.group.WORLD
    if not all(hasattr(group, name) for name in ("send", "recv", "rank", "size")):
        raise ValueError(f"group={group!r}: not a process group that this rank is a member of")
    return group
