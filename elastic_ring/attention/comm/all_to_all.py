"""All-to-all of small messages between the ranks of a ring: every rank sends one of its own to every other.

Receives and sends are posted before any wait, so waits cannot form a cycle. On a GPU they are one coalesced operation,
and a wait blocks the stream, not the host, as in `exchange`. Group and tags are arguments; what messages mean
must not enter. Exceptions of `Work.wait()` are not wrapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastic_ring.attention.comm.exchange import Group, HopLedger, one_operation
from elastic_ring.attention.comm.ledger import Way

_Message = tuple[int, int, torch.Tensor, bool]
"""Its hop, the peer, the buffer, and whether it is received."""


class AllToAll:
    """The all-to-alls of a ring's rank.

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
        sign, messages = -1 if way == "backward" else 1, list[_Message]()  # receives, then sends, each nearest first
        for buffers, step, received in ((incoming, -sign, True), (outgoing, sign, False)):
            for hop in range(1, self.cp):
                peer = (self.cp_rank + step * hop) % self.cp
                if buffers[peer].numel():
                    messages.append((hop, peer, buffers[peer], received))
        works: list[Any] = []
        try:
            works = self._post(messages, tag) if messages else []
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

    def _post(self, messages: Sequence[_Message], tag: int) -> list[Any]:
        """A work for each message; of one coalesced operation the first has it."""
        group: Any = self._group
        device = messages[0][2].device

        def post() -> list[Any]:
            return [(group.recv if received else group.send)([x], peer, tag) for _, peer, x, received in messages]

        if not (device.type == "cuda" if self._coalesced is None else self._coalesced):
            works = post()
            assert all(work is not None for work in works), "this rank is not in the group"
            return works
        with one_operation(group._get_backend(device) if hasattr(group, "_get_backend") else group) as whole:
            post()
        return [whole[0], *[None] * (len(messages) - 1)]
