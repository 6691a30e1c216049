"""Moving K/V to the ranks that need them and dK/dV partials back to their owner, stage by stage.

One `HopExchange` serves one forward or backward pass of one attention call. It posts, waits, counts bytes and keeps
buffers alive. The schedule decides what moves; kernels and merging stay outside. Errors of `Work.wait()` (GroupAborted,
PeerFailed, a backend's own) pass through; `abandon` then returns the buffers that the group may still write to.

On a GPU all messages of a stage are one coalesced operation: NCCL serializes unbatched sends and receives of one
communicator, so two ranks that both receive first would deadlock. Waits are stream waits, and all hops and calls share
the ring's buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from elastic_ring.attention.comm.ledger import HopEvents, HopLedger
from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.plan.rank_plan import PeerTransfer, RankPlan, Traffic
from elastic_ring.attention.plan.schedule import Direction

__all__ = ["Group", "HopBuffers", "HopExchange", "HopLedger", "PendingWork"]


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


def hop_number(call_index: int, direction: Direction, cp: int, hop: int) -> int:
    """The number that tags are made from, below NUM_TAGGED_CALLS * 2 * cp: equal on both ranks, different for other
    calls, passes and hops, so that a late message is not matched."""
    return (call_index % NUM_TAGGED_CALLS * 2 + (direction == "backward")) * cp + hop


class PendingWork(Protocol):
    """A send or receive in flight; `wait` returns when it is complete and raises when it cannot complete."""

    def wait(self) -> Any: ...


class Group(Protocol):
    """What the exchange needs of a process group. `torch.distributed.ProcessGroup` objects have it."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> PendingWork | None: ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> PendingWork | None: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...


class HopBuffers:
    """Buffers shared by the hops of all calls: one tensor per name and slot, as large as the largest request.

    Reuse is ordered by the stream: a slot is handed out again only after the work that read it was queued.
    """

    def __init__(self) -> None:
        self._storages: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def get(
        self, name: str, slot: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        num_elements = 1
        for size in shape:
            num_elements *= size
        kept = self._storages.get((name, slot, dtype))
        if kept is None or kept.numel() < num_elements or kept.device != device:
            kept = self._storages[name, slot, dtype] = torch.empty(num_elements, dtype=dtype, device=device)
        return kept[:num_elements].view(shape)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The GPU's high-priority stream for filling these buffers while kernels run."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        return self._streams[device]

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes for storage in self._storages.values())

    def shared_buffers(self) -> list[torch.Tensor]:
        """The current tensors; a larger request replaces its tensor."""
        return list(self._storages.values())

    def drop(self) -> list[torch.Tensor]:
        """Forget and return all tensors, after an error: the group may still write to them."""
        dropped = self.shared_buffers()
        self._storages.clear()
        return dropped


class HopMemory(Protocol):
    """Memory that the ranks of a ring share, and through which a pass may send its hops."""

    @property
    def device(self) -> torch.device: ...

    def open_exchange(self, arguments: tuple[Any, ...], k: torch.Tensor) -> HopExchange:
        """The exchange of a pass over keys like `k` (B, S_local, Hkv, D); `arguments` are those of `HopExchange`."""


@dataclass(eq=False)
class _Completion:
    """The work of one message, or of all messages posted together. Waited for once: a pass uses one stream, where a
    second wait would only cost host time."""

    work: PendingWork | None
    is_over: bool = False


@dataclass(eq=False)
class _HopMessage:
    hop: int
    buffer: torch.Tensor
    end: _Completion


@dataclass(eq=False)
class _Arrival:
    """The buffer that a stage's `take` returns, the messages that fill it, and its timing events."""

    buffer: torch.Tensor
    messages: list[_HopMessage] = field(default_factory=list)
    events: HopEvents | None = None


_KEYS, _PARTIALS = 0, 1
NUM_TAGGED_CALLS, NUM_TAGS = 1024, 2**31 - 1


