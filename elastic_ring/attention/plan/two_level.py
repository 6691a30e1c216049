"""Keys cross between hosts once, not once for each rank that reads them.

In hop t rank r reads rank r - t, and in hop t - 1 rank r - 1 read the same rank. Where both are on one host, the owner
is on another, and both want the same keys, rank r gets them from its neighbour, out of the buffer of the stage before:
the classical ring inside a host (Liu et al. 2023, arXiv:2310.01889), direct messages between hosts. The first rank of
a host fetches for all of it, so that a link between hosts carries a host's keys once instead of once a rank, and no
hop waits longer. That rank's own card still carries all it did: what gains is a link that the ranks of a host share.
Stages of several hops fetch directly, since the neighbour has their keys no sooner. Bytes and their order in every
buffer are the same, and so are all bits: a run may move to other hosts. dK and dV go back directly: their sum inside a
host would be another order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic_ring.attention.plan.schedule import Schedule
from elastic_ring.attention.plan.traffic import FETCHED, ContiguousCopy, ExchangePlan, PeerTransfer, Traffic

Hosts = tuple[str, ...]
"""The host of each rank of a ring."""


def two_level(
    exchange: ExchangePlan,
    hops: Sequence[tuple[int, ...]],
    schedule: Schedule,
    cp_rank: int,
    hosts: Hosts,
) -> ExchangePlan:
    """`exchange`, whose stages have these `hops`, for ranks on these hosts; the same plan where all are on one."""
    far = frozenset(rank for rank, host in enumerate(hosts) if host != hosts[cp_rank])
    if not far:
        return exchange
    stages = list(exchange.stages)
    for index in range(1, len(stages)):
        if len(hops[index - 1]) == len(hops[index]) == 1:
            stages[index] = _stage(exchange.stages, index, hops[index][0], schedule, cp_rank, hosts)
    return replace(exchange, stages=tuple(stages), far=far)


def is_forwarded(schedule: Schedule, cp_rank: int, hop: int, hosts: Hosts) -> bool:
    """Whether the keys that `cp_rank` fetches in `hop` come from its neighbour."""
    own = schedule.hops[cp_rank][hop]
    before, host = schedule.hops[cp_rank - 1][hop - 1], hosts[cp_rank]
    same = own.source == before.source and own.fetch == before.fetch and any(own.fetch)
    return hop > 1 and same and hosts[cp_rank - 1] == host != hosts[own.source]


def _stage(
    stages: tuple[Traffic, ...],
    index: int,
    hop: int,
    schedule: Schedule,
    cp_rank: int,
    hosts: Hosts,
) -> Traffic:
    stage, cp = stages[index], schedule.cp
    keys_in, keys_out, following = stage.keys_in, stage.keys_out, (cp_rank + 1) % cp
    if is_forwarded(schedule, cp_rank, hop, hosts):
        keys_in = (_whole(hop, (cp_rank - 1) % cp, keys_in),)
    if is_forwarded(schedule, schedule.reader(cp_rank, hop), hop, hosts):
        keys_out = ()
    if is_forwarded(schedule, following, hop, hosts):
        keys_out = (*keys_out, _whole(hop, following, stages[index - 1].keys_in))
    return replace(stage, keys_in=keys_in, keys_out=keys_out)


def _whole(hop: int, peer: int, fetched: tuple[PeerTransfer, ...]) -> PeerTransfer:
    """All that a stage of one hop fetched, as it lies in its buffer."""
    return PeerTransfer(hop, peer, (ContiguousCopy(FETCHED, 0, 0, sum(leg.size for leg in fetched)),))
