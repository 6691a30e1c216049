"""The exchange of one pass of a staged sparse ring: packed all-to-all-v.

The messages of a stage arrive in the buffer that one kernel call reads; what a rank sends is gathered first, in one
launch, on a GPU on a side stream. There the messages of one direction are one coalesced operation, and a wait blocks
the stream, not the host, as in `exchange`. Serving keys waits for this rank's kernels only if the stage's receives
overwrite a buffer that those kernels read, so a rank with much work on its own keys does not delay the others. dK and
dV arrive in an inbox of `NUM_TURNS` slots, which stages use in rotation. Kernels and merging must not enter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_ring.attention.comm.exchange import (
    NUM_TAGGED_CALLS,
    NUM_TAGS,
    Group,
    HopBuffers,
    HopLedger,
    _now,
    hop_number,
    one_operation,
)
from elastic_ring.attention.comm.ledger import HopEvents
from elastic_ring.attention.comm.packing import gather_rows_
from elastic_ring.attention.plan.device_blocks import DeviceBlocks
from elastic_ring.attention.plan.schedule import Direction
from elastic_ring.attention.plan.sparse_blocks import NUM_TURNS, BlockStage, StageMessage

_KEYS, _PARTIALS = 0, 1


@dataclass(eq=False)
class _Operation:
    """Messages posted together: the works to wait for, by hop, for the receives and for the sends."""

    buffer: torch.Tensor
    receives: list[tuple[int, Any]] = field(default_factory=list)
    sends: list[tuple[int, Any]] = field(default_factory=list)
    received_bytes: dict[int, int] = field(default_factory=dict)
    events: HopEvents | None = None
    is_over: bool = False  # on the kernels' stream


class PackedExchange:
    """Exchanges keys, and dK and dV, stage by stage through shared buffers (rows, B, 2, D), in which K and V (or dK and
    dV) are adjacent. A message is a range of rows.

    Stages count from 0. Buffers, in rotation: 2 for K/V, `NUM_TURNS` for dK/dV, `NUM_TURNS` inbox slots, 1 for sends.
    Call `begin`, then for each stage `take_keys`, `free_keys` and, in backward, `swap_partials`. Before `swap_partials`
    of a stage, the result of `take_partials` for the stage `NUM_TURNS` earlier must have been read.

    Waits cannot form a cycle: a message waits only for messages that come earlier in an order common to all ranks. With
    coalescing it is K0 K1 K2 P0 K3 P1 ...: no post waits, and no keys queue behind partials that their owner waits for.
    Without, it is K0 K1 P0 K2 P1 ..., with K1 posted after K0 has arrived.

    `like` is k (B, S_local, Hkv, D). With `keep`, fetched keys get memory of their own that outlives the pass.
    `coalesced` posts the messages of one direction as one operation: NCCL needs it, gloo does not support it. After an
    error `abandon` returns the buffers that the group may still write to.
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
        # Sources of the gathers, kept until all posts are waited for: freed memory would be reusable by the kernels'
        # stream at once.
        self._source: tuple[torch.Tensor, torch.Tensor] | None = None
        self._first_keys: list[torch.Tensor] = []

    @property
    def keeps(self) -> bool:
        return self._keep

    def begin(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Post the first stages: send the requested rows of k, v (B, S_local, Hkv, D), contiguous, and receive this
        rank's keys."""
        stages = self._blocks.stages
        if not stages:
            return
        self._source = (k, v)
        self._first_keys = [self._keys_buffer(index) for index in range(min(2, len(stages)))]
        # Allocate everything now: memory taken later may be in use by kernels that the side stream does not wait for.
        self._served_buffer(0)
        self._wait_for_kernels()
        for index in range(2 if self._coalesced else 1):
            self._post_keys(index)

    def take_keys(self, index: int) -> torch.Tensor:
        """Wait for the fetched K and V of stage `index`, (rows, B, 2, D)."""
        keys = self._take(_KEYS, index)
        if not self._coalesced:
            self._post_keys(index + 1)
        return keys

    def free_keys(self, index: int) -> None:
        """Allow the key buffer of stage `index` to be refilled. Call once the kernels that read it are launched."""
        if self._coalesced:
            self._post_keys(index + 2)

    def partials_buffer(self, index: int) -> torch.Tensor:
        """The uninitialized buffer for dK and dV of the fetched keys of stage `index`, in the order of the keys."""
        self._settle(_PARTIALS, index - NUM_TURNS)
        num_rows = self._blocks.stages[index].plan.num_fetched_rows
        return self._buffer("partials", index % NUM_TURNS, NUM_TURNS, num_rows, _fetched, self.partial_dtype)

    def swap_partials(self, index: int, partials: torch.Tensor) -> None:
        """Post the sends of dK and dV of the fetched keys to their owners, and the receives of those of the served
        rows."""
        plan, inbox = self._blocks.stages[index].plan, self.inbox[slice(*self._blocks.plan.inbox_rows(index))]
        self._post(_PARTIALS, index, inbox, plan.served, partials, plan.fetched)

    @property
    def inbox(self) -> torch.Tensor:
        """(rows, B, 2, D): the received dK and dV of the last stages, each at its `inbox_rows`."""
        shape = (self._blocks.plan.num_inbox_rows, *self._row)
        return self._buffers.get("inbox", 0, shape, self.partial_dtype, self._like.device)

    def take_partials(self, index: int) -> torch.Tensor:
        """Wait for dK and dV of the served rows of stage `index`, (rows, B, 2, D)."""
        return self._take(_PARTIALS, index)

    def finish(self) -> None:
        """Wait until all sends are complete. Ends the pass."""
        for kind, index in list(self._posted):
            self._settle(kind, index)
        begun, self._source = self._source is not None, None
        if begun and self._like.is_cuda and torch.cuda.is_current_stream_capturing():
            # A capture requires the side stream to be joined again.
            self._wait_for_gathering()

    def abandon(self) -> list[torch.Tensor]:
        """Drop the group and its works after an error. Returns the buffers still in flight.

        On a GPU the kernels' stream waits for the gathers on the side stream, and those may wait for keys that never
        arrive: a device synchronization then blocks until the group is aborted.
        """
        buffers = [operation.buffer for operation in self._posted.values()]
        self._posted.clear()
        self._group = None
        # The sources may be freed only after the gathers that read them.
        if self._source is not None and self._like.is_cuda:
            self._wait_for_gathering()
        self._source = None
        self._first_keys.clear()
        return buffers + self._buffers.drop()

    def _post_keys(self, index: int) -> None:
        """Gather and send the rows requested in stage `index`, and receive its keys. No-op past the last stage."""
        if index >= len(self._blocks.stages):
            return
        assert self._source is not None, "a pass begins with `begin`"
        stage = self._blocks.stages[index]
        fetched = self._first_keys[index] if index < 2 else self._keys_buffer(index)
        served = self._served_buffer(index)
        refills = index >= 2 and bool(stage.plan.fetched)  # overwrites a buffer that kernels read
        with self._beside(after_kernels=refills):
            if index > 0:
                self._wait_sent(_KEYS, index - 1)  # the send buffer is about to be refilled
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
        """A shared buffer, allocated at the largest size that any stage using it needs."""
        most = self._blocks.plan.most_rows(of, slot, num_slots)
        return self._buffers.get(name, slot, (most, *self._row), dtype, self._like.device)[:num_rows]

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

    def _post(
        self,
        kind: int,
        index: int,
        inbox: torch.Tensor,
        incoming: tuple[StageMessage, ...],
        outbox: torch.Tensor,
        outgoing: tuple[StageMessage, ...],
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
        """Coalesce all messages posted inside into one operation, if enabled."""
        if not self._coalesced:
            yield
            return
        backend: Any = self._group
        backend = backend._get_backend(device) if hasattr(backend, "_get_backend") else backend
        with one_operation(backend) as works:
            yield
        self._merge_works(operation, works[0])

    def _merge_works(self, operation: _Operation, work: Any) -> None:
        """Replace the works of single messages, which are None on NCCL, by the work of the whole operation."""
        hops = [hop for hop, _ in operation.receives]
        sent = [hop for hop, _ in operation.sends]
        operation.receives = [(hops[0], work)] if hops else []
        operation.sends = [((sent or hops)[0], work)]
        if hops and self._ledger.keep_events:
            operation.events = HopEvents(self._direction, hops[0], _now())

    def _settle(self, kind: int, index: int) -> None:
        """Wait until this operation's sends are complete, and drop it."""
        if (kind, index) in self._posted:
            assert not self._posted[kind, index].receives, "something was posted and never taken"
            if not self._posted[kind, index].is_over:
                self._wait_sent(kind, index)
            del self._posted[kind, index]

    def _wait_sent(self, kind: int, index: int) -> None:
        operation = self._posted[kind, index]
        for hop, work in operation.sends:
            self._wait(hop, work)
        if not self._coalesced:  # a gloo work is waited for once; a coalesced one by each stream that needs it
            operation.sends = []

    def _take(self, kind: int, index: int) -> torch.Tensor:
        operation = self._posted[kind, index]
        if operation.events is not None:
            self._watch(operation.events, operation.receives[0][1])
        for hop, work in operation.receives:
            self._wait(hop, work)
            operation.is_over = self._coalesced  # the receives and the sends are one operation
        operation.receives = []
        for hop, num_bytes in operation.received_bytes.items():
            self._ledger.received_bytes[self._direction, hop] += num_bytes
        if operation.events is not None:
            operation.events.had = _now()
            self._ledger.events.append(operation.events)
        return operation.buffer

    def _watch(self, events: HopEvents, work: Any) -> None:
        """Record on a separate stream when the messages arrived, and on the kernels' stream when they were needed."""
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


def _numbered(messages: tuple[StageMessage, ...]) -> Iterator[tuple[StageMessage, int]]:
    """Each message with its number among those of its hop. Both sides of a hop number them alike, by size of head
    group."""
    numbers: dict[int, int] = {}
    for message in messages:
        number = numbers[message.hop] = numbers.get(message.hop, -1) + 1
        yield message, number


def _fetched(stage: BlockStage) -> int:
    return stage.num_fetched_rows


def _served(stage: BlockStage) -> int:
    return stage.num_served_rows
