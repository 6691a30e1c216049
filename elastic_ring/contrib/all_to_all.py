"""All-to-all of small messages between the ranks of a ring.

The group and the tags are arguments, and waits end when the group is aborted. The meaning of messages must not enter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic_ring.attention.comm.exchange import Group, HopLedger, PendingWork
from elastic_ring.attention.plan.schedule import Direction


@dataclass(frozen=True, eq=False)
class _AllToAllMessage:
    hop: int
    buffer: torch.Tensor
    work: PendingWork | None
    received: bool


class AllToAll:
    """Sends one message from every rank to every other; empty ones are skipped.

    `ledger` counts bytes and waits by direction and distance, as for hops: forward goes to cp_rank + hop, backward to
    cp_rank - hop. Buffers that the group may still write to after an error are kept until this object is dropped.
    """

    def __init__(self, cp: int, cp_rank: int, group: Group | None, ledger: HopLedger) -> None:
        self.cp, self.cp_rank, self.ledger = cp, cp_rank, ledger
        self._group = group
        self._abandoned: list[torch.Tensor] = []

    def swap(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], direction: Direction, tag: int
    ) -> None:
        """Send `outgoing[peer]` and fill `incoming[peer]`, both indexed by cp_rank; a rank's own entries are ignored.

        Everything is posted before any wait, so waits cannot form a cycle. Raises whatever the group raises.
        """
        if self._group is None:
            return
        sign = 1 if direction == "forward" else -1
        in_flight: list[_AllToAllMessage] = []
        try:
            for hop in range(1, self.cp):
                peer = (self.cp_rank - sign * hop) % self.cp
                if incoming[peer].numel():
                    work = self._group.recv([incoming[peer]], peer, tag)
                    in_flight.append(_AllToAllMessage(hop, incoming[peer], work, received=True))
            for hop in range(1, self.cp):
                peer = (self.cp_rank + sign * hop) % self.cp
                if outgoing[peer].numel():
                    work = self._group.send([outgoing[peer]], peer, tag)
                    in_flight.append(_AllToAllMessage(hop, outgoing[peer], work, received=False))
                    self.ledger.sent_bytes[direction, hop] += outgoing[peer].nbytes
            while in_flight:
                self._settle(in_flight[0], direction)
                del in_flight[0]
        except BaseException:
            self._abandoned += [message.buffer for message in in_flight]
            in_flight.clear()
            raise

    def _settle(self, message: _AllToAllMessage, direction: Direction) -> None:
        assert message.work is not None, "this rank is not in the group"
        start = time.perf_counter()
        try:
            message.work.wait()
        finally:
            self.ledger.wait_s[direction, message.hop] += time.perf_counter() - start
        if message.received:
            self.ledger.received_bytes[direction, message.hop] += message.buffer.nbytes
