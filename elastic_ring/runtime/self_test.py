"""The first exchange over each group of a generation: it proves the wires, and has them connected before a step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from elastic_ring.errors import PeerFailed
from elastic_ring.runtime.joined import JoinedGroup

if TYPE_CHECKING:
    from elastic_ring.runtime.groups import Groups


def self_test(groups: Groups) -> None:
    """A known sum over each group, and over the ring a known number from every rank to every other, as hops go.

    Raises PeerFailed when a wire carries something else, GroupAborted when the groups were given up meanwhile.
    """
    for name in ("world", "shard", "ring", "replica"):
        group: Any = getattr(groups, name)
        on = groups.connector.device if name != "world" else torch.device("cpu")
        probe = torch.tensor([1.0, float(group.rank())], device=on)
        # The others' launches go through the gate by themselves, which lets nobody in twice.
        with groups.launching() if name == "shard" else nullcontext():
            work = group.allreduce([probe])
        work.wait()
        size = group.size()
        found = probe.tolist()
        groups.check()  # an abort on a device ends the exchange and raises nothing
        if found != [size, size * (size - 1) / 2]:
            raise PeerFailed(f"self-test of group {name}: got {found} from {size} ranks")
    heard = shift(groups.ring, groups.connector.device)
    groups.check()
    if heard != [float(peer) for peer in range(len(heard))]:
        raise PeerFailed(f"self-test of the hops of the ring: heard {heard}")


def shift(ring: Any, device: torch.device) -> list[float]:
    """The ranks as each of them tells its own to all others, one operation where the group can join them.

    NCCL connects two ranks when something first goes between them, which takes as long as gigabytes do later. A hop
    pulls straight from its source, so a dense ring needs every pair.
    """
    rank, size = ring.rank(), ring.size()
    heard = torch.full((size,), float(rank), device=device)
    own = torch.full((1,), float(rank), device=device)
    joins = isinstance(ring, JoinedGroup) and size > 1
    if joins:
        ring._start_coalescing()
    works = []
    for hop in range(1, size):
        source = (rank - hop) % size
        works += [ring.send([own], (rank + hop) % size, 0), ring.recv([heard[source : source + 1]], source, 0)]
    if joins:
        works = [ring._end_coalescing()]
    for work in works:
        work.wait()
    return [float(value) for value in heard.tolist()]
