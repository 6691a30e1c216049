"""Ring attention over a sparse schedule: each hop fetches only the keys that are seen, and kernels run only those
tiles.

`SparseRingAttention` is the sparse counterpart of `ring.RingAttention`, with the same interface; it runs a schedule of
`plan_sparse`. On a CPU this file runs it hop by hop over gathered tiles of any shape; on a GPU `block_pass` runs it
stage by stage over whole blocks. Process groups are arguments: this file must not create, look up or destroy one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from elastic_ring.attention.block_pass import BlockPass
from elastic_ring.attention.checks import check_captured, check_group, check_local_length, check_tensors
from elastic_ring.attention.comm.exchange import Group, HopBuffers, HopExchange, HopLedger, row_frame
from elastic_ring.attention.comm.packing import (
    Pairs,
    as_index,
    gather_groups_,
    gather_rows_,
    parts_of_groups,
    select_heads,
)
from elastic_ring.attention.kernels import verify
from elastic_ring.attention.kernels.adapters import aten_cpu
from elastic_ring.attention.kernels.sparse_registry import SparseKernel, select_sparse
from elastic_ring.attention.merge import accumulate_dtype, lse_for_backward, merge_
from elastic_ring.attention.plan.device_blocks import DeviceBlocks, on_device
from elastic_ring.attention.plan.schedule import Direction
from elastic_ring.attention.plan.sparse_schedule import SparseSchedule
from elastic_ring.attention.plan.sparse_tiles import SparseTile, tile_exchange, tiles
from elastic_ring.attention.plan.traffic import ExchangePlan
from elastic_ring.attention.recomputation import RecomputableRing, Result
from elastic_ring.errors import RunFailed

Observer = Callable[[Direction, int, int], None]
"""Called as observer(direction, call_index, hop) just before a hop's tiles run."""

STAGE_LIMIT_BYTES = 1 << 29
"""Upper bound, per stage, of the K and V bytes that a rank fetches, and of those that it serves. Every further stage
costs one more round of kernels and one more merge, but overlaps with the exchange of the next stage."""


@dataclass(frozen=True)
class Footprint:
    """Device memory of a ring's calls, in bytes.

    `buffer_bytes`: buffers that all rings share. `kept_bytes`: kept by each call from forward to backward.
    `table_bytes`: the tables of a plan, with what kernels have derived from them so far. Temporaries of a pass are not
    counted; with more than three stages its sums are fp32.
    """

    num_stages: int
    buffer_bytes: int
    kept_bytes: int
    table_bytes: int


@dataclass(eq=False)
class SparsePlans:
    """What a rank derived from one schedule, shared by all rings with the same schedule, cp_rank and options."""

    blocks: dict[tuple[torch.device, int], DeviceBlocks] = field(default_factory=dict)
    tiles: tuple[tuple[SparseTile, ...], ...] | None = None
    exchanges: dict[tuple[object, ...], ExchangePlan] = field(default_factory=dict)


