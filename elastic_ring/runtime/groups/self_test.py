"""The first exchange over each group of a generation: it tests the connections and makes them before a step does."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from elastic_ring.errors import PeerFailed
from elastic_ring.runtime.groups.batched_p2p import BatchedGroup

if TYPE_CHECKING:
    from elastic_ring.runtime.groups.groups import Groups


def self_test(groups: Groups) -> None:
    """A known sum over each group, and over the ring a known number from every rank to every other.

    Raises PeerFailed for a wrong result, GroupAborted when the groups were aborted meanwhile.
    """
    for name in ("world", "shard", "ring", "replica"):
        group: Any = getattr(groups, name)
        on = groups.connector.device if name != "world" else torch.device("cpu")
        probe = torch.tensor([1.0, float(group.rank())], device=on)
        # The other groups' launches take the gate's lock themselves, and it is not reentrant.
        with groups.launching() if name == "shard" else nullcontext():
            work = group.allreduce([probe])
        work.wait()
        size = group.size()
        found = probe.tolist()
        groups.check()  # on a device an abort ends the exchange without an error
        if found != [size, size * (size - 1) / 2]:
            raise PeerFailed(f"self-test of group {name}: got {found} from {size} ranks")
    received = shift(groups.ring, groups.connector.device)
    groups.check()
    if received != [float(peer) for peer in range(len(received))]:
        raise PeerFailed(f"self-test of the hops of the ring: received {received}")


def shift(ring: Any, device: torch.device) -> list[float]:
    """All-to-all exchange of ranks, batched where the group supports it; returns what was received.

    NCCL connects two ranks at their first exchange, which takes as long as gigabytes do later. A hop pulls straight
    from its source, so a dense ring needs every pair.
    """
    rank, size = ring.rank(), ring.size()
    received = torch.full((size,), float(rank), device=device)
    own = torch.full((1,), float(rank), device=device)
    is_batched = isinstance(ring, BatchedGroup) and size > 1
    if is_batched:
        ring._start_coalescing()
    works = []
    for hop in range(1, size):
        source = (rank - hop) % size
        works += [ring.send([own], (rank + hop) % size, 0), ring.recv([received[source : source + 1]], source, 0)]
    if is_batched:
        works = [ring._end_coalescing()]
    for work in works:
        work.wait()
    return [float(value) for value in received.tolist()]
