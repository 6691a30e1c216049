"""The exchange of one pass of a sparse ring whose fetched keys are wanted all at once: a packed all-to-all-v.

All that a rank receives lands where one kernel call reads it; all that it sends is gathered before, in one go. On a
GPU the messages of a direction are one coalesced operation and a wait is a wait of the stream, as in `exchange`. No
kernel and no merging may enter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_ring.attention.exchange import Group, HopBuffers, HopLedger, _now
from elastic_ring.attention.ledger import HopEvents
from elastic_ring.attention.schedule import Direction
from elastic_ring.attention.sparse_blocks import DeviceBlocks, Message

_KEYS, _PARTIALS = 0, 1
_NUM_TAGGED_CALLS = 1024
_NUM_TAGS = 2**31 - 1


@dataclass(eq=False)
class _Operation:
    """What was posted together: the works that end with an arrival, by hop, and those of what was sent."""

    buffer: torch.Tensor
    receives: list[tuple[int, Any]] = field(default_factory=list)
    sends: list[tuple[int, Any]] = field(default_factory=list)
    received_bytes: dict[int, int] = field(default_factory=dict)
    events: HopEvents | None = None


class PackedExchange:
    """Buffers are (2, B, rows, D): K then V, or dK then dV; a message is the rows of one sequence of one of them.

    `coalesced` posts the messages of a direction as one operation, which NCCL needs and gloo does not know. After an
    error `abandon` hands over the buffers that the group may still write to.
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
        partial_dtype: torch.dtype,
        *,
        coalesced: bool,
    ) -> None:
        self._blocks = blocks
        self._cp = cp
        self._group = group
        self._direction = direction
        self._call_index = call_index
        self._ledger = ledger
        self._buffers = buffers
        self._partial_dtype = partial_dtype
        self._coalesced = coalesced
        self._posted: dict[int, _Operation] = {}
        self._like: torch.Tensor | None = None

    def post_keys(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Gather what others want of k, v (B, S_local, Hkv, D), contiguous; start sending it and receiving ours."""
        plan = self._blocks.plan
        self._like = k.new_empty((k.size(0), 0, k.size(3)))
        fetched = self._buffer("keys", plan.num_fetched_rows, k.dtype)
        served = self._buffer("served", plan.num_served_rows, k.dtype)
        if plan.num_served_rows:
            for x, gathered in zip((k, v), served, strict=True):
                torch.index_select(x.flatten(1, 2), 1, self._blocks.served_rows, out=gathered)
        self._post(_KEYS, fetched, plan.fetched, served, plan.served)

    def take_keys(self) -> torch.Tensor:
        """All fetched K and V, (2, B, rows, D). Blocks until they have arrived."""
        return self._take(_KEYS)

    def partials_buffer(self) -> torch.Tensor:
        """Where dK and dV of the fetched keys go, in the order of these. Not initialized."""
        return self._buffer("partials", self._blocks.plan.num_fetched_rows, self._partial_dtype)

    def swap_partials(self, partials: torch.Tensor) -> None:
        """Start returning dK and dV of the fetched keys to their owners, and receiving those of the served rows."""
        plan = self._blocks.plan
        inbox = self._buffer("inbox", plan.num_served_rows, self._partial_dtype)
        self._post(_PARTIALS, inbox, plan.served, partials, plan.fetched)

    def take_partials(self) -> torch.Tensor:
        """dK and dV of the served rows, (2, B, rows, D). Blocks until they have arrived."""
        return self._take(_PARTIALS)

    def finish(self) -> None:
        """Wait until the last buffer has left; the pass is over."""
        for operation in self._posted.values():
            assert not operation.receives, "something was posted and never taken"
            for hop, work in operation.sends:
                self._wait(hop, work)
        self._posted.clear()

    def abandon(self) -> list[torch.Tensor]:
        """Give up after an error: let go of the group and its works, return the buffers of those under way."""
        self._posted.clear()
        self._group = None
        return self._buffers.drop()

    def _buffer(self, name: str, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._like is not None, "keys are posted first"
        batch, _, head_dim = self._like.shape
        return self._buffers.get(name, 0, (2, batch, num_rows, head_dim), dtype, self._like.device)

    def _post(
        self,
        kind: int,
        inbox: torch.Tensor,
        incoming: tuple[Message, ...],
        outbox: torch.Tensor,
        outgoing: tuple[Message, ...],
    ) -> None:
        operation = self._posted[kind] = _Operation(inbox)
        if self._group is None:
            return
        backend: Any = self._group
        if self._coalesced:
            backend = backend._get_backend(inbox.device) if hasattr(backend, "_get_backend") else backend
            backend._start_coalescing()
        for message, channel, piece in _pieces(inbox, incoming):
            work = self._group.recv([piece], message.peer, self._tag(message.hop, channel, kind))
            operation.receives.append((message.hop, work))
            operation.received_bytes[message.hop] = operation.received_bytes.get(message.hop, 0) + piece.nbytes
        for message, channel, piece in _pieces(outbox, outgoing):
            work = self._group.send([piece], message.peer, self._tag(message.hop, channel, kind))
            operation.sends.append((message.hop, work))
            self._ledger.sent_bytes[self._direction, message.hop] += piece.nbytes
        if self._coalesced:
            self._as_one(operation, backend._end_coalescing())

    def _as_one(self, operation: _Operation, work: Any) -> None:
        """The works of single messages are none on NCCL; what ends them all is `work`, None where none was posted."""
        hops = [hop for hop, _ in operation.receives]
        sent = [hop for hop, _ in operation.sends]
        operation.receives = [(hops[0], work)] if hops else []
        operation.sends = [(sent[0], work)] if sent and not hops else []
        if hops and self._ledger.keep_events:
            operation.events = HopEvents(self._direction, hops[0], _now())

    def _take(self, kind: int) -> torch.Tensor:
        operation = self._posted[kind]
        if operation.events is not None:
            self._watch(operation.events, operation.receives[0][1])
        for hop, work in operation.receives:
            self._wait(hop, work)
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
        start = time.perf_counter()
        try:
            work.wait()
        finally:
            self._ledger.wait_s[self._direction, hop] += time.perf_counter() - start

    def _tag(self, hop: int, channel: int, kind: int) -> int:
        """The same on both sides; a late message of a neighbouring call, pass or hop cannot match it."""
        call = self._call_index % _NUM_TAGGED_CALLS
        backward = self._direction == "backward"
        number = ((call * 2 + backward) * self._cp + hop) * 2 + kind
        return (channel * 4 * self._cp * _NUM_TAGGED_CALLS + number) % _NUM_TAGS


def _pieces(buffer: torch.Tensor, messages: tuple[Message, ...]) -> list[tuple[Message, int, torch.Tensor]]:
    """The contiguous pieces of a buffer (2, B, rows, D) that messages fill or carry, each with its number among
    those of its hop. Both sides of a hop cut alike: groups in their order, then K and V, then sequences."""
    found: list[tuple[Message, int, torch.Tensor]] = []
    numbers: dict[int, int] = {}
    for message in messages:
        for kind in buffer.unbind(0):
            for sequence in kind.unbind(0):
                channel = numbers.get(message.hop, 0)
                numbers[message.hop] = channel + 1
                found.append((message, channel, sequence[message.start : message.stop]))
    return found
