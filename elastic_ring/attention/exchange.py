"""Moving K/V to the ranks that need them and dK/dV partials back to their owner, hop by hop.

One `HopExchange` serves one forward or backward pass of one attention call. It posts, waits, counts and
keeps buffers alive; what to move is the schedule's decision, what to do with it the ring's. No kernel and
no merging may enter. Whatever `Work.wait()` raises (GroupAborted, PeerFailed, a backend's own error)
passes through untouched; `abandon` then hands over the buffers that the group may still write to.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from elastic_ring.attention.layout import Range
from elastic_ring.attention.merge import accumulate_dtype
from elastic_ring.attention.schedule import Direction, Schedule


class PendingWork(Protocol):
    """A send or receive under way; `wait` returns when it is done or raises when it never will be."""

    def wait(self) -> Any: ...


class Group(Protocol):
    """What the exchange needs of a process group. `torch.distributed.ProcessGroup` objects have it."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> PendingWork | None: ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> PendingWork | None: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


@dataclass
class HopLedger:
    """What really moved, by (direction, hop): counted from the tensors handed over, never from the plan.

    `wait_s` is the time spent waiting for a hop's messages, that is, the latency no compute has hidden.
    """

    sent_bytes: dict[tuple[Direction, int], int] = field(default_factory=lambda: defaultdict(int))
    received_bytes: dict[tuple[Direction, int], int] = field(default_factory=lambda: defaultdict(int))
    wait_s: dict[tuple[Direction, int], float] = field(default_factory=lambda: defaultdict(float))

    def clear(self) -> None:
        self.sent_bytes.clear()
        self.received_bytes.clear()
        self.wait_s.clear()


@dataclass(eq=False)
class _Message:
    hop: int
    buffer: torch.Tensor
    work: PendingWork | None


_KEYS, _PARTIALS = 0, 1
_NUM_TAGGED_CALLS = 1024


class HopExchange:
    """The messages of one pass. Packed buffers have shape (2, B, n, Hkv, D): K then V, or dK then dV.

    Double-buffered: `post_keys(t + 1)` before hop t's kernels; it first waits for sends older than hop t,
    so at most two hops' buffers live at once. No cycle of waits can form, because a rank that posts hop t+1
    waits only for messages of hops before t.
    """

    def __init__(
        self,
        schedule: Schedule,
        cp_rank: int,
        group: Group | None,
        direction: Direction,
        call_index: int,
        ledger: HopLedger,
    ) -> None:
        self._schedule = schedule
        self._cp_rank = cp_rank
        self._group = group
        self._direction = direction
        self._call_index = call_index
        self._ledger = ledger
        self._sends: list[_Message] = []
        self._keys: dict[int, _Message] = {}
        self._partials: dict[int, _Message] = {}

    def post_keys(self, hop: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Start receiving the keys of `hop` and sending those its reader wants; k, v (B, S_local, Hkv, D)."""
        if hop >= self._schedule.cp:
            return
        self._settle_sends(before=hop - 1)
        own = self._schedule.hops[self._cp_rank][hop]
        if own.num_fetched_tokens:
            buffer = k.new_empty((2, k.size(0), own.num_fetched_tokens, *k.shape[2:]))
            self._keys[hop] = self._receive(hop, _KEYS, own.source, buffer)
        requested = self._schedule.requested(self._cp_rank, hop)
        if requested:
            self._send(hop, _KEYS, self._schedule.reader(self._cp_rank, hop), _pack(k, v, requested))

    def take_keys(self, hop: int) -> torch.Tensor | None:
        """The packed K and V of `hop`, or None when the hop needs none. Blocks until they have arrived."""
        return self._take(self._keys, hop)

    def expect_partials(self, hop: int, k: torch.Tensor) -> None:
        """Start receiving the dK and dV that `hop`'s reader computes for this rank's keys."""
        num_tokens = sum(stop - start for start, stop in self._schedule.requested(self._cp_rank, hop))
        if num_tokens:
            reader = self._schedule.reader(self._cp_rank, hop)
            buffer = k.new_empty((2, k.size(0), num_tokens, *k.shape[2:]), dtype=accumulate_dtype(k.dtype))
            self._partials[hop] = self._receive(hop, _PARTIALS, reader, buffer)

    def send_partials(self, hop: int, partials: torch.Tensor) -> None:
        """Return the packed dK and dV of `hop` to the owner of its keys."""
        self._send(hop, _PARTIALS, self._schedule.hops[self._cp_rank][hop].source, partials)

    def take_partials(self, hop: int) -> torch.Tensor | None:
        """The packed dK and dV for `schedule.requested(cp_rank, hop)`, or None when nobody read them."""
        return self._take(self._partials, hop)

    def finish(self) -> None:
        """Wait until the last buffer has left; the pass is over."""
        self._settle_sends(before=self._schedule.cp)
        assert not self._keys, sorted(self._keys)
        assert not self._partials, sorted(self._partials)

    def abandon(self) -> list[torch.Tensor]:
        """Give up after an error: let go of the group and its works, return the buffers of those under way.

        Works and group must not live as long as the error's traceback: they keep sockets open, and the
        peers of a failed rank learn of it by their closing.
        """
        messages = [*self._sends, *self._keys.values(), *self._partials.values()]
        for message in messages:
            message.work = None
        self._group = None
        return [message.buffer for message in messages]

    def _send(self, hop: int, kind: int, peer: int, buffer: torch.Tensor) -> None:
        assert self._group is not None
        assert buffer.is_contiguous()
        work = self._group.send([buffer], peer, self._tag(hop, kind))
        self._ledger.sent_bytes[self._direction, hop] += buffer.nbytes
        assert work is not None, "this rank is not in the group"
        self._sends.append(_Message(hop, buffer, work))

    def _receive(self, hop: int, kind: int, peer: int, buffer: torch.Tensor) -> _Message:
        assert self._group is not None
        work = self._group.recv([buffer], peer, self._tag(hop, kind))
        assert work is not None, "this rank is not in the group"
        return _Message(hop, buffer, work)

    def _take(self, messages: dict[int, _Message], hop: int) -> torch.Tensor | None:
        message = messages.get(hop)
        if message is None:
            return None
        self._wait(message)
        self._ledger.received_bytes[self._direction, hop] += message.buffer.nbytes
        del messages[hop]
        return message.buffer

    def _settle_sends(self, before: int) -> None:
        for message in [message for message in self._sends if message.hop < before]:
            self._wait(message)
            self._sends.remove(message)

    def _wait(self, message: _Message) -> None:
        assert message.work is not None
        start = time.perf_counter()
        try:
            message.work.wait()
        finally:
            self._ledger.wait_s[self._direction, message.hop] += time.perf_counter() - start

    def _tag(self, hop: int, kind: int) -> int:
        """The same on both sides; a late message of a neighbouring call, pass or hop cannot match it."""
        call = self._call_index % _NUM_TAGGED_CALLS
        backward = self._direction == "backward"
        return ((call * 2 + backward) * self._schedule.cp + hop) * 2 + kind


def _pack(k: torch.Tensor, v: torch.Tensor, ranges: tuple[Range, ...]) -> torch.Tensor:
    """The rows `ranges` of k and v in one buffer (2, B, n, Hkv, D)."""
    num_tokens = sum(stop - start for start, stop in ranges)
    buffer = k.new_empty((2, k.size(0), num_tokens, *k.shape[2:]))
    offset = 0
    for start, stop in ranges:
        end = offset + stop - start
        buffer[0, :, offset:end] = k[:, start:stop]
        buffer[1, :, offset:end] = v[:, start:stop]
        offset = end
    return buffer
