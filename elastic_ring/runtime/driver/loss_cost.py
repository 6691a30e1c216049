"""Whether the ranks hold copies of each other by default. Asked by the driver, once the cluster is there.

What a loss costs is said in the words of `control.placement.coverage`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from elastic_ring.config import RunConfig
from elastic_ring.control.options import AUTO, parse_copies
from elastic_ring.control.placement.coverage import COPIES, OUTCOMES, PROCESS, said, without_holder
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.driver.cluster import NodeInfo

log = logging.getLogger(__name__)

COPY_BYTES = 48
"""A parameter: two snapshots of its value and Adam's two moments, of the rank itself and of a peer."""
HOST_SHARE = 0.5
"""The most of a node's memory that `--copies auto` takes."""


def with_settled_copies(run: RunConfig, mesh: Mesh, num_parameters: int, nodes: Sequence[NodeInfo]) -> RunConfig:
    """`run` without copies by default where the nodes lack the memory for them. Says what a loss costs on a mesh whose
    shards have one holder each."""
    where = "they go to other processes of this node, so they cover the loss of processes, not of the node"
    on_one = f" on one node: {where}" * (len(nodes) == 1)
    if run.copies not in (AUTO, "0"):
        if on_one:
            log.warning("copies=%s%s", run.copies, on_one)
        return run
    why = ""
    if run.copies == AUTO and (why := lacking(mesh, num_parameters, nodes)):
        run = replace(run, copies="0")
    if mesh.dp > 1:
        return run
    outcome = without_holder(mesh, parse_copies(run.copies, mesh.dp), run.checkpoint_config.is_on)
    cost = said({PROCESS: f"{OUTCOMES[outcome]}{_how_often(run, outcome)}"})
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
            _size(need_bytes(mesh, num_parameters)),
            cost,
            f"; copies{on_one}" * bool(on_one),
        )
    return run


def need_bytes(mesh: Mesh, num_parameters: int) -> int:
    """What copies take of the host memory of a rank."""
    return COPY_BYTES * -(-num_parameters // mesh.cp)


def lacking(mesh: Mesh, num_parameters: int, nodes: Sequence[NodeInfo]) -> str:
    """Why some node has too little memory for the copies of all ranks that it may hold, or does not say what it has;
    empty if none."""
    need = need_bytes(mesh, num_parameters)
    for node in nodes:
        num_ranks = min(mesh.size, node.num_members)
        if num_ranks * need > HOST_SHARE * node.memory_bytes:
            return (
                f"on by default, they would take {_size(num_ranks * need)} of the {_size(node.memory_bytes)} that Ray "
                f"counts on {node.address}, more than {HOST_SHARE:.0%}"
            )
    return ""


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


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
