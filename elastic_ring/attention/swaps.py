"""Small messages between all ranks of a ring at once: what is not worth hops of its own.

What they mean is the caller's. Explicit group, a tag for each, waits that end when the group is aborted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic_ring.attention.exchange import Group, HopLedger, PendingWork
from elastic_ring.attention.schedule import Direction


@dataclass(frozen=True, eq=False)
class _Message:
    hop: int
    buffer: torch.Tensor
    work: PendingWork | None
    received: bool


class Swaps:
    """One small message from every rank to every other, where it is not empty.

    Bytes and waits are counted in `ledger` by direction and distance: forward to cp_rank + hop, backward to
    cp_rank - hop, as in hops. Buffers that the group may still write to after an error live as long as this object.
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
        if self._group is None:
            return
        towards = 1 if direction == "forward" else -1
        under_way: list[_Message] = []
        try:
            for hop in range(1, self.cp):
                peer = (self.cp_rank - towards * hop) % self.cp
                if incoming[peer].numel():
                    work = self._group.recv([incoming[peer]], peer, tag)
                    under_way.append(_Message(hop, incoming[peer], work, received=True))
            for hop in range(1, self.cp):
                peer = (self.cp_rank + towards * hop) % self.cp
                if outgoing[peer].numel():
                    work = self._group.send([outgoing[peer]], peer, tag)
                    under_way.append(_Message(hop, outgoing[peer], work, received=False))
                    self.ledger.sent_bytes[direction, hop] += outgoing[peer].nbytes
            while under_way:
                self._settle(under_way[0], direction)
                del under_way[0]
        except BaseException:
            self._abandoned += [message.buffer for message in under_way]
            under_way.clear()
            raise

    def _settle(self, message: _Message, direction: Direction) -> None:
        assert message.work is not None, "this rank is not in the group"
        start = time.perf_counter()
        try:
            message.work.wait()
        finally:
            self.ledger.wait_s[direction, message.hop] += time.perf_counter() - start
        if message.received:
            self.ledger.received_bytes[direction, message.hop] += message.buffer.nbytes
