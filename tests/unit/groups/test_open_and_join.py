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

from elastic_ring.control.messages import Heal
from elastic_ring.errors import ElasticRingError, GroupAborted, PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups import groups as groups_module
from elastic_ring.runtime.groups.groups import Connector, Part, Rendezvous, nccl
from elastic_ring.runtime.groups.transport import translated
from elastic_ring.runtime.worker.generation_build import heal_link
from tests.unit.groups.processes import HOST, Membership, abort, connect, leave, membership
from tests.unit.train.tiny_task import begin, facts, make_task, rebuild, run_steps

PAIR, REPLICAS = Mesh(1, 2), Mesh(2, 1)
WAIT_S = 60.0
MOMENT_S = 0.05
"""In which a group that should not connect might begin to."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Membership]:
    with membership(2) as made:
        yield made


# ------------------------------------------------------------ jobs on what stands in for GPUs


def stand_in(me: Any) -> None:
    """From now on the process builds NCCL's groups on a device that is none."""
    me.created, me.ended, me.devices, me.tested, me.exchanged = [], [], [], [], []
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
        mock.patch.object(nccl, "create_backend", create),
        mock.patch.object(nccl, "connect_now", connect_now),
        mock.patch.object(nccl, "end", me.ended.append),
        mock.patch.object(torch.cuda, "set_device", set_device),
        mock.patch.object(groups_module, "self_test", me.tested.append),
        mock.patch.object(
            nccl, "first_exchange", lambda group, device: me.exchanged.append((backend_of(group), device))
        ),
    ]
    for patch in me.patches:
        patch.start()


def backend_of(group: Any) -> Any:
    return (group.group if isinstance(group, Part) else group).backend


def unpatch(me: Any) -> None:
    for patch in getattr(me, "patches", ()):
        patch.stop()
    me.patches = []


def open_on_device(me: Any, where: Rendezvous, mesh: Mesh = PAIR) -> tuple[int, float]:
    """Open, and exchange something over `world` while the others connect: (how many connect, the sum)."""
    leave(me)
    me.connector = Connector(where, torch.device("cuda", 1))
    me.groups = me.connector.open(mesh, me.rank)
    probe = torch.tensor([me.rank + 1.0])
    with translated(me.connector):
        me.groups.world.allreduce([probe]).wait()
    num_connecting = sum(size > 1 for size in (mesh.cp, mesh.cp, mesh.dp))
    for _ in range(num_connecting):
        assert me.connecting.acquire(timeout=WAIT_S)
    return num_connecting + me.connecting.acquire(timeout=MOMENT_S), probe.item()


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
        "num_tested": len(me.tested),
        "timings": sorted(me.connector.timings),
        "devices": sorted(me.devices, key=str),
        "all_ended": {id(backend) for backend in me.created} <= {id(backend) for backend in me.ended},
    }


# ------------------------------------------------------------ on a device


def test_the_training_thread_is_free_while_groups_on_a_device_connect(pair: Membership) -> None:
    pair.all(stand_in)
    assert pair.all(open_on_device, pair.meeting()) == [(2, 3.0)] * 2, (
        "the replicas are one rank, which has nobody to connect to"
    )
    before = pair.call(0, seen)
    assert (before["num_tested"], before["timings"]) == (0, ["meet_s", "world_s"]), "nothing of them stands yet"
    pair.all(let_connect)
    assert pair.all(join) == ["joined", "joined"]
    after = pair.call(0, seen)
    assert (after["num_tested"], after["all_ended"]) == (1, False)
    assert after["timings"] == ["groups_s", "meet_s", "ring_s", "shard_s", "test_s", "world_s"]
    assert after["devices"] == [(f"nccl-{index}", torch.device("cuda", 1)) for index in range(2)]
    pair.all(unpatch)


def test_an_abort_between_open_and_join_shows_in_join_and_ends_what_connects(pair: Membership) -> None:
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


def test_an_abort_while_join_waits_ends_the_wait(pair: Membership) -> None:
    pair.all(stand_in)
    pair.all(open_on_device, pair.meeting())
    pair.start(0, join)
    pair.now(0, abort)
    assert pair.result(0) == "GroupAborted"
    pair.all(let_connect)
    pair.all(unpatch)


@pytest.mark.parametrize("breaks_at", [0, 1])
def test_one_group_that_does_not_connect_fails_the_join(pair: Membership, breaks_at: int) -> None:
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


# ------------------------------------------------------------ a heal's link


