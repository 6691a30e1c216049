"""Watches the nodes through their agents' connections and beats and through Ray's node table.

Reports what it finds as control events. A node counts as lost only when two sources agree: its agent's connection
is closed or silent, and its raylet's port is shut, Ray has dropped the node, or none of its workers answers.
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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray

from elastic_ring.control.decisions.detectors import host_share
from elastic_ring.control.messages import CauseIds, Event, NodeDraining, NodeJoined, NodeLost, NodesListed
from elastic_ring.runtime.agent.health import resolver_warning
from elastic_ring.runtime.agent.messages import (
    BadGpus,
    Beat,
    CoordinatorEndpoint,
    Death,
    Echo,
    Forget,
    FromAgent,
    Hello,
    HungUp,
    Kill,
    Leaves,
    NodeReading,
    Resolved,
    Said,
    Watch,
)
from elastic_ring.runtime.agent.rpc import AgentServer
from elastic_ring.runtime.coordinator.inbox import AgentAttached, Happened, NodeBeat, Put
from elastic_ring.runtime.coordinator.recorder import NodeFigures
from elastic_ring.runtime.doctor.verdicts import AtStart, HostReport
from elastic_ring.runtime.driver.cluster import Cluster, NodeInfo, live_nodes, watch_ref
from elastic_ring.runtime.driver.drain import give_notice

log = logging.getLogger(__name__)

POLL_S = 0.5
VACANT_S = 2.0
"""An agent goes from a node on which the run has had no worker, and wanted none, for this long."""
CONFIRM_S, CONFIRM_LOOK_S, CONFIRM_TIMES = 1.0, 0.1, 3
HEALTH_KEPT_S = 30.0
NOTICE_AGAIN_S = 5.0
"""What an agent read of its node's health counts for so long."""


@dataclass(frozen=True)
class WatchedWorker:
    node: str
    watch: Watch
    handle: Any
    activity: Mapping[str, Any] = field(default_factory=dict)
    """As its agent said last (`NodeReading.workers`)."""


@dataclass
class WatchedNode:
    """What is known of one node; a lost one begins anew. `info`: as Ray listed it last, `told`: what the core was told
    of that. `agent`: its handle. `beat_at`: when it said something last; `reading` and `health`: what, the latter with
    its time."""

    is_lost: bool = False
    info: NodeInfo | None = None
    told: tuple[int, int | None, bool, float] | None = None
    agent: Any = None
    beat_at: float | None = None
    reading: NodeReading | None = None
    health: tuple[float, Mapping[str, Any]] | None = None
    bad_gpus: Collection[str] = ()
    vacant_since: float | None = None