class HopExchange:
    """The messages of one pass. Packed buffers have shape (2, B, n, Hkv, D): K then V, or dK then dV.

    Double-buffered: `post_keys(t + 1)` before stage t's kernels; it first waits for sends older than stage
    t, so at most two stages' buffers live at once. No cycle of waits can form, because a rank that posts
    stage t+1 waits only for messages of stages before t. `coalesced`, which NCCL needs and gloo does not know: what
    is posted together is one operation, keys leave from where they lie and buffers are those that all hops share; then
    stage t's kernels wait for the partials of stage t-2 alone, whose buffer they write to, and hide those of t-1.

    `traffic` says by stage what goes where: each piece of a leg is a message.
    """

    def __init__(
        self,
        plan: RankPlan,
        traffic: tuple[Traffic, ...],
        group: Group | None,
        direction: Direction,
        call_index: int,
        ledger: HopLedger,
        buffers: HopBuffers,
        partial_dtype: torch.dtype,
        *,
        coalesced: bool = False,
    ) -> None:
        self._schedule = plan.schedule
        self._cp_rank = plan.cp_rank
        self._plan = plan.stages
        self._traffic = traffic
        self._group = group
        self._direction = direction
        self._call_index = call_index
        self._ledger = ledger
        self._buffers = buffers
        self._partial_dtype = partial_dtype
        self._coalesced = coalesced
        self._sends: list[tuple[int, _HopMessage]] = []
        self._keys: dict[int, _Arrival] = {}
        self._partials: dict[int, _Arrival] = {}
        self._posting = 0

    def post_keys(self, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Start receiving the keys of stage `index` and sending what others want; k, v (B, S_local, Hkv, D)."""
        if index >= len(self._plan):
            return
        if not self._coalesced:
            self._settle_sends(before=index - 1)
        traffic, arrival = self._traffic[index], None
        if not (traffic.keys_in or traffic.keys_out):
            return
        if traffic.keys_in:
            buffer = self._buffer("keys", index, k, self._plan[index].num_tokens, k.dtype)
            arrival = self._keys[index] = _Arrival(buffer)
        with self._together(index, arrival, k.device):
            self._receive_all(arrival, traffic.keys_in, _KEYS)
            whole = (k.flatten(), v.flatten()) if self._coalesced and traffic.keys_out else ()
            for leg in traffic.keys_out:
                requested = () if self._coalesced else self._schedule.requested(self._cp_rank, leg.hop)
                self._send_all(leg, whole or (_pack(k, v, requested).view(-1),), _KEYS)

    def push_keys(self, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """The part of `post_keys` that may follow the launch of overlapping kernels. Nothing here."""

    def take_keys(self, index: int) -> torch.Tensor | None:
        """The packed K and V of stage `index`, or None when it needs none. Blocks until they have arrived."""
        return self._take(self._keys, index)

    def partials_buffer(self, index: int, k: torch.Tensor) -> torch.Tensor:
        """Where the kernels of stage `index` leave dK and dV of its keys, (2, B, n, Hkv, D). Not initialized."""
        self._settle_sends(before=index - 1)
        return self._buffer("partials", index, k, self._plan[index].num_tokens, self._partial_dtype)

    def swap_partials(self, index: int, partials: torch.Tensor | None, k: torch.Tensor) -> None:
        """Return stage `index`'s packed dK and dV to the keys' owners, and start receiving those of own keys."""
        traffic, arrival = self._traffic[index], None
        if not (traffic.partials_in or traffic.partials_out):
            return
        if traffic.partials_in:
            inbox = self._buffer("inbox", index, k, traffic.num_requested, self._partial_dtype)
            arrival = self._partials[index] = _Arrival(inbox)
        with self._together(index, arrival, k.device):
            self._receive_all(arrival, traffic.partials_in, _PARTIALS)
            for leg in traffic.partials_out:
                assert partials is not None
                self._send_all(leg, (partials.view(-1),), _PARTIALS)

    def take_partials(self, index: int) -> dict[int, torch.Tensor]:
        """By hop of stage `index`, the packed dK and dV for `schedule.requested(cp_rank, hop)`."""
        inbox = self._take(self._partials, index)
        return {} if inbox is None else self._by_hop(inbox, index)

    def finish(self) -> None:
        """Wait until the last buffer has left; the pass is over."""
        self._settle_sends(before=len(self._plan))
        assert not self._keys, sorted(self._keys)
        assert not self._partials, sorted(self._partials)

    def abandon(self) -> list[torch.Tensor]:
        """Drop the group and its works after an error; return the buffers of messages in flight.

        Works and group must not live as long as the error's traceback: they keep sockets open, and peers detect a
        failed rank by its closed sockets.
        """
        arrivals = (*self._keys.values(), *self._partials.values())
        messages = [message for _, message in self._sends]
        messages += [message for arrival in arrivals for message in arrival.messages]
        for message in messages:
            message.end.work = None
        self._group = None
        return [message.buffer for message in messages] + self._buffers.drop()

    def _by_hop(self, inbox: torch.Tensor, index: int) -> dict[int, torch.Tensor]:
        """The parts of a stage's inbox, each packed (2, B, n, Hkv, D), one after another."""
        parts = self._traffic[index].inbox
        if len(parts) == 1:
            return {parts[0][0]: inbox}
        per_token, at = inbox.numel() // inbox.size(2), 0
        found: dict[int, torch.Tensor] = {}
        for hop, num_tokens in parts:
            flat = inbox.view(-1)[at * per_token : (at + num_tokens) * per_token]
            found[hop] = flat.view(2, inbox.size(1), num_tokens, *inbox.shape[3:])
            at += num_tokens
        return found

    def _buffer(self, name: str, index: int, k: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (2, k.size(0), num_tokens, *k.shape[2:])
        if self._coalesced:
            return self._buffers.get(name, index % 2, shape, dtype, k.device)
        return torch.empty(shape, dtype=dtype)

    @contextmanager
    def _together(self, index: int, arrival: _Arrival | None, device: torch.device) -> Iterator[None]:
        """Where coalesced, one operation out of all that is sent and received inside."""
        self._posting = index
        if not self._coalesced:
            yield
            return
        first_send = len(self._sends)
        group = self._group
        assert group is not None
        backend: Any = group._get_backend(device) if hasattr(group, "_get_backend") else group
        with one_operation(backend) as works:
            yield
        end = _Completion(works[0])
        posted = [message for _, message in self._sends[first_send:]]
        posted += arrival.messages if arrival is not None else []
        for message in posted:
            message.end = end
        if arrival is not None and self._ledger.keep_events:
            hop = self._plan[index].hops[0]
            arrival.events = HopEvents(self._direction, hop, _now())

    def _receive_all(self, arrival: _Arrival | None, legs: tuple[PeerTransfer, ...], kind: int) -> None:
        flat = None if arrival is None else arrival.buffer.view(-1)
        for leg in legs:
            assert arrival is not None
            assert flat is not None
            for channel, piece in enumerate(leg.pieces):
                buffer = flat.narrow(0, piece.target, piece.size)
                arrival.messages.append(self._receive(leg.hop, 2 * channel + kind, leg.peer, buffer))

    def _send_all(self, leg: PeerTransfer, sources: tuple[torch.Tensor, ...], kind: int) -> None:
        for channel, piece in enumerate(leg.pieces):
            buffer = sources[piece.kind].narrow(0, piece.source, piece.size)
            self._send(leg.hop, 2 * channel + kind, leg.peer, buffer)

    def _send(self, hop: int, kind: int, peer: int, buffer: torch.Tensor) -> None:
        assert self._group is not None
        assert buffer.is_contiguous()
        work = self._group.send([buffer], peer, self._tag(hop, kind))
        self._ledger.sent_bytes[self._direction, hop] += buffer.nbytes
        assert work is not None or self._coalesced, "this rank is not in the group"
        self._sends.append((self._posting, _HopMessage(hop, buffer, _Completion(work))))

    def _receive(self, hop: int, kind: int, peer: int, buffer: torch.Tensor) -> _HopMessage:
        assert self._group is not None
        work = self._group.recv([buffer], peer, self._tag(hop, kind))
        assert work is not None or self._coalesced, "this rank is not in the group"
        return _HopMessage(hop, buffer, _Completion(work))

    def _take(self, arrivals: dict[int, _Arrival], index: int) -> torch.Tensor | None:
        arrival = arrivals.get(index)
        if arrival is None:
            return None
        if arrival.events is not None:
            self._watch(arrival.events, arrival.messages[0])
        for message in arrival.messages:
            self._wait(message)
            self._ledger.received_bytes[self._direction, message.hop] += message.buffer.nbytes
        if arrival.events is not None:
            arrival.events.had = _now()
            self._ledger.events.append(arrival.events)
        del arrivals[index]
        return arrival.buffer

    def _watch(self, events: HopEvents, message: _HopMessage) -> None:
        """Note on a stream of its own when the exchange has arrived, and that the kernels now want it."""
        assert message.end.work is not None
        with torch.cuda.stream(torch.cuda.Stream()):
            message.end.work.wait()
            events.arrived = _now()
        events.wanted = _now()

    def _settle_sends(self, before: int) -> None:
        early = [message for index, message in self._sends if index < before]
        for message in early:
            self._wait(message)
        if early:
            self._sends = [entry for entry in self._sends if entry[0] >= before]

    def _wait(self, message: _HopMessage) -> None:
        end = message.end
        if end.is_over:
            return
        assert end.work is not None
        with self._ledger.waiting(self._direction, message.hop):
            end.work.wait()
        end.is_over = True

    def _tag(self, hop: int, kind: int) -> int:
        number = hop_number(self._call_index, self._direction, self._schedule.cp, hop)
        return (number * _NUM_CHANNELS + kind) % NUM_TAGS


_NUM_CHANNELS = 64


def _now() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


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
