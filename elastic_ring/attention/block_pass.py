"""One pass of a sparse ring over whole blocks: own keys, then fetched keys stage by stage.

`BlockPass` takes an exchange that moves the keys and a kernel that runs over block tables. Sums have a fixed order, and
no kernel call contains a (query, head) twice. Inputs and outputs have the model's order of heads; internally the heads
of a group are adjacent. Posting and waiting must not enter: the exchange does both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from elastic_ring.attention.comm.exchange import HopExchange
from elastic_ring.attention.kernels.block_tables import BlockTables
from elastic_ring.attention.kernels.sparse_registry import SparseKernel
from elastic_ring.attention.kv_grad_accumulation import KVGradAccumulator
from elastic_ring.attention.merge import (
    MOST_AT_ONCE,
    Accumulator,
    GradientSum,
    accumulate_dtype,
    add_,
    add_placed_,
    lse_for_backward,
    merge_,
)
from elastic_ring.attention.plan.device_blocks import DeviceBlocks, DeviceStage
from elastic_ring.attention.plan.query_index import OneGroup, QueryIndex
from elastic_ring.attention.plan.sparse_blocks import NUM_TURNS

LINK_BYTES_PER_S = 3e11
"""One-way NCCL bandwidth between two H200s for messages of this size."""
KERNEL_FLOPS = 4e14
"""FLOP/s of a block-sparse backward kernel on an H200 at a density of a few percent."""
HALVING_S = 2e-4
"""Cost in seconds of computing the own keys' gradients in two halves: one more round of launches and two kernel tails.
"""

_Share = tuple[QueryIndex, torch.Tensor]


class BlockPass:
    """One attention call. `observe(hop)` is called before the kernels that use the keys of `hop`."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        kernel: SparseKernel,
        exchange: HopExchange,
        observe: Callable[[int], None],
        scale: float,
    ) -> None:
        self._blocks, self._kernel, self._exchange = blocks, kernel, exchange
        self._observe, self._scale = observe, scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D), lse (B, S_local, H), +inf where
        a query sees no key, and the fetched keys if the exchange keeps them."""
        blocks, keys = self._blocks, None
        q, k, v = self._inner(q), self._inner_keys(k), self._inner_keys(v)
        self._exchange.begin(k, v)
        self._observe(0)
        at_once = self._adds_at_once(q)
        total = Accumulator(q, self._running_dtype(q, at_once), by_rows=blocks.by_rows, at_once=at_once)
        total.add((0, q.size(1)), *self._kernel.forward(q, k, v, blocks.own, self._scale))
        for index, stage in enumerate(blocks.stages):
            keys = self._exchange.take_keys(index)
            self._observe_stage(stage)
            for call in stage.calls:
                self._merge(total, call.query_index, *self._kernel.forward(
                    call.query_index.take(q), *call.of(keys), call.tables, self._scale))  # fmt: skip
            self._exchange.free_keys(index)
        out, lse = self._outer(total.out.to(q.dtype)), self._outer(lse_for_backward(total.lse))
        return out, lse, keys if self._exchange.keeps else None

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        keys: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv with the shapes of q, k, v. `keys` are the fetched keys if forward kept them; the bits are the
        same without."""
        k, v = self._inner_keys(k), self._inner_keys(v)
        rank = _Queries(*(self._inner(x) for x in (dout, q, out, lse)))
        at_once = self._adds_at_once(rank.q)
        dq = GradientSum(rank.q, self._running_dtype(rank.q, at_once), by_rows=self._blocks.by_rows, at_once=at_once)
        sums = (self._fetching if keys is None else self._not_fetching)(rank, k, v, dq, keys)
        dk, dv = (self._outer_keys(x.to(k.dtype)) for x in sums.totals)
        return self._outer(dq.total.to(q.dtype)), dk, dv

    def _fetching(
        self, rank: _Queries, k: torch.Tensor, v: torch.Tensor, dq: GradientSum, _: torch.Tensor | None
    ) -> KVGradAccumulator:
        """Backward that fetches keys again. Own keys are computed while the first stage arrives; a part of their heads
        runs later, to overlap with the return of the last stages' partials."""
        stages, num_heads, half = self._blocks.stages, k.size(2), self._first_heads(rank.q)
        sums, hiding = self._sums(k, halved=half < num_heads), self._hiding_stage()

        def own_rest() -> None:
            if half < num_heads:
                self._own(rank, k, v, (half, num_heads), self._blocks.own_parts[1], dq, sums)

        self._exchange.begin(k, v)
        self._observe(0)
        own = self._blocks.own if half == num_heads else self._blocks.own_parts[0]
        self._own(rank, k, v, (0, half), own, dq, sums)
        for index, stage in enumerate(stages):
            if index == hiding:
                own_rest()
            # As late as possible, to give slow readers time to compute and return them.
            self._add_partials(sums, index - NUM_TURNS)
            keys = self._exchange.take_keys(index)
            self._observe_stage(stage)
            partials = self._exchange.partials_buffer(index)
            for share in self._fetched(rank, stage, keys, partials):
                self._add_share(dq, share)
            self._exchange.free_keys(index)
            self._exchange.swap_partials(index, partials)
        if hiding == len(stages):
            own_rest()
        self._add_last_partials(sums)
        return sums

    def _hiding_stage(self) -> int:
        """The stage before which the remaining own heads run: the first stage that would wait for partials, where
        neither it nor any later stage has kernels to run; the number of stages if there is none."""
        stages = self._blocks.stages
        last = max((index for index, stage in enumerate(stages) if stage.plan.fetched), default=-1)
        return min(max(last + 1, NUM_TURNS), len(stages))

    def _not_fetching(
        self, rank: _Queries, k: torch.Tensor, v: torch.Tensor, dq: GradientSum, keys: torch.Tensor | None
    ) -> KVGradAccumulator:
        """Backward on kept keys. Fetched keys run first, so that the single call on all own keys overlaps with the
        partials' return. Their shares of dq are added later, in the order used when keys are fetched again, so the bits
        are the same."""
        assert keys is not None
        (stage,), sums = self._blocks.stages, self._sums(k, halved=False)
        self._observe_stage(stage)
        partials = self._exchange.partials_buffer(0)
        shares = list(self._fetched(rank, stage, keys, partials))
        self._exchange.swap_partials(0, partials)
        self._observe(0)
        self._own(rank, k, v, (0, k.size(2)), self._blocks.own, dq, sums)
        for share in shares:
            self._add_share(dq, share)
        self._add_last_partials(sums)
        return sums

    def _fetched(
        self, rank: _Queries, stage: DeviceStage, keys: torch.Tensor, partials: torch.Tensor
    ) -> Iterator[_Share]:
        """The share of dq of each kernel call; dK and dV of the stage's keys are written to `partials`."""
        for call in stage.calls:
            share = self._gradients(rank, call.query_index, *call.of(keys), call.tables, call.of(partials))
            yield call.query_index, share

    def _own(
        self,
        rank: _Queries,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_heads: tuple[int, int],
        tables: BlockTables,
        dq: GradientSum,
        sums: KVGradAccumulator,
    ) -> None:
        sharing, some = rank.q.size(2) // k.size(2), slice(*kv_heads)
        heads = slice(kv_heads[0] * sharing, kv_heads[1] * sharing)
        queries, places = OneGroup(slice(None), heads), sums.places(some)
        if places is not None:
            share = self._gradients(rank, queries, k[:, :, some], v[:, :, some], tables, places)
        else:
            share, *found = self._run(rank, queries, k[:, :, some], v[:, :, some], tables)
            sums.put(some, found)
        dq.add((0, rank.q.size(1)), share, heads)

    def _gradients(
        self,
        rank: _Queries,
        queries: QueryIndex,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: BlockTables,
        places: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """The share of dq; dK and dV are written to `places`, by the kernel itself where it can."""
        if self._kernel.writes_gradients and places[0].dtype == k.dtype:
            return self._run(rank, queries, k, v, tables, dk=places[0], dv=places[1])[0]
        share, *found = self._run(rank, queries, k, v, tables)
        for place, each in zip(places, found, strict=True):
            place.copy_(each)
        return share

    def _run(
        self,
        rank: _Queries,
        queries: QueryIndex,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: BlockTables,
        **places: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dout, q, out, lse = (queries.take(x) for x in (rank.dout, rank.q, rank.out, rank.lse))
        return self._kernel.backward(dout, q, k, v, out, lse, tables, self._scale, **places)

    def _merge(self, total: Accumulator, queries: QueryIndex, out: torch.Tensor, lse: torch.Tensor) -> None:
        run = queries.run(total.num_heads)
        if total.at_once and run is not None:
            total.defer(run, out, lse)
            return
        grown, grown_lse = queries.take(total.out), queries.take(total.lse)
        merge_(grown, grown_lse, out, lse)
        queries.put_back(total.out, grown)
        queries.put_back(total.lse, grown_lse)

    def _add_share(self, dq: GradientSum, share: _Share) -> None:
        queries, found = share
        run = queries.run(dq.num_heads)
        if dq.at_once and run is not None:
            dq.defer(run, found)
            return
        grown = queries.take(dq.total)
        if grown[0].is_contiguous():
            add_(grown, [found])
        else:
            grown.add_(found)
        queries.put_back(dq.total, grown)

    def _adds_at_once(self, q: torch.Tensor) -> bool:
        """Whether all contributions of fetched keys to out, or to dq, are contiguous and few enough for one pass over
        memory."""
        return len(self._blocks.stages) <= MOST_AT_ONCE and self._blocks.queries_are_contiguous(q.size(2))

    def _add_partials(self, sums: KVGradAccumulator, index: int) -> None:
        """Add what the readers of stage `index` computed for own keys. Call in stage order, the order of sums."""
        if index < 0:
            return
        inbox, places = self._exchange.take_partials(index), self._blocks.places_apart[index]
        if len(inbox):
            self._add_placed(sums, inbox, places)

    def _add_last_partials(self, sums: KVGradAccumulator) -> None:
        """Add the partials of the last stages, in one pass over memory."""
        last = range(self._blocks.plan.num_added_apart, len(self._blocks.stages))
        if sum(len(self._exchange.take_partials(index)) for index in last):
            self._add_placed(sums, self._exchange.inbox, self._blocks.last_places)

    def _add_placed(self, sums: KVGradAccumulator, inbox: torch.Tensor, places: torch.Tensor) -> None:
        for kind, total in enumerate(sums.totals):
            add_placed_(total.flatten(1, 2), inbox[:, :, kind].transpose(0, 1), places)

    def _sums(self, k: torch.Tensor, *, halved: bool) -> KVGradAccumulator:
        served = [stage.plan.num_served_rows > 0 for stage in self._blocks.stages]
        apart = any(served[: self._blocks.plan.num_added_apart])  # some are added before the later own heads run
        dtype = accumulate_dtype(k.dtype) if apart else k.dtype
        return KVGradAccumulator(k, dtype, early=halved and apart, writes=self._kernel.writes_gradients)

    def _first_heads(self, q: torch.Tensor) -> int:
        """The number of own K/V heads that run before the fetched keys."""
        stages, num_heads = self._blocks.stages, len(self._blocks.plan.kv_head_order)
        if not stages or not self._blocks.half:
            return num_heads
        num_rows = max(max(stage.plan.num_fetched_rows, stage.plan.num_served_rows) for stage in stages)
        row_bytes = 2 * q.size(0) * q.size(3) * self._exchange.partial_dtype.itemsize
        flops = 10.0 * q.size(0) * q.size(3) * self._blocks.plan.num_own_pairs
        hidden_s = min(num_rows * row_bytes / LINK_BYTES_PER_S, flops / 2 / KERNEL_FLOPS)
        return self._blocks.half if hidden_s > HALVING_S else num_heads

    def _running_dtype(self, q: torch.Tensor, at_once: bool) -> torch.dtype:
        """The dtype of the running sum. Two rounded parts are summed in registers and rounded once, so a wider dtype
        would gain nothing; the same holds for all parts that are added at once."""
        return q.dtype if at_once or self._blocks.plan.num_row_visits <= 2 else accumulate_dtype(q.dtype)

    def _observe_stage(self, stage: DeviceStage) -> None:
        for hop in stage.plan.hops:
            self._observe(hop)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._blocks.head_order is None else x.index_select(2, self._blocks.head_order)

    def _inner_keys(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._blocks.kv_head_order is None else x.index_select(2, self._blocks.kv_head_order)

    def _outer(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._blocks.back_order is None else x.index_select(2, self._blocks.back_order)

    def _outer_keys(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._blocks.kv_back_order is None else x.index_select(2, self._blocks.kv_back_order)


class _Queries:
    """A rank's own queries with their forward results and dout, in the internal order of heads."""

    def __init__(self, dout: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.dout, self.q, self.out, self.lse = dout, q, out, lse
