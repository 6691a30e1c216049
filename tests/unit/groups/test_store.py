"""The rendezvous store listens on one address only, and its keys are seen by those who were given its secret."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from elastic_ring.errors import PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups.groups import Connector, Rendezvous
from elastic_ring.runtime.groups.sockets import RendezvousStore, common_host, with_secret

HOST = "127.0.0.1"
ANOTHER_ADDRESS = "127.0.0.2"  # of the same host


def client(store: RendezvousStore) -> TCPStore:
    timeout = timedelta(seconds=5)
    return TCPStore(HOST, store.port, is_master=False, wait_for_workers=False, timeout=timeout)


def test_a_store_refuses_connections_on_the_hosts_other_addresses() -> None:
    store = RendezvousStore(HOST)
    assert store.server.port == store.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ANOTHER_ADDRESS, store.port), timeout=5)
    with socket.create_connection((HOST, store.port), timeout=5):
        pass


def test_keys_without_the_secret_are_not_seen_and_do_not_count() -> None:
    store = RendezvousStore(HOST)
    member, other = with_secret(client(store), store.secret), client(store)
    member.set("1/7/port/0", "127.0.0.1:9")
    other.set("1/7/port/1", "127.0.0.1:666")
    assert store.keys.get("1/7/port/0") == b"127.0.0.1:9"
    assert not other.check(["1/7/port/0"])
    assert not member.check(["1/7/port/1"])


def test_a_rank_without_the_secret_meets_nobody() -> None:
    """A worker of another run that was given this port, as after a restart."""
    store = RendezvousStore(HOST)
    store.keys.set("1/7/port/1", "127.0.0.1:9")
    with pytest.raises(PeerFailed, match="DistStoreError"):
        Connector(Rendezvous(HOST, store.port, "1/7", HOST, 0.2, 0.2, "another")).connect(Mesh(1, 2), 0)
    assert not store.keys.check(["1/7/port/0"])


def test_each_store_has_a_port_and_a_secret_of_its_own_and_ends_with_its_object() -> None:
    stores = [RendezvousStore(HOST) for _ in range(3)]
    assert len({store.port for store in stores}) == len({store.secret for store in stores}) == 3
    assert all(len(store.secret) == 32 for store in stores)
    gone = stores.pop().port
    with pytest.raises(dist.DistNetworkError):
        TCPStore(HOST, gone, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=0.2))


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        (["10.0.0.1"], "127.0.0.1"),
        (["10.0.0.1", "10.0.0.1"], "127.0.0.1"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.1"),
        (["10.0.0.1", ""], "10.0.0.1"),  # one whose node is not known
    ],
)
def test_members_of_one_host_meet_on_loopback(nodes: list[str], host: str) -> None:
    assert common_host("10.0.0.1", nodes) == host
