"""Groups that connect while the training thread does something else: in what order, and whatever meets them half way.

Real processes, gloo and stores. NCCL's backends are stood in for: a gloo of one for each, and connecting is a wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from elastic_ring.errors import ElasticRingError, PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime import groups as groups_module
from elastic_ring.runtime import nccl
from elastic_ring.runtime.groups import Connector, Rendezvous
from tests.unit.crew import HOST, Crew, abort, connect, crew, leave
from tests.unit.tiny_task import begin, facts, make_task, rebuild, run_steps

PAIR, REPLICAS = Mesh(1, 2), Mesh(2, 1)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def pair() -> Iterator[Crew]:
    with crew(2) as made:
        yield made


# ------------------------------------------------------------ jobs on what stands in for GPUs


def stand_in(me: Any) -> None:
    """From now on the process builds NCCL's groups on a device that is none."""
    me.created, me.ended, me.devices, me.tested = [], [], [], []
    me.connecting, me.may_connect, me.breaks_at = threading.Semaphore(0), threading.Event(), None

    def create(store: Any, rank: int, size: int, device: torch.device, collective_s: float) -> Any:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
        backend = ProcessGroupGloo(HashStore(), 0, 1, options)
        me.created.append(backend)
        return backend

    def connect_now(backend: Any, device: torch.device, given_up: Callable[[], bool]) -> None:
        me.connecting.release()
        assert me.may_connect.wait(WAIT_S)
        if me.breaks_at is not None and backend is me.created[me.breaks_at]:
            raise PeerFailed("a GPU that is gone")

    def set_device(device: torch.device) -> None:
        me.devices.append((threading.current_thread().name, device))

    unpatch(me)
    me.patches = [
        mock.patch.object(nccl, "create_backend", create), mock.patch.object(nccl, "connect_now", connect_now),
        mock.patch.object(nccl, "end", me.ended.append), mock.patch.object(torch.cuda, "set_device", set_device),
        mock.patch.object(groups_module, "self_test", me.tested.append),
    ]  # fmt: skip
    for patch in me.patches:
        patch.start()


def unpatch(me: Any) -> None:
    for patch in getattr(me, "patches", ()):
        patch.stop()
    me.patches = []


def open_on_device(me: Any, where: Rendezvous) -> tuple[int, float]:
    """Open, and exchange something over `world` while the others connect: (how many connect, the sum)."""
    leave(me)
    me.connector = Connector(where, torch.device("cuda", 1))
    me.groups = me.connector.open(PAIR, me.rank)
    for _ in me.created:
        assert me.connecting.acquire(timeout=WAIT_S)
    probe = torch.tensor([me.rank + 1.0])
    me.groups.world.allreduce([probe]).wait()
    return len(me.created), probe.item()


def let_connect(me: Any, breaks_at: int | None = None) -> None:
    me.breaks_at = breaks_at
    me.may_connect.set()


def join(me: Any) -> str:
    try:
        me.connector.join(me.groups)
    except ElasticRingError as error:
        return type(error).__name__
    return "joined"


def seen(me: Any) -> dict[str, Any]:
    assert me.connector.wait_closed(WAIT_S)
    return {
        "num_tested": len(me.tested), "timings": sorted(me.connector.timings), "devices": sorted(me.devices, key=str),
        "all_ended": {id(backend) for backend in me.created} <= {id(backend) for backend in me.ended},
    }  # fmt: skip


# ------------------------------------------------------------ on a device


def test_the_training_thread_is_free_while_groups_on_a_device_connect(pair: Crew) -> None:
    pair.all(stand_in)
    assert pair.all(open_on_device, pair.meeting()) == [(3, 3.0)] * 2
    before = pair.call(0, seen)
    assert (before["num_tested"], before["timings"]) == (0, ["meet_s", "world_s"]), "nothing of them stands yet"
    pair.all(let_connect)
    assert pair.all(join) == ["joined", "joined"]
    after = pair.call(0, seen)
    assert (after["num_tested"], after["all_ended"]) == (1, False)
    assert after["timings"] == ["groups_s", "meet_s", "replica_s", "ring_s", "shard_s", "test_s", "world_s"]
    assert after["devices"] == [(f"nccl-{index}", torch.device("cuda", 1)) for index in range(3)]
    pair.all(unpatch)


def test_an_abort_between_open_and_join_shows_in_join_and_ends_what_connects(pair: Crew) -> None:
    pair.all(stand_in)
    pair.all(open_on_device, pair.meeting())
    pair.now(0, abort)
    pair.now(1, abort)
    assert pair.all(join) == ["GroupAborted", "GroupAborted"], "though nothing has connected, nor ever will"
    found = pair.call(0, seen)
    assert (found["num_tested"], found["all_ended"]) == (0, True)
    pair.all(unpatch)
    pair.all(connect, pair.meeting(), PAIR)  # and the next generation is built over what is left of it
    pair.all(let_connect)


def test_an_abort_while_join_waits_ends_the_wait(pair: Crew) -> None:
    pair.all(stand_in)
    pair.all(open_on_device, pair.meeting())
    pair.start(0, join)
    pair.now(0, abort)
    assert pair.result(0) == "GroupAborted"
    pair.all(let_connect)
    pair.all(unpatch)


@pytest.mark.parametrize("breaks_at", [0, 2])
def test_one_group_that_does_not_connect_fails_the_join(pair: Crew, breaks_at: int) -> None:
    pair.all(stand_in)
    pair.all(open_on_device, pair.meeting())
    pair.call(0, let_connect, breaks_at)
    assert pair.call(0, join) == "PeerFailed"
    assert pair.call(0, seen)["num_tested"] == 0
    pair.call(1, let_connect)
    pair.all(unpatch)


def test_groups_of_a_generation_that_is_given_up_already_do_not_begin_to_connect() -> None:
    asked = []
    backend = SimpleNamespace(eager_connect_single_device=asked.append, abort=lambda: None)
    nccl.connect_now(backend, torch.device("cpu"), lambda: True)
    assert asked == []
    nccl.connect_now(backend, torch.device("cpu"), lambda: False)
    assert asked == [torch.device("cpu")]


# ------------------------------------------------------------ what a survivor holds


def enter_between(me: Any, where: Rendezvous) -> str:
    """A build that gets as far as the wrapping, and breaks off in `join`."""
    me.state.leave()
    leave(me)
    me.connector = Connector(where)
    me.groups = me.connector.open(REPLICAS, me.rank)
    me.state.enter(me.groups, (1, me.cast[1] + 1), keep=True)
    me.connector.abort()
    return join(me)


def test_a_survivor_that_is_aborted_after_it_has_wrapped_holds_what_it_held(pair: Crew) -> None:
    pair.all(begin, pair.meeting(), REPLICAS, make_task())
    pair.all(run_steps, 2)
    held = pair.all(facts)
    assert pair.all(enter_between, pair.meeting()) == ["GroupAborted"] * 2
    assert pair.all(facts) == held
    assert all(fact["valid"] for fact in held)
    pair.all(rebuild, pair.meeting(), REPLICAS)
    pair.all(run_steps, 1)
    first, second = (fact["digest"] for fact in pair.all(facts))
    pair.all(begin, pair.meeting(), REPLICAS, make_task())
    pair.all(run_steps, 3)
    assert first == second == pair.call(0, facts)["digest"], "and goes on to the bits of a run without the break"
