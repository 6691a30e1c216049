"""Where spares stand, over fleets of hosts x GPUs x failure domains, and what that covers when a host is lost."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from elastic_ring.config import Timeouts
from elastic_ring.control.capacity.worker_pool import STANDBY_AFTER_S, _spread
from elastic_ring.control.messages import NodeJoined, NodeLost, StartWorker
from elastic_ring.control.placement.coverage import OUTCOMES, covered, patience_s
from elastic_ring.control.pool import Node, Worker
from elastic_ring.control.state import Forming, State, members, mesh_of, spares
from elastic_ring.mesh import Mesh
from tests.sim.bench import Bench, build_in, only
from tests.sim.simulator.options import simulated

SLOTS = 8


def _fleet(hosts: dict[str, int], domains: dict[str, tuple[str, ...]] | None = None, **options: Any) -> Bench:
    """A run that trains on hosts of so many GPUs, each with room for eight processes, told of one after the other."""
    run = Bench({}, **options)
    for host, num_gpus in hosts.items():
        run.handle(NodeJoined("n", host, SLOTS, num_gpus, (domains or {}).get(host, ())))
    run.wait(STANDBY_AFTER_S)
    return run.form()


def _on(run: Bench, names: tuple[str, ...]) -> Counter[str]:
    return Counter(run.state.workers[name].node for name in names)


def _able_spares(run: Bench, hosts: dict[str, int]) -> tuple[str, ...]:
    """Spares with a GPU of their own."""
    left, able = Counter(hosts) - _on(run, members(run.state)), []
    for name in spares(run.state):
        node = run.state.workers[name].node
        if left[node] > 0:
            able.append(name)
            left[node] -= 1
    return tuple(able)


def test_a_spare_stands_on_a_host_of_its_own_and_replaces_a_lost_host_at_once() -> None:
    run = _fleet({"a": 1, "b": 1, "c": 1, "d": 1}, dp=2, cp=1, spares=1)
    assert len(run.state.workers) == 3, "no standby, while a GPU is free"
    before = members(run.state)
    (spare,) = spares(run.state)
    assert _on(run, (*before, spare)).most_common(1)[0][1] == 1
    run.handle(NodeLost("n", run.state.workers[before[1]].node))
    order = build_in(run.report_all(3))
    assert (order.mesh, order.members) == (Mesh(2, 1), (before[0], spare))
    (start,) = only(StartWorker, run.resume_all() + run.wait(run.options.restart_delay_s))
    assert start.node not in _on(run, order.members), "the next spare stands on the last free GPU"


def test_a_lost_spares_host_is_made_good_by_a_standby_and_by_a_gpu_once_one_comes() -> None:
    run = _fleet({"a": 1, "b": 1, "c": 1}, dp=1, cp=2, spares=1)
    (host,) = _on(run, spares(run.state))
    run.handle(NodeLost("n", host))
    (standby,) = [worker.node for worker in run.state.workers.values() if worker.status == "starting"]
    assert standby in _on(run, members(run.state))
    run.handle(NodeJoined("n", "d", SLOTS, 1))
    assert [w.node for w in run.state.workers.values() if w.status == "starting"] == [standby, "d"]


def test_without_a_free_gpu_a_standby_covers_a_killed_process_and_gives_way_to_a_gpu_that_comes() -> None:
    run = _fleet({"a": 1, "b": 1}, dp=2, cp=1, spares=1)
    (standby,) = spares(run.state)
    killed = next(
        name for name in members(run.state) if run.state.workers[name].node == run.state.workers[standby].node
    )
    run.handle(NodeJoined("n", "c", SLOTS, 1))
    (start,) = [worker for worker in run.state.workers.values() if worker.status == "starting"]
    assert start.node == "c", "a standby covers no host, so a free GPU is used although the number is right"
    run.all_ready()
    run.lose(members(run.state).index(killed))
    assert build_in(run.report_all(2)).mesh == Mesh(2, 1)


def test_spares_stand_in_the_domain_that_has_least_of_the_run() -> None:
    hosts = {"a1": 2, "a2": 2, "b1": 2}
    run = _fleet(hosts, {"a1": ("A",), "a2": ("A",), "b1": ("B",)}, dp=1, cp=4, spares=1)
    assert _on(run, members(run.state)).keys() == {"a1", "a2"}
    assert _on(run, spares(run.state)) == {"b1": 1}


def test_a_spare_is_placed_among_a_thousand_hosts_in_milliseconds() -> None:
    """By the thread that also answers the agents' beats: silent for 15 s, it would be killed."""
    nodes = {f"h{i}": Node(f"h{i}", 9, num_gpus=8, domains=(f"zone{i % 4}", f"rack{i % 40}")) for i in range(1000)}
    state = State(simulated("big", dp=250, cp=32, total_steps=1, spares=8), Forming(0.0), 1, 1, nodes=nodes)
    begun, hosts = time.process_time(), []
    for number in range(20):
        hosts.append(min(nodes.values(), key=_spread(state)))
        workers = {**state.workers, f"w{number}": Worker(f"w{number}", hosts[-1].node, "ready", 0.0)}
        state = replace(state, workers=workers)
    assert time.process_time() - begun < 2.0
    assert sorted(Counter(host.domains[0] for host in hosts).values()) == [5, 5, 5, 5]


