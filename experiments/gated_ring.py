"""The three views of gated sparse attention over the ranks of a ring: block means, selected blocks, and a window.

After native sparse attention (Yuan et al. 2025, arXiv:2502.11089); the gates and the single-process definition are in
`gated`. Ranks exchange one sum per block and head and its gradient, the numbers of the selected blocks, the keys of the
union of the selected blocks, and the keys of the window beyond a rank's own. Parameters must not enter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from elastic_ring.attention.comm.all_to_all import AllToAll
from elastic_ring.attention.comm.exchange import Group, HopLedger
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.options import RingOptions, check_local_length, check_tensors
from elastic_ring.attention.patterns.rules import Rule, Window
from elastic_ring.attention.patterns.sparse import SparsePattern
from elastic_ring.attention.plan.schedule import Direction, Schedule
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.ring import RingAttention
from experiments.block_means import BlockMeans, block_map
from experiments.compressed import attend_to_first


@dataclass(frozen=True)
class ViewSizes:
    """Sizes of the views: `block` tokens per block; `top_k` blocks selected, the own one included; `window` recent
    tokens.

    With `first_query` only a block's first query selects, so later queries have no influence.
    """

    block: int
    top_k: int
    window: int
    first_query: bool = False


@dataclass
class ViewLedgers:
    """Measured traffic by view. `block_means` covers the sums of blocks, their gradients and the selections."""

    block_means: HopLedger = field(default_factory=HopLedger)
    selected: HopLedger = field(default_factory=HopLedger)
    window: HopLedger = field(default_factory=HopLedger)

    def received_bytes(self, direction: Direction) -> int:
        """Bytes that this rank received in `direction`, over all views."""
        ledgers = (self.block_means, self.selected, self.window)
        return sum(num for ledger in ledgers for (way, _), num in ledger.received_bytes.items() if way == direction)

    def clear(self) -> None:
        for ledger in (self.block_means, self.selected, self.window):
            ledger.clear()


class GatedRing:
    """The ring that `GatedSparseAttention` takes for a sharded sequence of one document; every rank creates one for a
    sequence or a step.

    `group` is a process group of exactly the ring's ranks in cp_rank order, or None for cp = 1, which computes without
    S x S masks. All ranks make the same calls in the same order; `ahead` is that of `RingAttention`. `schedules`
    are those of the last call's selected blocks, one per sequence of the batch. Sums are added in a fixed order, so
    equal calls give bitwise equal results. CPU only.

    The selection does not depend on ring or layout, except where two scores differ by no more than the rounding of a
    sum whose block lies on several ranks. Keys that are both selected and in the window are sent twice.

    Raises: `ValueError` if layout, cp_rank and group do not match. After a call that raised, buffers that the group may
    still write to are kept until this object is dropped.
    """

    def __init__(
        self, layout: Layout, cp_rank: int, group: Group | None, *, ahead: int = 1, ledgers: ViewLedgers | None = None
    ) -> None:
        _check_group(layout, cp_rank, group)
        if ahead < 1:
            raise ValueError(f"ahead={ahead}: at least the next hop is posted; use 1")
        self.layout, self.cp_rank = layout, cp_rank
        self.ledgers = ViewLedgers() if ledgers is None else ledgers
        self.schedules: tuple[Schedule, ...] = ()
        self._group, self._ahead = group, ahead
        self._abandoned: list[torch.Tensor] = []
        self._all_to_all = AllToAll(layout.cp, cp_rank, group, self.ledgers.block_means, self._abandoned)
        self._next_call_index = 0

    def views(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: ViewSizes
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The compressed, selected and window views, each (B, S_local, H, D) with a softmax of its own, of q
        (B, S_local, H, D) and k, v (B, S_local, Hkv, D).

        Raises: `ValueError` for tensors that do not match each other or the layout, or are on a GPU, and whatever the
        group raises when a peer is lost.
        """
        self.check(q, k, v)
        block_means = BlockMeans(block_map(self.layout, sizes.block), self._all_to_all)
        call_index = self._new_call()
        # With top_k = 1 mean_q is unused: the first query avoids its messages.
        first_query = sizes.first_query or sizes.top_k == 1
        mean_q, mean_k, mean_v = block_means.means(q, k, v, call_index, first_query=first_query)
        num_seen = block_means.blocks.block_of_token(self.cp_rank)
        compressed = attend_to_first(q, mean_k, mean_v, num_seen, q.size(-1) ** -0.5)
        rules = block_means.choose(mean_q, mean_k, sizes.top_k, call_index)
        selected = self._selected(q, k, v, rules, sizes.block)
        near = plan_sparse(SparsePattern((Window(sizes.window),)), self.layout, q.size(2), k.size(2))
        window = self._ring(near, self.ledgers.window)(q, k, v)
        return compressed, selected, window

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raises: `ValueError` for arguments that `views` would reject."""
        check_tensors(q, k, v)
        check_local_length(q, self.layout, self.cp_rank)
        if q.device.type != "cpu":
            raise ValueError(
                f"device {q.device}: gated attention over a ring runs on CPUs, block-sparse kernels take no window of"
                " single tokens; on a GPU use one process, without ring="
            )

    def reset_calls(self) -> None:
        """Restart call numbers at 0. All ranks must do so between the same calls (once a step)."""
        self._next_call_index = 0

    def _selected(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: list[tuple[Rule, ...]], block: int
    ) -> torch.Tensor:
        """Each sequence of the batch has a selection, and hence a pattern and a ring, of its own."""
        patterns = [SparsePattern(own, block) for own in rules]
        self.schedules = tuple(plan_sparse(pattern, self.layout, q.size(2), k.size(2)) for pattern in patterns)
        rings = [self._ring(schedule, self.ledgers.selected) for schedule in self.schedules]
        if len(rings) == 1:
            return rings[0](q, k, v)
        return torch.cat([ring(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i, ring in enumerate(rings)])

    def _ring(self, schedule: Schedule, ledger: HopLedger) -> RingAttention:
        return RingAttention(
            schedule,
            self.cp_rank,
            self._group,
            RingOptions(ahead=self._ahead, ledger=ledger, abandoned=self._abandoned),
            first_call_index=self._new_call(),
        )

    def _new_call(self) -> int:
        self._next_call_index += 1
        return self._next_call_index - 1


def _check_group(layout: Layout, cp_rank: int, group: Group | None) -> None:
    if not 0 <= cp_rank < layout.cp:
        raise ValueError(f"cp_rank={cp_rank}: the layout has ranks 0 to {layout.cp - 1}")
    if group is None:
        if layout.cp > 1:
            raise ValueError(f"group=None: a layout for cp={layout.cp} needs a group of as many ranks")
    elif group.size() != layout.cp:
        raise ValueError(f"the group has {group.size()} ranks, the layout has cp={layout.cp}; make it for as many")
    elif group.rank() != cp_rank:
        raise ValueError(f"cp_rank={cp_rank}, but this process is rank {group.rank()} of the group; use that")
