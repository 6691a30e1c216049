"""Watches the nodes through their agents' connections and beats and through Ray's node table.

Puts control events into the coordinator's queue. A node counts as lost only when two sources agree: its agent's
connection is closed or silent, and its raylet's port is shut, Ray has dropped the node, or none of its workers answers.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray

from elastic_ring.control.decisions.detectors import host_share
from elastic_ring.control.messages import CauseIds, NodeDraining, NodeJoined, NodeLost, NodesListed
from elastic_ring.runtime.agent.health import resolver_warning
from elastic_ring.runtime.agent.messages import (
    BadGpus,
    Beat,
    BePatient,
    CoordinatorEndpoint,
    Death,
    Echo,
    Forget,
    FromAgent,
    Hello,
    HungUp,
    Kill,
    Leaves,
    NodeHealth,
    NodeReading,
    Resolved,
    Said,
    Watch,
)
from elastic_ring.runtime.agent.rpc import AgentServer
from elastic_ring.runtime.coordinator.folds.run_totals import Live
from elastic_ring.runtime.coordinator.inbox import AgentAttached, Happened, NodeBeat, Put
from elastic_ring.runtime.doctor.verdicts import AtStart, HostReport
from elastic_ring.runtime.driver.cluster import Cluster, NodeInfo, give_notice, live_nodes, watch_ref
from elastic_ring.runtime.worker.coordinator_client import WorkerDescription

log = logging.getLogger(__name__)

POLL_S = 0.5
VACANT_S = 2.0
"""An agent goes from a node on which the run has had no worker, and wanted none, for this long."""
CONFIRM_S, CONFIRM_LOOK_S, CONFIRM_TIMES = 1.0, 0.1, 3
HEALTH_KEPT_S = 30.0
"""For how long a reading of a node's health counts."""
NOTICE_AGAIN_S = 5.0


@dataclass(frozen=True)
class WatchedWorker:
    node: str
    watch: Watch
    handle: Any


@dataclass
class WatchedNode:
    """A node as the core knows it; a lost one begins anew. `info`: as Ray listed it last; `reported`: slots, GPUs,
    drain and leave time as the core got them. `agent`: its handle. `beat_at`: the time of its last message. `limits_s`:
    as its agent has them (`be_patient`)."""

    is_lost: bool = False
    info: NodeInfo | None = None
    reported: tuple[int, int | None, bool, float] | None = None
    agent: Any = None
    beat_at: float | None = None
    bad_gpus: Collection[str] = ()
    vacant_since: float | None = None
    limits_s: Mapping[str, float] = field(default_factory=dict)


class AgentReadings:
    """The latest readings of the nodes' agents: workers' activity, memory, health."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeReading] = {}
        self._health: dict[str, tuple[float, NodeHealth]] = {}

    def take(self, node: str, beat: Beat) -> None:
        with self._lock:
            if beat.reading is not None:
                self._nodes[node] = beat.reading
            if beat.health is not None:
                self._health[node] = (time.monotonic(), beat.health)

    def forget(self, node: str) -> None:
        with self._lock:
            self._nodes.pop(node, None)
            self._health.pop(node, None)

    def host_share(self) -> float:
        """How full the fullest node is, as `detectors.host_share` counts; 0 where nothing is known yet."""
        with self._lock:
            readings = list(self._nodes.values())
        return max((host_share(read.memory_share, read.limit, read.pressure) for read in readings), default=0.0)

    def live(self, addresses: Mapping[str, str], live: Live) -> Live:
        """`live` with the readings of these nodes, given by their address. Health counts only while it is fresh: a
        GPU's driver may hang."""
        with self._lock:
            readings = [reading for node, reading in self._nodes.items() if node in addresses]
            health = {node: read for node, read in self._health.items() if node in addresses}
        fresh = time.monotonic() - HEALTH_KEPT_S
        pressures = [reading.pressure for reading in readings if reading.pressure]
        return replace(
            live,
            workers={worker: read for reading in readings for worker, read in reading.workers.items()},
            pressure=max(pressures, key=lambda pressure: (pressure["full"], pressure["some"]), default={}),
            health={addresses[node]: read for node, (at, read) in health.items() if at > fresh},
        )


