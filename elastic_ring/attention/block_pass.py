"""One pass of a sparse ring over whole blocks: own keys, then all fetched ones, each in one kernel call.

Takes an exchange that moves the keys and a kernel that computes over tables; adds up in a fixed order. Tensors come in
the model's order of heads and leave in it; inside, the heads of a group are neighbours. Posts and waits for nothing
itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastic_ring.attention.block_kernels import SparseKernel
from elastic_ring.attention.kernels.block_tables import BlockTables
from elastic_ring.attention.merge import Accumulator, GradientSum, add_, add_placed_, lse_for_backward, merge_
from elastic_ring.attention.packed_exchange import PackedExchange
from elastic_ring.attention.sparse_blocks import DeviceBlocks, Region

HALVED_FLOPS = 1e11
"""Where own keys' gradients have fewer than these (a fifth of a millisecond of an H200), one launch more costs more
than it hides."""


class BlockPass:
    """Of one attention call. `observe(hop)` is called before the kernels that hop `hop`'s keys go into."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        kernel: SparseKernel,
        exchange: PackedExchange,
        observe: Callable[[int], None],
        cp: int,
        scale: float,
    ) -> None:
        self._blocks, self._kernel, self._exchange = blocks, kernel, exchange
        self._observe, self._cp, self._scale = observe, cp, scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out (B, S_local, H, D) and lse (B, S_local, H), +inf where a query sees nothing."""
        blocks = self._blocks
        q, k, v = self._inner(q), self._inner_keys(k), self._inner_keys(v)
        self._exchange.post_keys(k, v)
        self._observe(0)
        # Two parts, already rounded, are summed in registers and rounded once: no wider sum would say more.
        total = Accumulator(q, q.dtype)
        total.add((0, q.size(1)), *self._kernel.forward(q, k, v, blocks.own, self._scale))
        keys = self._exchange.take_keys()
        self._observe_fetched()
        for region, tables, rows in zip(blocks.plan.regions, blocks.fetched, blocks.readers, strict=True):
            if tables is not None:
                heads = slice(*region.heads)
                part = self._kernel.forward(_taken(q, rows, heads), *_of(keys, region), tables, self._scale)
                out, lse = _taken(total.out, rows, heads), _taken(total.lse, rows, heads)
                merge_(out, lse, *part)
                _put_back(total.out, rows, heads, out)
                _put_back(total.lse, rows, heads, lse)
        return self._outer(total.out), self._outer(lse_for_backward(total.lse))

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv as q, k, v. Half of the own heads run behind the keys' arrival, half behind the partials'."""
        blocks = self._blocks
        k, v = self._inner_keys(k), self._inner_keys(v)
        rank = _Queries(*(self._inner(x) for x in (dout, q, out, lse)))
        dq = GradientSum(rank.q, rank.q.dtype)
        self._exchange.post_keys(k, v)
        self._observe(0)
        num_heads, half = k.size(2), self._half(rank.q)
        own = [self._own(rank, k, v, (0, half), blocks.own_parts[0] if half < num_heads else blocks.own, dq)]
        keys = self._exchange.take_keys()
        self._observe_fetched()
        partials = self._exchange.partials_buffer()
        for region, tables, rows in zip(blocks.plan.regions, blocks.fetched, blocks.readers, strict=True):
            if tables is not None:
                heads = slice(*region.heads)
                share = self._gradients(rank, heads, *_of(keys, region), tables, rows)
                grown = _taken(dq.total, rows, heads)
                if grown[0].is_contiguous():
                    add_(grown, [share[0]])
                else:
                    grown.add_(share[0])
                _put_back(dq.total, rows, heads, grown)
                for place, found in zip(_of(partials, region), share[1:], strict=True):
                    place.copy_(found)
        self._exchange.swap_partials(partials)
        if half < num_heads:
            own.append(self._own(rank, k, v, (half, num_heads), blocks.own_parts[1], dq))
        dk, dv = (
            torch.cat(parts, dim=2) if len(parts) > 1 else parts[0].contiguous() for parts in zip(*own, strict=True)
        )
        for total, inbox in zip((dk, dv), self._exchange.take_partials(), strict=True):
            if blocks.plan.num_served_rows:
                add_placed_(total.view(total.size(0), -1, total.size(3)), inbox, blocks.places)
        return self._outer(dq.total), self._outer_keys(dk), self._outer_keys(dv)

    def _own(
        self,
        rank: _Queries,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_heads: tuple[int, int],
        tables: BlockTables,
        dq: GradientSum,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of some own heads; their dq is added to `dq`."""
        sharing = rank.q.size(2) // k.size(2)
        heads, some = slice(kv_heads[0] * sharing, kv_heads[1] * sharing), slice(*kv_heads)
        share = self._gradients(rank, heads, k[:, :, some], v[:, :, some], tables)
        dq.add((0, rank.q.size(1)), share[0], heads)
        return share[1], share[2]

    def _gradients(
        self,
        rank: _Queries,
        heads: slice,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: BlockTables,
        rows: slice | torch.Tensor = slice(None),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dout, q, out, lse = (_taken(x, rows, heads) for x in (rank.dout, rank.q, rank.out, rank.lse))
        return self._kernel.backward(dout, q, k, v, out, lse, tables, self._scale)

    def _half(self, q: torch.Tensor) -> int:
        """How many own K/V heads run first."""
        plan, num_heads = self._blocks.plan, len(self._blocks.plan.kv_head_order)
        flops = 10.0 * q.size(0) * q.size(3) * plan.num_own_pairs
        worth = plan.any_moved and self._blocks.half > 0 and flops >= HALVED_FLOPS
        return self._blocks.half if worth else num_heads

    def _observe_fetched(self) -> None:
        for hop in range(1, self._cp):
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


def _taken(x: torch.Tensor, rows: slice | torch.Tensor, heads: slice) -> torch.Tensor:
    """Some tokens and heads of x (B, S, H, ...): a view for a slice of tokens, a copy for an index."""
    return x[:, rows, heads] if isinstance(rows, slice) else x[:, :, heads].index_select(1, rows)


def _put_back(x: torch.Tensor, rows: slice | torch.Tensor, heads: slice, part: torch.Tensor) -> None:
    if not isinstance(rows, slice):
        x[:, :, heads].index_copy_(1, rows, part)


def _of(buffer: torch.Tensor, region: Region) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V (B, n, heads of the group, D) of a head group in a packed buffer (2, B, rows, D)."""
    num_heads = region.kv_heads[1] - region.kv_heads[0]
    both = buffer[:, :, slice(*region.rows)].unflatten(2, (region.num_tokens, num_heads))
    return both[0], both[1]
