"""Drains one node: tells Ray that it leaves, and waits until no run has a worker there.

For what runs before a machine goes, such as a pod's preStop hook. The runs decide by themselves how they hand over.
"""

from __future__ import annotations

import time

import ray
from ray._private.state import state as gcs_state
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2

from elastic_ring.errors import RunFailed
from elastic_ring.runtime.driver.cluster import NAMESPACE, actor_name

LOOK_S = 0.2
KEPT = ("coordinator", "agent:")
"""Actors of a run that a node may keep: they hold no state of the training."""


def drain(node: str | None, deadline_s: float) -> list[str]:
    """Names of the runs' workers that are still on the node at the deadline; none if all have left before it.

    `node`: Ray's id of it in hexadecimal; None for the one that this process is on. Raises: RunFailed when Ray refuses.
    """
    ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    try:
        context = ray.get_runtime_context()
        node = node or context.get_node_id()
        deadline = time.monotonic() + deadline_s
        accepted, why_not = GcsClient(address=context.gcs_address).drain_node(
            node, autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), "elastic-ring drain",
            int((time.time() + deadline_s) * 1000),
        )  # fmt: skip
        if not accepted:
            raise RunFailed(f"Ray does not drain node {node}: {why_not}", node=node)
        while (left := workers_on(node)) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return left
    finally:
        ray.shutdown()


def workers_on(node: str) -> list[str]:
    """Names of the runs' workers on a node."""
    return sorted(
        actor["Name"] for actor in gcs_state.actor_table(None).values()
        if actor["Address"]["NodeID"] == node and actor["State"] != "DEAD" and _is_worker(actor["Name"])
    )  # fmt: skip


def _is_worker(name: str) -> bool:
    """A name is `er:RUN:ROLE`, and RUN has no colon."""
    prefix, *rest = name.split(":", 2)
    return prefix == actor_name("", "").split(":")[0] and len(rest) == 2 and not rest[1].startswith(KEPT)
