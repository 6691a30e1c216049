"""The exchange of one pass of a sparse ring whose fetched keys meet the queries stage by stage: packed all-to-all-v.

All that a rank receives in a stage lands where one kernel call reads it; all that it sends is gathered before, in one
go and, on a GPU, beside the kernels. There the messages of a direction are one coalesced operation and a wait is a
wait of the stream, as in `exchange`; the keys that a rank serves wait for its own kernels only where what it fetches
with them takes the place of what these read, so that one with much to compute on its own keys serves those that have
little. What is returned comes into an inbox of three parts, which stages take in turn. No kernel and no merging may
enter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_ring.attention.device_blocks import DeviceBlocks
from elastic_ring.attention.exchange import (
    NUM_TAGGED_CALLS,
    NUM_TAGS,
    Group,
    HopBuffers,
    HopLedger,
    _now,
    hop_number,
    one_operation,
)
from elastic_ring.attention.ledger import HopEvents
from elastic_ring.attention.packing import gather_rows_
from elastic_ring.attention.schedule import Direction
from elastic_ring.attention.sparse_blocks import NUM_TURNS, BlockStage, Message

_KEYS, _PARTIALS = 0, 1


@dataclass(eq=False)
class _Operation:
    """What was posted together: the works that end with an arrival, by hop, and those that end with the sends."""

    buffer: torch.Tensor
    receives: list[tuple[int, Any]] = field(default_factory=list)
    sends: list[tuple[int, Any]] = field(default_factory=list)
    received_bytes: dict[int, int] = field(default_factory=dict)
    events: HopEvents | None = None
    is_over: bool = False  # for the kernels' stream


class PackedExchange:
    """Buffers are (rows, B, 2, D), of each row K and V, or dK and dV, side by side; a message is a run of rows.

    Stages count from 0. Keys have two buffers, partials three and the inbox as many parts, which the stages take in
    turn, and what is served has one: after `begin`, for each stage `take_keys`, `free_keys` and in backward
    `swap_partials`, and before them, in backward, what the `take_partials` of the stage NUM_TURNS before gave must have
    been read. Everywhere the order of
    posts is K0 K1 K2 P0 K3 P1 ... where messages are coalesced, and so no post waits: nobody's keys stand behind
    partials that their owner waits for. Else it is K0 K1 P0 K2 P1 ..., K1 behind the arrival of K0. No cycle of waits
    can form, because whoever posts something waits only for what comes before it in this order, which all ranks have
    posted by then or post without waiting for later ones.

    `like` is k (B, S_local, Hkv, D). With `keep` keys get memory of their own, which outlives the pass. `coalesced`
    posts the messages of a direction as one operation, which NCCL needs and gloo does not know. After an error
    `abandon` hands over the buffers that the group may still write to.
    """

    def __init__(
        self,
        blocks: DeviceBlocks,
        cp: int,
        group: Group | None,
        direction: Direction,
        call_index: int,
        ledger: HopLedger,
        buffers: HopBuffers,
        like: torch.Tensor,
        partial_dtype: torch.dtype,
        *,
        keep: bool,
        coalesced: bool,
    ) -> None:
        self._blocks = blocks
        self._cp = cp
        self._group = group
        self._direction = direction
        self._call_index = call_index
        self._ledger = ledger
        self._buffers = buffers
        self._like = like.detach()
        self.partial_dtype = partial_dtype
        self._keep = keep
        self._coalesced = coalesced
        self._posted: dict[tuple[int, int], _Operation] = {}
        # What is gathered from, until all that was posted is waited for: memory that is let go is free for the kernels'
        # stream at once.
        self._source: tuple[torch.Tensor, torch.Tensor] | None = None
        self._first_keys: list[torch.Tensor] = []

    @property
    def keeps(self) -> bool:
        return self._keep

    def begin(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Start sending what others want of k, v (B, S_local, Hkv, D), contiguous, and receiving ours."""
        stages = self._blocks.stages
        if not stages:
            return
        self._source = (k, v)
        self._first_keys = [self._keys_buffer(index) for index in range(min(2, len(stages)))]
        # All of it now: memory that is taken later may be in use by kernels which the stream beside does not wait for.
        self._served_buffer(0)
        self._wait_for_kernels()
        for index in range(2 if self._coalesced else 1):
            self._post_keys(index)

    def take_keys(self, index: int) -> torch.Tensor:
        """The fetched K and V of stage `index`, (rows, B, 2, D). Blocks until they have arrived."""
        keys = self._take(_KEYS, index)
        if not self._coalesced:
            self._post_keys(index + 1)
        return keys

    def free_keys(self, index: int) -> None:
        """The kernels that read the keys of stage `index` are launched: others may come in their place."""
        if self._coalesced:
            self._post_keys(index + 2)

    def partials_buffer(self, index: int) -> torch.Tensor:
        """Where dK and dV of the fetched keys of stage `index` go, in the order of these. Not initialized."""
        self._settle(_PARTIALS, index - NUM_TURNS)
        num_rows = self._blocks.stages[index].plan.num_fetched_rows
        return self._buffer("partials", index % NUM_TURNS, NUM_TURNS, num_rows, _fetched, self.partial_dtype)

    def swap_partials(self, index: int, partials: torch.Tensor) -> None:
        """Start returning dK and dV of the fetched keys to their owners, and receiving those of the served rows."""
        plan, inbox = self._blocks.stages[index].plan, self.inbox[slice(*self._blocks.plan.inbox_rows(index))]
        self._post(_PARTIALS, index, inbox, plan.served, partials, plan.fetched)

    @property
    def inbox(self) -> torch.Tensor:
        """(rows, B, 2, D): what was taken of the last stages, each at its `inbox_rows`."""
        shape = (self._blocks.plan.num_inbox_rows, *self._row)
        return self._buffers.get("inbox", 0, shape, self.partial_dtype, self._like.device)

    def take_partials(self, index: int) -> torch.Tensor:
        """dK and dV of the served rows of stage `index`, (rows, B, 2, D). Blocks until they have arrived."""
        return self._take(_PARTIALS, index)

    def finish(self) -> None:
        """Wait until the last buffer has left; the pass is over."""
        for kind, index in list(self._posted):
            self._settle(kind, index)
        begun, self._source = self._source is not None, None
        if begun and self._like.is_cuda and torch.cuda.is_current_stream_capturing():
            # All that ran there has been waited for; a graph wants to see the stream itself come back.
            self._wait_for_gathering()

    def abandon(self) -> list[torch.Tensor]:
        """Give up after an error: let go of the group and its works, return the buffers of those under way. On a GPU
        the kernels' stream waits for what is gathered beside it, and that for keys which may never come: whoever then
        waits for the device does so until the group is aborted."""
        buffers = [operation.buffer for operation in self._posted.values()]
        self._posted.clear()
        self._group = None
        # What was gathered there must not outlive what it was gathered from.
        if self._source is not None and self._like.is_cuda:
            self._wait_for_gathering()
        self._source = None
        self._first_keys.clear()
        return buffers + self._buffers.drop()

    def _post_keys(self, index: int) -> None:
        """Gather what others want in stage `index`, send it, receive ours. Nothing where there is no such stage."""
        if index >= len(self._blocks.stages):
            return
        assert self._source is not None, "a pass begins with `begin`"
        stage = self._blocks.stages[index]
        fetched = self._first_keys[index] if index < 2 else self._keys_buffer(index)
        served = self._served_buffer(index)
        refills = index >= 2 and bool(stage.plan.fetched)  # what kernels read
        with self._beside(after_kernels=refills):
            if index > 0:
                self._wait_sent(_KEYS, index - 1)  # from the place of what is gathered now
            if stage.plan.num_served_rows:
                gather_rows_(served, *self._source, stage.served_rows)
            self._post(_KEYS, index, fetched, stage.plan.fetched, served, stage.plan.served)

    def _served_buffer(self, index: int) -> torch.Tensor:
        return self._buffer("served", 0, 1, self._num_served_rows(index), _served, self._like.dtype)

    def _num_served_rows(self, index: int) -> int:
        return self._blocks.stages[index].plan.num_served_rows

    def _keys_buffer(self, index: int) -> torch.Tensor:
        num_rows = self._blocks.stages[index].plan.num_fetched_rows
        if self._keep:
            return self._like.new_empty((num_rows, *self._row))
        return self._buffer("keys", index % 2, 2, num_rows, _fetched, self._like.dtype)

    @property
    def _row(self) -> tuple[int, int, int]:
        return self._like.size(0), 2, self._like.size(3)

    def _buffer(
        self, name: str, slot: int, num_slots: int, num_rows: int, of: Callable[[BlockStage], int], dtype: torch.dtype
    ) -> torch.Tensor:
        """As large at once as any of the stages that share it will ask for."""
        most = self._blocks.plan.most_rows(of, slot, num_slots)
        return self._buffers.get(name, slot, (most, *self._row), dtype, self._like.device)[:num_rows]

    @contextmanager
    def _beside(self, *, after_kernels: bool = False) -> Iterator[None]:
        """On a GPU, a stream of its own, which waits for the kernels launched so far only if told to. Whoever waits for
        what is posted here waits for the gathering."""
        if not self._like.is_cuda:
            yield
            return
        if after_kernels:
            self._wait_for_kernels()
        # As torch's context does, which asks for the device twice on its way. The current device is the tensors'.
        kernels = torch.cuda.current_stream(self._like.device.index)
        torch.cuda.set_stream(self._buffers.stream(self._like.device))
        try:
            yield
        finally:
            torch.cuda.set_stream(kernels)

    def _wait_for_gathering(self) -> None:
        """The kernels launched from now on run after what is on the stream beside."""
        torch.cuda.current_stream(self._like.device).wait_stream(self._buffers.stream(self._like.device))

    def _wait_for_kernels(self) -> None:
        """What is put on the stream beside from now on runs after the kernels launched so far."""
        if self._like.is_cuda:
            kernels = torch.cuda.current_stream(self._like.device.index)
            self._buffers.stream(self._like.device).wait_stream(kernels)

    def _post(
        self,
        kind: int,
        index: int,
        inbox: torch.Tensor,
        incoming: tuple[Message, ...],
        outbox: torch.Tensor,
        outgoing: tuple[Message, ...],
    ) -> None:
        operation = self._posted[kind, index] = _Operation(inbox)
        group = self._group
        if group is None or not (incoming or outgoing):
            return
        with self._together(operation, inbox.device):
            for message, channel in _numbered(incoming):
                piece = inbox[message.start : message.stop]
                work = group.recv([piece], message.peer, self._tag(message.hop, channel, kind))
                operation.receives.append((message.hop, work))
                operation.received_bytes[message.hop] = operation.received_bytes.get(message.hop, 0) + piece.nbytes
            for message, channel in _numbered(outgoing):
                piece = outbox[message.start : message.stop]
                work = group.send([piece], message.peer, self._tag(message.hop, channel, kind))
                operation.sends.append((message.hop, work))
                self._ledger.sent_bytes[self._direction, message.hop] += piece.nbytes

    @contextmanager
    def _together(self, operation: _Operation, device: torch.device) -> Iterator[None]:
        """Where coalesced, one operation out of all that is posted inside."""
        if not self._coalesced:
            yield
            return
        backend: Any = self._group
        backend = backend._get_backend(device) if hasattr(backend, "_get_backend") else backend
        with one_operation(backend) as works:
            yield
        self._as_one(operation, works[0])

    def _as_one(self, operation: _Operation, work: Any) -> None:
        """The works of single messages are none on NCCL; what ends them all is `work`."""
        hops = [hop for hop, _ in operation.receives]
        sent = [hop for hop, _ in operation.sends]
        operation.receives = [(hops[0], work)] if hops else []
        operation.sends = [((sent or hops)[0], work)]
        if hops and self._ledger.keep_events:
            operation.events = HopEvents(self._direction, hops[0], _now())

    def _settle(self, kind: int, index: int) -> None:
        """Wait until what was posted so has left, and forget it."""
        if (kind, index) in self._posted:
            assert not self._posted[kind, index].receives, "something was posted and never taken"
            if not self._posted[kind, index].is_over:
                self._wait_sent(kind, index)
            del self._posted[kind, index]

    def _wait_sent(self, kind: int, index: int) -> None:
        operation = self._posted[kind, index]
        for hop, work in operation.sends:
            self._wait(hop, work)
        if not self._coalesced:  # gloo's end once; a coalesced one is waited for by each stream that needs it
            operation.sends = []

    def _take(self, kind: int, index: int) -> torch.Tensor:
        operation = self._posted[kind, index]
        if operation.events is not None:
            self._watch(operation.events, operation.receives[0][1])
        for hop, work in operation.receives:
            self._wait(hop, work)
            operation.is_over = self._coalesced  # what ends the receives ends the sends
        operation.receives = []
        for hop, num_bytes in operation.received_bytes.items():
            self._ledger.received_bytes[self._direction, hop] += num_bytes
        if operation.events is not None:
            operation.events.had = _now()
            self._ledger.events.append(operation.events)
        return operation.buffer

    def _watch(self, events: HopEvents, work: Any) -> None:
        """Note on a stream of its own when the exchange has arrived, and that the kernels now want it."""
        with torch.cuda.stream(torch.cuda.Stream()):
            work.wait()
            events.arrived = _now()
        events.wanted = _now()

    def _wait(self, hop: int, work: Any) -> None:
        assert work is not None, "this rank is not in the group"
        with self._ledger.waiting(self._direction, hop):
            work.wait()

    def _tag(self, hop: int, channel: int, kind: int) -> int:
        number = hop_number(self._call_index, self._direction, self._cp, hop) * 2 + kind
        return (channel * 4 * self._cp * NUM_TAGGED_CALLS + number) % NUM_TAGS


def _numbered(messages: tuple[Message, ...]) -> Iterator[tuple[Message, int]]:
    """Each with its number among those of its hop. Both sides of a hop number alike: sizes of head groups in
    their order."""
    numbers: dict[int, int] = {}
    for message in messages:
        number = numbers[message.hop] = numbers.get(message.hop, -1) + 1
        yield message, number


def _fetched(stage: BlockStage) -> int:
    return stage.num_fetched_rows


def _served(stage: BlockStage) -> int:
    return stage.num_served_rows
