"""Real gloo between real processes: an abort from another thread ends whatever waits, and leaves nothing behind.

No test measures time. An operation may wait for ten minutes here and an answer is waited for one: what came
back was released.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from elastic_ring.errors import ElasticRingError, GroupAborted, PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups.groups import Connector, Rendezvous
from elastic_ring.runtime.groups.nccl import Builds
from elastic_ring.runtime.groups.transport import translated
from elastic_ring.runtime.worker.training_thread import TrainingThread
from tests.unit.groups.processes import HOST, Membership, abort, connect, leave, membership

PAIR = Mesh(1, 2)


@pytest.fixture(scope="module")
def pair() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


# ------------------------------------------------------------ jobs


def mark_started(me: Any) -> None:
    """The operation is posted; the control thread may abort it."""
    me.started.set()


def prepare(me: Any) -> None:
    me.started, me.paused = threading.Event(), threading.Event()


def await_started(me: Any) -> None:
    assert me.started.wait(30)


def outcome(me: Any, operation: str) -> str:
    """Post an operation that no peer answers, wait for it, and tell which error ended it."""
    world, probe = me.groups.world, torch.ones(4)
    post = {
        "recv": lambda: world.recv([probe], 1 - me.rank, 7),
        "all-reduce": lambda: world.allreduce([probe]),
        "all-gather": lambda: world.allgather([[torch.empty(4), torch.empty(4)]], [probe]),
        "ring all-reduce": lambda: me.groups.ring.allreduce([probe]),
    }[operation]
    try:
        with translated(me.connector):
            work = post()
            mark_started(me)
            work.wait()
    except ElasticRingError as error:
        return type(error).__name__
    return "completed"


def total(me: Any) -> float:
    probe = torch.tensor([me.rank + 1.0])
    me.groups.world.allreduce([probe]).wait()
    return probe.item()


def exchange_until_aborted(me: Any, operation: str, num_exchanges: int) -> str:
    """One small exchange after another; after some of them the control thread may abort it."""
    world, peer, done = me.groups.world, 1 - me.rank, 0
    try:
        with translated(me.connector):
            while True:
                probe, other = torch.ones(64), torch.empty(64)
                if operation == "send and recv":
                    for work in [world.send([probe], peer, 3), world.recv([other], peer, 3)]:
                        work.wait()
                elif operation == "all-reduce":
                    world.allreduce([probe]).wait()
                else:
                    world.allgather([[other, torch.empty(64)]], [probe]).wait()
                done += 1
                if done == num_exchanges:
                    mark_started(me)
    except ElasticRingError as error:
        return type(error).__name__
    finally:
        me.paused.set()


def abort_when_started(me: Any) -> bool:
    await_started(me)
    return abort_until_paused(me)


def abort_until_paused(me: Any) -> bool:
    return me.connector.abort_until(me.paused, 20.0)


def outcome_of_connecting(me: Any, where: Rendezvous, mesh: Mesh) -> str:
    try:
        connect(me, where, mesh)
    except ElasticRingError as error:
        return type(error).__name__
    finally:
        me.paused.set()
    return "connected"


class Unanswering(dist.Store):
    """A store that gives this rank's addresses to the others and none of theirs to this one."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: bytes) -> None:
        self._inner.set(key, value)

    def wait(self, *args: Any) -> None:
        raise RuntimeError("Gloo connects no further")


def never_call(me: Any, where: Rendezvous, mesh: Mesh) -> str:
    """Tell the others where to find this rank's end of the first group, and do not connect it."""
    only_publish(me, where, mesh)
    store = PrefixStore(f"{where.prefix}/world", me.store)
    me.store.wait([f"{where.prefix}/port/0"])
    try:
        me.connector._gloo(Unanswering(store), me.rank, mesh.size)
    except RuntimeError:
        return "stopped"
    return "connected"


def only_publish(me: Any, where: Rendezvous, mesh: Mesh) -> None:
    """Come to the meeting, say where this rank listens, and do nothing more: a peer that died there."""
    leave(me)
    me.connector = Connector(where)
    me.store = me.connector._meet(mesh, me.rank)