def test_whichever_host_is_lost_the_mesh_stays_whole_if_gpus_and_spares_are_enough() -> None:
    """Over random fleets, told of in any order: as many spares have a GPU as there are free ones; a lost host shrinks
    no mesh that the spares left could fill, and what is missing afterwards starts on free GPUs, before any standby."""
    rng, num_kept, num_shrunk = random.Random(11), 0, 0
    for _ in range(150):
        cp, dp, num_spares = rng.choice([1, 2, 4]), rng.randint(2, 3), rng.randint(0, 3)
        hosts = {f"h{index}": rng.choice([1, 2, 4]) for index in range(rng.randint(2, 8))}
        num_gpus = sum(hosts.values())
        if num_gpus < dp * cp:
            continue
        run = _fleet(hosts, dp=dp, cp=cp, spares=num_spares)
        able = _able_spares(run, hosts)
        assert len(able) == min(num_spares, num_gpus - dp * cp)
        lost = rng.choice(sorted(hosts))
        gone = set(_on(run, members(run.state))[lost] * [lost])
        num_lost = _on(run, members(run.state))[lost]
        left = [name for name in able if run.state.workers[name].node != lost]
        held = {rank % cp for rank, name in enumerate(members(run.state)) if run.state.workers[name].node != lost}
        run.handle(NodeLost("n", lost))
        if not gone or len(held) < cp:
            continue
        order = build_in(run.report_all(3))
        if num_lost <= len(left):
            assert order.mesh == mesh_of(run.state) == Mesh(dp, cp)
            num_kept += 1
        num_shrunk += order.mesh.dp < dp
        run.resume_all()
        run.wait(STANDBY_AFTER_S)
        busy = Counter(worker.node for worker in run.state.workers.values())
        num_free = sum(max(0, hosts[host] - busy[host]) for host in hosts if host != lost)
        assert not num_free or len(run.state.workers) >= dp * cp + num_spares, "a GPU is free and somebody is missing"
    assert num_kept > 10
    assert num_shrunk > 10


# ------------------------------------------------------------ what is covered


