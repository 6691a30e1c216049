"""What the cluster has room for before a run's coordinator starts: the mesh, and copies of the ranks' state.

Waits for the autoscaler where the user asked for that. What a failure costs is said in the words of
`control.placement.coverage`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import ray
import torch

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.capacity.scaling import Ask, next_ask, sizes
from elastic_ring.control.options import AUTO, parse_copies
from elastic_ring.control.placement.coverage import COPIES, OUTCOMES, PROCESS, describe, without_holder
from elastic_ring.files import size_text
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.driver.cluster import NodeInfo, live_nodes
from elastic_ring.runtime.ray_head import RENEW_S, Autoscaler

log = logging.getLogger(__name__)

LOOK_S = 0.5
COPY_BYTES = 48
"""A parameter: two snapshots of its value and Adam's two moments, of the rank itself and of a peer."""
HOST_SHARE = 0.5
"""The most of a node's memory that `--copies auto` takes."""


def room(scaling: ScalingConfig, run: str = "") -> int:
    """Wait until the cluster can hold the mesh. Returns the number of rings with which the run begins.

    With `wait_for_resources_s` it asks the autoscaler for everything that the run `run` wants; `min_dp` rings suffice
    when the time is over, or when the autoscaler refuses more. The coordinator renews the request.

    Raises: ValueError after `wait_for_resources_s`, with what is there and what is missing.
    """
    deadline, here, num_here = time.monotonic() + scaling.wait_for_resources_s, "", 0
    if scaling.device == "cuda":
        here, num_here = ray.util.get_node_ip_address(), torch.cuda.device_count()
    requests = _ResourceRequests(run, scaling) if scaling.wait_for_resources_s > 0 else None
    while True:
        nodes = live_nodes(scaling)
        missing = without_gpus(scaling, nodes, here, num_here) or shortage(scaling, nodes, ray.cluster_resources())
        if not missing:
            return scaling.dp
        is_late = time.monotonic() >= deadline
        if requests is not None and (is_late or requests.refused(scaling.dp * scaling.cp)):
            rings = num_room(nodes, scaling.dp * scaling.cp) // scaling.cp
            if rings >= scaling.min_dp:
                log.warning("%s; the run begins with %d of its dp=%d rings", missing, rings, scaling.dp)
                return rings
        if is_late:
            if requests is not None:
                requests.withdraw()
            raise ValueError(f"{missing}, add nodes, or set wait_for_resources_s to wait for the autoscaler")
        if requests is not None:
            requests.step(num_room(nodes, scaling.most_rings * scaling.cp))
        time.sleep(LOOK_S)


class _ResourceRequests:
    """A driver's requests to the autoscaler, until there is a coordinator."""

    def __init__(self, run: str, scaling: ScalingConfig) -> None:
        self._autoscaler = autoscaler_of(run, scaling)
        self._sizes = sizes(scaling.min_dp, scaling.most_rings, scaling.cp, scaling.spares)
        self._ask, self._sent_at = Ask(), 0.0

    def refused(self, num_workers: int) -> bool:
        return self._ask.refused is not None and self._ask.refused <= num_workers

    def step(self, num_here: int) -> None:
        """One look; an autoscaler that does not answer is asked again at the next."""
        now, before = time.monotonic(), self._ask.num_workers
        try:
            is_refused = before > 0 and self._autoscaler.is_refused(before)
            self._ask = next_ask(self._ask, self._sizes, num_here, is_refused, now)
            if self._ask.num_workers != before or now >= self._sent_at + RENEW_S:
                if self._ask.num_workers != before:
                    log.info("room for %d worker(s): asks the autoscaler for %d", num_here, self._ask.num_workers)
                self._autoscaler.ask(self._ask.num_workers)
                self._sent_at = now
        except Exception as error:
            log.warning("could not ask the autoscaler; tries again: %s", error)
            self._ask, self._sent_at = Ask(), 0.0

    def withdraw(self) -> None:
        """A request that cannot be withdrawn expires."""
        try:
            self._autoscaler.ask(0)
        except Exception as error:
            log.warning("could not withdraw the request to the autoscaler; it expires: %s", error)


def autoscaler_of(run: str, scaling: ScalingConfig) -> Autoscaler:
    """Requests for the workers of a run. Members on GPUs need one each, although Ray gives it to no actor."""
    ring = scaling.cp if scaling.device == "cuda" else 0
    return Autoscaler(run, scaling.resources_per_worker, ring, scaling.most_rings)


def num_room(nodes: Iterable[NodeInfo], num_members: int) -> int:
    """Room for workers on the nodes without a notice; standbys count once `num_members` have GPUs."""
    staying = [node for node in nodes if not node.draining]
    slots, able = sum(node.num_slots for node in staying), sum(node.num_members for node in staying)
    return slots if able >= num_members else min(slots, able)


