"""One pass of a sparse ring over whole blocks: own keys, then the fetched ones stage by stage.

Takes an exchange that moves the keys and a kernel that computes over tables; adds up in a fixed order: no call has a
query's head twice. Tensors come in the model's order of heads and leave in it; inside, the heads of a group are
neighbours. Posts and waits for nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from elastic_ring.attention.block_kernels import SparseKernel
from elastic_ring.attention.device_blocks import DeviceBlocks, DeviceStage
from elastic_ring.attention.kernels.block_tables import BlockTables
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
from elastic_ring.attention.own_sums import KeySums
from elastic_ring.attention.packed_exchange import PackedExchange
from elastic_ring.attention.readers import OneGroup, Readers
from elastic_ring.attention.sparse_blocks import NUM_TURNS

LINK_BYTES_PER_S = 3e11
"""One way between two H200s through NCCL, for messages of this size."""
KERNEL_FLOPS = 4e14
"""Of a block-sparse backward kernel on an H200, at a few percent of the pairs."""
HALVING_S = 2e-4
"""What it costs to run own keys' gradients in two halves: one more round of launches, and tails of two kernels."""

_Share = tuple[Readers, torch.Tensor]


class BlockPass:
    """Of one attention call. `observe(hop)` is called before the kernels that hop `hop`'s keys go into."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        kernel: SparseKernel,
        exchange: PackedExchange,
        observe: Callable[[int], None],
        scale: float,
    ) -> None:
        self._blocks, self._kernel, self._exchange = blocks, kernel, exchange
        self._observe, self._scale = observe, scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """out (B, S_local, H, D), lse (B, S_local, H), +inf where a query sees nothing, and the fetched keys if the
        exchange keeps them."""
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
                self._merge(total, call.readers, *self._kernel.forward(
                    call.readers.take(q), *call.of(keys), call.tables, self._scale))  # fmt: skip
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
        """dq, dk, dv as q, k, v. `keys` are the fetched ones if forward kept them; the bits are the same without."""
        k, v = self._inner_keys(k), self._inner_keys(v)
        rank = _Queries(*(self._inner(x) for x in (dout, q, out, lse)))
        at_once = self._adds_at_once(rank.q)
        dq = GradientSum(rank.q, self._running_dtype(rank.q, at_once), by_rows=self._blocks.by_rows, at_once=at_once)
        sums = (self._fetching if keys is None else self._not_fetching)(rank, k, v, dq, keys)
        dk, dv = (self._outer_keys(x.to(k.dtype)) for x in sums.totals)
        return self._outer(dq.total.to(q.dtype)), dk, dv

    def _fetching(
        self, rank: _Queries, k: torch.Tensor, v: torch.Tensor, dq: GradientSum, _: torch.Tensor | None
    ) -> KeySums:
        """Own keys behind the arrival of the first stage's, or a half of their heads where the other has the return
        of the last stages' partials to hide."""
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
            # As late as can be, so that readers which are behind had time to compute and return it.
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
        """Before which stage the other half of the own heads runs: the first that would wait for partials and has
        nothing of its own to compute, nor has any after it; their number if there is none."""
        stages = self._blocks.stages
        last = max((index for index, stage in enumerate(stages) if stage.plan.fetched), default=-1)
        return min(max(last + 1, NUM_TURNS), len(stages))

    def _not_fetching(
        self, rank: _Queries, k: torch.Tensor, v: torch.Tensor, dq: GradientSum, keys: torch.Tensor | None
    ) -> KeySums:
        """Fetched keys first, so that all own ones, in one call, have the way of the partials to hide. What the
        fetched ones gave to dq waits, to be added in the order in which it is when they are fetched again."""
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
        """By kernel call the share of dq; dK and dV of the stage's keys go to `partials`."""
        for call in stage.calls:
            share = self._gradients(rank, call.readers, *call.of(keys), call.tables, call.of(partials))
            yield call.readers, share

    def _own(
        self,
        rank: _Queries,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_heads: tuple[int, int],
        tables: BlockTables,
        dq: GradientSum,
        sums: KeySums,
    ) -> None:
        sharing, some = rank.q.size(2) // k.size(2), slice(*kv_heads)
        heads = slice(kv_heads[0] * sharing, kv_heads[1] * sharing)
        readers, places = OneGroup(slice(None), heads), sums.places(some)
        if places is not None:
            share = self._gradients(rank, readers, k[:, :, some], v[:, :, some], tables, places)
        else:
            share, *found = self._run(rank, readers, k[:, :, some], v[:, :, some], tables)
            sums.put(some, found)
        dq.add((0, rank.q.size(1)), share, heads)

    def _gradients(
        self,
        rank: _Queries,
        readers: Readers,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: BlockTables,
        places: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """The share of dq; dK and dV are left in `places`, by the kernel itself where it can."""
        if self._kernel.writes_gradients and places[0].dtype == k.dtype:
            return self._run(rank, readers, k, v, tables, dk=places[0], dv=places[1])[0]
        share, *found = self._run(rank, readers, k, v, tables)
        for place, each in zip(places, found, strict=True):
            place.copy_(each)
        return share

    def _run(
        self,
        rank: _Queries,
        readers: Readers,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: BlockTables,
        **places: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dout, q, out, lse = (readers.take(x) for x in (rank.dout, rank.q, rank.out, rank.lse))
        return self._kernel.backward(dout, q, k, v, out, lse, tables, self._scale, **places)

    def _merge(self, total: Accumulator, readers: Readers, out: torch.Tensor, lse: torch.Tensor) -> None:
        run = readers.run(total.num_heads)
        if total.at_once and run is not None:
            total.defer(run, out, lse)
            return
        grown, grown_lse = readers.take(total.out), readers.take(total.lse)
        merge_(grown, grown_lse, out, lse)
        readers.put_back(total.out, grown)
        readers.put_back(total.lse, grown_lse)

    def _add_share(self, dq: GradientSum, share: _Share) -> None:
        readers, found = share
        run = readers.run(dq.num_heads)
        if dq.at_once and run is not None:
            dq.defer(run, found)
            return
        grown = readers.take(dq.total)
        if grown[0].is_contiguous():
            add_(grown, [found])
        else:
            grown.add_(found)
        readers.put_back(dq.total, grown)

    def _adds_at_once(self, q: torch.Tensor) -> bool:
        """Whether all that fetched keys give to out, or to dq, is of neighbours and little enough for one pass over
        memory."""
        return len(self._blocks.stages) <= MOST_AT_ONCE and self._blocks.readers_are_runs(q.size(2))

    def _add_partials(self, sums: KeySums, index: int) -> None:
        """Add what the readers of stage `index` computed for own keys. Called in stage order, the order of sums."""
        if index < 0:
            return
        inbox, places = self._exchange.take_partials(index), self._blocks.places_apart[index]
        if len(inbox):
            self._add_placed(sums, inbox, places)

    def _add_last_partials(self, sums: KeySums) -> None:
        """The same of the last stages, in one pass over memory."""
        last = range(self._blocks.plan.num_added_apart, len(self._blocks.stages))
        if sum(len(self._exchange.take_partials(index)) for index in last):
            self._add_placed(sums, self._exchange.inbox, self._blocks.last_places)

    def _add_placed(self, sums: KeySums, inbox: torch.Tensor, places: torch.Tensor) -> None:
        for kind, total in enumerate(sums.totals):
            add_placed_(total.flatten(1, 2), inbox[:, :, kind].transpose(0, 1), places)

    def _sums(self, k: torch.Tensor, *, halved: bool) -> KeySums:
        served = [stage.plan.num_served_rows > 0 for stage in self._blocks.stages]
        apart = any(served[: self._blocks.plan.num_added_apart])  # some of it before the own share of the later heads
        dtype = accumulate_dtype(k.dtype) if apart else k.dtype
        return KeySums(k, dtype, early=halved and apart, writes=self._kernel.writes_gradients)

    def _first_heads(self, q: torch.Tensor) -> int:
        """How many own K/V heads run before the fetched ones."""
        stages, num_heads = self._blocks.stages, len(self._blocks.plan.kv_head_order)
        if not stages or not self._blocks.half:
            return num_heads
        num_rows = max(max(stage.plan.num_fetched_rows, stage.plan.num_served_rows) for stage in stages)
        row_bytes = 2 * q.size(0) * q.size(3) * self._exchange.partial_dtype.itemsize
        flops = 10.0 * q.size(0) * q.size(3) * self._blocks.plan.num_own_pairs
        hidden_s = min(num_rows * row_bytes / LINK_BYTES_PER_S, flops / 2 / KERNEL_FLOPS)
        return self._blocks.half if hidden_s > HALVING_S else num_heads

    def _running_dtype(self, q: torch.Tensor, at_once: bool) -> torch.dtype:
        """Two parts, already rounded, are summed in registers and rounded once: no wider sum would say more. So are
        all parts where they are added at once."""
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
    """A rank's own queries and what forward gave for them, in the inner order of heads."""

    def __init__(self, dout: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.dout, self.q, self.out, self.lse = dout, q, out, lse