def say_over_link(me: Any, heal: Heal, members: tuple[str, ...]) -> dict[str, Any]:
    """A word from the donor to the newcomers over the link, as a heal gets it; and what making it still took."""
    num_before, worker = len(me.created), f"w{me.rank}"
    link = heal_link(heal, worker, members, me.groups if worker in members else None, me.connector)
    word = torch.tensor([7.0 if worker == heal.donor else 0.0])
    if worker == heal.donor:
        works = [link.host.send([word], peer, 0) for peer in range(1, link.size())]
    else:
        works = [link.host.recv([word], 0, 0)]
    for work in works:
        work.wait()
    ended = len(me.ended)
    me.connector.retire(link)
    assert me.connector.wait_closed(WAIT_S)
    return {
        "word": word.item(),
        "num_made_late": len(me.created) - num_before,
        "exchanged": [(me.created.index(backend), device) for backend, device in me.exchanged],
        "retired": [me.created.index(backend) for backend in me.ended[ended:]],
    }


def opened_and_joined(pair: Membership, mesh: Mesh) -> None:
    pair.all(stand_in)
    pair.all(open_on_device, pair.meeting(), mesh)
    pair.all(let_connect)
    assert pair.all(join) == ["joined", "joined"]


def test_members_that_hold_the_same_shard_heal_over_the_groups_that_they_have(pair: Membership) -> None:
    opened_and_joined(pair, REPLICAS)
    replicas = (2, torch.device("cuda", 1))
    found = {"word": 7.0, "num_made_late": 0, "exchanged": [replicas], "retired": []}
    assert pair.all(say_over_link, Heal(0, "w0", ("w1",)), ("w0", "w1")) == [found, found]
    found["exchanged"] = [replicas] * 2
    assert pair.all(say_over_link, Heal(0, "w1", ("w0",)), ("w0", "w1")) == [found, found], "the donor is any of them"
    pair.all(unpatch)


def test_an_abort_releases_one_that_waits_for_its_donor_and_one_whose_first_exchange_it_ended(pair: Membership) -> None:
    opened_and_joined(pair, REPLICAS)
    pair.start(1, say_over_link, Heal(0, "leaving", ("w1",)), ("w0", "w1"))
    pair.now(1, abort)
    with pytest.raises(GroupAborted):
        pair.result(1)
    pair.call(0, abort_in_exchange)
    with pytest.raises(GroupAborted):
        pair.call(0, say_over_link, Heal(0, "w0", ("w1",)), ("w0", "w1"))
    pair.all(unpatch)


def abort_in_exchange(me: Any) -> None:
    """On a device an abort ends an exchange without an error."""

    def aborted(group: Any, on: torch.device) -> None:
        me.connector.abort()

    patch = mock.patch.object(nccl, "first_exchange", aborted)
    patch.start()
    me.patches.append(patch)


@pytest.mark.parametrize(("members", "mesh"), [(("w1", "w2"), REPLICAS), (("w0", "w1"), PAIR)])
def test_a_donor_without_a_rank_or_with_another_shard_in_this_mesh_gets_a_link_of_its_own(
    pair: Membership, members: tuple[str, ...], mesh: Mesh
) -> None:
    opened_and_joined(pair, mesh)
    late = {"word": 7.0, "num_made_late": 1, "exchanged": [(3, torch.device("cuda", 1))], "retired": [3]}
    assert pair.all(say_over_link, Heal(0, "w0", ("w1",)), members) == [late, late]
    pair.all(unpatch)


def test_a_part_of_a_group_counts_from_its_donor_and_reaches_nobody_else() -> None:
    with membership(3) as three:
        three.all(connect, three.meeting(), Mesh(3, 1))
        assert three.all(tell_from, (2, 0)) == [9.0, 0.0, 9.0]
        assert three.all(tell_from, (1, 2, 0)) == [9.0, 9.0, 9.0]


def tell_from(me: Any, ranks: tuple[int, ...]) -> float:
    """What this process holds once the first of `ranks` has sent a 9 to the others over a link on a CPU."""
    if me.rank not in ranks:
        return 0.0
    link = me.groups.link(ranks)
    word = torch.tensor([9.0 if link.host.rank() == 0 else 0.0])
    peers = range(1, link.size()) if link.host.rank() == 0 else ()
    for work in [link.host.send([word], peer, 0) for peer in peers] or [link.host.recv([word], 0, 0)]:
        work.wait()
    return float(word.item())


# ------------------------------------------------------------ what a survivor holds


def enter_between(me: Any, where: Rendezvous) -> str:
    """A build that gets as far as the wrapping, and breaks off in `join`."""
    me.state.leave()
    leave(me)
    me.connector = Connector(where)
    me.groups = me.connector.open(REPLICAS, me.rank)
    me.state.enter(me.groups, (1, me.membership_id[1] + 1), keep=True)
    me.connector.abort()
    return join(me)


def test_a_survivor_that_is_aborted_after_it_has_wrapped_holds_what_it_held(pair: Membership) -> None:
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