def without_gpus(scaling: ScalingConfig, nodes: Sequence[NodeInfo], here: str, num_here: int) -> str:
    """An error text if the run needs GPUs and this machine (`here`) is the whole cluster and has none; else empty.

    On other machines Ray may simply not know of the GPUs, so nothing is concluded about them.
    """
    alone = all(node.address == here for node in nodes)
    if scaling.device == "cuda" and alone and num_here == 0 and not any(node.num_gpus for node in nodes):
        return (
            "device='cuda': this machine, which is the whole cluster, has no GPU that torch can use. Train on CPUs "
            "(device='cpu', --preset laptop), join a cluster that has some (RAY_ADDRESS)"
        )
    return ""


def shortage(scaling: ScalingConfig, nodes: Sequence[NodeInfo], resources: Mapping[str, float]) -> str:
    """An error text that says what the mesh lacks and which setting to lower; empty if there is enough.

    `resources`: the cluster's totals.
    """
    num_ranks, need = scaling.mesh.size, dict(scaling.resources_per_worker)
    staying = [node for node in nodes if not node.draining]
    slots, members = sum(node.num_slots for node in staying), sum(node.num_members for node in staying)
    if slots < num_ranks:
        there = ", ".join(f"{name}: {resources.get(name, 0.0):g}" for name in need)
        return (
            f"mesh {scaling.mesh} needs {num_ranks} workers with {need} each; the cluster has {there} on "
            f"{len(nodes)} node(s), room for {slots}: {num_ranks - slots} missing. Lower dp or cp or "
            "resources_per_worker"
        )
    if members < num_ranks:
        return (
            f"mesh {scaling.mesh} needs {num_ranks} GPUs, one for each member; the cluster has GPU: "
            f"{resources.get('GPU', 0.0):g} on {len(nodes)} node(s), room for {members} member(s): "
            f"{num_ranks - members} missing. Lower dp or cp"
        )
    return ""


def with_settled_copies(run: RunConfig, mesh: Mesh, num_parameters: int, nodes: Sequence[NodeInfo]) -> RunConfig:
    """`run` without copies by default where a node lacks the memory for those of all ranks that it may hold, or does
    not say what it has. Says what a failure costs on a mesh whose shards have one holder each."""
    where = "they go to other processes of this node, so they cover failures of processes, not of the node"
    on_one = f" on one node: {where}" * (len(nodes) == 1)
    if run.copies not in (AUTO, "0"):
        if on_one:
            log.warning("copies=%s%s", run.copies, on_one)
        return run
    why, rank_bytes = "", COPY_BYTES * -(-num_parameters // mesh.cp)
    for node in nodes if run.copies == AUTO else ():
        node_bytes = min(mesh.size, node.num_members) * rank_bytes
        if node_bytes > HOST_SHARE * node.memory_bytes:
            why = (
                f"on by default, they would take {size_text(node_bytes)} of the {size_text(node.memory_bytes)} that "
                f"Ray counts on {node.address}, more than {HOST_SHARE:.0%}"
            )
            run = replace(run, copies="0")
            break
    if mesh.dp > 1:
        return run
    outcome = without_holder(mesh, parse_copies(run.copies, mesh.dp), run.checkpoint_config.is_on)
    cost = describe({PROCESS: f"{OUTCOMES[outcome]}{_how_often(run, outcome)}"})
    if mesh.size == 1:
        log.warning("one rank: nobody else holds its state; %s", cost)
    elif run.copies == "0":
        log.warning(
            "dp=1 and copies=0%s: nobody else holds a worker's state; %s. copies=1 (--copies 1) keeps it in another "
            "worker's memory, dp=2 in a second ring",
            f" ({why})" * bool(why),
            cost,
        )
    else:
        log.info(
            "dp=1: another worker's memory keeps a copy of each worker's state (--copies 0 for none), %s of host "
            "memory a rank; %s%s",
            size_text(rank_bytes),
            cost,
            f"; copies{on_one}" * bool(on_one),
        )
    return run


def _how_often(run: RunConfig, outcome: int) -> str:
    """From when the state is to which a run goes back."""
    config = run.checkpoint_config
    if outcome == COPIES:
        return f" (one each {run.copy_every_steps} step(s))"
    if not config.is_on:
        return ""
    if config.every_steps is not None:
        return f" (one each {config.every_steps} step(s))"
    if config.every_s is not None:
        return f" (one each {config.every_s:g} s)"
    return " (the first after step 1, the others as the run finds worth their cost, 30 s to an hour apart)"
