"""Moving K/V to the ranks that need them and dK/dV partials back to their owner, stage by stage.

One `HopExchange` serves one forward or backward pass of one attention call, under any pattern. It posts, waits, counts
bytes and hands out buffers, as its `ExchangePlan` says; kernels and merging stay outside. Errors of `Work.wait()`
(GroupAborted, PeerFailed, a backend's own) pass through; `abandon` then returns the buffers that the group may still
write to.

On a GPU the messages of one direction of a stage are one coalesced operation: NCCL serializes unbatched sends and
receives of one communicator, so two ranks that both receive first would deadlock. Waits are stream waits. Rows that are
gathered before they leave are gathered and posted on a side stream, so that a rank with much work on its own keys does
not delay those that wait for them; contiguous pieces leave from where they lie.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch

from elastic_ring.attention.comm import fp8
from elastic_ring.attention.comm.ledger import HopEvents, HopLedger
from elastic_ring.attention.plan.schedule import Direction
from elastic_ring.attention.plan.traffic import FETCHED, ExchangePlan, Frame, PeerTransfer

__all__ = ["Frame", "Group", "HopBuffers", "HopExchange", "HopLedger", "PendingWork"]

log = logging.getLogger(__name__)


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
        self.wire_error: fp8.WireError | None = None

    def get(
        self,
        name: str,
        slot: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        most: int = 0,
        start: int = 0,
    ) -> torch.Tensor:
        """A tensor of `shape`, from element `start` on, of a buffer with room for at least `most` elements."""
        stop = start + math.prod(shape)
        most = max(most, stop)
        kept = self._storages.get((name, slot, dtype))
        if kept is None or kept.numel() < most or kept.device != device:
            kept = self._storages[name, slot, dtype] = torch.empty(most, dtype=dtype, device=device)
        return kept[start:stop].view(shape)

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


def row_frame(k: torch.Tensor) -> Frame:
    """For rows of (token, K/V head) of keys like k (B, S_local, Hkv, D): K and V, or dK and dV, side by side."""
    return Frame((), (k.size(0), 2, k.size(3)), 2 * k.size(0) * k.size(3))


def token_frame(k: torch.Tensor, unit: int = 1) -> Frame:
    """For whole tokens: K, then V, (2, B, n, Hkv, D); pieces count in units of `unit` elements."""
    return Frame((2, k.size(0)), (k.size(2), k.size(3)), unit)


Wire = Literal["native", "fp8"]
"""How keys and values cross: in their own type, or as `fp8` encodes them."""


Pack = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called as pack(stage, buffer, k, v): gathers what others want of k and v in that stage into the buffer's rows."""


class _Form(NamedTuple):
    """How rows lie in a buffer."""

    frame: Frame
    dtype: torch.dtype


@dataclass(eq=False)
class _End:
    """The work of one message, or of all messages posted together. `is_over` on the kernels' stream, where a second
    wait would only cost host time."""

    work: PendingWork | None
    is_over: bool = False


@dataclass(eq=False)
class _Message:
    hop: int
    buffer: torch.Tensor
    end: _End


@dataclass(eq=False)
class _Operation:
    """What was posted together: the buffer that it fills, its messages, and its timing events."""

    buffer: torch.Tensor
    receives: list[_Message] = field(default_factory=list)
    sends: list[_Message] = field(default_factory=list)
    events: HopEvents | None = None


_KEYS, _PARTIALS = 0, 1
_MEASURED = 1 << 16
"""Vectors of the first keys that are encoded for the wire, whose error is measured."""
_NUM_TAGGED_CALLS, _NUM_CHANNELS, _NUM_TAGS = 1024, 64, 2**31 - 1


