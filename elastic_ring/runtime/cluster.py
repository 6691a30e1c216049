"""What the coordinator asks of Ray: which nodes there are, workers in their places, and nothing left behind.

Every actor and placement group is detached and named `er:RUN:...`, so that it outlives whoever made it and
can be found and removed by name. No decision is made here.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray._private.state import state as gcs_state
from ray.util import list_named_actors, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.runtime import nccl
from elastic_ring.runtime.card import WorkerCard
from elastic_ring.runtime.node_agent import NodeAgent
from elastic_ring.runtime.worker import Worker
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

NAMESPACE = "elastic_ring"
# All GPUs of the node stay visible to a worker, which locks the one that it takes (`runtime.devices`).
WORKER_ENVIRONMENT = {**nccl.ENVIRONMENT, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""What elastic_ring sets for workers on GPUs where the user has set nothing; docs/operating.md says why each."""
NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class NodeInfo:
    """One live node. `num_slots`: how many workers its resources can hold in all; `num_seats`: how many of them may
    be members at once, one for each GPU, None where nothing limits that."""

    node: str
    address: str
    num_slots: int
    draining: bool
    num_seats: int | None = None

    @property
    def num_members(self) -> int:
        """How many members it can hold at once."""
        return self.num_slots if self.num_seats is None else min(self.num_slots, self.num_seats)


def actor_name(run: str, role: str) -> str:
    return f"er:{run}:{role}"


def live_nodes(scaling: ScalingConfig) -> list[NodeInfo]:
    """Ray's live nodes in a fixed order."""
    draining = gcs_state.get_draining_nodes()
    return [
        NodeInfo(
            node["NodeID"], node["NodeManagerAddress"], num_slots(node["Resources"], scaling.resources_per_worker),
            node["NodeID"] in draining, num_seats(node["Resources"], scaling.device),
        )
        for node in sorted(ray.nodes(), key=lambda node: node["NodeID"])
        if node["Alive"]
    ]


def num_slots(resources: Mapping[str, float], need: Mapping[str, float]) -> int:
    """How many workers fit; a need of nothing fits any number of times, which no node has."""
    counts = [resources.get(name, 0.0) / amount for name, amount in need.items() if amount > 0]
    return math.floor(min(counts) + 1e-9) if counts else 0


def num_seats(resources: Mapping[str, float], device: str) -> int | None:
    """How many workers can compute there at once: each member holds a GPU, and a standby process none.

    Ray counts the GPUs. Where it names none, as on a node it was told nothing of, there is nothing to go by.
    """
    return int(resources["GPU"]) if device == "cuda" and "GPU" in resources else None


def worker_environment(
    device: str, asked: Mapping[str, str], inherited: Mapping[str, str], of_job: Mapping[str, str]
) -> dict[str, str]:
    """The variables that workers are started with: the user's own win.

    `asked`: `RunConfig.env`, first of all; then `of_job`, those of the job's runtime_env, and `inherited`, those of the
    driver's process. Of the last two only what elastic_ring would set otherwise: Ray passes on the job's by itself.
    """
    ours = WORKER_ENVIRONMENT if device == "cuda" else {}
    theirs = {**inherited, **of_job}
    return {**{name: theirs.get(name, value) for name, value in ours.items()}, **asked}


class Cluster:
    """The Ray side of one run. All calls return at once; what comes later comes through callbacks."""

    def __init__(self, run: RunConfig, scaling: ScalingConfig, task: TrainingTask) -> None:
        self._run, self._scaling, self._task = run, scaling, task

    @property
    def need(self) -> dict[str, float]:
        return {name: float(amount) for name, amount in self._scaling.resources_per_worker.items()}

    def start_worker(self, worker: str, node: NodeInfo, coordinator: Any, stamp_dir: str, done: Callable) -> Any:
        """Start a worker on a node; `done(worker, answer or None, error or None)` is called from another thread."""
        name = actor_name(self._run.name, worker)
        group = placement_group(
            [self.need], strategy="STRICT_PACK", name=name, lifetime="detached",
            bundle_label_selector=[{NODE_LABEL: node.node}],
        )  # fmt: skip
        card = WorkerCard(
            worker, node.node, node.address, f"{stamp_dir}/{worker}.stamp", self._task, self._scaling, self._run
        )
        need, on_gpu = self.need, self._scaling.device == "cuda"
        # The place holds the GPUs; which of them a worker computes on it settles by lock (`runtime.devices`).
        num_gpus = need.pop("GPU", 0) * (not on_gpu)
        actor = (
            ray.remote(Worker)
            .options(
                name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=0, max_concurrency=4,
                num_cpus=need.pop("CPU", 0), num_gpus=num_gpus, memory=need.pop("memory", None), resources=need,
                runtime_env={"env_vars": dict(self._run.env)} if self._run.env else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote(card)
        )  # fmt: skip
        watch_ref(actor.start.remote(coordinator), lambda answer, error: done(worker, answer, error))
        return actor

    def remove_worker(self, worker: str) -> None:
        """Free a worker's place: its actor, if Ray still thinks it lives, and its placement group."""
        name = actor_name(self._run.name, worker)
        with suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        with suppress(ValueError):
            remove_placement_group(get_placement_group(name))

    def start_agent(self, node: NodeInfo) -> Any:
        """The node's agent, found or made."""
        return (
            ray.remote(NodeAgent)
            .options(
                name=actor_name(self._run.name, f"agent:{node.node}"), namespace=NAMESPACE, lifetime="detached",
                get_if_exists=True, max_restarts=0, max_concurrency=4, num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node, soft=False),
            )
            .remote(node.node, self._run.timeouts, self._scaling.device == "cuda")
        )  # fmt: skip

    def find_worker(self, worker: str) -> Any | None:
        """The handle of a worker that another coordinator started; None when Ray knows it no more."""
        try:
            return ray.get_actor(actor_name(self._run.name, worker), namespace=NAMESPACE)
        except ValueError:
            return None


