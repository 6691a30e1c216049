"""What several threads of the coordinator share: no step is skipped, no id issued twice, no table breaks."""

from __future__ import annotations

import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ring.control.messages import CauseIds, NodeDraining, NodeJoined, NodeLost
from elastic_ring.runtime.agent.messages import Beat, NodeReading
from elastic_ring.runtime.agent.rpc import AgentServer
from elastic_ring.runtime.coordinator import node_monitor
from elastic_ring.runtime.coordinator.folds.run_totals import Live
from elastic_ring.runtime.coordinator.inbox import KEPT_STEPS, DriverFeed, Happened
from elastic_ring.runtime.coordinator.node_monitor import NodeMonitor, answers, refuses
from elastic_ring.runtime.driver.cluster import NodeInfo


@pytest.fixture(autouse=True)
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*works: Callable[[], None]) -> None:
    """Run all in threads of their own. Raises what the first of them raised."""
    raised: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    if raised:
        raise raised[0]


def test_no_cause_id_is_issued_twice():
    issue, issued = CauseIds("c"), [[""] for _ in range(8)]

    def work(ids: list[str]) -> None:
        ids[:] = [issue() for _ in range(2000)]

    at_once(*[lambda ids=ids: work(ids) for ids in issued])  # type: ignore[misc]
    assert len(set(itertools.chain(*issued))) == 16_000


class Slow:
    """Metrics at whose reading another thread gets its turn."""

    def __init__(self, step: int) -> None:
        self._step, self.generation = step, 1

    @property
    def step(self) -> int:
        time.sleep(0)
        return self._step


def test_no_step_is_skipped_while_the_oldest_are_dropped():
    feed, over = DriverFeed(), threading.Event()

    def publish() -> None:
        for step in range(4 * KEPT_STEPS):
            feed.publish([Slow(step)])  # type: ignore[list-item]
            time.sleep(0)
        over.set()

    def follow() -> None:
        while not over.is_set():
            steps = [metrics.step for metrics in feed.news(-1)["steps"]]
            assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True

    at_once(publish, follow, follow, follow)


def test_a_driver_that_follows_is_shown_the_steps_again_where_the_run_goes_back():
    feed, shown = DriverFeed(), []
    for generation, steps in ((1, range(4)), (3, range(2, 6))):
        feed.publish([SimpleNamespace(step=step, generation=generation) for step in steps])  # type: ignore[misc]
        newest = max([(0, -1), *shown])
        shown += [(new.generation, new.step) for new in feed.news(newest[1], newest[0])["steps"]]
    assert shown == [*((1, step) for step in range(4)), *((3, step) for step in range(2, 6))]
    assert feed.news(5, 3)["steps"] == []
    assert feed.news(3, 3)["steps"] == feed.news(5, 1)["steps"][-2:], "none of the branch that is undone"


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> NodeMonitor:
    """One that has not been opened, of a coordinator on node "me". What Ray lists is given by each test."""
    monkeypatch.setattr(node_monitor.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "me"))
    spec: Any = SimpleNamespace(
        run=SimpleNamespace(timeouts=SimpleNamespace(node_silent_s=1e9, hello_s=1.0)), scaling=None, task=None
    )
    return NodeMonitor(spec, lambda message: None, "key")


def test_a_callback_of_ray_never_waits_for_a_thread_that_waits_for_ray(monitor, monkeypatch):
    """Ray calls back in the thread that a call to Ray waits for."""
    started, callbacks = [], []
    described = {"worker": "w", "node": "n", "pid": 1, "stamp_path": "", "log_path": "", "gpus": []}

    def start_agent(node: NodeInfo) -> Any:
        watched = threading.Thread(target=monitor.watch_worker, args=(described, None), daemon=True)
        watched.start()
        watched.join(5.0)
        assert not watched.is_alive(), "an agent is started under the lock"
        started.append(node.node)
        return SimpleNamespace(attach=SimpleNamespace(remote=lambda coordinator: None))

    monkeypatch.setattr(monitor._cluster, "start_agent", start_agent)
    monkeypatch.setattr(AgentServer, "port", 1, raising=False)
    monkeypatch.setattr(node_monitor, "live_nodes", lambda _: [NodeInfo("n", "127.0.0.1", 2, False)])
    monkeypatch.setattr(node_monitor, "watch_ref", lambda ref, done: callbacks.append(done))
    monitor._poll()
    monitor._poll()
    assert started == ["n"]
    with monitor._lock:
        failed = threading.Thread(target=callbacks[0], args=(None, OSError("refused")), daemon=True)
        failed.start()
        failed.join(5.0)
        assert not failed.is_alive(), "the callback takes the lock"
    monitor._poll()
    assert started == ["n", "n"]


def test_what_an_agent_read_of_its_node_counts_for_a_while_and_only_while_the_node_is_there(monitor, monkeypatch):
    """A driver of a GPU may hang: an old reading must not look like a good one."""
    clock = [100.0]
    monkeypatch.setattr(node_monitor.time, "monotonic", lambda: clock[0])
    reading = {"network": {"errors": 1}, "gpus": {}}
    monkeypatch.setattr(node_monitor, "live_nodes", lambda _: [NodeInfo("n", "10.0.0.1", 2, False)])
    monkeypatch.setattr(monitor, "_start_agent", lambda node: None)
    monitor._poll()
    monitor._on_message("n", Beat(health=reading))
    monitor._on_message("gone", Beat(health=reading))
    assert monitor.live(Live()).health == {"10.0.0.1": reading}
    clock[0] += node_monitor.HEALTH_KEPT_S + 1
    monitor._on_message("n", Beat())
    assert monitor.live(Live()).health == {}


