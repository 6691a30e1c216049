"""Who connects to a rank's ports without being a rank: groups that are built go on, and no descriptor is lost."""

from __future__ import annotations

import gc
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.messages import Build
from elastic_ring.errors import PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.coordinator.dispatch import Dispatcher
from elastic_ring.runtime.coordinator.run_spec import RunSpec
from elastic_ring.runtime.groups.gloo import Sockets
from elastic_ring.runtime.groups.groups import Connector, Rendezvous
from elastic_ring.runtime.groups.transport import (
    NewListeners,
    RendezvousStore,
    common_host,
    let_in,
    listening,
    with_secret,
)
from tests.unit.groups.processes import HOST, Membership, connect, membership, reaches

PAIR = Mesh(1, 2)
NUM_CALLS, NUM_SPARE = 300, 100
SOON = timedelta(seconds=5)


@pytest.fixture(scope="module")
def pair() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


def with_few_descriptors(me: Any) -> list[int]:
    """Lower this process's limit to a little above what it has open; the ports it listens on."""
    gc.collect()
    most = max(map(int, os.listdir("/proc/self/fd"))) + NUM_SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return [port for port, _ in listening()]


def call_and_close(ports: list[int]) -> int:
    """Connect `NUM_CALLS` times to each of these ports of this host and say nothing; how many were taken."""
    calls = []
    for port in ports:
        for _ in range(NUM_CALLS):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex((HOST, port))
            calls.append(sock)
    taken = 0
    for sock in calls:
        with sock, suppress(OSError):
            sock.getpeername()
            taken += 1
    return taken


def settled_descriptors(me: Any) -> int:
    """How many are open, once a thread that accepts would have had its time."""
    until, before = time.monotonic() + 5, -1
    while (found := len(os.listdir("/proc/self/fd"))) != before and time.monotonic() < until:
        before = found
        time.sleep(0.05)
    return found


def sums(me: Any) -> list[float]:
    found = []
    for group in (me.groups.world, me.groups.ring):
        probe = torch.tensor([me.rank + 1.0])
        group.allreduce([probe]).wait()
        found.append(probe.item())
    return found


def links(me: Any) -> float:
    """A group that is built later in the generation, as that of copies is."""
    link = me.connector.host_link("late", ("a", "b"), "ab"[me.rank])
    probe = torch.tensor([me.rank + 1.0])
    link.allreduce([probe]).wait()
    return probe.item()


def test_three_hundred_connections_to_a_rank_leave_no_descriptor_and_its_groups_go_on(pair: Membership) -> None:
    pair.all(connect, pair.meeting(), PAIR)
    ports = pair.call(0, with_few_descriptors)
    assert len(ports) == 1
    before = pair.call(0, settled_descriptors)
    assert call_and_close(ports) == 0
    assert pair.call(0, settled_descriptors) == before
    assert pair.all(sums) == [[3.0, 3.0]] * 2
    assert pair.all(links) == [3.0, 3.0]
    assert call_and_close(ports) == 0  # after a later group too
    pair.all(connect, pair.meeting(), PAIR)  # and the next generation
    assert pair.all(sums) == [[3.0, 3.0]] * 2


def test_a_port_that_is_shut_is_that_of_one_address() -> None:
    """Another socket of the process may listen on the same port of another address."""
    with socket.create_server((HOST, 0)) as own:
        port = own.getsockname()[1]
        with socket.create_server(("127.0.0.2", port)) as other:
            let_in(HOST, port, None)
            assert reaches(other.getsockname())
            assert not reaches((HOST, port))
            let_in(HOST, port, ())
            assert reaches((HOST, port))


def test_what_opens_from_now_on_at_this_address_takes_connections_of_the_peers_hosts() -> None:
    """NCCL's listeners; those of Ray were there before, and other networks have other addresses."""
    with socket.create_server((HOST, 0)) as old:
        opened = NewListeners(HOST, ("127.0.0.2",))
        with socket.create_server((HOST, 0)) as new, socket.create_server(("127.0.0.4", 0)) as elsewhere:
            opened.keep_out_strangers()
            for sock, from_stranger in ((old, True), (new, False), (elsewhere, True)):
                assert [reaches(sock.getsockname(), one) for one in (HOST, "127.0.0.2")] == [True, True]
                assert reaches(sock.getsockname(), "127.0.0.3") == from_stranger