def resources(me: Any) -> tuple[int, int]:
    """(descriptors, threads) of this process, once garbage and finished threads are gone."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def live_and_die(me: Any, meetings: list[Rendezvous]) -> int:
    """One generation after another, each ended by an abort as after a death."""
    for where in meetings:
        connect(me, where, PAIR)
        assert total(me) == 3.0
        me.connector.abort()
    leave(me)
    return len(meetings)


# ------------------------------------------------------------ abort


@pytest.mark.parametrize("operation", ["recv", "all-reduce", "all-gather", "ring all-reduce"])
def test_an_abort_from_another_thread_releases_a_blocked_operation(pair: Membership, operation: str) -> None:
    pair.all(connect, pair.meeting(), PAIR)
    pair.call(0, prepare)
    pair.start(0, outcome, operation)
    pair.now(0, await_started)
    pair.now(0, abort)
    assert pair.result(0) == "GroupAborted"


def test_what_a_live_peer_waits_for_fails_once_the_aborted_generation_is_let_go(pair: Membership) -> None:
    pair.all(connect, pair.meeting(), PAIR)
    pair.call(1, prepare)
    pair.start(1, outcome, "all-reduce")
    pair.now(1, await_started)
    pair.now(0, abort)
    pair.call(0, leave)
    assert pair.result(1) == "PeerFailed"


@pytest.mark.slow
@pytest.mark.thinned(num=1)
@pytest.mark.parametrize("operation", ["send and recv", "all-reduce", "all-gather"])
def test_aborts_in_the_midst_of_exchanges_leave_nobody_waiting(pair: Membership, operation: str) -> None:
    """Gloo loses a message that is being written when its connection breaks: whoever waited for it stayed."""
    for num_exchanges in range(1, 13):
        pair.all(connect, pair.meeting(), PAIR)
        pair.all(prepare)
        for rank in (0, 1):
            pair.start(rank, exchange_until_aborted, operation, num_exchanges)
        assert [pair.now(rank, abort_when_started) for rank in (0, 1)] == [True, True]
        assert [pair.result(rank) for rank in (0, 1)] == ["GroupAborted", "GroupAborted"]


def test_operations_that_begin_after_an_abort_fail_and_a_second_abort_is_harmless(pair: Membership) -> None:
    pair.all(connect, pair.meeting(), PAIR)
    pair.call(0, prepare)
    pair.now(0, abort)
    pair.now(0, abort)
    assert pair.call(0, outcome, "all-reduce") == "GroupAborted"


def test_an_abort_releases_a_meeting_to_which_a_peer_never_comes(pair: Membership) -> None:
    where = pair.meeting()
    pair.all(prepare)
    pair.start(0, outcome_of_connecting, where, PAIR)
    pair.store.wait([f"{where.prefix}/port/0"])
    pair.now(0, abort)
    assert pair.result(0) == "GroupAborted"


def test_an_abort_releases_a_group_that_waits_for_a_peer_which_came_and_stopped(pair: Membership) -> None:
    where = pair.meeting()
    pair.all(prepare)
    before = pair.store.num_keys()
    pair.start(1, only_publish, where, PAIR)
    pair.start(0, outcome_of_connecting, where, PAIR)
    pair.result(1)
    while pair.store.num_keys() <= before + 2:  # until rank 0 has written of its first group
        pass
    pair.now(0, abort)
    assert pair.result(0) == "GroupAborted"


def test_an_abort_releases_a_pair_whose_peer_never_calls(pair: Membership) -> None:
    """Which end of a pair calls depends on the ports: in several meetings both roles occur."""
    for _ in range(8):
        where = pair.meeting()
        pair.all(prepare)
        pair.start(0, outcome_of_connecting, where, PAIR)
        assert pair.call(1, never_call, where, PAIR) == "stopped"
        assert pair.now(0, abort_until_paused)
        assert pair.result(0) == "GroupAborted"


def test_a_connector_that_was_aborted_before_it_connects_does_not_connect() -> None:
    connector = Connector(Rendezvous(HOST, 1, "1/0", HOST, 60.0, 60.0))
    connector.abort()
    with pytest.raises(GroupAborted, match="generation 1/0 was aborted"):
        connector.connect(PAIR, 0)
    with pytest.raises(GroupAborted):
        connector.link("0/w", ("w", "v"), "w")


def test_a_store_that_nobody_serves_is_a_failed_peer() -> None:
    with socket.create_server((HOST, 0)) as taken:
        free = taken.getsockname()[1]
    with pytest.raises(PeerFailed):
        Connector(Rendezvous(HOST, free, "1/0", HOST, 0.5, 0.5)).connect(PAIR, 0)


# ------------------------------------------------------------ deaths and what comes after


def test_a_killed_peer_gives_peer_failed_and_the_survivor_builds_the_next_generation() -> None:
    with membership(3) as three:
        mesh = Mesh(1, 3)
        three.all(connect, three.meeting(), mesh)
        for rank in (0, 1):
            three.call(rank, prepare)
            three.start(rank, outcome, "all-reduce")
        for rank in (0, 1):
            three.now(rank, await_started)
        three.kill(2)
        assert {three.result(0), three.result(1)} == {"PeerFailed"}
        for rank in (0, 1):
            three.now(rank, abort)
        three.all(connect, three.meeting(), PAIR, ranks=(0, 1))
        assert three.all(total, ranks=(0, 1)) == [3.0, 3.0]


def meet(me: Any, where: Rendezvous, mesh: Mesh) -> None:
    """The first half of a build: the store, the ports, the group of all."""
    leave(me)
    me.connector = Connector(where)
    me.world = me.connector._group(me.connector._meet(mesh, me.rank), "world", range(mesh.size), me.rank)


def connect_out_of_reach(me: Any, port: int, name: str) -> None:
    """As NCCL's set-up does: wait for all ranks over sockets that no abort knows of."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    store = TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    me.waiting.release()
    ProcessGroupGloo(PrefixStore(name, store), me.rank, 3, options)


