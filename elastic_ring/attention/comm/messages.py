"""Messages between the ranks of a ring: the posts and waits of one pass's hops, and all-to-alls of small messages.

Receives and sends are posted before any wait, so waits cannot form a cycle. On a GPU the messages of one direction of a
stage are one coalesced operation: NCCL serializes unbatched sends and receives of one communicator, so two ranks that
both receive first would deadlock; a wait blocks the stream, not the host. The meaning of messages must not enter.
Exceptions of `Work.wait()` are not wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from elastic_ring.attention.comm.ledger import HopEvents, HopLedger, Way
from elastic_ring.attention.plan.schedule import Direction
from elastic_ring.attention.plan.traffic import ExchangePlan, PeerTransfer

KEYS, PARTIALS = 0, 1
_NUM_TAGGED_CALLS, _NUM_CHANNELS, _NUM_TAGS = 1024, 64, 2**31 - 1


class PendingWork(Protocol):
    """A send or receive in flight; `wait` returns when it is complete and raises when it cannot complete."""

    def wait(self) -> Any: ...


class Group(Protocol):
    """The part of a process group that hops use. `torch.distributed.ProcessGroup` objects have it."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> PendingWork | None: ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> PendingWork | None: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


@contextmanager
def one_operation(backend: Any) -> Iterator[list[Any]]:
    """Coalesce the sends and receives of the block; afterwards the list holds their one work.

    NCCL's group mode is a state of the calling thread. If the block raises, the mode must end, or nothing that the
    thread posts later, in any group, would launch: the messages are dropped where the group can, else sent, and the
    caller abandons the group.
    """
    works: list[Any] = []
    backend._start_coalescing()
    try:
        yield works
    except BaseException:
        if hasattr(backend, "drop"):
            backend.drop()
        else:
            backend._end_coalescing()
        raise
    works.append(backend._end_coalescing())


def backend_of(group: Any, device: torch.device) -> Any:
    return group._get_backend(device) if hasattr(group, "_get_backend") else group


@dataclass(eq=False)
class _Work:
    """The work of one message, or of all messages posted together. `is_over` on the kernels' stream, where a second
    wait would only cost host time."""

    work: PendingWork | None
    is_over: bool = False


@dataclass(eq=False)
class _Message:
    hop: int
    buffer: torch.Tensor
    work: _Work


@dataclass(eq=False)
class _Operation:
    """The messages of one stage and kind: the buffer that they fill, and their timing events."""

    buffer: torch.Tensor
    receives: list[_Message] = field(default_factory=list)
    sends: list[_Message] = field(default_factory=list)
    events: HopEvents | None = None