def test_what_is_covered_is_told_for_a_process_a_host_and_two() -> None:
    run = _fleet({"a": 1, "b": 1, "c": 1, "d": 1}, dp=2, cp=1, spares=1)
    end = {"any two hosts": "back to the first step"}
    assert covered(run.state) == {"any process": "a spare", "any host": "a spare", **end}
    two = _fleet({f"h{index}": 1 for index in range(5)}, dp=4, cp=1, spares=1)
    assert covered(two.state) == {"any process": "a spare", "any host": "a spare", "any two hosts": "fewer rings"}
    full = _fleet({"a": 2, "b": 2}, dp=2, cp=2, spares=2)
    assert covered(full.state) == {"any process": "a spare", "any host": "fewer rings", **end}
    packed = _fleet({"a": 4}, dp=2, cp=2, spares=0, min_dp=2)
    assert covered(packed.state) == {"any process": "a wait for workers", "its host": "back to the first step"}
    kept = _fleet({"a": 2, "b": 3}, dp=1, cp=2, spares=2, takes_checkpoints=True)
    assert covered(kept.state) == dict.fromkeys(("any process", "its host"), "back to the newest checkpoint")
    alone = {"dp": 1, "cp": 2, "spares": 1}
    hosts = {"a": 1, "b": 1, "c": 1}
    assert covered(_fleet(hosts, **alone).state)["any host"] == "back to the first step", "there are no checkpoints"
    saves = _fleet(hosts, **alone, takes_checkpoints=True)
    assert covered(saves.state)["any host"] == "back to the newest checkpoint"
    assert covered(_fleet(hosts, **alone, copies="1").state)["any host"] == "back to copies"
    two = _fleet({"a": 1, "b": 1}, dp=1, cp=2, spares=0, copies="1")
    assert covered(two.state)["any host"] == "a wait for workers, then back to copies"


def test_the_last_holders_of_a_shard_are_waited_for_as_long_as_going_back_costs() -> None:
    def limits_s(run: Bench, since_saved_s: float) -> dict[str, float]:
        usual = replace(run.options, run=replace(run.options.run, timeouts=Timeouts()))
        return patience_s(replace(run.state, options=usual), since_saved_s)

    assert limits_s(_fleet({"a": 2, "b": 2}, dp=2, cp=1), 5.0) == {}, "each shard has another holder"
    one = _fleet({"a": 2, "b": 1}, dp=1, cp=2, spares=1)
    assert limits_s(one, 0.2) == dict.fromkeys(members(one.state), 2.0)
    assert limits_s(one, 1e6) == dict.fromkeys(members(one.state), Timeouts().heart_cap_s)
    two = _fleet({"a": 2, "b": 2}, dp=2, cp=2, spares=0)
    before = members(two.state)
    two.lose(1)
    assert limits_s(two, 5.0) == {before[3]: 6.0}, "while the others report"


@pytest.mark.parametrize("num_domains", [0, 2, 3])
def test_what_is_told_of_a_host_or_a_failure_domain_is_what_follows_from_its_loss(num_domains: int) -> None:
    """Each one of random fleets is lost once, from the same state: the worst that happens is what was told."""
    rng, seen = random.Random(12), Counter[str]()
    for _ in range(60):
        cp, dp = rng.choice([1, 2, 4]), rng.randint(1, 3)
        hosts = {f"h{index}": rng.choice([1, 2, 4]) for index in range(rng.randint(2, 6))}
        if sum(hosts.values()) < dp * cp:
            continue
        options = {"dp": dp, "cp": cp, "spares": rng.randint(0, 3), "min_dp": rng.choice([1, dp])}
        domains = {host: (f"d{index % num_domains}",) for index, host in enumerate(hosts)} if num_domains else {}
        parts = [[host for host in hosts if domains.get(host, host) == one] for one in {*domains.values()} or hosts]
        formed = _fleet(hosts, domains, **options).state
        told = covered(formed).get("any failure domain" if num_domains else "any host")
        if told is None:
            continue
        follows = [_after(_fleet(hosts, domains, **options), part) for part in parts]
        assert max(follows, key=OUTCOMES.index) == told, (hosts, domains, options)
        seen[told] += 1
    assert len(seen) == 4, seen


def _after(run: Bench, lost: list[str]) -> str:
    before = mesh_of(run.state)
    for host in lost:
        run.handle(NodeLost("n", host))
    if run.phase == "running":
        return OUTCOMES[0]
    run.report_all(3)
    if run.phase == "waiting":
        return "a wait for workers"
    if run.phase == "building" and not run.change.steps_undone:
        return OUTCOMES[0] if mesh_of(run.state) == before else "fewer rings"
    assert run.state.num_restarts == 1
    return "back to the first step"