def watch_ref(ref: Any, done: Callable[[Any, BaseException | None], None]) -> None:
    """Call `done(value, None)` or `done(None, error)` when a Ray call has ended."""

    def finished(future: Any) -> None:
        error = future.exception()
        done(None if error else future.result(), error)

    ref.future().add_done_callback(finished)


def clear(run: str, *, keep: str, timeout_s: float) -> list[str]:
    """Kill every actor and remove every placement group of a run but the actor `keep`.

    Returns what is still there after `timeout_s`: an empty list when all is gone.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = left_behind(run, keep=keep)
        if not left or time.monotonic() > deadline:
            return left
        for name in _actors(run, keep):
            with suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        for group_id in _groups(run):
            with suppress(ValueError):
                remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))
        time.sleep(0.05)


def left_behind(run: str, *, keep: str = "") -> list[str]:
    """Names of the run's actors and placement groups that exist now."""
    return _actors(run, keep) + [f"placement group {group_id}" for group_id in _groups(run)]


def _actors(run: str, keep: str) -> list[str]:
    prefix = actor_name(run, "")
    found = list_named_actors(all_namespaces=True)
    return sorted(
        actor["name"] for actor in found
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix) and actor["name"] != keep
    )  # fmt: skip


def _groups(run: str) -> list[str]:
    prefix = actor_name(run, "")
    return sorted(
        group_id for group_id, group in placement_group_table().items()
        if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    )  # fmt: skip


def room(scaling: ScalingConfig) -> None:
    """Wait for the cluster to hold the mesh. Raises ValueError saying what is there and what is missing."""
    deadline, here, num_here = time.monotonic() + scaling.wait_for_resources_s, "", 0
    if scaling.device == "cuda":
        here, num_here = ray.util.get_node_ip_address(), torch.cuda.device_count()

    def too_little() -> str:
        nodes = live_nodes(scaling)
        return without_gpus(scaling, nodes, here, num_here) or shortage(scaling, nodes, ray.cluster_resources())

    while missing := too_little():
        if time.monotonic() >= deadline:
            raise ValueError(f"{missing}, add nodes, or set wait_for_resources_s to wait for the autoscaler")
        time.sleep(0.5)


def without_gpus(scaling: ScalingConfig, nodes: Sequence[NodeInfo], here: str, num_here: int) -> str:
    """What to do about a run on GPUs on a cluster that is so far this machine (`here`) alone, which has none; else
    empty. Of another machine that Ray was told nothing of there is nothing to go by."""
    alone = all(node.address == here for node in nodes)
    if scaling.device == "cuda" and alone and num_here == 0 and not any(node.num_seats for node in nodes):
        return (
            "device='cuda': this machine, which is the whole cluster, has no GPU that torch can use. Train on CPUs "
            "(device='cpu', --preset laptop), join a cluster that has some (RAY_ADDRESS)"
        )
    return ""


def shortage(scaling: ScalingConfig, nodes: Sequence[NodeInfo], resources: Mapping[str, float]) -> str:
    """What there is too little of for the mesh, and what to lower; empty if there is enough. `resources`: in all."""
    wanted, need = scaling.mesh.size, dict(scaling.resources_per_worker)
    staying = [node for node in nodes if not node.draining]
    slots, members = sum(node.num_slots for node in staying), sum(node.num_members for node in staying)
    if slots < wanted:
        there = ", ".join(f"{name}: {resources.get(name, 0.0):g}" for name in need)
        return (
            f"mesh {scaling.mesh} needs {wanted} workers with {need} each; the cluster has {there} on "
            f"{len(nodes)} node(s), room for {slots}: {wanted - slots} missing. Lower dp or cp or resources_per_worker"
        )
    if members < wanted:
        return (
            f"mesh {scaling.mesh} needs {wanted} GPUs, one for each member; the cluster has GPU: "
            f"{resources.get('GPU', 0.0):g} on {len(nodes)} node(s), room for {members} member(s): "
            f"{wanted - members} missing. Lower dp or cp"
        )
    return ""