class NodeMonitor(NodeFigures):
    """Watches nodes and agents for one coordinator. `put`: into the coordinator's queue."""

    def __init__(self, run_spec: Any, put: Put, key: str) -> None:
        self._scaling, self._timeouts, self._put = run_spec.scaling, run_spec.run.timeouts, put
        self._own_node = ray.get_runtime_context().get_node_id()
        self._agent_server = AgentServer(key, self._on_message)
        self._cluster = Cluster(run_spec.run, run_spec.scaling, run_spec.task)
        self._nodes: defaultdict[str, WatchedNode] = defaultdict(WatchedNode)
        self._workers: dict[str, WatchedWorker] = {}
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

    def watch_worker(self, worker: str, node: str, started: Mapping[str, Any]) -> None:
        """Have the node's agent watch this worker: by pidfd, and by its stamps."""
        gpus = tuple(started.get("gpus", ()))
        watch = Watch(worker, started["pid"], started["stamp_path"], started["log_path"], gpus)
        with self._lock:
            self._workers[worker] = WatchedWorker(node, watch, started.get("handle"))
        self._agent_server.send(node, watch)

    def kill(self, worker: str, reason: str) -> bool:
        """SIGKILL by PID through the agent; False without a connection to it."""
        known = self._workers.get(worker)
        return known is not None and self._agent_server.send(known.node, Kill(worker, reason))

    def info(self, node: str) -> NodeInfo | None:
        """The node as Ray listed it last; None where it is lost, or was never listed."""
        with self._lock:
            return self._nodes[node].info if node in self._nodes else None

    def address_of(self, worker: str) -> str:
        """The address of a worker's node; empty where it is not known."""
        known = self._workers.get(worker)
        node = self.info(known.node) if known is not None else None
        return node.address if node is not None else ""

    def came_from(self, worker: str) -> str:
        """The address from which a worker's node connects to this one, which may be another one of it; empty where it
        is not known."""
        known = self._workers.get(worker)
        return self._agent_server.came_from(known.node) if known is not None else ""

    def failing_limits(self, worker: str, limits: HostReport) -> list[str]:
        """Lines for what will fail on the worker's host by `doctor.host.limits`, each once."""
        host = f"{self.address_of(worker)}/{self._workers[worker].node[:6]}"
        return self._at_start.look(host, limits, time.time())

    def progress(self, worker: str) -> Mapping[str, Any]:
        """The worker's activity at its agent's last beat, as in `agent.progress`; {} if unknown."""
        known = self._workers.get(worker)
        return known.activity if known is not None else {}

    def pressure(self) -> Mapping[str, float]:
        """`some` and `full` of `host_memory.Pressure` on the node that waits most; {} without kernel support."""
        told = [node.reading.pressure for node in self._listed() if node.reading is not None and node.reading.pressure]
        return max(told, key=lambda one: (one["full"], one["some"]), default={})

    def health(self) -> dict[str, Mapping[str, Any]]:
        """The last reading of each node's agent by address (`agent.health`), unless it is old: a driver may hang."""
        fresh = time.monotonic() - HEALTH_KEPT_S
        known = [(node.info.address, *node.health) for node in self._listed() if node.info and node.health]
        return {address: read for address, at, read in known if at > fresh}

    def host_share(self) -> float:
        """How full the fullest node is, as `memory_pressure.host_share` counts; 0 where nothing is known yet."""
        known = [node.reading for node in self._listed() if node.reading is not None]
        return max((host_share(read.memory_share, read.limit, read.pressure) for read in known), default=0.0)

    def listed(self) -> list[NodeInfo]:
        """The nodes that Ray lists."""
        return [node.info for node in self._listed() if node.info is not None]

    def _listed(self) -> list[WatchedNode]:
        """Copies, as others change them."""
        with self._lock:
            return [replace(node) for node in self._nodes.values() if node.info is not None]

    def vacate(self, nodes: frozenset[str]) -> None:
        """The nodes on which the run has no worker and wants none: their agents go, and Ray may remove them.

        An agent, although it takes no resources, keeps a node from being idle. It comes again where a worker is wanted.
        """
        self._vacant = nodes - {self._own_node}  # the coordinator is watched as well

    def forget(self, worker: str) -> None:
        with self._lock:
            known = self._workers.pop(worker, None)
        if known is not None:
            self._agent_server.send(known.node, Forget(worker))

    # ------------------------------------------------------------ from the agents

    def _on_message(self, node: str, message: FromAgent) -> None:
        with self._lock:
            self._nodes[node].beat_at = time.monotonic()
        match message:
            case Beat():
                self._keep(node, message)
                self._put(NodeBeat(node))
            case Hello():
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

    def _keep(self, name: str, beat: Beat) -> None:
        with self._lock:
            node = self._nodes[name]
            node.reading = beat.reading or node.reading
            if beat.health is not None:
                node.health = (time.monotonic(), beat.health)
            for worker, activity in (beat.reading.workers if beat.reading is not None else {}).items():
                if worker in self._workers:
                    self._workers[worker] = replace(self._workers[worker], activity=activity)

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
                    log.exception("could not report to Ray that node %s leaves; its loss will be noticed", node)
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
            self._drop_unattached()
            before = with_room(node.info for node in self._nodes.values() if node.info)
            after = with_room(without(node, self._nodes[name].bad_gpus) for name, node in listed.items())
            if before != after:  # told before any of them joins
                self._event(NodesListed(self._cause(), tuple(sorted(after))))
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
                    self._confirm_in_thread(name, f"no beat for {limit_s:.1f} s", now)
            vacant = self._long_vacant(now)
            known = {name: self._nodes[name] for name in listed}
            without_agent = [n.info for n in known.values() if n.agent is None and n.vacant_since is None and n.info]
        for name in vacant:
            self._remove_agent(name)
        for node in without_agent:
            if not self._closed:
                self._start_agent(node)

    def _long_vacant(self, now: float) -> list[str]:
        """Nodes whose agent is to go now."""
        for name, node in self._nodes.items():
            node.vacant_since = (node.vacant_since or now) if name in self._vacant else None
        has_agent = {name: n.vacant_since for name, n in self._nodes.items() if n.agent is not None}
        return [name for name, since in has_agent.items() if since is not None and now - since > VACANT_S]

    def _remove_agent(self, name: str) -> None:
        with self._lock:
            if name not in self._vacant:
                return
            node = self._nodes[name]
            agent, node.agent, node.beat_at, node.reading = node.agent, None, None, None  # nobody renews them
        self._agent_server.hang_up(name)
        if agent is not None:
            log.info("node %s: no worker of the run is there or wanted; its agent exits", name)
            ray.kill(agent, no_restart=True)

    def _update(self, listed: NodeInfo) -> None:
        """Report what is new about the node, once its agent is connected."""
        name, node = listed.node, self._nodes[listed.node]
        node.info = info = without(listed, node.bad_gpus)
        known, news = node.told, (info.num_slots, info.num_gpus, info.draining, info.leaves_at)
        if known == news or (known is None and name not in self._agent_server.nodes):
            return
        node.told, node.is_lost = news, False
        if known is None or known[:2] != news[:2]:
            self._event(NodeJoined(self._cause(), name, info.num_slots, info.num_gpus, info.domains, info.is_reserved))
        if info.draining:
            self._event(NodeDraining(self._cause(), name, info.leaves_at))

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

    def _drop_unattached(self) -> None:
        """Forget the agents that could not connect, so that they are started again."""
        while not self._unattached.empty():
            name, agent = self._unattached.get()
            if self._nodes[name].agent is agent:
                self._nodes[name].agent = None

    def _confirm_in_thread(self, node: str, why: str, silent_at: float = math.inf) -> None:
        """In a thread for each node, because many may fall silent at once and each takes time to confirm."""
        threading.Thread(target=self._confirm, args=(node, why, silent_at), name="confirm", daemon=True).start()

    def _confirm(self, node: str, why: str, silent_at: float) -> None:
        """Ask the second source: does any worker of the node, or the agent through Ray, still answer? A beat after
        `silent_at` is an answer, too.

        A node without workers is left to Ray's own table, as nothing there is urgent. This process's own node is
        alive. An agent that does not answer while its workers do is stopped or stuck, and is replaced.
        """
        with self._lock:
            known = self._nodes[node]
            agent, info = known.agent, known.info
        handles = [worker.handle for worker in self._workers_on(node) if worker.handle is not None]
        asked = [handle.ping.remote() for handle in (*handles, agent) if handle is not None]
        if not answers(asked, partial(refuses, info)) and handles and node != self._own_node:
            if (known.beat_at or 0.0) <= silent_at:
                self._lose(node, why)
            return
        agent_answers = agent is not None and answers(asked[-1:])
        log.warning("node %s: %s; its agent is %s", node, why, "asked to attach again" if agent_answers else "replaced")
        if agent is not None and not agent_answers:
            ray.kill(agent, no_restart=True)
        with self._lock:
            known.agent, known.beat_at = None, time.monotonic()

    def _lose(self, node: str, why: str) -> None:
        with self._lock:
            lost = self._nodes[node]
            if self._closed or (lost.info is None and lost.told is None):
                return
            # Ray goes on listing a silent node for a while; when Ray drops it, the loss has been reported.
            known = lost.is_lost and lost.told is None
            if not known:
                log.warning("node %s is lost: %s", node, why)
            self._nodes[node] = WatchedNode(is_lost=True)
            # A machine without power closes no connection: it would look like a node that has just joined.
            self._agent_server.hang_up(node)
        if not known:
            self._event(NodeLost(self._cause(), node))

    def _event(self, event: Event) -> None:
        self._put(Happened(event))


