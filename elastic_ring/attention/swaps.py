"""Small messages between all ranks of a ring at once: what is not worth hops of its own.

What they mean is the caller's. Explicit group, a tag for each, waits that end when the group is aborted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from elastic_ring.attention.exchange import Group, HopLedger, PendingWork
from elastic_ring.attention.schedule import Direction


class Swaps:
    """One small message from every rank to every other, where it is not empty.

    Bytes and waits are counted in `ledger` by direction and distance: forward to cp_rank + hop, backward to
    cp_rank - hop, as in hops. Buffers that the group may still write to after an error are kept in `abandoned`.
    """

    def __init__(self, cp: int, cp_rank: int, group: Group | None, ledger: HopLedger) -> None:
        self.cp, self.cp_rank, self.ledger = cp, cp_rank, ledger
        self._group = group
        self._abandoned: list[torch.Tensor] = []

    def swap(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], direction: Direction, tag: int
    ) -> None:
        """Send `outgoing[peer]` and fill `incoming[peer]`, both by cp_rank; own entries are left alone.

        Everything is posted before anything is waited for, so no cycle of waits can form. Whatever the group
        raises passes through.
        """
        sign = 1 if direction == "forward" else -1
        under_way: list[tuple[int, torch.Tensor, PendingWork, bool]] = []
        try:
            for hop in range(1, self.cp):
                source, buffer = self._peer(-sign * hop, incoming)
                if buffer.numel():
                    under_way.append((hop, buffer, self._posted(self._the_group.recv([buffer], source, tag)), True))
            for hop in range(1, self.cp):
                reader, buffer = self._peer(sign * hop, outgoing)
                if buffer.numel():
                    under_way.append((hop, buffer, self._posted(self._the_group.send([buffer], reader, tag)), False))
                    self.ledger.sent_bytes[direction, hop] += buffer.nbytes
            while under_way:
                self._settle(*under_way[0], direction)
                del under_way[0]
        except BaseException:
            self._abandoned += [buffer for _, buffer, _, _ in under_way]
            under_way.clear()
            raise

    def _peer(self, distance: int, messages: Sequence[torch.Tensor]) -> tuple[int, torch.Tensor]:
        peer = (self.cp_rank + distance) % self.cp
        return peer, messages[peer]

    @property
    def _the_group(self) -> Group:
        assert self._group is not None
        return self._group

    def _posted(self, work: PendingWork | None) -> PendingWork:
        assert work is not None, "this rank is not in the group"
        return work

    def _settle(
        self, hop: int, buffer: torch.Tensor, work: PendingWork, received: bool, direction: Direction
    ) -> None:
        start = time.perf_counter()
        try:
            work.wait()
        finally:
            self.ledger.wait_s[direction, hop] += time.perf_counter() - start
        if received:
            self.ledger.received_bytes[direction, hop] += buffer.nbytes