def build_the_rest(me: Any, port: int) -> None:
    """The second half, in a training thread."""
    me.waiting, me.ended = threading.Semaphore(0), "not yet"
    me.training = TrainingThread("training")
    me.training.start()

    def build() -> None:
        try:
            builds = [partial(connect_out_of_reach, me, port, name) for name in ("shard", "ring")]
            Builds(builds).results(me.connector.raise_if_aborted)
        except GroupAborted as error:
            me.ended = type(error).__name__

    me.training.give(build)
    for _ in range(2):
        assert me.waiting.acquire(timeout=30)


def release_training(me: Any) -> tuple[str, str]:
    return me.training.release(me.connector.abort_until, lambda: True, 20.0), me.ended


def test_survivors_come_back_from_groups_that_a_killed_newcomer_never_joins() -> None:
    """It dies between the group of all, which it joined, and the others: what sets those up waits, deaf to aborts."""
    with membership(3) as three:
        three.all(meet, three.meeting(), Mesh(1, 3))
        three.kill(2)
        elsewhere = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        three.all(build_the_rest, elsewhere.port, ranks=(0, 1))
        assert [three.now(rank, release_training) for rank in (0, 1)] == [("paused", "GroupAborted")] * 2
        three.all(connect, three.meeting(), PAIR, ranks=(0, 1))
        assert three.all(total, ranks=(0, 1)) == [3.0, 3.0]


@pytest.mark.slow
def test_thirty_generations_leave_no_descriptor_and_no_thread_behind(pair: Membership) -> None:
    assert pair.all(live_and_die, [pair.meeting() for _ in range(3)]) == [3, 3]
    before = pair.all(resources)
    assert pair.all(live_and_die, [pair.meeting() for _ in range(30)]) == [30, 30]
    after = pair.all(resources)
    for (fds_before, threads_before), (fds_after, threads_after) in zip(before, after, strict=True):
        assert fds_after <= fds_before
        assert threads_after <= threads_before


# ------------------------------------------------------------ what is not the group's


def open_bystanders(me: Any, port: int, group_port: int) -> None:
    """A conversation over TCP, a listener, a client of another store, and a gloo group of one's own."""
    me.listener = socket.create_server((HOST, 0))
    me.near = socket.create_connection(me.listener.getsockname())
    me.far, _ = me.listener.accept()
    me.other_store = TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    meeting = TCPStore(HOST, group_port, is_master=False, wait_for_workers=False)
    me.other_group = ProcessGroupGloo(meeting, me.rank, 2, options)


def use_bystanders(me: Any) -> tuple[bytes, bytes, bytes, float]:
    me.near.sendall(b"over")
    heard = me.far.recv(4)
    with socket.create_connection(me.listener.getsockname()) as late:
        accepted, _ = me.listener.accept()
        with accepted:
            late.sendall(b"late")
            heard_late = accepted.recv(4)
    me.other_store.set(f"still/{me.rank}", "here")
    probe = torch.ones(1)
    me.other_group.allreduce([probe]).wait()
    return heard, heard_late, me.other_store.get(f"still/{me.rank}"), probe.item()


def close_bystanders(me: Any) -> None:
    for sock in (me.listener, me.near, me.far):
        sock.close()
    me.other_store = me.other_group = None


def test_sockets_that_are_not_the_groups_are_left_alone(pair: Membership) -> None:
    stores = [TCPStore(HOST, 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    pair.all(open_bystanders, *(store.port for store in stores))
    pair.all(connect, pair.meeting(), PAIR)
    for rank in (0, 1):
        pair.now(rank, abort)
    pair.call(0, prepare)
    assert pair.call(0, outcome, "all-reduce") == "GroupAborted"
    assert pair.all(use_bystanders) == [(b"over", b"late", b"here", 2.0)] * 2
    pair.all(close_bystanders)