def with_room(nodes: Iterable[NodeInfo]) -> set[str]:
    """Those on which a worker may start."""
    return {node.node for node in nodes if node.num_members and not node.draining}


def without(node: NodeInfo, bad_gpus: Collection[str]) -> NodeInfo:
    """The node without the GPUs that are not to be used."""
    if node.num_gpus is None or not bad_gpus:
        return node
    return replace(node, num_gpus=max(0, node.num_gpus - len(bad_gpus)))


def answers(asked: list[Any], given_up: Callable[[], bool] = lambda: False) -> bool:
    """Whether any of these calls succeeds within CONFIRM_S, or before they are given up CONFIRM_TIMES in a
    row, each time after none was answered for CONFIRM_LOOK_S."""
    deadline, pending, num_given_up = time.monotonic() + CONFIRM_S, asked, 0
    while pending and (left_s := deadline - time.monotonic()) > 0 and num_given_up < CONFIRM_TIMES:
        done, pending = ray.wait(pending, num_returns=1, timeout=min(left_s, CONFIRM_LOOK_S))
        if any(not failed(ref) for ref in done):
            return True
        if not done:
            num_given_up = num_given_up + 1 if given_up() else 0
    return False


def refuses(node: NodeInfo | None) -> bool:
    """Whether the host answers that nobody listens on its raylet's port any more: its workers end with the raylet. Ray
    itself needs up to a second to say so."""
    if node is None or not node.port:
        return False
    try:
        socket.create_connection((node.address, node.port), timeout=CONFIRM_LOOK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # no answer, or no descriptor here
        return False
    return False


def failed(ref: Any) -> bool:
    try:
        ray.get(ref)
    except Exception:
        return True
    return False