class NodeMonitor:
    """Watches nodes and agents for one coordinator. `put`: into the coordinator's queue."""

    def __init__(self, run_spec: Any, put: Put, key: str) -> None:
        self._scaling, self._timeouts, self._put = run_spec.scaling, run_spec.run.timeouts, put
        self._own_node = ray.get_runtime_context().get_node_id()
        self._agent_server = AgentServer(key, self._on_message)
        self._cluster = Cluster(run_spec.run, run_spec.scaling, run_spec.task)
        self._nodes: defaultdict[str, WatchedNode] = defaultdict(WatchedNode)
        self._workers: dict[str, WatchedWorker] = {}
        self.readings = AgentReadings()
        self._vacant: frozenset[str] = frozenset()
        self._cause = CauseIds("monitor")
        self._at_start = AtStart(run_spec.scaling.device if run_spec.scaling is not None else "cpu")
        # Guards nodes and workers. No call to Ray while it is held, and no use of it in a callback of Ray: callbacks
        # run in the thread that such a call waits for.
        self._lock = threading.RLock()
        self._unattached: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._closed = False
        self._watcher = threading.Thread(target=self._watch, name="node-monitor", daemon=True)

    def close(self) -> None:
        """Stop watching: the run is over. Returns once no agent is being started any more."""
        self._closed = True
        self._watcher.join(timeout=self._timeouts.clear_s)

    def open(self, address: str) -> None:
        """Accept agents at this address, and watch."""
        self._agent_server.open(address)
        self._watcher.start()

    # ------------------------------------------------------------ for the coordinator

    def echo(self, node: str) -> None:
        self._agent_server.send(node, Echo())

    def watch_worker(self, described: WorkerDescription, handle: Any) -> None:
        """Have the node's agent watch this worker: by pidfd, and by its stamps."""
        worker, node, gpus = described["worker"], described["node"], tuple(described["gpus"])
        watch = Watch(worker, described["pid"], described["stamp_path"], described["log_path"], gpus)
        with self._lock:
            self._workers[worker] = WatchedWorker(node, watch, handle)
        self._agent_server.send(node, watch)

    def kill(self, worker: str, reason: str) -> bool:
        """SIGKILL by PID through the agent; False without a connection to it."""
        watched = self._workers.get(worker)
        return watched is not None and self._agent_server.send(watched.node, Kill(worker, reason))

    def be_patient(self, limits_s: Mapping[str, float]) -> None:
        """Have the agents wait for these workers at least so long, and for all others as usual."""
        for node in self._agent_server.nodes:
            workers = (watched.watch.worker for watched in self._workers_on(node))
            own = {worker: limits_s[worker] for worker in workers if worker in limits_s}
            if own != self._nodes[node].limits_s and self._agent_server.send(node, BePatient(own)):
                self._nodes[node].limits_s = own

    def info(self, node: str) -> NodeInfo | None:
        """The node as Ray listed it last; None where it is lost, or was never listed."""
        with self._lock:
            return self._nodes[node].info if node in self._nodes else None

    def addresses_of(self, worker: str) -> tuple[str, str]:
        """The address of a worker's node, and the one from which the node connects to this one, which may be another;
        empty where unknown."""
        watched = self._workers.get(worker)
        if watched is None:
            return "", ""
        info = self.info(watched.node)
        return info.address if info is not None else "", self._agent_server.came_from(watched.node)

    def failing_limits(self, worker: str, limits: HostReport) -> list[str]:
        """Lines for what will fail on the worker's host by `doctor.host.limits`, each once."""
        watched = self._workers.get(worker)
        host = f"{self.addresses_of(worker)[0]}/{watched.node[:6]}" if watched is not None else ""
        return self._at_start.look(host, limits, time.time()) if host else []

    def live(self, live: Live) -> Live:
        """`live` with the agents' readings of the nodes that Ray lists."""
        return self.readings.live({info.node: info.address for info in self.listed()}, live)

    def listed(self) -> list[NodeInfo]:
        """The nodes that Ray lists."""
        with self._lock:
            return [node.info for node in self._nodes.values() if node.info is not None]

    def vacate(self, nodes: frozenset[str]) -> None:
        """The nodes on which the run has no worker and wants none: their agents go, and Ray may remove them.

        An agent, although it takes no resources, keeps a node from being idle. It comes again where a worker is wanted.
        """
        self._vacant = nodes - {self._own_node}  # the coordinator is watched as well

    def forget(self, worker: str) -> None:
        with self._lock:
            watched = self._workers.pop(worker, None)
        if watched is not None:
            self._agent_server.send(watched.node, Forget(worker))

    # ------------------------------------------------------------ from the agents

    def _on_message(self, node: str, message: FromAgent) -> None:
        with self._lock:
            self._nodes[node].beat_at = time.monotonic()
        match message:
            case Beat():
                if self.info(node) is not None:
                    self.readings.take(node, message)
                self._put(NodeBeat(node))
            case Hello():
                self._nodes[node].limits_s = {}
                for worker in self._workers_on(node):
                    self._agent_server.send(node, worker.watch)
                self._put(AgentAttached(node, message.reconnect_s))
            case Death() | Said():
                self._put(message)
            case BadGpus():
                names = ", ".join(message.names) or "none any more"
                log.error("node %s: GPUs that are not used: %s", node, names)
                with self._lock:
                    self._nodes[node].bad_gpus = message.names
            case Resolved():
                if text := resolver_warning(node, message.address, message.took_s):
                    self._put(Said(text))
            case Leaves():
                threading.Thread(target=self._pass_notice, args=(node, message.in_s), daemon=True).start()
            case HungUp():
                self._confirm_in_thread(node, "its agent closed the connection")

    def _pass_notice(self, node: str, in_s: float) -> None:
        """Make the provider's notice Ray's: others that use the node hear it, and the autoscaler replaces the node."""
        log.warning("node %s: its provider takes it away in %.0f s", node, in_s)
        goes_at = time.monotonic() + in_s
        while not self._closed:
            left_s = goes_at - time.monotonic()
            try:
                give_notice(node, max(left_s, 0.0), "the provider takes the machine away")
                return
            except Exception:
                if left_s <= 0:
                    log.exception("could not report to Ray that node %s leaves; its end will be noticed", node)
                    return
                log.warning(
                    "could not report to Ray that node %s leaves in %.0f s; tries again", node, left_s, exc_info=True
                )
            time.sleep(min(NOTICE_AGAIN_S, max(left_s, 0.1)))

    # ------------------------------------------------------------ nodes

    def _watch(self) -> None:
        while not self._closed:
            try:
                self._poll()
            except Exception:
                # Ray's own control plane may be away for a while; training does not need it.
                log.exception("could not look at the cluster")
            time.sleep(POLL_S)

    def _poll(self) -> None:
        listed = {node.node: node for node in live_nodes(self._scaling)}
        with self._lock:
            while not self._unattached.empty():  # agents that could not connect are started again
                name, agent = self._unattached.get()
                if self._nodes[name].agent is agent:
                    self._nodes[name].agent = None
            before = with_room(node.info for node in self._nodes.values() if node.info)
            after = with_room(without(node, self._nodes[name].bad_gpus) for name, node in listed.items())
            if before != after:  # before any of them joins
                self._put(Happened(NodesListed(self._cause(), tuple(sorted(after)))))
            for node in listed.values():
                self._update(node)
            for name in [name for name, node in self._nodes.items() if node.info and name not in listed]:
                self._lose(name, "Ray no longer lists it")
            now, limit_s = time.monotonic(), self._timeouts.node_silent_s
            # The second source is asked within the limit, so that a silent node is lost when it is reached.
            silent = now - max(limit_s - CONFIRM_S, limit_s / 2)
            for name in self._agent_server.nodes:
                beat_at = self._nodes[name].beat_at
                if beat_at is not None and beat_at < silent:
                    self._nodes[name].beat_at = now  # asked once for each such silence
                    self._confirm_in_thread(name, f"no beat for {limit_s:.1f} s", now, beat_at)
            for name, watched in self._nodes.items():
                watched.vacant_since = (watched.vacant_since or now) if name in self._vacant else None
            vacant = [
                name
                for name, watched in self._nodes.items()
                if watched.agent is not None and now - (watched.vacant_since or now) > VACANT_S
            ]
            present = [self._nodes[name] for name in listed]
            without_agent = [n.info for n in present if n.agent is None and n.vacant_since is None and n.info]
        for name in vacant:
            with self._lock:
                if name not in self._vacant:
                    continue
                watched = self._nodes[name]
                agent, watched.agent, watched.beat_at = watched.agent, None, None
            self.readings.forget(name)  # nobody renews them
            self._agent_server.hang_up(name)
            if agent is not None:
                log.info("node %s: no worker of the run is there or wanted; its agent exits", name)
                ray.kill(agent, no_restart=True)
        for node in without_agent:
            if not self._closed:
                self._start_agent(node)

    def _update(self, listed: NodeInfo) -> None:
        """Report what is new about the node, once its agent is connected."""
        name, node = listed.node, self._nodes[listed.node]
        node.info = info = without(listed, node.bad_gpus)
        before, news = node.reported, (info.num_slots, info.num_gpus, info.draining, info.leaves_at)
        if before == news or (before is None and name not in self._agent_server.nodes):
            return
        node.reported, node.is_lost = news, False
        if before is None or before[:2] != news[:2]:
            self._put(
                Happened(NodeJoined(self._cause(), name, info.num_slots, info.num_gpus, info.domains, info.is_reserved))
            )
        if info.draining:
            self._put(Happened(NodeDraining(self._cause(), name, info.leaves_at)))

    def _workers_on(self, node: str) -> list[WatchedWorker]:
        with self._lock:
            return [worker for worker in self._workers.values() if worker.node == node]

    def _start_agent(self, node: NodeInfo) -> None:
        """Start or find the node's agent and have it connect. Waits for Ray, so the lock must not be held."""
        agent, server = self._cluster.start_agent(node), self._agent_server
        endpoint = CoordinatorEndpoint(server.host, server.port, server.key, os.getpid(), self._own_node)

        def attached(_: Any, error: BaseException | None) -> None:
            if error is not None:
                log.error("agent of node %s did not attach: %s", node.node, error)
                self._unattached.put((node.node, agent))

        attaching = agent.attach.remote(endpoint)
        with self._lock:
            if self.info(node.node) is not None:  # it may have been lost meanwhile
                self._nodes[node.node].agent = agent
        watch_ref(attaching, attached)

    def _confirm_in_thread(self, node: str, why: str, silent_at: float = math.inf, beat_at: float = math.inf) -> None:
        """In a thread for each node, because many may fall silent at once and each takes time to confirm."""
        threading.Thread(
            target=self._confirm, args=(node, why, silent_at, beat_at), name="confirm", daemon=True
        ).start()

    def _confirm(self, node: str, why: str, silent_at: float, beat_at: float) -> None:
        """Ask the second source: does any worker of the node, or the agent through Ray, still answer? A beat after
        `silent_at` is an answer, too.

        A node without workers is left to Ray's own table, as nothing there is urgent. This process's own node is
        alive. An agent that does not answer while its workers do is stopped or stuck, and is replaced.
        """
        with self._lock:
            watched = self._nodes[node]
            agent, info = watched.agent, watched.info
        handles = [worker.handle for worker in self._workers_on(node) if worker.handle is not None]
        pings = [handle.ping.remote() for handle in (*handles, agent) if handle is not None]
        if not answers(pings, partial(refuses, info)) and handles and node != self._own_node:
            if (watched.beat_at or 0.0) <= silent_at:
                self._lose(node, why, beat_at)
            return
        agent_answers = agent is not None and answers(pings[-1:])
        log.warning("node %s: %s; its agent is %s", node, why, "asked to attach again" if agent_answers else "replaced")
        if agent is not None and not agent_answers:
            ray.kill(agent, no_restart=True)
        with self._lock:
            watched.agent, watched.beat_at = None, time.monotonic()

    def _lose(self, node: str, why: str, beat_at: float = math.inf) -> None:
        """`beat_at`: when a silent one gave its last sign of life."""
        with self._lock:
            lost = self._nodes[node]
            if self._closed or (lost.info is None and lost.reported is None):
                return
            # Ray goes on listing a silent node for a while; when Ray drops it, the loss has been reported.
            was_reported = lost.is_lost and lost.reported is None
            if not was_reported:
                log.warning("node %s is lost: %s", node, why)
            self._nodes[node] = WatchedNode(is_lost=True)
            self.readings.forget(node)
            # A machine without power closes no connection: it would look like a node that has just joined.
            self._agent_server.hang_up(node)
        if not was_reported:
            self._put(Happened(NodeLost(self._cause(), node), {"still_s": max(0.0, time.monotonic() - beat_at)}))


