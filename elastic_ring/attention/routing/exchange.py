"""The two exchanges of routing: every rank sends a message of its own to every other rank.

Receives and sends are posted before any wait, so waits cannot form a cycle. On a GPU they are one coalesced operation,
and a wait blocks the stream, not the host, as in `packed_exchange`. Exceptions of `Work.wait()` are not wrapped. The
content of messages must not enter: it is `router`'s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from elastic_ring.attention.comm.exchange import Group, HopLedger, one_operation

_NUM_TAGGED_CALLS = 1024
_NUM_SWAPS = 2
_FIRST_TAG = 1 << 30
"""Larger than all tags of hops, of any call."""


@dataclass(eq=False)
class _RoutingMessage:
    hop: int
    buffer: torch.Tensor
    received: bool
    work: Any = None


class RoutingExchange:
    """The exchanges of one attention call. After an error `abandon` returns the buffers that the group may still write
    to."""

    def __init__(
        self, cp_rank: int, cp: int, group: Group | None, call_index: int, ledger: HopLedger, *, coalesced: bool
    ) -> None:
        self._cp_rank, self._cp, self._group = cp_rank, cp, group
        self._first_tag = _FIRST_TAG + call_index % _NUM_TAGGED_CALLS * _NUM_SWAPS
        self._ledger = ledger
        self._coalesced = coalesced
        self._num_swaps = 0
        self._messages: list[_RoutingMessage] = []

    def swap(self, given: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Send `given[rank]` to each rank and return what each rank sends, flat, `sizes[rank]` elements.

        All ranks know all sizes, so empty messages are not sent. Blocks until everything is received and sent.
        """
        tag = self._first_tag + self._num_swaps
        self._num_swaps += 1
        own = given[self._cp_rank]
        inbox = [own if rank == self._cp_rank else own.new_empty(size) for rank, size in enumerate(sizes)]
        hops = range(1, self._cp)
        incoming = [_RoutingMessage(hop, inbox[(self._cp_rank - hop) % self._cp], True) for hop in hops]
        outgoing = [_RoutingMessage(hop, given[(self._cp_rank + hop) % self._cp].contiguous(), False) for hop in hops]
        self._messages = [message for message in (*incoming, *outgoing) if message.buffer.numel()]
        if self._messages:
            self._post(tag)
            for message in self._messages:
                self._wait(message)
        self._messages = []
        return inbox

    def abandon(self) -> list[torch.Tensor]:
        """Drop the group and its works after an error. Returns the buffers still in flight."""
        buffers = [message.buffer for message in self._messages]
        for message in self._messages:
            message.work = None
        self._messages, self._group = [], None
        return buffers

    def _post(self, tag: int) -> None:
        assert self._group is not None
        backend: Any = self._group
        if self._coalesced:
            device = self._messages[0].buffer.device
            backend = backend._get_backend(device) if hasattr(backend, "_get_backend") else backend
            with one_operation(backend) as works:
                self._send_and_receive(tag)
            for message in self._messages:
                message.work = None
            (self._messages[0].work,) = works  # the coalesced operation has a single work
        else:
            self._send_and_receive(tag)

    def _send_and_receive(self, tag: int) -> None:
        assert self._group is not None
        for message in self._messages:
            if message.received:
                message.work = self._group.recv([message.buffer], (self._cp_rank - message.hop) % self._cp, tag)
            else:
                message.work = self._group.send([message.buffer], (self._cp_rank + message.hop) % self._cp, tag)
                self._ledger.routing_sent_bytes[message.hop] += message.buffer.nbytes

    def _wait(self, message: _RoutingMessage) -> None:
        assert message.work is not None or self._coalesced, "this rank is not in the group"
        start = time.perf_counter()
        try:
            if message.work is not None:
                message.work.wait()
        finally:
            self._ledger.routing_wait_s += time.perf_counter() - start
        if message.received:
            self._ledger.routing_received_bytes[message.hop] += message.buffer.nbytes
