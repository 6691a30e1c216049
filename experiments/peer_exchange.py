"""The exchange of one pass through peer memory: the messages of `HopExchange`, written by copy engines.

The sender writes each message directly into the receiver's buffer. Two flags per pair order this: *free* (the
receiver's kernels have finished with the buffer) before the copy, *arrived* after it. Both sides count messages, so
flags are never reset. Kernels and merging must not enter.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from elastic_ring.attention.comm.exchange import Group, HopExchange, _now
from elastic_ring.attention.comm.ledger import HopEvents
from elastic_ring.attention.lowering.call_plan import CallPlan
from elastic_ring.attention.lowering.rectangles import hops_together
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.plan.rank_plan import stages
from elastic_ring.attention.plan.schedule import Direction, Schedule
from elastic_ring.attention.plan.traffic import PeerTransfer
from elastic_ring.attention.ring import RingAttention
from experiments.peer_memory import (
    ARRIVED_KEYS,
    ARRIVED_PARTIALS,
    FREE_KEYS,
    FREE_PARTIALS,
    PeerMemory,
)


class PeerRing(RingAttention):
    """A ring whose dense hops go through `memory` where its device is the tensors'. Discard both after a call raised.

    `options` as for `RingAttention`, without `hosts`, `coalesced` and `kv_wire`: copy engines send keys as they lie.
    """

    def __init__(
        self, schedule: Schedule, cp_rank: int, group: Group | None, options: RingOptions, memory: PeerMemory
    ) -> None:
        for name, left_out in (("hosts", None), ("coalesced", None), ("kv_wire", "native")):
            if (value := getattr(options, name)) != left_out:
                raise ValueError(f"{name}={value!r}: copy engines send keys as they lie; leave it out")
        self._memory, self._by_copies = memory, schedule.is_dense and schedule.cp > 1
        self._most: dict[int, tuple[int, int]] = {}
        super().__init__(schedule, cp_rank, group, replace(options, coalesced=True if self._by_copies else None))

    def _open_exchange(self, direction: Direction, call_index: int, k: torch.Tensor, plan: CallPlan) -> HopExchange:
        if not self._by_copies or k.device.type != self._memory.device.type:
            return super()._open_exchange(direction, call_index, k, plan)
        together = hops_together(self.schedule, k, self.options.hops_per_stage)
        if together not in self._most:
            self._most[together] = most_tokens(self.schedule, together)
        exchange = PeerExchange(
            plan.exchange,
            plan.frame,
            self.group,
            direction,
            call_index,
            self.ledger,
            self.options.buffers,
            k,
            plan.partial_dtype,
            memory=self._memory,
            most=self._most[together],
        )
        exchange.reserve()
        return exchange


def most_tokens(schedule: Schedule, hops_per_stage: int) -> tuple[int, int]:
    """(keys, returned partials): the largest number of tokens of each, over all ranks and all stages after stage 0."""
    keys = inbox = 0
    for cp_rank in range(schedule.cp):
        for stage in stages(schedule, cp_rank, hops_per_stage)[1:]:
            requested = [span for hop in stage.hops for span in schedule.requested(cp_rank, hop)[0]]
            keys = max(keys, stage.num_tokens)
            inbox = max(inbox, sum(stop - start for start, stop in requested))
    return keys, inbox


class PeerExchange(HopExchange):
    """`HopExchange` for ranks that share `memory`. Streams, not the host, wait for the flags.

    A pass runs in one thread on one kernel stream: the current stream at its start, looked up once because the lookup
    takes the host as long as a flag operation.
    """

    def __init__(self, *arguments: Any, memory: PeerMemory, most: tuple[int, int]) -> None:
        super().__init__(*arguments)
        self._memory, self._most = memory, most
        self._awaited: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        self._opened: dict[tuple[int, int], HopEvents] = {}
        self._touched: set[int] = set()
        self._returns: dict[int, list[Any]] = {}
        self._stream = torch.cuda.current_stream(self._like.device.index)
        self._ready: Any = None
        self._itemsizes = {ARRIVED_KEYS: self._like.element_size(), ARRIVED_PARTIALS: self._partials.dtype.itemsize}

    def reserve(self) -> None:
        """Reserve the buffers. Collective if one has to grow: sizes are the same on every rank, so that all ranks grow
        it or none does."""
        keys, inbox = self._most
        for slot in range(min(2, len(self._plan.stages))):
            self._memory.reserve("keys", slot, keys * self._plain.frame.row, self._like.dtype)
            if self._direction == "backward":
                self._memory.reserve("inbox", slot, inbox * self._plain.frame.row, self._partials.dtype)

    def begin(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._source = (k, v)
        self._offer_keys(0)

    def _offer_keys(self, index: int) -> None:
        if index >= len(self._plan.stages):
            return
        for leg in self._plan.stages[index].keys_in:
            self._offer(index, leg, FREE_KEYS, ARRIVED_KEYS)
        self._ready = self._stream.record_event()

    def free_keys(self, index: int) -> None:
        """Launch the copies of the next stage: behind the kernels, for this takes the host longer than a launch."""
        if index + 1 < len(self._plan.stages):
            for leg in self._plan.stages[index + 1].keys_out:
                self._write("keys", index + 1, leg, self._source, self._ready, FREE_KEYS, ARRIVED_KEYS)

    def take_keys(self, index: int) -> torch.Tensor:
        num_rows = self._plan.stages[index].num_fetched
        if num_rows:
            self._await(index, ARRIVED_KEYS)
        self._offer_keys(index + 1)
        return self._memory.own("keys", index % 2, self._plain.frame.shape(num_rows))

    def partials_buffer(self, index: int) -> torch.Tensor:
        # The copies of its last use, two stages ago, may still be in flight.
        for event in self._returns.pop(index - 2, []):
            self._stream.wait_event(event)
        return super().partials_buffer(index)

    def swap_partials(self, index: int, partials: torch.Tensor) -> None:
        traffic = self._plan.stages[index]
        for leg in traffic.partials_in:
            self._offer(index, leg, FREE_PARTIALS, ARRIVED_PARTIALS)
        ready = self._stream.record_event()
        for leg in traffic.partials_out:
            self._write("inbox", index, leg, (partials,), ready, FREE_PARTIALS, ARRIVED_PARTIALS)
            self._returns.setdefault(index, []).append(self._memory.streams[leg.peer].record_event())

    def take_partials(self, index: int) -> torch.Tensor:
        num_rows = self._plan.stages[index].num_served
        if num_rows:
            self._await(index, ARRIVED_PARTIALS)
        return self._memory.own("inbox", index % 2, self._plain.frame.shape(num_rows))

    def finish(self) -> None:
        """Make the kernels' stream wait for all copies, after which their sources may be freed."""
        self._join()
        self._source = ()
        assert not self._awaited, sorted(self._awaited)

    def abandon(self) -> list[torch.Tensor]:
        self._group, self._source = None, ()
        regions = [region.own for region in self._memory.regions.values()]
        return regions + self._buffers.drop()

    def _offer(self, index: int, leg: PeerTransfer, free: int, arrived: int) -> None:
        """Raise the free flag for the sender of `leg`, and record the message to wait for."""
        source = leg.peer
        self._memory.raise_flag(free, source, self._memory.next(free, source), self._stream)
        number = self._memory.next(arrived, source)
        num_bytes = leg.size * self._itemsizes[arrived]
        self._awaited.setdefault((arrived, index), []).append((leg.hop, source, number, num_bytes))
        if self._ledger.keep_events and (arrived, index) not in self._opened:
            self._opened[arrived, index] = HopEvents(self._direction, leg.hop, _now())

    def _write(
        self,
        name: str,
        index: int,
        leg: PeerTransfer,
        sources: tuple[torch.Tensor, ...],
        ready: Any,
        free: int,
        arrived: int,
    ) -> None:
        """Copy `leg` from `sources` on the peer's copy stream, once they are `ready` and the receiver's buffer is
        free."""
        peer = leg.peer
        stream = self._memory.streams[peer]
        # Both sides count the messages of a pair, so flags need no acknowledgement.
        number = self._memory.next(_SENT[free], peer)
        stream.wait_event(ready)
        self._memory.wait_flag(free, peer, number, stream)
        num_bytes = self._memory.copy(name, index % 2, peer, leg.pieces, sources, stream)
        self._ledger.sent_bytes[self._direction, leg.hop] += num_bytes
        self._memory.raise_flag(arrived, peer, number, stream)
        self._touched.add(peer)

    def _await(self, index: int, arrived: int) -> None:
        started = time.perf_counter()
        messages = self._awaited.pop((arrived, index))
        events = self._opened.pop((arrived, index), None)
        if events is not None:
            watch = torch.cuda.Stream()
            for _, source, number, _ in messages:
                self._memory.wait_flag(arrived, source, number, watch)
            with torch.cuda.stream(watch):
                events.arrived = _now()
            events.wanted = _now()
        for hop, source, number, num_bytes in messages:
            self._memory.wait_flag(arrived, source, number, self._stream)
            self._ledger.received_bytes[self._direction, hop] += num_bytes
            self._ledger.wait_s[self._direction, hop] += time.perf_counter() - started
        if events is not None:
            events.had = _now()
            self._ledger.events.append(events)

    def _join(self) -> None:
        for peer in sorted(self._touched):
            self._stream.wait_stream(self._memory.streams[peer])
        self._touched.clear()


_SENT = {FREE_KEYS: -1, FREE_PARTIALS: -2}
"""The sender's private counters, by the flag that its messages wait for."""
