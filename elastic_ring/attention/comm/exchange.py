"""Moves K/V to the ranks that need them and dK/dV partials back to their owner, stage by stage.

One `HopExchange` serves one forward or backward pass of one attention call, under any pattern. It gives out buffers and
orders messages as its `ExchangePlan` says; kernels and merging stay outside. Errors of `Work.wait()` (GroupAborted,
PeerFailed, a backend's own) pass through; `abandon` then returns the buffers that the group may still write to.

On a GPU waits are stream waits. Rows that are gathered before they leave are gathered and posted on a side stream, so
that a rank with much work on its own keys does not delay its readers; contiguous pieces leave in place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.comm.messages import KEYS, PARTIALS, Group, HopMessages
from elastic_ring.attention.comm.packing import WireError, decode_, encode_, measure_wire_error, wire_frame
from elastic_ring.attention.plan.schedule import Direction
from elastic_ring.attention.plan.traffic import FETCHED, ExchangePlan, Frame

log = logging.getLogger(__name__)


class HopBuffers:
    """Buffers shared by the hops of all calls: one tensor per name and slot, as large as the largest request.

    Reuse is ordered by the stream: a slot is handed out again only after the work that read it was queued.
    """

    def __init__(self) -> None:
        self._storages: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.wire_error: WireError | None = None

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
"""How keys and values cross: in their own type, or encoded in 8 bits (`packing`)."""
Pack = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called as pack(stage, buffer, k, v): gathers the rows of k and v that other ranks fetch in that stage."""


class _Form(NamedTuple):
    """The layout of rows in a buffer."""

    frame: Frame
    dtype: torch.dtype


_MEASURED = 1 << 16
"""Vectors of the first keys that are encoded for the wire, whose error is measured."""