def test_nodes_that_join_and_go_in_several_threads_leave_whole_tables(monitor, monkeypatch):
    """What Ray lists is given here; the tables and the threads are the monitor's own."""
    events: list[Any] = []
    monitor._put = lambda message: events.append(message.event) if isinstance(message, Happened) else None
    monkeypatch.setattr(monitor, "_start_agent", lambda node: None)
    monkeypatch.setattr(AgentServer, "nodes", property(lambda self: tuple(f"n{i}" for i in range(40))))
    rounds = itertools.count()

    def listed(_: object) -> list[NodeInfo]:
        first = next(rounds) % 3
        return [NodeInfo(f"n{i}", "127.0.0.1", 2, False) for i in range(first, 40, 2)]

    monkeypatch.setattr(node_monitor, "live_nodes", listed)

    def poll() -> None:
        for _ in range(40):
            monitor._poll()

    def lose() -> None:
        for number in range(600):
            monitor._lose(f"n{number % 40}", "silent")

    at_once(poll, poll, lose, lose)
    joined, lost = (sum(isinstance(event, kind) for event in events) for kind in (NodeJoined, NodeLost))
    assert joined - lost == len(monitor.listed())


def test_a_notice_that_rays_head_cannot_take_is_told_again_until_the_machine_goes(monitor, monkeypatch):
    told, refusals = list[float](), [ConnectionError("the head is away")] * 2

    def give_notice(node: str, in_s: float, why: str) -> None:
        told.append(in_s)
        if refusals:
            raise refusals.pop()

    monkeypatch.setattr(node_monitor, "give_notice", give_notice)
    monkeypatch.setattr(node_monitor, "NOTICE_AGAIN_S", 0.01)
    monitor._pass_notice("n", 60.0)
    assert len(told) == 3
    assert 60.0 >= told[0] > told[1] > told[2] > 50.0, "the machine does not go later for it"
    refusals += [ConnectionError("the head is away")] * 10**6
    monitor._pass_notice("n", 0.05)
    assert told[-1] == 0.0
    assert refusals, "nobody tells for ever"


def test_an_agent_goes_from_a_node_where_nobody_is_wanted_and_comes_back_with_the_wish(monitor, monkeypatch):
    events, killed, started = list[Any](), list[Any](), list[str]()
    monitor._put = lambda message: events.append(message.event) if isinstance(message, Happened) else None
    nodes = [NodeInfo("me", "127.0.0.1", 0, False), NodeInfo("n", "127.0.0.2", 2, False)]

    def start_agent(node: NodeInfo) -> None:
        started.append(node.node)
        monitor._nodes[node.node].agent = f"agent of {node.node}"

    monkeypatch.setattr(monitor, "_start_agent", start_agent)
    monkeypatch.setattr(
        AgentServer, "nodes", property(lambda self: tuple(name for name, node in monitor._nodes.items() if node.agent))
    )
    monkeypatch.setattr(node_monitor, "live_nodes", lambda _: nodes)
    monkeypatch.setattr(node_monitor.ray, "kill", lambda agent, no_restart: killed.append(agent))
    monkeypatch.setattr(node_monitor, "VACANT_S", 0.0)
    monitor._poll()
    monitor._poll()
    assert started == ["me", "n"]
    for node, share in (("me", 0.44), ("n", 0.87)):
        monitor._on_message(node, Beat(NodeReading({}, share, 0.88, {})))
    assert monitor.readings.host_share() == pytest.approx(0.87 / 0.88), "of what that node's guard allows"
    monitor.vacate(frozenset({"me", "n"}))
    for _ in range(3):
        monitor._poll()
        time.sleep(0.01)
    assert (started, killed) == (["me", "n"], ["agent of n"]), "the coordinator's own is kept"
    assert monitor.readings.host_share() == 0.5, "a node that was left says nothing any more"
    nodes[1] = NodeInfo("n", "127.0.0.2", 2, True, None, 5.0)
    monitor._poll()
    assert [event.leaves_at for event in events if isinstance(event, NodeDraining)] == [5.0], "still heard of"
    monitor.vacate(frozenset())
    monitor._poll()
    assert started == ["me", "n", "n"]
    assert not any(isinstance(event, NodeLost) for event in events)


def test_a_raylet_whose_port_is_shut_needs_no_second_to_be_missed(monkeypatch):
    """Calls to it that hang are given up after three refusals in a row; a host that answers nothing at all is asked for
    as long as before."""
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        node = NodeInfo("n", "127.0.0.1", 2, False, port=raylet.getsockname()[1])
        assert not refuses(node)
    assert refuses(node)
    assert not refuses(replace(node, port=0)), "not known"
    assert not refuses(None)
    looks, refusals = itertools.count(1), iter((True, True, False, True, True, True))
    monkeypatch.setattr(node_monitor.ray, "wait", lambda refs, **_: (next(looks) and [], refs))
    assert not answers(["a call that hangs: nobody may wait for it"], lambda: next(refusals))
    assert (next(looks), next(refusals, None)) == (7, None), "a look before each; one that is not refused begins anew"
    monkeypatch.setattr(node_monitor.ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(node_monitor.ray, "get", lambda ref: None)
    assert answers(["a worker that answers behind a full queue of connections"], lambda: True)
