"""The coordinator's eyes: node agents on their lines, Ray's node table, and the beats that stop coming.

Turns what it sees into control events. A node counts as lost only when two sources agree: its agent's line
is dead or silent, and Ray says so or none of its workers answers.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import ray

from elastic_ring.control.messages import NodeDraining, NodeJoined, NodeLost
from elastic_ring.runtime.cluster import Cluster, NodeInfo, live_nodes, watch_ref
from elastic_ring.runtime.lifeline import Message, Switchboard

log = logging.getLogger(__name__)

POLL_S = 0.5
CONFIRM_S = 1.0

Put = Callable[..., None]


class Lookout:
    """Watches nodes and agents for one coordinator. `put(kind, body, extra)` is the coordinator's queue."""

    def __init__(self, charter: Any, address: str, put: Put, key: str) -> None:
        self._charter, self._address, self._put, self._key = charter, address, put, key
        self._timeouts = charter.run.timeouts
        self._own_node = ray.get_runtime_context().get_node_id()
        self._board = Switchboard(key, self._hear)
        self._cluster = Cluster(charter.run, charter.scaling, charter.task)
        self.nodes: dict[str, NodeInfo] = {}
        self._agents: dict[str, Any] = {}
        self._beats: dict[str, float] = {}
        self._workers: dict[str, dict[str, Any]] = {}
        self._told: dict[str, tuple[int, int | None, bool]] = {}
        self._lost: set[str] = set()
        self._bad_chips: dict[str, list[str]] = {}
        self._causes = 0
        self._closed = False
        self._watcher = threading.Thread(target=self._patrol, name="lookout", daemon=True)

    def close(self) -> None:
        """Look no further: the run is over. Returns once no agent is being started any more."""
        self._closed = True
        self._watcher.join(timeout=self._timeouts.clear_s)

    def open(self) -> None:
        self._board.open(self._address)
        self._watcher.start()

    # ------------------------------------------------------------ for the coordinator

    def echo(self, node: str) -> None:
        self._board.send(node, {"kind": "echo"})

    def watch_worker(self, worker: str, node: str, card: Mapping[str, Any]) -> None:
        """Have the node's agent hold a pidfd on this worker and read its stamps."""
        entry = {
            "kind": "watch", "worker": worker, "node": node, "pid": card["pid"], "stamp_path": card["stamp_path"],
            "log_path": card["log_path"], "handle": card.get("handle"), "chips": card.get("chips", []),
        }  # fmt: skip
        self._workers[worker] = entry
        self._tell(entry)

    def kill(self, worker: str, reason: str) -> bool:
        """SIGKILL by PID through the agent; False when there is no line to it."""
        entry = self._workers.get(worker)
        return entry is not None and self._board.send(
            entry["node"], {"kind": "kill", "worker": worker, "reason": reason}
        )

    def forget(self, worker: str) -> None:
        entry = self._workers.pop(worker, None)
        if entry is not None:
            self._board.send(entry["node"], {"kind": "forget", "worker": worker})

    # ------------------------------------------------------------ from the agents

    def _hear(self, node: str, message: Message) -> None:
        self._beats[node] = time.monotonic()
        match message["kind"]:
            case "beat":
                self._put("beat", node)
            case "hello":
                for entry in [e for e in list(self._workers.values()) if e["node"] == node]:
                    self._tell(entry)
            case "death":
                self._put("death", message)
            case "chips":
                log.error("node %s: GPUs that are not used: %s", node, ", ".join(message["bad"]) or "none any more")
                self._bad_chips[node] = message["bad"]
            case "hung-up":
                self._confirm_aside(node, "its agent hung up")

    def _tell(self, entry: Mapping[str, Any]) -> None:
        message = {key: value for key, value in entry.items() if key not in ("handle", "node")}
        self._board.send(entry["node"], message)

    # ------------------------------------------------------------ nodes

    def _patrol(self) -> None:
        while not self._closed:
            try:
                self._look()
            except Exception:
                # Ray's own control plane may be away for a while; training does not need it.
                log.exception("could not look at the cluster")
            time.sleep(POLL_S)

    def _look(self) -> None:
        bad = self._bad_chips
        seen = {node.node: without(node, bad.get(node.node, ())) for node in live_nodes(self._charter.scaling)}
        for name, node in seen.items():
            if name not in self._agents and not self._closed:
                self._hire(node)
            known, self.nodes[name] = self._told.get(name), node
            news = (node.num_slots, node.num_seats, node.draining)
            if known != news and name in self._board.nodes:
                self._told[name] = news
                self._lost.discard(name)
                if known is None or known[:2] != news[:2]:
                    self._event(NodeJoined(self._cause(), name, node.num_slots, node.num_seats))
                if node.draining:
                    self._event(NodeDraining(self._cause(), name))
        for name in [n for n in self.nodes if n not in seen]:
            self._lose(name, "Ray lists it no more")
        silent = time.monotonic() - self._timeouts.node_silent_s
        for name in [n for n in self._board.nodes if self._beats.get(n, silent) < silent]:
            self._beats[name] = time.monotonic()  # asked once for each such silence
            self._confirm_aside(name, f"no beat for {self._timeouts.node_silent_s:.1f} s")

    def _hire(self, node: NodeInfo) -> None:
        agent = self._agents[node.node] = self._cluster.start_agent(node)
        ray_self = {"host": self._address, "port": self._board.port, "key": self._key, "pid": os.getpid(),
                    "node": self._own_node}  # fmt: skip

        def attached(_: Any, error: BaseException | None) -> None:
            if error is not None:
                log.error("agent of node %s did not attach: %s", node.node, error)
                self._agents.pop(node.node, None)

        watch_ref(agent.attach.remote(ray_self), attached)

    def _confirm_aside(self, node: str, why: str) -> None:
        """Many nodes may fall silent at once, and each is waited for."""
        threading.Thread(target=self._confirm, args=(node, why), name="confirm", daemon=True).start()

    def _confirm(self, node: str, why: str) -> None:
        """The second source: does any worker of the node, or the agent through Ray, still answer?

        A node without workers is left to Ray's own table: nothing is in a hurry there. The node of this very
        process is there; an agent that does not answer while others do is stopped or stuck, and is replaced.
        """
        agent = self._agents.get(node)
        handles = [e["handle"] for e in list(self._workers.values()) if e["node"] == node and e["handle"] is not None]
        asked = [handle.ping.remote() for handle in (*handles, agent) if handle is not None]
        if not answers(asked) and handles and node != self._own_node:
            self._lose(node, why)
            return
        agent_answers = agent is not None and answers(asked[-1:])
        log.warning("node %s: %s; its agent is %s", node, why, "asked to attach again" if agent_answers else "replaced")
        if agent is not None and not agent_answers:
            ray.kill(agent, no_restart=True)
        self._agents.pop(node, None)
        self._beats[node] = time.monotonic()

    def _lose(self, node: str, why: str) -> None:
        if node not in self.nodes and node not in self._told:
            return
        if self._closed:
            return
        # Ray lists a silent node for a while yet, and when it drops it the loss is no news.
        known = node in self._lost and node not in self._told
        if not known:
            log.warning("node %s is lost: %s", node, why)
        for table in (self.nodes, self._agents, self._beats, self._told, self._bad_chips):
            table.pop(node, None)
        # A machine that lost power says no goodbye: its line would look like a node that has just joined.
        self._board.hang_up(node)
        self._lost.add(node)
        if not known:
            self._event(NodeLost(self._cause(), node))

    def _event(self, event: Any) -> None:
        self._put("event", event)

    def _cause(self) -> str:
        self._causes += 1
        return f"lookout{os.getpid()}.{self._causes}"


def without(node: NodeInfo, bad_chips: Collection[str]) -> NodeInfo:
    """The node with a seat fewer for each GPU that is not to be used."""
    if node.num_seats is None or not bad_chips:
        return node
    return replace(node, num_seats=max(0, node.num_seats - len(bad_chips)))


def answers(asked: list[Any]) -> bool:
    """Whether any of these calls comes back well within CONFIRM_S; one that failed is no answer."""
    deadline, pending = time.monotonic() + CONFIRM_S, asked
    while pending and (left_s := deadline - time.monotonic()) > 0:
        done, pending = ray.wait(pending, num_returns=1, timeout=left_s)
        if any(not failed(ref) for ref in done):
            return True
    return False


def failed(ref: Any) -> bool:
    try:
        ray.get(ref)
    except Exception:
        return True
    return False