def test_only_the_members_hosts_reach_the_store_of_a_generation() -> None:
    """By their nodes' addresses and those from which they come; everybody where one of them is not known, and after a
    build that did not come to its end."""
    run_spec = RunSpec(RunConfig("r", run_dir="nowhere"), ScalingConfig(), None, "a", "", "")  # type: ignore[arg-type]
    build = Build("c", "w0", 1, 2, PAIR, ("w0", "w1"), 0, None, (), True)
    came_from = "127.0.0.4"
    nodes: Any = SimpleNamespace(addresses_of=lambda worker: ("127.0.0.2", came_from))
    for known, are_let_in in (("127.0.0.3", True), ("127.0.0.4", False), ("", True)):
        came_from = known
        dispatch = Dispatcher(run_spec, "127.0.0.5", None, nodes, None, None)  # type: ignore[arg-type]
        place = dispatch._rendezvous(build)
        at = (place.host, place.port)
        assert [reaches(at, one) for one in ("127.0.0.2", "127.0.0.5", "127.0.0.3")] == [True, True, are_let_in]
        store = TCPStore(*at, is_master=False, wait_for_workers=False, timeout=SOON)
        with_secret(store, place.secret).set("a", "b")
    came_from = "127.0.0.4"
    for generation, are_let_in in ((3, False), (4, True), (5, True)):
        if generation == 3:
            dispatch = Dispatcher(run_spec, "127.0.0.5", None, nodes, None, None)  # type: ignore[arg-type]
        place = dispatch._rendezvous(replace(build, generation=generation))
        assert reaches((place.host, place.port), "127.0.0.3") == are_let_in, generation


def reached_while_it_builds(me: Any, hosts: tuple[str, ...]) -> list[bool]:
    sockets = Sockets(HOST, lambda: None, hosts)
    with sockets.admitting():
        sockets.listen()
        at = (HOST, sockets._own_port)
        return [reaches(at, source) for source in (HOST, "127.0.0.2", "127.0.0.3")]


def test_a_rank_that_builds_takes_connections_from_its_peers_hosts(pair: Membership) -> None:
    assert pair.call(0, reached_while_it_builds, ("127.0.0.2",)) == [True, True, False]
    assert pair.call(0, reached_while_it_builds, ()) == [True, True, True]
    where = replace(pair.meeting(), hosts=("10.0.0.1",))  # of these all the same
    pair.all(connect, where, PAIR)
    assert pair.all(sums) == [[3.0, 3.0]] * 2


def test_the_store_of_a_generation_is_gone_with_all_connections_once_its_members_have_come(pair: Membership) -> None:
    """And they need it no more: what a stranger put there, and who held it open, is gone."""
    run_spec = RunSpec(RunConfig("r", run_dir="nowhere"), ScalingConfig(), None, "a", "", "")  # type: ignore[arg-type]
    nodes: Any = SimpleNamespace(addresses_of=lambda worker: (HOST, HOST))
    dispatch = Dispatcher(run_spec, HOST, None, nodes, None, None)  # type: ignore[arg-type]
    build = Build("c", "w0", 1, 2, PAIR, ("w0", "w1"), 0, None, (), True)
    place = dispatch._rendezvous(build)
    assert dispatch._rendezvous(replace(build, worker="w1")) == place
    at = (place.host, place.port)
    where = replace(pair.meeting(), host=at[0], port=at[1], secret=place.secret)
    with socket.create_connection(at, timeout=5) as stranger:
        pair.all(connect, where, PAIR)
        dispatch.end_meeting()
        assert stranger.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(at, timeout=5)
    assert pair.all(sums) == [[3.0, 3.0]] * 2


# ------------------------------------------------------------ the store


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
