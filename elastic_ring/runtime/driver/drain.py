"""Drains one node: reports to Ray that it leaves, and waits until no run has a worker there.

For what runs before a machine goes, such as a pod's preStop hook. The runs decide by themselves how they hand over.
"""

from __future__ import annotations

import logging
import re
import time

import ray
from ray._private.state import state as gcs_state
from ray.core.generated import autoscaler_pb2

from elastic_ring.errors import RunFailed
from elastic_ring.runtime.driver import access
from elastic_ring.runtime.driver.cluster import NAMESPACE, actor_name
from elastic_ring.runtime.ray_head import ON_HEAD, cluster_status, gcs_client

log = logging.getLogger(__name__)

LOOK_S = 0.2
KEPT = ("coordinator", "agent:")
"""Actors of a run that a node may keep: they hold no state of the training."""


def drain(node: str | None, deadline_s: float) -> list[str]:
    """Names of the runs' workers that are still on the node at the deadline; none if all have left before it.

    `node`: Ray's id of it in hexadecimal; None for the one that this process is on. Raises: ValueError for the head and
    for a node that Ray does not list, dead or alive; RunFailed when Ray refuses; ConnectionError without a cluster that
    lets this process in.
    """
    access.connect(namespace=NAMESPACE, logging_level="ERROR")
    try:
        node = node or ray.get_runtime_context().get_node_id()
        # Ray accepts any id. It ends a drained node once nothing runs there that counts, and coordinators do not count.
        nodes = {listed["NodeID"]: listed for listed in ray.nodes()}
        if node not in nodes:
            raise ValueError(f"node-id={node!r}: Ray lists no such node; `ray list nodes` has the ids")
        if nodes[node]["Alive"] and ON_HEAD.keys() <= nodes[node]["Resources"].keys():
            raise ValueError(
                f"node {node} is the cluster's head: Ray would end it once its workers have left, and the coordinator "
                "of each run with it. End the runs with SIGTERM, which saves them, and submit them again on another "
                "head; one started with --num-cpus=0 --num-gpus=0 has no workers to move"
            )
        deadline = time.monotonic() + deadline_s
        give_notice(node, deadline_s)
        while (left := workers_on(node)) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return left
    finally:
        ray.shutdown()


def give_notice(node: str, deadline_s: float, why: str = "elastic-ring drain") -> None:
    """Tell Ray that a node goes `deadline_s` from now. Raises: RunFailed when Ray refuses."""
    accepted, why_not = gcs_client().drain_node(
        node,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        why,
        int((time.time() + deadline_s) * 1000),
    )
    if not accepted:
        raise RunFailed(f"Ray does not drain node {node}: {why_not}", node=node)


def leave_node(node: str) -> None:
    """Let an autoscaler remove a node that the run has left, once it is idle: it might choose another one otherwise.

    A node that no autoscaler has brought stays as it is: nobody would bring it back.
    """
    nodes = cluster_status().cluster_resource_state.node_states
    if node not in {listed.node_id.hex() for listed in nodes if listed.instance_id}:
        log.info("node %s: the run has left it; it stays in the cluster, since no autoscaler started it", node)
        return
    accepted, why_not = gcs_client().drain_node(
        node, autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "left by an elastic_ring run", 0
    )
    log.info("node %s: left%s", node, "" if accepted else f", and Ray does not drain it: {why_not}")


def workers_on(node: str) -> list[str]:
    """Names of the runs' workers on a node: `er:RUN:ROLE`, and RUN has no colon."""
    is_worker = re.compile(actor_name("[^:]*", rf"(?!{'|'.join(KEPT)})"), re.DOTALL).match
    return sorted(
        actor["Name"]
        for actor in gcs_state.actor_table(None).values()
        if actor["Address"]["NodeID"] == node and actor["State"] != "DEAD" and is_worker(actor["Name"])
    )
