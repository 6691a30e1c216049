"""NCCL's listeners between two hosts: strangers do not reach them, built groups go on, and later ones connect."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups import nccl
from elastic_ring.runtime.groups.groups import Connector, Rendezvous
from elastic_ring.runtime.groups.transport import listening
from tests.unit.groups.processes import HOST, membership, reaches

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

PAIR = Mesh(1, 2)


def join(me: Any, where: Rendezvous) -> list[int]:
    """As a host of its own; the ports of this process that NCCL has opened."""
    os.environ |= {**nccl.ENVIRONMENT, "NCCL_SOCKET_IFNAME": "lo", "NCCL_HOSTID": f"h{me.rank}", "NCCL_IB_DISABLE": "1"}
    before = set(listening())
    me.connector = Connector(where, torch.device("cuda", me.rank))
    me.groups = me.connector.connect(PAIR, me.rank)
    gloo = me.connector._sockets._own_port
    return [port for port, address in set(listening()) - before if address == HOST and port != gloo]


def sums(me: Any) -> float:
    probe = torch.full((1 << 20,), me.rank + 1.0, device=me.connector.device)
    me.groups.shard.allreduce([probe]).wait()
    return float(probe.mean())


def links(me: Any) -> float:
    """A group of a later heal: donor and newcomer exchange one element over a communicator of their own."""
    link = me.connector.link("late", ("a", "b"), "ab"[me.rank])
    probe = torch.tensor([me.rank + 1.0])
    link.host.allreduce([probe]).wait()
    return probe.item()


def end(me: Any) -> bool:
    me.connector.abort()
    me.connector.close()
    return me.connector.wait_closed(10.0)


def test_strangers_do_not_reach_nccls_listeners_and_peers_do():
    with membership(2) as pair:
        ports = pair.all(join, replace(pair.meeting(), hosts=("127.0.0.2",)))
        assert all(ports), "NCCL listens on the address of its interface"
        found = {port: reaches((HOST, port), "127.0.0.3") for own in ports for port in own}
        assert not any(found.values()), found
        assert pair.all(sums) == [3.0, 3.0]
        assert pair.all(links) == [3.0, 3.0]
        assert pair.all(sums) == [3.0, 3.0]
        assert pair.all(end) == [True, True]
