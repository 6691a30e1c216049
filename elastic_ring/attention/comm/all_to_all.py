"""All-to-all of small messages between the ranks of a ring: every rank sends one of its own to every other.

Receives and sends are posted before any wait, so waits cannot form a cycle. On a GPU they are one coalesced operation,
and a wait blocks the stream, not the host, as in `exchange`. Group and tags are arguments; what messages mean
must not enter. Exceptions of `Work.wait()` are not wrapped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic_ring.attention.comm.exchange import Group, HopLedger, one_operation
from elastic_ring.attention.plan.schedule import Direction


@dataclass(eq=False)
class _Message:
    hop: int
    peer: int
    buffer: torch.Tensor
    received: bool
    work: Any = None


class AllToAll:
    """The all-to-alls of a ring's rank.

    `ledger` counts bytes and waits by distance: forward goes to cp_rank + hop, backward to cp_rank - hop. `coalesced`
    posts a swap as one operation (None: on a GPU). After an error the buffers that the group may still write to are
    kept until this object is dropped.
    """

    def __init__(
        self, cp: int, cp_rank: int, group: Group | None, ledger: HopLedger, *, coalesced: bool | None = None
    ) -> None:
        self.cp, self.cp_rank, self.ledger = cp, cp_rank, ledger
        self._group, self._coalesced = group, coalesced
        self._abandoned: list[torch.Tensor] = []

    def swap(
        self,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        tag: int,
        direction: Direction | None = None,
    ) -> None:
        """Send `outgoing[peer]` and fill `incoming[peer]`, both contiguous and indexed by cp_rank; a rank's own entries
        are ignored and empty messages not sent. Blocks until all is received and sent.

        Counted as hops of `direction`, or, without one, as routing. Raises whatever the group raises.
        """
        messages = self._messages(outgoing, incoming, -1 if direction == "backward" else 1)
        if not messages:
            return
        try:
            self._post(messages, tag, direction)
            for message in messages:
                self._wait(message, direction)
        except BaseException:
            self._abandoned += [message.buffer for message in messages]
            for message in messages:
                message.work = None
            raise

    def _messages(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], sign: int
    ) -> list[_Message]:
        """Receives, then sends, each nearest first."""
        found = []
        for buffers, way, received in ((incoming, -sign, True), (outgoing, sign, False)):
            for hop in range(1, self.cp):
                peer = (self.cp_rank + way * hop) % self.cp
                if buffers[peer].numel():
                    found.append(_Message(hop, peer, buffers[peer], received))
        return found

    def _post(self, messages: list[_Message], tag: int, direction: Direction | None) -> None:
        assert self._group is not None
        device = messages[0].buffer.device
        if not (device.type == "cuda" if self._coalesced is None else self._coalesced):
            self._send_and_receive(messages, tag, direction)
            assert all(message.work is not None for message in messages), "this rank is not in the group"
            return
        backend: Any = self._group
        backend = backend._get_backend(device) if hasattr(backend, "_get_backend") else backend
        with one_operation(backend) as works:
            self._send_and_receive(messages, tag, direction)
        for message in messages:
            message.work = None
        (messages[0].work,) = works  # the coalesced operation has a single work

    def _send_and_receive(self, messages: list[_Message], tag: int, direction: Direction | None) -> None:
        assert self._group is not None
        for message in messages:
            if message.received:
                message.work = self._group.recv([message.buffer], message.peer, tag)
                continue
            message.work = self._group.send([message.buffer], message.peer, tag)
            if direction is None:
                self.ledger.routing_sent_bytes[message.hop] += message.buffer.nbytes
            else:
                self.ledger.sent_bytes[direction, message.hop] += message.buffer.nbytes

    def _wait(self, message: _Message, direction: Direction | None) -> None:
        begun = time.perf_counter()
        try:
            if message.work is not None:
                message.work.wait()
        finally:
            waited = time.perf_counter() - begun
            if direction is None:
                self.ledger.routing_wait_s += waited
            else:
                self.ledger.wait_s[direction, message.hop] += waited
        if not message.received:
            return
        if direction is None:
            self.ledger.routing_received_bytes[message.hop] += message.buffer.nbytes
        else:
            self.ledger.received_bytes[direction, message.hop] += message.buffer.nbytes
