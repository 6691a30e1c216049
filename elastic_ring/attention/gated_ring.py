"""The three views of gated sparse attention over the ranks of a ring: block means, chosen blocks, and a window.

After native sparse attention (Yuan et al. 2025, arXiv:2502.11089); the gates that mix the views, and the definition on
one process, are `gated`'s. What moves: one sum for each block and head, and its gradient back; the numbers of the
chosen blocks; the keys of the union of what was chosen; the keys that the window reaches beyond a rank's own.
No parameters in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from elastic_ring.attention.checks import check_local_length, check_tensors
from elastic_ring.attention.compressed import attend_to_first
from elastic_ring.attention.exchange import Group, HopLedger
from elastic_ring.attention.layout import Layout
from elastic_ring.attention.rules import Rule, Window
from elastic_ring.attention.schedule import Direction
from elastic_ring.attention.sparse import SparsePattern
from elastic_ring.attention.sparse_ring import SparseRingAttention
from elastic_ring.attention.sparse_schedule import SparseSchedule, plan_sparse
from elastic_ring.attention.summaries import BlockSummaries, block_map
from elastic_ring.attention.swaps import Swaps


@dataclass(frozen=True)
class ViewSizes:
    """Blocks of `block` tokens; `top_k` of them are chosen, the own one among them; `window` tokens are seen beside.
    With `first_query` a block's first query alone chooses, so that no later one has a say."""

    block: int
    top_k: int
    window: int
    first_query: bool = False


@dataclass
class ViewLedgers:
    """What really moved, view by view. `summaries` counts the sums of blocks, their gradients and the choices."""

    summaries: HopLedger = field(default_factory=HopLedger)
    selected: HopLedger = field(default_factory=HopLedger)
    window: HopLedger = field(default_factory=HopLedger)

    def received_bytes(self, direction: Direction) -> int:
        """By this rank, over all views."""
        ledgers = (self.summaries, self.selected, self.window)
        return sum(num for ledger in ledgers for (way, _), num in ledger.received_bytes.items() if way == direction)

    def clear(self) -> None:
        for ledger in (self.summaries, self.selected, self.window):
            ledger.clear()


class GatedRing:
    """What `GatedSparseAttention` calls where the sequence lies on a ring: made once for a sequence or a step, for one
    document, by every rank.

    `group` is a process group of exactly the ring's ranks in cp_rank order, or None for cp = 1, where it is the path
    that never makes S x S masks. Every rank makes the same calls in the same order; `ahead` is as for
    `SparseRingAttention`. `schedules` are those of the last call's chosen blocks, one for each sequence of the batch.
    All sums have a fixed order, so equal calls give equal bits. On the CPU only.

    Which blocks are chosen does not depend on ring or layout, except where two scores are equal to within the rounding
    of a sum whose block lies on several ranks. Keys that were both chosen and lie in the window are sent for each.

    Raises `ValueError` when layout, cp_rank and group do not belong together. After a call that raised, the buffers
    which the group may still write to are kept until this object is dropped.
    """

    def __init__(
        self, layout: Layout, cp_rank: int, group: Group | None, *, ahead: int = 1, ledgers: ViewLedgers | None = None
    ) -> None:
        _check_group(layout, cp_rank, group)
        if ahead < 1:
            raise ValueError(f"ahead={ahead}: at least the next hop is posted; use 1")
        self.layout, self.cp_rank = layout, cp_rank
        self.ledgers = ViewLedgers() if ledgers is None else ledgers
        self.schedules: tuple[SparseSchedule, ...] = ()
        self._group, self._ahead = group, ahead
        self._swaps = Swaps(layout.cp, cp_rank, group, self.ledgers.summaries)
        self._next_call_index = 0
        self._rings: list[SparseRingAttention] = []  # a call that raised leaves buffers with its ring

    def views(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: ViewSizes
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The compressed, selected and window view, (B, S_local, H, D) each, of q (B, S_local, H, D) and k, v
        (B, S_local, Hkv, D), every one with a softmax of its own.

        Raises `ValueError` for tensors that do not fit each other or the layout, or lie on a GPU, and whatever the
        group raises when a peer is lost.
        """
        self.check(q, k, v)
        near = SparsePattern((Window(sizes.window),))
        summaries = BlockSummaries(block_map(self.layout, sizes.block), self._swaps)
        call_index = self._new_call()
        # Where only own blocks are chosen nobody reads mean_q, so it must not cost a message.
        first_query = sizes.first_query or sizes.top_k == 1
        mean_q, mean_k, mean_v = summaries.means(q, k, v, call_index, first_query=first_query)
        num_seen = summaries.blocks.block_of_token(self.cp_rank)
        compressed = attend_to_first(q, mean_k, mean_v, num_seen, q.size(-1) ** -0.5)
        rules = summaries.choose(mean_q, mean_k, sizes.top_k, call_index)
        selected = self._selected(q, k, v, rules, sizes.block)
        window = self._ring(near, q, k, self.ledgers.window)(q, k, v)
        return compressed, selected, window

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raises `ValueError` for what `views` would refuse."""
        check_tensors(q, k, v)
        check_local_length(q, self.layout, self.cp_rank)
        if q.device.type != "cpu":
            raise ValueError(
                f"device {q.device}: gated attention over a ring runs on CPUs, block-sparse kernels take no window of"
                " single tokens; on a GPU use one process, without ring="
            )

    def reset_calls(self) -> None:
        """Start counting calls from 0 again; all ranks do so at the same place (once a step)."""
        self._next_call_index = 0
        self._rings = [ring for ring in self._rings if ring._abandoned]

    def _selected(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: list[tuple[Rule, ...]], block: int
    ) -> torch.Tensor:
        """Content chooses for each sequence of the batch alone, so each is a pattern and a ring of its own."""
        rings = [self._ring(SparsePattern(own, block), q, k, self.ledgers.selected) for own in rules]
        self.schedules = tuple(ring.schedule for ring in rings)
        if len(rings) == 1:
            return rings[0](q, k, v)
        return torch.cat([ring(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i, ring in enumerate(rings)])

    def _ring(self, pattern: SparsePattern, q: torch.Tensor, k: torch.Tensor, ledger: HopLedger) -> SparseRingAttention:
        ring = SparseRingAttention(
            plan_sparse(pattern, self.layout, q.size(2), k.size(2)), self.cp_rank, self._group,
            ahead=self._ahead, ledger=ledger, first_call_index=self._new_call(),
        )  # fmt: skip
        self._rings.append(ring)
        return ring

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