class HopExchange:
    """The messages of one pass. Stages count from 0, the first after a rank's own keys.

    Call `begin`, then for each stage, empty ones too, `take_keys`, `free_keys` and, in backward, `partials_buffer` and
    `swap_partials`; `free_keys(-1)` once the kernels on own keys are launched. Before `swap_partials` of a stage, what
    `take_partials` gave for the stage `plan.turns` earlier must have been read.

    Waits cannot form a cycle: a message waits only for messages that come earlier in an order common to all ranks. With
    `plan.late` it is K0 K1 K2 P0 K3 P1 ...: no post waits, and no keys queue behind partials that their owner waits
    for. Without, it is K0 K1 P0 K2 P1 ..., with K1 posted after K0 has arrived.

    `like` is k (B, S_local, Hkv, D). `frame` gives the buffers' shape. `pack` gathers what is sent, if `plan.packed`.
    With `keep`, fetched keys get memory of their own that outlives the pass. `wire` "fp8" needs `pack`: what is
    gathered is encoded, and what arrives decoded; partials cross as they are.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        frame: Frame,
        group: Group | None,
        direction: Direction,
        call_index: int,
        ledger: HopLedger,
        buffers: HopBuffers,
        like: torch.Tensor,
        partial_dtype: torch.dtype,
        *,
        pack: Pack | None = None,
        keep: bool = False,
        wire: Wire = "native",
    ) -> None:
        assert plan.packed == (pack is not None)
        assert pack is not None or wire == "native"
        self._plain, self._partials = _Form(frame, like.dtype), _Form(frame, partial_dtype)
        self._wire = _Form(fp8.wire_frame(frame), torch.uint8) if wire == "fp8" else self._plain
        self._plan = plan
        self._group = group
        self._direction = direction
        self._call_index = call_index
        self._ledger = ledger
        self._buffers = buffers
        self._like = like.detach()
        self._pack, self._keep = pack, keep
        self._posted: dict[tuple[int, int], _Operation] = {}
        # Kept until all posts are waited for: memory that is freed would be the kernels' stream's to reuse at once.
        self._source: tuple[torch.Tensor, ...] = ()
        self._first_keys: list[torch.Tensor] = []

    def begin(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Post the first stages: send what others want of k and v (B, S_local, Hkv, D), contiguous unless they are
        packed on a CPU, and receive this rank's keys."""
        if not self._plan.stages:
            return
        self._source = (k, v)
        # Allocate everything now: memory taken later may be in use by kernels that the side stream does not wait for.
        self._first_keys = [self._keys_buffer(i) for i in range(min(len(self._plan.key_slots), len(self._plan.stages)))]
        if self._pack is not None:
            for index in range(min(self._plan.send_slots, len(self._plan.stages))):
                self._served_buffer(index)
            self._wait_for_kernels()
        self._post_keys_until(self._plan.ahead - 1)

    def take_keys(self, index: int) -> torch.Tensor:
        """Wait for the fetched K and V of stage `index`, as `frame` shapes them."""
        keys = self._take(_KEYS, index)
        if self._encodes:
            arrived, num_rows = keys, self._plan.stages[index].num_fetched
            shape = self._plain.frame.shape(num_rows)
            most = max(self._plan.key_slots)
            keys = self._like.new_empty(shape) if self._keep else self._buffer("keys", 0, most, num_rows, self._plain)
            fp8.decode_(keys, arrived)
        if not self._plan.late:
            self._post_keys_until(index + self._plan.ahead)
        return keys

    def free_keys(self, index: int) -> None:
        """Call once the kernels that read the keys of stage `index` are launched: their buffer may be refilled."""
        if self._plan.late:
            self._post_keys_until(index + self._plan.ahead)

    def partials_buffer(self, index: int) -> torch.Tensor:
        """Wait until the slot's last partials have left; then it is the uninitialized buffer for dK and dV of the
        fetched keys of stage `index`, in the order of the keys."""
        turn = index % self._plan.turns
        self._settle(_PARTIALS, index - self._plan.turns)
        num_rows = self._plan.stages[index].num_fetched
        return self._buffer("partials", turn, self._plan.partial_slots[turn], num_rows, self._partials)

    def swap_partials(self, index: int, partials: torch.Tensor) -> None:
        """Post the sends of dK and dV of fetched keys to their owners, and the receives for own keys."""
        stage = self._plan.stages[index]
        inbox, sources = self._inbox_of(index), (partials.view(-1),)
        self._post(_PARTIALS, index, inbox, stage.partials_in, sources, stage.partials_out)

    def take_partials(self, index: int) -> torch.Tensor:
        """Wait for dK and dV of the own keys that stage `index` served, `num_served` rows as `frame` shapes them."""
        return self._take(_PARTIALS, index)

    @property
    def inbox(self) -> torch.Tensor:
        """The received dK and dV of the last stages, each at its `plan.inbox_rows`, as `frame` shapes them."""
        num_rows = sum(self._plan.inbox_slots)
        return self._buffer("inbox", 0, num_rows, num_rows, self._partials)

    def finish(self) -> None:
        """Wait until the last message has left; the pass is over."""
        for kind, index in list(self._posted):
            self._settle(kind, index)
        begun, self._source = bool(self._source), ()
        if begun and self._packs_beside and torch.cuda.is_current_stream_capturing():
            self._wait_for_gathering()  # a capture requires the side stream to be joined again

    def abandon(self) -> list[torch.Tensor]:
        """Drop the group and its works after an error; return the buffers of messages in flight.

        Works and group must not live as long as the error's traceback: they keep sockets open, and peers detect a
        failed rank by its closed sockets. On a GPU the kernels' stream waits for the gathers on the side stream, and
        those may wait for keys that never arrive: a device synchronization then blocks until the group is aborted.
        """
        in_flight = [operation.buffer for operation in self._posted.values()]
        for operation in self._posted.values():
            for message in (*operation.receives, *operation.sends):
                message.end.work = None
                in_flight.append(message.buffer)
        self._posted.clear()
        self._group = None
        if self._source and self._packs_beside:
            self._wait_for_gathering()  # the sources may be freed only after the gathers that read them
        self._source = ()
        self._first_keys.clear()
        return in_flight + self._buffers.drop()

    # ------------------------------------------------------------ keys and buffers

    def _post_keys_until(self, index: int) -> None:
        for stage in range(min(index + 1, len(self._plan.stages))):
            if (_KEYS, stage) not in self._posted:  # all stay there until `finish`
                self._post_keys(stage)

    def _post_keys(self, index: int) -> None:
        """Send the rows requested in stage `index`, gathered or from where they lie, and receive its keys."""
        assert self._source, "a pass begins with `begin`"
        stage, first = self._plan.stages[index], self._first_keys
        fetched = first[index] if index < len(first) else self._keys_buffer(index)
        before = self._forwarded(index)
        if self._pack is None:
            sources = (*(x.flatten() for x in self._source), before) if stage.keys_out else ()
            self._post(_KEYS, index, fetched, stage.keys_in, sources, stage.keys_out)
            return
        served = self._served_buffer(index)
        refills = index >= len(self._plan.key_slots) and bool(stage.keys_in)  # overwrites a buffer that kernels read
        with self._beside(after_kernels=refills):
            self._wait_sent(_KEYS, index - self._plan.send_slots)  # the send buffer is about to be refilled
            if any(piece.kind != FETCHED for leg in stage.keys_out for piece in leg.pieces):
                self._fill(index, served)
            sources = (served.view(-1), served.view(-1), before)
            self._post(_KEYS, index, fetched, stage.keys_in, sources, stage.keys_out)

    def _forwarded(self, index: int) -> torch.Tensor:
        """The keys of the stage before, for peers on this host; they have arrived, or do before what is posted next
        leaves. On a GPU the order of operations also keeps them until they have left."""
        if not self._plan.far or not index:
            return self._like.new_empty(0)
        refilled = index - len(self._plan.key_slots) + 1  # forwards out of the buffer that is about to be refilled
        if not self._plan.coalesced and refilled >= 0:
            legs = self._plan.stages[refilled].keys_out
            if any(piece.kind == FETCHED for leg in legs for piece in leg.pieces):
                self._wait_sent(_KEYS, refilled)
        return self._posted[_KEYS, index - 1].buffer.view(-1)

    def _fill(self, index: int, served: torch.Tensor) -> None:
        """Gather the keys that others want in stage `index`, encoded if the wire is."""
        assert self._pack is not None
        if not self._encodes:
            self._pack(index, served, *self._source)
            return
        plain = self._buffer("plain", 0, max(self._plan.served_slots), self._plan.stages[index].num_served, self._plain)
        self._pack(index, plain, *self._source)
        fp8.encode_(served, plain)
        if self._buffers.wire_error is None:
            first = (x.flatten(0, -2)[:_MEASURED] for x in (plain, served))
            self._buffers.wire_error = found = fp8.measured(*first)
            log.info("keys cross as fp8: worst error %.4f of a vector's largest, rms %.4f", found.worst, found.rms)
        self._ledger.wire_error = self._buffers.wire_error

    def _served_buffer(self, index: int) -> torch.Tensor:
        slot, plan = index % self._plan.send_slots, self._plan
        most, num_rows = plan.served_slots[slot], plan.stages[index].num_served
        return self._buffer("served", slot, most, num_rows, self._wire)

    def _keys_buffer(self, index: int) -> torch.Tensor:
        num_rows, slots = self._plan.stages[index].num_fetched, self._plan.key_slots
        if self._keep and not self._encodes:
            return self._like.new_empty(self._plain.frame.shape(num_rows))
        slot = index % len(slots)
        return self._buffer("keys", slot, slots[slot], num_rows, self._wire)

    def _inbox_of(self, index: int) -> torch.Tensor:
        start, stop = self._plan.inbox_rows(index)
        return self._buffer("inbox", 0, sum(self._plan.inbox_slots), stop - start, self._partials, start)

    def _buffer(self, name: str, slot: int, most: int, num_rows: int, form: _Form, first: int = 0) -> torch.Tensor:
        """`num_rows` from row `first` on of a shared buffer, allocated for the `most` rows that any stage uses."""
        shape, row = form.frame.shape(num_rows), form.frame.row
        return self._buffers.get(name, slot, shape, form.dtype, self._like.device, most * row, first * row)

    # ------------------------------------------------------------ posting and waiting

    def _post(
        self,
        kind: int,
        index: int,
        inbox: torch.Tensor,
        incoming: tuple[PeerTransfer, ...],
        sources: tuple[torch.Tensor, ...],
        outgoing: tuple[PeerTransfer, ...],
    ) -> None:
        operation = self._posted[kind, index] = _Operation(inbox)
        if not (incoming or outgoing):
            return
        unit, flat = (self._wire if kind == _KEYS else self._plain).frame.unit, inbox.view(-1)
        with self._together(operation):
            for leg in incoming:
                for channel, piece in enumerate(leg.pieces):
                    part = flat.narrow(0, piece.target * unit, piece.size * unit)
                    operation.receives.append(self._receive(leg.hop, 2 * channel + kind, leg.peer, part))
            for leg in outgoing:
                for channel, piece in enumerate(leg.pieces):
                    part = sources[piece.kind].narrow(0, piece.source * unit, piece.size * unit)
                    operation.sends.append(self._send(leg.hop, 2 * channel + kind, leg.peer, part))

    @contextmanager
    def _together(self, operation: _Operation) -> Iterator[None]:
        """Where coalesced, one operation out of all that is sent and received inside."""
        if not self._plan.coalesced:
            yield
            return
        backend: Any = self._group
        backend = backend._get_backend(self._like.device) if hasattr(backend, "_get_backend") else backend
        with one_operation(backend) as works:
            yield
        end = _End(works[0])
        for message in (*operation.receives, *operation.sends):
            message.end = end
        if operation.receives and self._ledger.keep_events:
            operation.events = HopEvents(self._direction, operation.receives[0].hop, _now())

    def _send(self, hop: int, kind: int, peer: int, buffer: torch.Tensor) -> _Message:
        assert self._group is not None
        work = self._group.send([buffer], peer, self._tag(hop, kind))
        self._ledger.sent_bytes[self._direction, hop] += buffer.nbytes
        if peer in self._plan.far:
            self._ledger.far_sent_bytes[self._direction, hop] += buffer.nbytes
        assert work is not None or self._plan.coalesced, "this rank is not in the group"
        return _Message(hop, buffer, _End(work))

    def _receive(self, hop: int, kind: int, peer: int, buffer: torch.Tensor) -> _Message:
        assert self._group is not None
        work = self._group.recv([buffer], peer, self._tag(hop, kind))
        assert work is not None or self._plan.coalesced, "this rank is not in the group"
        return _Message(hop, buffer, _End(work))

    def _take(self, kind: int, index: int) -> torch.Tensor:
        operation = self._posted[kind, index]
        if operation.events is not None:
            self._watch(operation.events, operation.receives[0])
        for message in operation.receives:
            self._wait(message)
            self._ledger.received_bytes[self._direction, message.hop] += message.buffer.nbytes
        operation.receives = []
        if operation.events is not None:
            operation.events.had = _now()
            self._ledger.events.append(operation.events)
        return operation.buffer

    def _watch(self, events: HopEvents, message: _Message) -> None:
        """Note on a stream of its own when the exchange has arrived, and that the kernels now want it."""
        assert message.end.work is not None
        with torch.cuda.stream(torch.cuda.Stream()):
            message.end.work.wait()
            events.arrived = _now()
        events.wanted = _now()

    def _settle(self, kind: int, index: int) -> None:
        """Wait until this operation's messages have left, and drop it."""
        operation = self._posted.get((kind, index))
        if operation is None:
            return
        assert not operation.receives, "something was posted and never taken"
        for message in operation.sends:
            self._wait(message)
        del self._posted[kind, index]

    def _wait_sent(self, kind: int, index: int) -> None:
        """Make the stream that gathers wait until this operation's messages have left."""
        operation = self._posted.get((kind, index))
        if operation is not None:
            for message in operation.sends[:1] if self._plan.coalesced else operation.sends:
                self._wait(message, beside=self._plan.coalesced)

    def _wait(self, message: _Message, *, beside: bool = False) -> None:
        end = message.end
        if end.is_over and not beside:
            return
        assert end.work is not None
        with self._ledger.waiting(self._direction, message.hop):
            end.work.wait()
        end.is_over = end.is_over or not beside

    # ------------------------------------------------------------ the side stream

    @property
    def _encodes(self) -> bool:
        return self._wire is not self._plain

    @property
    def _packs_beside(self) -> bool:
        return self._pack is not None and self._like.is_cuda

    @contextmanager
    def _beside(self, *, after_kernels: bool = False) -> Iterator[None]:
        """Run the body on the side stream on a GPU. The side stream waits for the kernels launched so far only with
        `after_kernels`. Waiting for a message posted inside also waits for its gather."""
        if not self._like.is_cuda:
            yield
            return
        if after_kernels:
            self._wait_for_kernels()
        # Like `torch.cuda.stream`, which looks up the device twice. The current device is the tensors'.
        kernels = torch.cuda.current_stream(self._like.device.index)
        torch.cuda.set_stream(self._buffers.stream(self._like.device))
        try:
            yield
        finally:
            torch.cuda.set_stream(kernels)

    def _wait_for_gathering(self) -> None:
        """Make the kernels' stream wait for the side stream."""
        torch.cuda.current_stream(self._like.device).wait_stream(self._buffers.stream(self._like.device))

    def _wait_for_kernels(self) -> None:
        """Make the side stream wait for the kernels launched so far."""
        if self._like.is_cuda:
            kernels = torch.cuda.current_stream(self._like.device.index)
            self._buffers.stream(self._like.device).wait_stream(kernels)

    def _tag(self, hop: int, kind: int) -> int:
        """Equal on both ranks, different for other calls, passes, hops and messages, so that a late one is not
        matched."""
        call = self._call_index % _NUM_TAGGED_CALLS * 2 + (self._direction == "backward")
        return ((call * self._plan.cp + hop) * _NUM_CHANNELS + kind) % _NUM_TAGS


def _now() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
