"""The exchange of a sparse schedule on CPUs: one message per hop, with the key ranges that each head group needs.

Like `exchange`, but head groups may need different tokens. One `SparseExchange` serves one pass of one attention call.
`ahead` is the number of hops posted before their kernels run: 1 is hop by hop; cp - 1 posts everything at once, like a
packed all-to-all-v. Kernels and merging must not enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from elastic_ring.attention.comm.exchange import Group, HopLedger, PendingWork, hop_number
from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.merge import accumulate_dtype
from elastic_ring.attention.plan.schedule import Direction
from elastic_ring.attention.plan.sparse_schedule import SparseSchedule
from elastic_ring.attention.plan.sparse_tiles import num_tokens

_KEYS, _PARTIALS = 0, 1


@dataclass(eq=False)
class _TileMessage:
    hop: int
    buffer: torch.Tensor
    work: PendingWork | None


class SparseExchange:
    """Sends and receives flat messages: for each head group K then V (or dK then dV), each (B, n, heads of the group,
    D).

    `views` splits a message into these tensors. Waits cannot form a cycle: a rank that posts a hop waits only for sends
    of hops that their receivers post before they wait for anything later.
    """

    def __init__(
        self,
        schedule: SparseSchedule,
        cp_rank: int,
        group: Group | None,
        direction: Direction,
        call_index: int,
        ledger: HopLedger,
        ahead: int,
    ) -> None:
        self._schedule = schedule
        self._cp_rank = cp_rank
        self._group = group
        self._direction = direction
        self._call_index = call_index
        self._ledger = ledger
        self._ahead = ahead
        self._posted = 0
        self._sends: list[_TileMessage] = []
        self._keys: dict[int, _TileMessage] = {}
        self._partials: dict[int, _TileMessage] = {}

    def post_keys(self, hop: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Post the receives and sends of all hops up to `hop + ahead`; k, v (B, S_local, Hkv, D)."""
        self._settle_sends(before=hop)
        while self._posted < min(hop + self._ahead, self._schedule.cp - 1):
            self._posted += 1
            self._post(self._posted, k, v)

    def take_keys(self, hop: int) -> torch.Tensor | None:
        """Wait for the keys of `hop` and return them; None if the hop needs no keys."""
        return self._take(self._keys, hop)

    def expect_partials(self, hop: int, k: torch.Tensor) -> None:
        """Post the receive of the dK and dV that the reader of `hop` computes for this rank's keys."""
        buffer = self.empty(self._schedule.requested(self._cp_rank, hop), k, accumulate_dtype(k.dtype))
        if buffer.numel():
            self._partials[hop] = self._receive(hop, _PARTIALS, self._schedule.reader(self._cp_rank, hop), buffer)

    def send_partials(self, hop: int, partials: torch.Tensor) -> None:
        """Send the dK and dV of `hop` to the rank that owns the keys."""
        self._send(hop, _PARTIALS, self._schedule.hops[self._cp_rank][hop].source, partials)

    def take_partials(self, hop: int) -> torch.Tensor | None:
        """Wait for the dK and dV of `schedule.requested(cp_rank, hop)`; None if no rank reads these keys."""
        return self._take(self._partials, hop)

    def finish(self) -> None:
        """Wait until all sends are complete. Ends the pass."""
        self._settle_sends(before=self._schedule.cp)
        assert not self._keys, sorted(self._keys)
        assert not self._partials, sorted(self._partials)

    def abandon(self) -> list[torch.Tensor]:
        """Drop the group and its works after an error. Returns the buffers still in flight."""
        messages = [*self._sends, *self._keys.values(), *self._partials.values()]
        for message in messages:
            message.work = None
        self._group = None
        return [message.buffer for message in messages]

    def empty(self, ranges: tuple[tuple[Range, ...], ...], k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized message for the token ranges of each head group."""
        total = sum(
            num_tokens(own) * len(group.kv_heads) for own, group in zip(ranges, self._schedule.groups, strict=True)
        )
        return k.new_empty(2 * k.size(0) * total * k.size(3), dtype=dtype)

    def views(
        self, message: torch.Tensor, ranges: tuple[tuple[Range, ...], ...], k: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each head group views of its K and V (or dK and dV) in `message`, each (B, n, heads of the group, D)."""
        cut: list[tuple[torch.Tensor, torch.Tensor]] = []
        offset = 0
        for own, group in zip(ranges, self._schedule.groups, strict=True):
            shape = (2, k.size(0), num_tokens(own), len(group.kv_heads), k.size(3))
            length = 2 * shape[1] * shape[2] * shape[3] * shape[4]
            both = message[offset : offset + length].view(shape)
            cut.append((both[0], both[1]))
            offset += length
        assert offset == message.numel(), (offset, message.numel())
        return cut

    def _post(self, hop: int, k: torch.Tensor, v: torch.Tensor) -> None:
        own = self._schedule.hops[self._cp_rank][hop]
        buffer = self.empty(own.fetch, k, k.dtype)
        if buffer.numel():
            self._keys[hop] = self._receive(hop, _KEYS, own.source, buffer)
        requested = self._schedule.requested(self._cp_rank, hop)
        message = self.empty(requested, k, k.dtype)
        if message.numel():
            cut = self.views(message, requested, k)
            for group, ranges, parts in zip(self._schedule.groups, requested, cut, strict=True):
                for whole, part in zip((k, v), parts, strict=True):
                    of_group = select_heads(whole, group.kv_heads)
                    offset = 0
                    for start, stop in ranges:
                        part[:, offset : offset + stop - start] = of_group[:, start:stop]
                        offset += stop - start
            self._send(hop, _KEYS, self._schedule.reader(self._cp_rank, hop), message)

    def _send(self, hop: int, kind: int, peer: int, buffer: torch.Tensor) -> None:
        assert self._group is not None
        work = self._group.send([buffer], peer, self._tag(hop, kind))
        self._ledger.sent_bytes[self._direction, hop] += buffer.nbytes
        assert work is not None, "this rank is not in the group"
        self._sends.append(_TileMessage(hop, buffer, work))

    def _receive(self, hop: int, kind: int, peer: int, buffer: torch.Tensor) -> _TileMessage:
        assert self._group is not None
        work = self._group.recv([buffer], peer, self._tag(hop, kind))
        assert work is not None, "this rank is not in the group"
        return _TileMessage(hop, buffer, work)

    def _take(self, messages: dict[int, _TileMessage], hop: int) -> torch.Tensor | None:
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

    def _wait(self, message: _TileMessage) -> None:
        assert message.work is not None
        with self._ledger.waiting(self._direction, message.hop):
            message.work.wait()

    def _tag(self, hop: int, kind: int) -> int:
        return hop_number(self._call_index, self._direction, self._schedule.cp, hop) * 2 + kind


def select_heads(x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
    """x[:, :, heads], (B, S, len(heads), D): a view if the heads are consecutive, else a copy."""
    if heads == tuple(range(heads[0], heads[0] + len(heads))):
        return x[:, :, heads[0] : heads[0] + len(heads)]
    return x[:, :, list(heads)]


def as_index(ranges: tuple[Range, ...]) -> Any:
    """An index of these rows: a slice for a single range, else an int64 tensor."""
    if len(ranges) == 1:
        return slice(*ranges[0])
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])
