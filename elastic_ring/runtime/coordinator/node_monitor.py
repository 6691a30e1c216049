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
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from elastic_ring.control.decisions.detectors import host_share
from elastic_ring.control.messages import CauseIds, NodeDraining, NodeJoined, NodeLost
from elastic_ring.runtime.agent.resolver import warning
from elastic_ring.runtime.agent.rpc import AgentServer, Message
from elastic_ring.runtime.coordinator.recorder import NodeFigures
from elastic_ring.runtime.doctor.verdicts import AtStart
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

Put = Callable[..., None]


class NodeMonitor(NodeFigures):
    """Watches nodes and agents for one coordinator. `put(kind, body, extra)` is the coordinator's queue."""

    def __init__(self, run_spec: Any, address: str, put: Put, key: str) -> None:
        self._run_spec, self._address, self._put, self._key = run_spec, address, put, key
        self._timeouts = run_spec.run.timeouts
        self._own_node = ray.get_runtime_context().get_node_id()
        self._agent_server = AgentServer(key, self._on_message)
        self._cluster = Cluster(run_spec.run, run_spec.scaling, run_spec.task)
        self.nodes: dict[str, NodeInfo] = {}
        self._agents: dict[str, Any] = {}
        self._beats: dict[str, float] = {}
        self._workers: dict[str, dict[str, Any]] = {}
        self._told: dict[str, tuple[int, int | None, bool, float]] = {}
        self._lost: set[str] = set()
        self._bad_gpus: dict[str, list[str]] = {}
        self._vacant: frozenset[str] = frozenset()
        self._vacant_since: dict[str, float] = {}
        self._progress: dict[str, dict[str, Any]] = {}
        self._pressure: dict[str, dict[str, float]] = {}
        self._memory_shares: dict[str, float] = {}
        self._guard_limits: dict[str, float] = {}  # an agent's is lower where Ray's own monitor would act first
        self._health: dict[str, tuple[float, dict[str, Any]]] = {}
        self._cause = CauseIds("monitor")
        self._at_start = AtStart(run_spec.scaling.device if run_spec.scaling is not None else "cpu")
        # Guards the tables above. No call to Ray while it is held, and no use of it in a callback of Ray: callbacks run
        # in the thread that such a call waits for.
        self._lock = threading.RLock()
        self._unattached: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._closed = False
        self._watcher = threading.Thread(target=self._watch, name="node-monitor", daemon=True)

    def close(self) -> None:
        """Stop watching: the run is over. Returns once no agent is being started any more."""
        self._closed = True
        self._watcher.join(timeout=self._timeouts.clear_s)

    def open(self) -> None:
        self._agent_server.open(self._address)
        self._watcher.start()

    # ------------------------------------------------------------ for the coordinator

    def echo(self, node: str) -> None:
        self._agent_server.send(node, {"kind": "echo"})

    def watch_worker(self, worker: str, node: str, started: Mapping[str, Any]) -> None:
        """Have the node's agent watch this worker: by pidfd, and by its stamps."""
        entry = {
            "kind": "watch",
            "worker": worker,
            "node": node,
            "pid": started["pid"],
            "stamp_path": started["stamp_path"],
            "log_path": started["log_path"],
            "handle": started.get("handle"),
            "gpus": started.get("gpus", []),
        }
        with self._lock:
            self._workers[worker] = entry
        self._send_watch(entry)

    def kill(self, worker: str, reason: str) -> bool:
        """SIGKILL by PID through the agent; False without a connection to it."""
        entry = self._workers.get(worker)
        return entry is not None and self._agent_server.send(
            entry["node"], {"kind": "kill", "worker": worker, "reason": reason}
        )

    def address_of(self, worker: str) -> str:
        """The address of a worker's node; empty where it is not known."""
        entry = self._workers.get(worker)
        node = self.nodes.get(entry["node"]) if entry is not None else None
        return node.address if node is not None else ""

    def came_from(self, worker: str) -> str:
        """The address from which a worker's node connects to this one, which may be another one of it; empty where it
        is not known."""
        entry = self._workers.get(worker)
        return self._agent_server.came_from(entry["node"]) if entry is not None else ""

    def failing_limits(self, worker: str, limits: Mapping[str, Any]) -> list[str]:
        """Lines for what will fail on the worker's host by `doctor.host.limits`, each once."""
        host = f"{self.address_of(worker)}/{self._workers[worker]['node'][:6]}"
        return self._at_start.look(host, limits, time.time())

    def progress(self, worker: str) -> dict[str, Any]:
        """The worker's activity at its agent's last beat, as in `agent.progress`; {} if unknown."""
        with self._lock:
            return dict(self._progress.get(worker, {}))

    def pressure(self) -> dict[str, float]:
        """`some` and `full` of `host_memory.Pressure` on the node that waits most; {} without kernel support."""
        with self._lock:
            told = [self._pressure[node] for node in self.nodes if self._pressure.get(node)]
        return max(told, key=lambda one: (one["full"], one["some"]), default={})

    def health(self) -> dict[str, dict[str, Any]]:
        """The last reading of each node's agent by address (`agent.health`), unless it is old: a driver may hang."""
        fresh = time.monotonic() - HEALTH_KEPT_S
        with self._lock:
            known = [(self.nodes[node].address, *told) for node, told in self._health.items() if node in self.nodes]
        return {address: read for address, at, read in known if at > fresh}

    def host_share(self) -> float:
        """How full the fullest node is, as `memory_pressure.host_share` counts; 0 where nothing is known yet."""
        with self._lock:
            known = [
                (share, self._guard_limits.get(node, 0.0), self._pressure.get(node, {}))
                for node, share in self._memory_shares.items()
                if node in self.nodes
            ]
        return max((host_share(*each) for each in known), default=0.0)

    def listed(self) -> list[NodeInfo]:
        """The nodes that Ray lists."""
        with self._lock:
            return list(self.nodes.values())

    def vacate(self, nodes: frozenset[str]) -> None:
        """The nodes on which the run has no worker and wants none: their agents go, and Ray may remove them.

        An agent, although it takes no resources, keeps a node from being idle. It comes again where a worker is wanted.
        """
        self._vacant = nodes - {self._own_node}  # the coordinator is watched as well

    def forget(self, worker: str) -> None:
        with self._lock:
            entry = self._workers.pop(worker, None)
            self._progress.pop(worker, None)
        if entry is not None:
            self._agent_server.send(entry["node"], {"kind": "forget", "worker": worker})

    # ------------------------------------------------------------ from the agents

    def _on_message(self, node: str, message: Message) -> None:
        with self._lock:
            self._beats[node] = time.monotonic()
        match message["kind"]:
            case "beat":
                with self._lock:
                    self._progress |= {w: told for w, told in message.get("progress", {}).items() if w in self._workers}
                    self._health |= {node: (time.monotonic(), message["health"])} if "health" in message else {}
                    self._pressure |= {node: message["pressure"]} if "pressure" in message else {}
                    if "memory_share" in message:
                        self._memory_shares[node], self._guard_limits[node] = message["memory_share"], message["limit"]
                self._put("beat", node)
            case "hello":
                for entry in self._workers_on(node):
                    self._send_watch(entry)
                self._put("reconnect", node, {"reconnect_s": message["reconnect_s"]})
            case "death":
                self._put("death", message)
            case "gpus":
                log.error("node %s: GPUs that are not used: %s", node, ", ".join(message["bad"]) or "none any more")
                with self._lock:
                    self._bad_gpus[node] = message["bad"]
            case "resolver":
                if told := warning(node, message["address"], message["took_s"]):
                    self._put("told", told)
            case "told":
                self._put("told", message["text"])
            case "leaves":
                threading.Thread(target=self._pass_notice, args=(node, message["in_s"]), daemon=True).start()
            case "hung-up":
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
                    log.exception("could not report to Ray that node %s leaves; its loss will be noticed", node)
                    return
                log.warning(
                    "could not report to Ray that node %s leaves in %.0f s; tries again", node, left_s, exc_info=True
                )
            time.sleep(min(NOTICE_AGAIN_S, max(left_s, 0.1)))

    def _send_watch(self, entry: Mapping[str, Any]) -> None:
        message = {key: value for key, value in entry.items() if key not in ("handle", "node")}
        self._agent_server.send(entry["node"], message)

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
        listed = live_nodes(self._run_spec.scaling)
        with self._lock:
            self._drop_unattached()
            seen = {node.node: without(node, self._bad_gpus.get(node.node, ())) for node in listed}
            for node in seen.values():
                self._update(node)
            for name in [n for n in self.nodes if n not in seen]:
                self._lose(name, "Ray no longer lists it")
            now, limit_s = time.monotonic(), self._timeouts.node_silent_s
            # The second source is asked within the limit, so that a silent node is lost when it is reached.
            silent = now - max(limit_s - CONFIRM_S, limit_s / 2)
            for name in [n for n in self._agent_server.nodes if self._beats.get(n, silent) < silent]:
                self._beats[name] = now  # asked once for each such silence
                self._confirm_in_thread(name, f"no beat for {limit_s:.1f} s", now)
            vacant = self._long_vacant()
            without_agent = [node for name, node in seen.items() if name not in self._agents | self._vacant_since]
        for name in vacant:
            self._remove_agent(name)
        for node in without_agent:
            if not self._closed:
                self._start_agent(node)

    def _long_vacant(self) -> list[str]:
        """Nodes whose agent is to go now."""
        vacant, now = self._vacant, time.monotonic()
        self._vacant_since = {name: self._vacant_since.get(name, now) for name in vacant}
        return [name for name, since in self._vacant_since.items() if name in self._agents and now - since > VACANT_S]

    def _remove_agent(self, node: str) -> None:
        with self._lock:
            if node not in self._vacant:
                return
            agent = self._agents.pop(node, None)
            for told in (self._beats, self._memory_shares, self._guard_limits, self._pressure):
                told.pop(node, None)  # nobody renews them
        self._agent_server.hang_up(node)
        if agent is not None:
            log.info("node %s: no worker of the run is there or wanted; its agent exits", node)
            ray.kill(agent, no_restart=True)

    def _update(self, node: NodeInfo) -> None:
        """Report what is new about the node, once its agent is connected."""
        name = node.node
        known, self.nodes[name] = self._told.get(name), node
        news = (node.num_slots, node.num_gpus, node.draining, node.leaves_at)
        if known == news or (known is None and name not in self._agent_server.nodes):
            return
        self._told[name] = news
        self._lost.discard(name)
        if known is None or known[:2] != news[:2]:
            self._event(NodeJoined(self._cause(), name, node.num_slots, node.num_gpus, node.domains, node.is_reserved))
        if node.draining:
            self._event(NodeDraining(self._cause(), name, node.leaves_at))

    def _workers_on(self, node: str) -> list[dict[str, Any]]:
        with self._lock:
            return [entry for entry in self._workers.values() if entry["node"] == node]

    def _start_agent(self, node: NodeInfo) -> None:
        """Start or find the node's agent and have it connect. Waits for Ray, so the lock must not be held."""
        agent = self._cluster.start_agent(node)
        coordinator = {
            "host": self._address,
            "port": self._agent_server.port,
            "key": self._key,
            "pid": os.getpid(),
            "node": self._own_node,
        }

        def attached(_: Any, error: BaseException | None) -> None:
            if error is not None:
                log.error("agent of node %s did not attach: %s", node.node, error)
                self._unattached.put((node.node, agent))

        attaching = agent.attach.remote(coordinator)
        with self._lock:
            if node.node in self.nodes:  # it may have been lost meanwhile
                self._agents[node.node] = agent
        watch_ref(attaching, attached)

    def _drop_unattached(self) -> None:
        """Forget the agents that could not connect, so that they are started again."""
        while not self._unattached.empty():
            name, agent = self._unattached.get()
            if self._agents.get(name) is agent:
                del self._agents[name]

    def _confirm_in_thread(self, node: str, why: str, silent_at: float = math.inf) -> None:
        """In a thread for each node, because many may fall silent at once and each takes time to confirm."""
        threading.Thread(target=self._confirm, args=(node, why, silent_at), name="confirm", daemon=True).start()

    def _confirm(self, node: str, why: str, silent_at: float) -> None:
        """Ask the second source: does any worker of the node, or the agent through Ray, still answer? A beat after
        `silent_at` is an answer, too.

        A node without workers is left to Ray's own table, as nothing there is urgent. This process's own node is
        alive. An agent that does not answer while its workers do is stopped or stuck, and is replaced.
        """
        agent = self._agents.get(node)
        handles = [entry["handle"] for entry in self._workers_on(node) if entry["handle"] is not None]
        asked = [handle.ping.remote() for handle in (*handles, agent) if handle is not None]
        if not answers(asked, partial(refuses, self.nodes.get(node))) and handles and node != self._own_node:
            if self._beats.get(node, 0.0) <= silent_at:
                self._lose(node, why)
            return
        agent_answers = agent is not None and answers(asked[-1:])
        log.warning("node %s: %s; its agent is %s", node, why, "asked to attach again" if agent_answers else "replaced")
        if agent is not None and not agent_answers:
            ray.kill(agent, no_restart=True)
        with self._lock:
            self._agents.pop(node, None)
            self._beats[node] = time.monotonic()

    def _lose(self, node: str, why: str) -> None:
        with self._lock:
            if self._closed or (node not in self.nodes and node not in self._told):
                return
            # Ray goes on listing a silent node for a while; when Ray drops it, the loss has been reported.
            known = node in self._lost and node not in self._told
            if not known:
                log.warning("node %s is lost: %s", node, why)
            for table in (self.nodes, self._agents, self._beats, self._told, self._bad_gpus):
                table.pop(node, None)
            # A machine without power closes no connection: it would look like a node that has just joined.
            self._agent_server.hang_up(node)
            self._lost.add(node)
        if not known:
            self._event(NodeLost(self._cause(), node))

    def _event(self, event: Any) -> None:
        self._put("event", event)


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