def with_room(nodes: Iterable[NodeInfo]) -> set[str]:
    """The names of the nodes on which a worker may start."""
    return {node.node for node in nodes if node.num_members and not node.draining}


def without(node: NodeInfo, bad_gpus: Collection[str]) -> NodeInfo:
    """The node without its bad GPUs."""
    if node.num_gpus is None or not bad_gpus:
        return node
    return replace(node, num_gpus=max(0, node.num_gpus - len(bad_gpus)))


def answers(pings: list[Any], given_up: Callable[[], bool] = lambda: False) -> bool:
    """Whether any of these calls succeeds within CONFIRM_S. It stops earlier once `given_up` says so CONFIRM_TIMES in a
    row, each time after no answer for CONFIRM_LOOK_S."""
    deadline, pending, num_given_up = time.monotonic() + CONFIRM_S, pings, 0
    while pending and (left_s := deadline - time.monotonic()) > 0 and num_given_up < CONFIRM_TIMES:
        done, pending = ray.wait(pending, num_returns=1, timeout=min(left_s, CONFIRM_LOOK_S))
        for ref in done:
            with suppress(Exception):
                ray.get(ref)
                return True
        if not done:
            num_given_up = num_given_up + 1 if given_up() else 0
    return False


def refuses(node: NodeInfo | None) -> bool:
    """Whether the host refuses connections to its raylet's port: its workers end with the raylet, which Ray reports up
    to a second later."""
    if node is None or not node.port:
        return False
    try:
        socket.create_connection((node.address, node.port), timeout=CONFIRM_LOOK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # no answer, or no descriptor here
        return False
    return False