class HopExchange:
    """The buffers and the order of messages of one pass. Stages count from 0, the first after a rank's own keys.

    Call `begin`, then for each stage, empty ones too, `take_keys`, `free_keys` and, in backward, `partials_buffer` and
    `swap_partials`; `free_keys(-1)` once the kernels on own keys are launched. Before `swap_partials` of a stage, the
    result of `take_partials` for the stage `plan.turns` earlier must have been read.

    Waits cannot form a cycle: a message waits only for messages that come earlier in an order common to all ranks. With
    `plan.late` it is K0 K1 K2 P0 K3 P1 ...: no post waits, and no keys queue behind partials that their owner waits
    for. Without, it is K0 K1 P0 K2 P1 ..., with K1 posted after K0 has arrived.

    `like` is k (B, S_local, Hkv, D). `frame` gives the buffers' shape. `pack` gathers the rows to send, if
    `plan.packed`. With `keep`, fetched keys get memory of their own that outlives the pass. `wire` "fp8" needs `pack`:
    gathered rows are encoded, and fetched keys decoded; partials cross in their own type.
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
        self._wire = _Form(wire_frame(frame), torch.uint8) if wire == "fp8" else self._plain
        self._encodes = wire == "fp8"
        self._plan, self._direction, self._ledger, self._buffers = plan, direction, ledger, buffers
        self._like, self._pack, self._keep = like.detach(), pack, keep
        self._messages = HopMessages(plan, group, direction, call_index, ledger, like.device)
        # Kept until all posts are waited for: memory that is freed would be the kernels' stream's to reuse at once.
        self._source: tuple[torch.Tensor, ...] = ()
        self._first_keys: list[torch.Tensor] = []

    def begin(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Post the first stages: send the requested rows of k and v (B, S_local, Hkv, D), contiguous unless they are
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
        keys = self._messages.take(KEYS, index)
        if self._encodes:
            arrived, num_rows = keys, self._plan.stages[index].num_fetched
            shape = self._plain.frame.shape(num_rows)
            most = max(self._plan.key_slots)
            keys = self._like.new_empty(shape) if self._keep else self._buffer("keys", 0, most, num_rows, self._plain)
            decode_(keys, arrived)
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
        self._messages.settle(PARTIALS, index - self._plan.turns)
        num_rows = self._plan.stages[index].num_fetched
        return self._buffer("partials", turn, self._plan.partial_slots[turn], num_rows, self._partials)

    def swap_partials(self, index: int, partials: torch.Tensor) -> None:
        """Post the sends of dK and dV of fetched keys to their owners, and the receives for own keys."""
        stage, (start, stop) = self._plan.stages[index], self._plan.inbox_rows(index)
        inbox = self._buffer("inbox", 0, sum(self._plan.inbox_slots), stop - start, self._partials, start)
        unit, sources = self._plain.frame.unit, (partials.view(-1),)
        self._messages.post(PARTIALS, index, inbox, unit, stage.partials_in, sources, stage.partials_out)

    def take_partials(self, index: int) -> torch.Tensor:
        """Wait for dK and dV of the own keys that stage `index` served, `num_served` rows as `frame` shapes them."""
        return self._messages.take(PARTIALS, index)

    @property
    def inbox(self) -> torch.Tensor:
        """The received dK and dV of the last stages, each at its `plan.inbox_rows`, as `frame` shapes them."""
        num_rows = sum(self._plan.inbox_slots)
        return self._buffer("inbox", 0, num_rows, num_rows, self._partials)

    def finish(self) -> None:
        """Wait until the last message has left; the pass is over."""
        for kind, index in list(self._messages.posted):
            self._messages.settle(kind, index)
        begun, self._source = bool(self._source), ()
        if begun and self._packs_beside and torch.cuda.is_current_stream_capturing():
            self._wait_for_gathering()  # a capture requires the side stream to be joined again

    def abandon(self) -> list[torch.Tensor]:
        """Drop the group and its works after an error; return the buffers of messages in flight.

        On a GPU the kernels' stream waits for the gathers on the side stream, and those may wait for keys that never
        arrive: a device synchronization then blocks until the group is aborted.
        """
        in_flight = self._messages.abandon()
        if self._source and self._packs_beside:
            self._wait_for_gathering()  # the sources may be freed only after the gathers that read them
        self._source = ()
        self._first_keys.clear()
        return in_flight + self._buffers.drop()

    # ------------------------------------------------------------ keys and buffers

    def _post_keys_until(self, index: int) -> None:
        for stage in range(min(index + 1, len(self._plan.stages))):
            if (KEYS, stage) not in self._messages.posted:  # all stay there until `finish`
                self._post_keys(stage)

    def _post_keys(self, index: int) -> None:
        """Send the rows requested in stage `index`, gathered or in place, and receive its keys."""
        assert self._source, "a pass begins with `begin`"
        stage, first, unit = self._plan.stages[index], self._first_keys, self._wire.frame.unit
        fetched = first[index] if index < len(first) else self._keys_buffer(index)
        before = self._keys_to_forward(index)
        if self._pack is None:
            sources = (*(x.flatten() for x in self._source), before) if stage.keys_out else ()
            self._messages.post(KEYS, index, fetched, unit, stage.keys_in, sources, stage.keys_out)
            return
        served = self._served_buffer(index)
        refills = index >= len(self._plan.key_slots) and bool(stage.keys_in)  # overwrites a buffer that kernels read
        with self._beside(after_kernels=refills):
            self._messages.wait_sent(KEYS, index - self._plan.send_slots)  # the send buffer is about to be refilled
            if any(piece.kind != FETCHED for leg in stage.keys_out for piece in leg.pieces):
                self._fill(index, served)
            sources = (served.view(-1), served.view(-1), before)
            self._messages.post(KEYS, index, fetched, unit, stage.keys_in, sources, stage.keys_out)

    def _keys_to_forward(self, index: int) -> torch.Tensor:
        """The keys of the stage before, for peers on this host; they have arrived, or do before the next post leaves.
        On a GPU the order of operations also keeps them until they have left."""
        if not self._plan.far or not index:
            return self._like.new_empty(0)
        refilled = index - len(self._plan.key_slots) + 1  # forwards out of the buffer that is about to be refilled
        if not self._plan.coalesced and refilled >= 0:
            legs = self._plan.stages[refilled].keys_out
            if any(piece.kind == FETCHED for leg in legs for piece in leg.pieces):
                self._messages.wait_sent(KEYS, refilled)
        return self._messages.posted[KEYS, index - 1].buffer.view(-1)

    def _fill(self, index: int, served: torch.Tensor) -> None:
        """Gather the keys that other ranks fetch in stage `index`, encoded if the wire is."""
        assert self._pack is not None
        if not self._encodes:
            self._pack(index, served, *self._source)
            return
        plain = self._buffer("plain", 0, max(self._plan.served_slots), self._plan.stages[index].num_served, self._plain)
        self._pack(index, plain, *self._source)
        encode_(served, plain)
        if self._buffers.wire_error is None:
            first = (x.flatten(0, -2)[:_MEASURED] for x in (plain, served))
            self._buffers.wire_error = error = measure_wire_error(*first)
            log.info("keys cross as fp8: worst error %.4f of a vector's largest, rms %.4f", error.worst, error.rms)
        self._ledger.wire_error = self._buffers.wire_error

    def _served_buffer(self, index: int) -> torch.Tensor:
        slot, plan = index % self._plan.send_slots, self._plan
        return self._buffer("served", slot, plan.served_slots[slot], plan.stages[index].num_served, self._wire)

    def _keys_buffer(self, index: int) -> torch.Tensor:
        num_rows, slots = self._plan.stages[index].num_fetched, self._plan.key_slots
        if self._keep and not self._encodes:
            return self._like.new_empty(self._plain.frame.shape(num_rows))
        slot = index % len(slots)
        return self._buffer("keys", slot, slots[slot], num_rows, self._wire)

    def _buffer(self, name: str, slot: int, most: int, num_rows: int, form: _Form, first: int = 0) -> torch.Tensor:
        """`num_rows` from row `first` on of a shared buffer, allocated for the `most` rows that any stage uses."""
        shape, row = form.frame.shape(num_rows), form.frame.row
        return self._buffers.get(name, slot, shape, form.dtype, self._like.device, most * row, first * row)

    # ------------------------------------------------------------ the side stream

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