class SparseRingAttention(RecomputableRing):
    """Exact attention under `schedule.pattern` over a sequence that is sharded over the ranks of a ring.

    `group` is a process group of exactly the ring's ranks in cp_rank order, or None for cp = 1; all ranks make the same
    calls in the same order. `ahead` hops are posted before their kernels run: 1 overlaps hop by hop, cp - 1 posts all
    at once. `first_call_index` is the index of the first call among the group's calls. `observer` is called before
    every hop. A query that sees no key gives 0. Sums are added in a fixed order, so equal calls give bitwise equal
    results.

    On a GPU, or where `kernel` names one of `kernels.sparse_registry`, hops are fetched in stages, two stages ahead of
    their kernels, and `ahead` is ignored. The pattern must then keep whole blocks of 128 tokens, and documents and the
    layout's cuts must start at block boundaries. Options of this path:

    - `deterministic` selects a kernel whose gradients repeat bit for bit.
    - `partials` is the dtype in which dK and dV are sent; None: the dtype in which the kernel returns them.
    - `buffers` may be shared by rings that are used one after another.
    - `stage_bytes` bounds the bytes fetched and the bytes served per stage. Hops share a stage while both fit on every
      rank; a single hop may exceed the bound.
    - `keep_keys` keeps fetched keys for backward, which then does not fetch them again. None: if they are one stage and
      at most a quarter of any rank's own keys. `stage_bytes` and `keep_keys` must be the same on all ranks.
    - `coalesced` posts the messages of one direction as one operation; None: on a GPU.
    - `cache_dir` stores that a kernel passed its self-test, for later processes.

    Raises: `ValueError` if schedule, cp_rank and group do not match. After a call that raised, buffers that the group
    may still write to are kept until this object is dropped.
    """

    def __init__(
        self,
        schedule: SparseSchedule,
        cp_rank: int,
        group: Group | None,
        *,
        ahead: int = 1,
        ledger: HopLedger | None = None,
        first_call_index: int = 0,
        observer: Observer | None = None,
        kernel: str | None = None,
        deterministic: bool = True,
        partials: torch.dtype | None = None,
        buffers: HopBuffers | None = None,
        stage_bytes: int = STAGE_LIMIT_BYTES,
        keep_keys: bool | None = None,
        coalesced: bool | None = None,
        plans: SparsePlans | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        check_group(schedule, cp_rank, group)
        if ahead < 1:
            raise ValueError(f"ahead={ahead}: at least the next hop is posted; use 1")
        if stage_bytes < 1:
            raise ValueError(f"stage_bytes={stage_bytes}: a stage is at least one hop; leave it out")
        self.schedule = schedule
        self.cp_rank = cp_rank
        self.ledger = HopLedger() if ledger is None else ledger
        self._group = group
        self._ahead = ahead
        self._observer = observer
        self._next_call_index = first_call_index
        self._kernel, self._deterministic = kernel, deterministic
        self._partials = partials
        self._buffers = HopBuffers() if buffers is None else buffers
        self._stage_bytes, self._keep_keys = stage_bytes, keep_keys
        self._coalesced = coalesced
        self._cache_dir = cache_dir
        self._abandoned: list[torch.Tensor] = []
        # Kept here because the module-level caches skip schedules that content chose.
        self._plans = SparsePlans() if plans is None else plans

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D).

        `scale` multiplies the scores; default 1/sqrt(D). Raises: `ValueError` for tensors that do not match each other
        or the schedule, `RunFailed` if the kernel fails its self-test, and whatever the group raises when a peer is
        lost.
        """
        self.check_call(q, k, v)
        if self._in_blocks(q):
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out: torch.Tensor = _SparseFunction.apply(q, k, v, self, q.size(-1) ** -0.5 if scale is None else scale)
        return out

    def footprint(self, q: torch.Tensor) -> Footprint:
        """Memory of calls with queries like q (B, S_local, H, D) on the block path, besides their inputs and outputs.
        Raises: `ValueError` as a call does."""
        blocks = self._blocks_for(q)
        kept, row = self._keeps(blocks), 2 * q.size(0) * q.size(3)
        sizes = (row * q.dtype.itemsize, row * self._partial_dtype(q).itemsize)
        return Footprint(
            len(blocks.stages), blocks.plan.buffer_bytes(*sizes, kept=kept),
            sizes[0] * blocks.plan.num_fetched_rows if kept else 0, blocks.num_bytes,
        )  # fmt: skip

    def reset_calls(self, first_call_index: int = 0) -> None:
        """Restart call numbers at `first_call_index`. All ranks must do so between the same calls (once a step)."""
        self._next_call_index = first_call_index

    def check_call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise what a call with these tensors would raise, before anything is sent."""
        check_tensors(q, k, v)
        check_local_length(q, self.schedule.layout, self.cp_rank)
        if (q.size(2), k.size(2)) != (self.schedule.num_heads, self.schedule.num_kv_heads):
            raise ValueError(
                f"q has {q.size(2)} heads and k {k.size(2)}, the schedule is for {self.schedule.num_heads} and"
                f" {self.schedule.num_kv_heads}; plan for these"
            )
        if self._in_blocks(q):
            self._keeps(self._blocks_for(q))
            self._sparse_kernel(q)
        elif (failure := verify.masked_self_test(q.dtype, q.size(-1))) is not None:
            raise RunFailed(f"the sparse CPU kernel fails its self-test: {failure}")

    def check_graphable(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Raises: `ValueError` where a CUDA graph of the calls would not repeat them."""
        check_captured(self._observer, self.ledger, self._group, q.device)
        if self.schedule.for_one_call:
            raise ValueError("the schedule is of blocks that content chose for one call; plan a static pattern")

    def shared_buffers(self) -> list[torch.Tensor]:
        """The buffers that calls share at present."""
        return self._buffers.shared_buffers()

    def run_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
        call_index = self._next_call_index
        self._next_call_index += 1
        if self._in_blocks(q):
            with self._block_pass("forward", call_index, q, k, scale) as blocks:
                out, lse, fetched = blocks.forward(q, k, v)
                return Result(out, lse, call_index, fetched)
        out = torch.zeros(q.shape, dtype=accumulate_dtype(q.dtype), device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=out.dtype, device=q.device)
        with self._exchange("forward", call_index, k) as exchange:
            exchange.begin(k, v)
            for index, own in enumerate(self._tiles()):
                keys = self._keys(exchange, index, k, v)
                self._observe("forward", call_index, index)
                for tile in own:
                    rows, tile_q, tile_k, tile_v = _gather(tile, q, keys)
                    part, part_lse = aten_cpu.forward(
                        tile_q, tile_k, tile_v, causal=tile.causal, scale=scale, mask=_mask(tile)
                    )
                    merged, merged_lse = out[:, rows], lse[:, rows]
                    of_heads, of_heads_lse = _heads(merged, tile.heads), _heads(merged_lse, tile.heads)
                    merge_(of_heads, of_heads_lse, part, part_lse)
                    _put(out, rows, tile.heads, of_heads)
                    _put(lse, rows, tile.heads, of_heads_lse)
        return Result(out.to(q.dtype), lse_for_backward(lse), call_index)

    def run_backward(
        self,
        dout: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        scale: float,
        call_index: int,
        fetched: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, out, lse = saved
        if self._in_blocks(q):
            with self._block_pass("backward", call_index, q, k, scale) as blocks:
                return blocks.backward(dout, q, k, v, out, lse, fetched)
        dq = torch.zeros(q.shape, dtype=accumulate_dtype(q.dtype), device=q.device)
        dk = torch.zeros(k.shape, dtype=dq.dtype, device=k.device)
        dv = torch.zeros_like(dk)
        with self._exchange("backward", call_index, k) as exchange:
            exchange.begin(k, v)
            for index, own in enumerate(self._tiles()):
                keys = self._keys(exchange, index, k, v)
                self._observe("backward", call_index, index)
                if index == 0:
                    shares = [tuple(torch.zeros_like(x, dtype=dq.dtype) for x in pair) for pair in keys]
                else:
                    partials = exchange.partials_buffer(index - 1).zero_()
                    fetch = self.schedule.hops[self.cp_rank][index].fetch
                    shares = list(parts_of_groups(partials, self.schedule.groups, fetch, k))
                for tile in own:
                    self._tile_gradients(tile, keys, dout, saved, scale, dq, shares[tile.group])
                if index == 0:
                    for group, share in zip(self.schedule.groups, shares, strict=True):
                        _put(dk, slice(None), group.kv_heads, share[0])
                        _put(dv, slice(None), group.kv_heads, share[1])
                else:
                    exchange.swap_partials(index - 1, partials)
                # One hop late, which gives the reader of hop t - 1 the time of one hop to compute and return them.
                self._add_partials(dk, dv, exchange, index - 1)
            self._add_partials(dk, dv, exchange, self.schedule.cp - 1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _tile_gradients(
        self,
        tile: SparseTile,
        keys: Pairs,
        dout: torch.Tensor,
        saved: tuple[torch.Tensor, ...],
        scale: float,
        dq: torch.Tensor,
        share: tuple[torch.Tensor, ...],
    ) -> None:
        """Add one tile's gradients to `dq` (B, S_local, H, D) and to dK, dV of its head group in `share`."""
        q, _, _, out, lse = saved
        rows, tile_q, tile_k, tile_v = _gather(tile, q, keys)
        tile_dout, tile_out, tile_lse = (_heads(x[:, rows], tile.heads) for x in (dout, out, lse))
        part_q, part_k, part_v = aten_cpu.backward(
            tile_dout, tile_q, tile_k, tile_v, tile_out, tile_lse, causal=tile.causal, scale=scale, mask=_mask(tile)
        )
        _put(dq, rows, tile.heads, _heads(dq[:, rows], tile.heads) + part_q)
        columns = as_index(tile.k)
        share[0][:, columns] += part_k
        share[1][:, columns] += part_v

    def _keys(self, exchange: HopExchange, index: int, k: torch.Tensor, v: torch.Tensor) -> Pairs:
        """For each head group the K and V that hop `index` computes on."""
        if index == 0:
            return [(select_heads(k, g.kv_heads), select_heads(v, g.kv_heads)) for g in self.schedule.groups]
        fetch = self.schedule.hops[self.cp_rank][index].fetch
        return parts_of_groups(exchange.take_keys(index - 1), self.schedule.groups, fetch, k)

    def _add_partials(self, dk: torch.Tensor, dv: torch.Tensor, exchange: HopExchange, hop: int) -> None:
        """Add the dK and dV that the reader of `hop` computed for this rank's keys. Call in hop order, which fixes the
        sums' bits."""
        if hop < 1:
            return
        requested = self.schedule.requested(self.cp_rank, hop)
        cut = parts_of_groups(exchange.take_partials(hop - 1), self.schedule.groups, requested, dk)
        for group, ranges, parts in zip(self.schedule.groups, requested, cut, strict=True):
            if ranges:
                rows = as_index(ranges)
                for total, part in zip((dk, dv), parts, strict=True):
                    _put(total, rows, group.kv_heads, _heads(total[:, rows], group.kv_heads) + part)

    def _tiles(self) -> tuple[tuple[SparseTile, ...], ...]:
        if self._plans.tiles is None:
            self._plans.tiles = tiles(self.schedule, self.cp_rank)
        return self._plans.tiles

    def _observe(self, direction: Direction, call_index: int, hop: int) -> None:
        if self._observer is not None:
            self._observer(direction, call_index, hop)

    def _in_blocks(self, q: torch.Tensor) -> bool:
        return q.is_cuda or self._kernel is not None

    def _sparse_kernel(self, q: torch.Tensor) -> SparseKernel:
        head_ratio = self.schedule.num_heads // self.schedule.num_kv_heads
        return select_sparse(
            q.size(-1), head_ratio, q.dtype, self._deterministic, self._kernel, q.device.type, self._cache_dir
        )

    def _partial_dtype(self, q: torch.Tensor) -> torch.dtype:
        if self._partials is not None:
            return self._partials
        return q.dtype if self._sparse_kernel(q).keeps_type else accumulate_dtype(q.dtype)

    def _blocks_for(self, q: torch.Tensor) -> DeviceBlocks:
        """The device plan, cached for the lifetime of this object so that forward and backward use the same one."""
        row_bytes = 2 * q.size(0) * q.size(3) * max(q.dtype, self._partial_dtype(q), key=lambda x: x.itemsize).itemsize
        key = (q.device, self._stage_bytes // max(1, row_bytes))
        blocks = self._plans.blocks
        if key not in blocks:
            make = on_device.fresh if self.schedule.for_one_call else on_device  # a routed schedule never repeats
            blocks[key] = make(self.schedule, self.cp_rank, *key)
        return blocks[key]

    def _keeps(self, blocks: DeviceBlocks) -> bool:
        if self._keep_keys and len(blocks.stages) > 1:
            raise ValueError(
                f"keep_keys=True, but what is fetched is {len(blocks.stages)} stages of at most stage_bytes="
                f"{self._stage_bytes}: keys are kept where they are one; raise stage_bytes, or leave keep_keys out"
            )
        kept = blocks.plan.small if self._keep_keys is None else self._keep_keys
        return kept and len(blocks.stages) == 1

    @contextmanager
    def _block_pass(
        self, direction: Direction, call_index: int, q: torch.Tensor, k: torch.Tensor, scale: float
    ) -> Iterator[BlockPass]:
        blocks, kernel = self._blocks_for(q), self._sparse_kernel(q)
        coalesced = q.is_cuda if self._coalesced is None else self._coalesced
        key, plans = (blocks, coalesced), self._plans.exchanges
        if key not in plans:
            plans[key] = blocks.plan.exchange(self.schedule.cp, coalesced=coalesced)

        def pack(index: int, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            gather_rows_(packed, k, v, blocks.stages[index].served_rows)

        exchange = HopExchange(
            plans[key], row_frame(k), self._group, direction, call_index, self.ledger, self._buffers, k,
            self._partial_dtype(q), pack=pack, keep=direction == "forward" and self._keeps(blocks),
        )  # fmt: skip
        observe = partial(self._observe, direction, call_index)
        try:
            yield BlockPass(blocks, kernel, exchange, observe, scale)
            exchange.finish()
        except BaseException:
            self._abandoned += exchange.abandon()
            raise

    @contextmanager
    def _exchange(self, direction: Direction, call_index: int, k: torch.Tensor) -> Iterator[HopExchange]:
        key, plans = (self._ahead,), self._plans.exchanges
        if key not in plans:
            plans[key] = tile_exchange(self.schedule, self.cp_rank, self._ahead)

        def pack(index: int, packed: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            requested = self.schedule.requested(self.cp_rank, index + 1)
            gather_groups_(packed, k, v, self.schedule.groups, requested)

        exchange = HopExchange(
            plans[key], row_frame(k), self._group, direction, call_index, self.ledger, self._buffers, k,
            accumulate_dtype(k.dtype), pack=pack,
        )  # fmt: skip
        try:
            yield exchange
            exchange.finish()
        except BaseException:
            self._abandoned += exchange.abandon()
            raise


class _SparseFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: SparseRingAttention, scale: float
    ) -> torch.Tensor:
        # Detached as in `ring.py`.
        out, lse, ctx.call_index, fetched = ring._forward(q.detach(), k.detach(), v.detach(), scale)
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(q, k, v, out, lse, *(() if fetched is None else (fetched,)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = tuple(tensor.detach() for tensor in ctx.saved_tensors)
        grads = ctx.ring.run_backward(dout.contiguous(), saved[:5], ctx.scale, ctx.call_index, *saved[5:])
        return (*grads, None, None)


def _gather(tile: SparseTile, q: torch.Tensor, keys: Pairs) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tile's row index, and its q, k, v."""
    rows, columns = as_index(tile.q), as_index(tile.k)
    k, v = keys[tile.group]
    return rows, _heads(q[:, rows], tile.heads), k[:, columns], v[:, columns]


def _mask(tile: SparseTile) -> torch.Tensor | None:
    return None if tile.mask is None else torch.from_numpy(tile.mask)


def _heads(x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
    return x if len(heads) == x.size(2) else select_heads(x, heads)


def _put(whole: torch.Tensor, rows: Any, heads: tuple[int, ...], part: torch.Tensor) -> None:
    """Assign whole[:, rows, heads] = part; `part` may be a view of the target."""
    first = heads[0]
    if heads == tuple(range(first, first + len(heads))):
        whole[:, rows, first : first + len(heads)] = part
    elif isinstance(rows, slice):
        whole[:, rows][:, :, list(heads)] = part
    else:
        whole[:, rows[:, None], torch.tensor(heads)[None, :]] = part
