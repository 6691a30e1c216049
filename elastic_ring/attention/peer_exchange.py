"""The exchange of one pass through peer memory: the same messages as `HopExchange`, written by copy engines.

The sender puts each message where its receiver will read it. Two flags for each pair keep order: *free* (the
receiver's kernels are done with the buffer's last use) before the copy, *arrived* after it. Both sides count
messages, so that no flag is ever reset. No kernel and no merging may enter.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from elastic_ring.attention.exchange import HopExchange, _now
from elastic_ring.attention.layout import Range
from elastic_ring.attention.ledger import HopEvents
from elastic_ring.attention.peer_memory import (
    ARRIVED_KEYS,
    ARRIVED_PARTIALS,
    FREE_KEYS,
    FREE_PARTIALS,
    PeerMemory,
)
from elastic_ring.attention.stages import Stage, most_tokens, stages


class PeerExchange(HopExchange):
    """`HopExchange` for ranks that share `memory`. Its works are flags, waited for by streams, never by the host."""

    def __init__(self, *arguments: Any, memory: PeerMemory, hops_per_stage: int) -> None:
        super().__init__(*arguments, coalesced=True)
        self._memory = memory
        self._hops_per_stage = hops_per_stage
        self._awaited: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        self._opened: dict[tuple[int, int], HopEvents] = {}
        self._touched: set[int] = set()
        self._returns: dict[int, list[Any]] = {}
        self._ready: Any = None
        self._row_shape: tuple[int, ...] = ()
        self._itemsizes: dict[int, int] = {}

    def start(self, k: torch.Tensor) -> None:
        """Make sure of the buffers. The same sizes on every rank, so that all grow together or none."""
        self._row_shape = (k.size(0), *k.shape[2:])
        self._itemsizes = {ARRIVED_KEYS: k.element_size(), ARRIVED_PARTIALS: self._partial_dtype.itemsize}
        keys, inbox = most_tokens(self._schedule, self._hops_per_stage)
        per_token = 2 * k.size(0) * k.size(2) * k.size(3)
        for slot in sorted({index % 2 for index in range(1, len(self._plan))}):
            self._memory.reserve("keys", slot, keys * per_token, k.dtype)
            if self._direction == "backward":
                self._memory.reserve("inbox", slot, inbox * per_token, self._partial_dtype)

    def post_keys(self, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if index >= len(self._plan):
            return
        stage = self._plan[index]
        for hop in stage.hops:
            own = self._schedule.hops[self._cp_rank][hop]
            if own.num_fetched_tokens:
                self._offer(index, hop, own.source, FREE_KEYS, ARRIVED_KEYS)
        self._ready = torch.cuda.current_stream().record_event()

    def push_keys(self, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """The copies themselves: launching them takes the host longer than launching a kernel."""
        if index >= len(self._plan):
            return
        stage = self._plan[index]
        for hop in stage.hops:
            requested = self._schedule.requested(self._cp_rank, hop)
            if requested:
                reader = self._schedule.reader(self._cp_rank, hop)
                there = self._stage_of(reader, index)
                shape = (2, k.size(0), there.num_tokens, *k.shape[2:])
                remote = self._memory.of_peer("keys", index % 2, reader, shape)
                pieces = _pieces((k, v), requested, remote, there.place(hop))
                self._write(hop, reader, self._ready, pieces, FREE_KEYS, ARRIVED_KEYS)

    def take_keys(self, index: int) -> torch.Tensor | None:
        stage = self._plan[index]
        if not stage.num_tokens:
            return None
        self._await(index, ARRIVED_KEYS)
        return self._memory.own("keys", index % 2, self._keys_shape(stage.num_tokens))

    def partials_buffer(self, index: int, k: torch.Tensor) -> torch.Tensor:
        # Its last use, two stages ago, may still be on its way.
        for event in self._returns.pop(index - 2, []):
            torch.cuda.current_stream().wait_event(event)
        return super().partials_buffer(index, k)

    def swap_partials(self, index: int, partials: torch.Tensor | None, k: torch.Tensor) -> None:
        stage = self._plan[index]
        for hop in stage.hops:
            if self._num_requested(hop):
                reader = self._schedule.reader(self._cp_rank, hop)
                self._offer(index, hop, reader, FREE_PARTIALS, ARRIVED_PARTIALS)
        ready = torch.cuda.current_stream().record_event()
        for hop in stage.hops:
            own = self._schedule.hops[self._cp_rank][hop]
            if own.num_fetched_tokens:
                assert partials is not None
                start, num_tokens = stage.place(hop), own.num_fetched_tokens
                remote = self._remote_inbox(own.source, index, hop, k)
                spans = ((start, start + num_tokens),)
                pieces = _pieces((partials[0], partials[1]), spans, remote, 0)
                self._write(hop, own.source, ready, pieces, FREE_PARTIALS, ARRIVED_PARTIALS)
                self._returns.setdefault(index, []).append(self._memory.streams[own.source].record_event())

    def take_partials(self, index: int) -> dict[int, torch.Tensor]:
        stage = self._plan[index]
        num_requested = sum(self._num_requested(hop) for hop in stage.hops)
        if not num_requested:
            return {}
        self._await(index, ARRIVED_PARTIALS)
        inbox = self._memory.own("inbox", index % 2, self._keys_shape(num_requested))
        return {hop: self._inbox(inbox, stage, hop) for hop in stage.hops if self._num_requested(hop)}

    def finish(self) -> None:
        """The kernels' stream goes on when the last copy has left; what was copied from may be freed then."""
        self._join()
        assert not self._awaited, sorted(self._awaited)

    def abandon(self) -> list[torch.Tensor]:
        self._group = None
        regions = [region.own for region in self._memory.regions.values()]
        return regions + self._buffers.drop()

    def _keys_shape(self, num_tokens: int) -> tuple[int, ...]:
        batch, *rest = self._row_shape
        return (2, batch, num_tokens, *rest)

    def _stage_of(self, cp_rank: int, index: int) -> Stage:
        return stages(self._schedule, cp_rank, self._hops_per_stage)[index]

    def _remote_inbox(self, owner: int, index: int, hop: int, k: torch.Tensor) -> torch.Tensor:
        """Where `owner` expects this rank's partials of `hop`: as `HopExchange._inbox` has it there."""
        sizes = [_size(self._schedule.requested(owner, other)) for other in self._plan[index].hops]
        at = self._plan[index].hops.index(hop)
        per_token = 2 * k.size(0) * k.size(2) * k.size(3)
        whole = self._memory.of_peer("inbox", index % 2, owner, (sum(sizes) * per_token,))
        before = sum(sizes[:at])
        return whole[before * per_token : (before + sizes[at]) * per_token].view(self._keys_shape(sizes[at]))

    def _offer(self, index: int, hop: int, source: int, free: int, arrived: int) -> None:
        """Tell `source` that its next message may come, and remember to wait for it."""
        stream = torch.cuda.current_stream()
        self._memory.raise_flag(free, source, self._memory.next(free, source), stream)
        number = self._memory.next(arrived, source)
        self._awaited.setdefault((arrived, index), []).append((hop, source, number, self._size_of(hop, arrived)))
        if self._ledger.keep_events and (arrived, index) not in self._opened:
            self._opened[arrived, index] = HopEvents(self._direction, hop, _now())

    def _size_of(self, hop: int, arrived: int) -> int:
        num_tokens = (
            self._schedule.hops[self._cp_rank][hop].num_fetched_tokens
            if arrived == ARRIVED_KEYS
            else self._num_requested(hop)
        )
        num_elements = 2 * num_tokens
        for size in self._row_shape:
            num_elements *= size
        return num_elements * self._itemsizes[arrived]

    def _write(
        self,
        hop: int,
        peer: int,
        ready: Any,
        pieces: list[tuple[torch.Tensor, torch.Tensor]],
        free: int,
        arrived: int,
    ) -> None:
        stream = self._memory.streams[peer]
        # Both sides count the messages of a pair, so the receiver's flags need no answer.
        number = self._memory.next(_SENT[free], peer)
        stream.wait_event(ready)
        self._memory.wait_flag(free, peer, number, stream)
        with torch.cuda.stream(stream):
            for target, source in pieces:
                target.copy_(source, non_blocking=True)
                self._ledger.sent_bytes[self._direction, hop] += source.nbytes
        self._memory.raise_flag(arrived, peer, number, stream)
        self._touched.add(peer)

    def _await(self, index: int, arrived: int) -> None:
        started = time.perf_counter()
        stream = torch.cuda.current_stream()
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
            self._memory.wait_flag(arrived, source, number, stream)
            self._ledger.received_bytes[self._direction, hop] += num_bytes
            self._ledger.wait_s[self._direction, hop] += time.perf_counter() - started
        if events is not None:
            events.had = _now()
            self._ledger.events.append(events)

    def _join(self) -> None:
        for peer in sorted(self._touched):
            torch.cuda.current_stream().wait_stream(self._memory.streams[peer])
        self._touched.clear()


_SENT = {FREE_KEYS: -1, FREE_PARTIALS: -2}
"""Counters that a sender keeps for itself, by the flag that each message waits for."""


def _size(ranges: tuple[Range, ...]) -> int:
    return sum(stop - start for start, stop in ranges)


def _pieces(
    sources: tuple[torch.Tensor, torch.Tensor], ranges: tuple[Range, ...], remote: torch.Tensor, start: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(target, source) pairs of contiguous rows: `ranges` of two (B, n, Hkv, D) into `remote` from `start` on."""
    pieces = []
    for kind, source in enumerate(sources):
        for batch in range(source.size(0)):
            at = start
            for first, last in ranges:
                pieces.append((remote[kind, batch, at : at + last - first], source[batch, first:last]))
                at += last - first
    return pieces