class HopMessages:
    """Posts the transfers of one pass by (kind, stage), waits for them, and counts bytes and times in the ledger."""

    def __init__(
        self,
        plan: ExchangePlan,
        group: Group | None,
        direction: Direction,
        call_index: int,
        ledger: HopLedger,
        device: torch.device,
    ) -> None:
        self._plan, self._group, self._device = plan, group, device
        self._direction, self._call_index, self._ledger = direction, call_index, ledger
        self.posted: dict[tuple[int, int], _Operation] = {}

    def post(
        self,
        kind: int,
        index: int,
        inbox: torch.Tensor,
        unit: int,
        incoming: tuple[PeerTransfer, ...],
        sources: tuple[torch.Tensor, ...],
        outgoing: tuple[PeerTransfer, ...],
    ) -> None:
        """Receive into `inbox` and send out of `sources`, whose pieces count in units of `unit` elements."""
        operation = self.posted[kind, index] = _Operation(inbox)
        flat = inbox.view(-1)

        def post_all() -> None:
            for leg in incoming:
                for channel, piece in enumerate(leg.pieces):
                    part = flat.narrow(0, piece.target * unit, piece.size * unit)
                    operation.receives.append(self._receive(leg.hop, 2 * channel + kind, leg.peer, part))
            for leg in outgoing:
                for channel, piece in enumerate(leg.pieces):
                    part = sources[piece.kind].narrow(0, piece.source * unit, piece.size * unit)
                    operation.sends.append(self._send(leg.hop, 2 * channel + kind, leg.peer, part))

        if not self._plan.coalesced:
            post_all()
        elif incoming or outgoing:
            with one_operation(backend_of(self._group, self._device)) as works:
                post_all()
            work = _Work(works[0])
            for message in (*operation.receives, *operation.sends):
                message.work = work
            if operation.receives and self._ledger.keep_events:
                operation.events = HopEvents(self._direction, operation.receives[0].hop, now())

    def take(self, kind: int, index: int) -> torch.Tensor:
        """The buffer that the operation filled, after a wait for its receives."""
        operation = self.posted[kind, index]
        events = operation.events
        if events is not None:
            # Note on a stream of its own when the exchange has arrived, and that the kernels now want it.
            pending = operation.receives[0].work.work
            assert pending is not None
            with torch.cuda.stream(torch.cuda.Stream()):
                pending.wait()
                events.arrived = now()
            events.requested = now()
        for message in operation.receives:
            self._wait(message)
            self._ledger.received_bytes[self._direction, message.hop] += message.buffer.nbytes
        operation.receives = []
        if events is not None:
            events.received = now()
            self._ledger.events.append(events)
        return operation.buffer

    def settle(self, kind: int, index: int) -> None:
        """Wait until this operation's messages have left, and drop it."""
        operation = self.posted.get((kind, index))
        if operation is None:
            return
        assert not operation.receives, "something was posted and never taken"
        for message in operation.sends:
            self._wait(message)
        del self.posted[kind, index]

    def wait_sent(self, kind: int, index: int) -> None:
        """Make the current stream wait until this operation's messages have left."""
        operation = self.posted.get((kind, index))
        if operation is not None:
            for message in operation.sends[:1] if self._plan.coalesced else operation.sends:
                self._wait(message, beside=self._plan.coalesced)

    def abandon(self) -> list[torch.Tensor]:
        """Drop the group and its works after an error; return the buffers of messages in flight. Works and group must
        not live as long as the error's traceback: they keep sockets open, and peers detect a failed rank by its closed
        sockets."""
        in_flight = [operation.buffer for operation in self.posted.values()]
        for operation in self.posted.values():
            for message in (*operation.receives, *operation.sends):
                message.work.work = None
                in_flight.append(message.buffer)
        self.posted.clear()
        self._group = None
        return in_flight

    def _send(self, hop: int, channel: int, peer: int, buffer: torch.Tensor) -> _Message:
        assert self._group is not None
        work = self._group.send([buffer], peer, self._tag(hop, channel))
        self._ledger.sent_bytes[self._direction, hop] += buffer.nbytes
        if peer in self._plan.far:
            self._ledger.far_sent_bytes[self._direction, hop] += buffer.nbytes
        assert work is not None or self._plan.coalesced, "this rank is not in the group"
        return _Message(hop, buffer, _Work(work))

    def _receive(self, hop: int, channel: int, peer: int, buffer: torch.Tensor) -> _Message:
        assert self._group is not None
        work = self._group.recv([buffer], peer, self._tag(hop, channel))
        assert work is not None or self._plan.coalesced, "this rank is not in the group"
        return _Message(hop, buffer, _Work(work))

    def _wait(self, message: _Message, *, beside: bool = False) -> None:
        """Wait on the kernels' stream, once, or on the stream `beside` it."""
        work = message.work
        if work.is_over and not beside:
            return
        assert work.work is not None
        with self._ledger.waiting(self._direction, message.hop):
            work.work.wait()
        work.is_over = work.is_over or not beside

    def _tag(self, hop: int, channel: int) -> int:
        """Equal on both ranks, different for other calls, passes, hops and messages, so that a late one is not
        matched."""
        call = self._call_index % _NUM_TAGGED_CALLS * 2 + (self._direction == "backward")
        return ((call * self._plan.cp + hop) * _NUM_CHANNELS + channel) % _NUM_TAGS


def now() -> Any:
    """A timing event on the current CUDA stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class AllToAll:
    """The all-to-alls of a ring's rank: each rank sends one message to every other.

    `ledger` counts bytes and waits by distance: backward goes to cp_rank - hop, all else to cp_rank + hop. `coalesced`
    posts a swap as one operation (None: on a GPU). After an error the buffers that the group may still write to join
    `abandoned`.
    """

    def __init__(
        self,
        cp: int,
        cp_rank: int,
        group: Group | None,
        ledger: HopLedger,
        abandoned: list[torch.Tensor],
        *,
        coalesced: bool | None = None,
    ) -> None:
        self.cp, self.cp_rank, self.ledger = cp, cp_rank, ledger
        self._group, self._coalesced, self._abandoned = group, coalesced, abandoned

    def swap(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], tag: int, way: Way = "routing"
    ) -> None:
        """Send `outgoing[peer]` and fill `incoming[peer]`, both contiguous and indexed by cp_rank; a rank's own entries
        are ignored and empty messages not sent. Blocks until all is received and sent; raises what the group raises."""
        sign, messages = -1 if way == "backward" else 1, list[tuple[int, int, torch.Tensor, bool]]()
        for buffers, step, received in ((incoming, -sign, True), (outgoing, sign, False)):  # each nearest first
            for hop in range(1, self.cp):
                peer = (self.cp_rank + step * hop) % self.cp
                if buffers[peer].numel():
                    messages.append((hop, peer, buffers[peer], received))
        if not messages:
            return
        group: Any = self._group
        device, works = messages[0][2].device, list[Any]()

        def post() -> list[Any]:
            return [(group.recv if received else group.send)([x], peer, tag) for _, peer, x, received in messages]

        try:
            if device.type == "cuda" if self._coalesced is None else self._coalesced:
                with one_operation(backend_of(group, device)) as whole:
                    post()
                works = [whole[0], *[None] * (len(messages) - 1)]
            else:
                works = post()
                assert all(work is not None for work in works), "this rank is not in the group"
            for (hop, _, buffer, received), work in zip(messages, works, strict=True):
                with self.ledger.waiting(way, hop):
                    if work is not None:
                        work.wait()
                counts = self.ledger.received_bytes if received else self.ledger.sent_bytes
                counts[way, hop] += buffer.nbytes
        except BaseException:
            self._abandoned += [buffer for _, _, buffer, _ in messages]
            works.clear()  # they must not live as long as the error's traceback
            raise
