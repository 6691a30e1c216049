"""The Ray calls of a run: list nodes, place workers and agents, remove everything by name, and drain a node.

Every actor and placement group is detached and named `er:RUN:...`, so that it outlives the process that created it and
can be found by name. No decision is made here.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import state as gcs_state
from ray.core.generated import autoscaler_pb2
from ray.exceptions import ActorDiedError, RayError
from ray.util import list_named_actors, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from elastic_ring.config import RunConfig, ScalingConfig, environment
from elastic_ring.errors import PeerFailed, RunFailed
from elastic_ring.files import printable
from elastic_ring.runtime.agent.agent import AgentSpec, NodeAgent
from elastic_ring.runtime.driver import access
from elastic_ring.runtime.groups import nccl
from elastic_ring.runtime.ray_head import ON_HEAD, cluster_status, gcs_client
from elastic_ring.runtime.worker.actor import CONTROL, Worker
from elastic_ring.runtime.worker.coordinator_client import WorkerSpec
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

NAMESPACE = access.NAMESPACE
# Ray must not hide GPUs: a worker sees all of the node's and locks the one it uses (`runtime.gpu.device`).
WORKER_ENVIRONMENT = {**nccl.ENVIRONMENT, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Environment of GPU workers where the user has set nothing; docs/operating/gpus.md gives the reasons."""
PLAIN = frozenset({*WORKER_ENVIRONMENT, "PYTHONPATH"})
"""Variables that are no secret. Ray itself joins PYTHONPATH with the job's working_dir."""
NODE_LABEL = "ray.io/node-id"
MARKET_LABEL, SPOT = "ray.io/market-type", "spot"
DRAIN_LOOK_S = 0.2
KEPT = ("coordinator", "agent:")
"""Actors of a run that a node may keep while it is drained: they hold no state of the training."""


@dataclass(frozen=True)
class NodeInfo:
    """One live node.

    `num_slots`: how many workers fit its resources. `num_gpus`: how many of them may be members at once, one for each
    GPU; None for no limit. `leaves_at`: when a draining node is gone, in Unix seconds; 0 if nobody says. Where the
    clock of the host that gave notice differs from the coordinator's by up to `handover_s`, no step is lost.
    `domains` and `is_reserved`: as in `control.messages.NodeJoined`, from Ray's labels. `memory_bytes`: its host memory
    as Ray counts it, 0 if Ray does not. `port`: its raylet's, 0 where it is not known.
    """

    node: str
    address: str
    num_slots: int
    draining: bool
    num_gpus: int | None = None
    leaves_at: float = 0.0
    domains: tuple[str, ...] = ()
    is_reserved: bool = False
    memory_bytes: float = 0.0
    port: int = 0

    @property
    def num_members(self) -> int:
        """How many members the node can hold at once."""
        return self.num_slots if self.num_gpus is None else min(self.num_slots, self.num_gpus)


def actor_name(run: str, role: str) -> str:
    return f"er:{run}:{role}"


def live_nodes(scaling: ScalingConfig) -> list[NodeInfo]:
    draining = gcs_state.get_draining_nodes()
    nodes = []
    for node in sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"]):
        resources, labels = node["Resources"], node.get("Labels") or {}
        nodes.append(
            NodeInfo(
                node["NodeID"],
                node["NodeManagerAddress"],
                num_slots(resources, scaling.resources_per_worker),
                node["NodeID"] in draining,
                num_gpus(resources, scaling.device),
                draining.get(node["NodeID"], 0) / 1000,
                tuple(f"{name}={labels[name]}" for name in scaling.domain_labels if name in labels),
                labels.get(MARKET_LABEL, SPOT) != SPOT,
                resources.get("memory", 0.0),
                node["NodeManagerPort"],
            )
        )
    return nodes


def num_slots(resources: Mapping[str, float], need: Mapping[str, float]) -> int:
    """How many workers with these needs fit; 0 for an empty need."""
    counts = [resources.get(name, 0.0) / amount for name, amount in need.items() if amount > 0]
    return math.floor(min(counts) + 1e-9) if counts else 0


def num_gpus(resources: Mapping[str, float], device: str) -> int | None:
    """How many members the node can hold by its GPUs; None where Ray reports no GPU resource.

    Each member locks one GPU; a standby process locks none.
    """
    return int(resources["GPU"]) if device == "cuda" and "GPU" in resources else None


def worker_environment(
    device: str, requested: Mapping[str, str], inherited: Mapping[str, str], of_job: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables of workers; the user's values take precedence.

    Precedence: `requested` (`RunConfig.env`), `of_job` (the job's runtime_env), `inherited` (the driver's process). The
    last two only override variables that elastic_ring would set; Ray itself passes on the rest of the job's.
    """
    ours = WORKER_ENVIRONMENT if device == "cuda" else {}
    theirs = {**inherited, **of_job}
    return {**{name: theirs.get(name, value) for name, value in ours.items()}, **requested}


def worker_environment_of(run: RunConfig, device: str) -> dict[str, str]:
    """The full environment of a run's workers. Warns of values that are not elastic_ring's own."""
    of_job = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    variables = worker_environment(device, run.env, environment(), of_job)
    changed = [f"{name}={value}" for name, value in variables.items() if value != WORKER_ENVIRONMENT.get(name, value)]
    if changed:
        log.warning("workers get %s, not elastic_ring's own values", ", ".join(changed))
    return variables


class AgentAnswers:
    """Answers of the nodes' agents. A late one is waited for once, since starts on other nodes come after it."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._late: dict[str, Future[str]] = {}

    def get(self, node: str, ask: Callable[[], Future[str]]) -> str:
        """Raises PeerFailed while the node's agent does not answer, and what the answer raises."""
        late = self._late.pop(node, None)
        answer = ask() if late is None else late
        if wait((answer,), self._wait_s if late is None else 0.0).not_done:
            self._late[node] = answer
            raise PeerFailed(f"the agent of node {node} does not answer (waited {self._wait_s:g} s)")
        return answer.result()


class Cluster:
    """The Ray calls of one run. All return at once; results arrive through callbacks."""

    def __init__(self, run: RunConfig, scaling: ScalingConfig, task: TrainingTask) -> None:
        self._run, self._scaling, self._task = run, scaling, task
        self._answers = AgentAnswers(run.timeouts.hello_s)

    @property
    def need(self) -> dict[str, float]:
        return {name: float(amount) for name, amount in self._scaling.resources_per_worker.items()}

    def start_worker(self, worker: str, node: NodeInfo, coordinator: Any, stamp_dir: str, done: Callable) -> Any:
        """Start a worker on a node; another thread calls `done(worker, answer or None, error or None)`.
        Raises PeerFailed where the node's agent does not answer, and as Ray does."""
        name = actor_name(self._run.name, worker)
        group = placement_group(
            [self.need],
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[{NODE_LABEL: node.node}],
        )
        worker_spec = WorkerSpec(
            worker, node.node, node.address, f"{stamp_dir}/{worker}.stamp", self._task, self._scaling, self._run
        )
        # Ray logs its runtime environment and passes it as arguments, so it has only variables that are no secret; the
        # node's agent, which this waits for, keeps the others.
        plain = {name: value for name, value in self._run.env.items() if name in PLAIN}
        secret = {name: value for name, value in self._run.env.items() if name not in plain}
        runtime_env: dict[str, dict[str, str] | str] = {"env_vars": plain} if plain else {}
        if secret:
            python = ray.get_runtime_context().runtime_env.get("py_executable") or ""
            runtime_env["py_executable"] = self._answers.get(
                node.node, lambda: self.start_agent(node).keep_variables.remote(stamp_dir, secret, python).future()
            )
        need, on_gpu = self.need, self._scaling.device == "cuda"
        # The placement group reserves the GPU; the worker locks the one it uses (`runtime.gpu.device`).
        num_gpus = need.pop("GPU", 0) * (not on_gpu)
        actor = (
            ray.remote(concurrency_groups={CONTROL: 1})(Worker)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                max_concurrency=4,
                num_cpus=need.pop("CPU", 0),
                num_gpus=num_gpus,
                memory=need.pop("memory", None),
                resources=need,
                runtime_env=runtime_env or None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            )
            .remote(worker_spec)
        )
        watch_ref(actor.start.remote(coordinator), lambda answer, error: done(worker, answer, error))
        return actor

    def remove_worker(self, worker: str) -> None:
        """Kill a worker's actor, if Ray still lists it, and remove its placement group."""
        name = actor_name(self._run.name, worker)
        with suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        with suppress(ValueError):
            remove_placement_group(get_placement_group(name))

    def start_agent(self, node: NodeInfo) -> Any:
        """The node's agent, found or created."""
        return (
            ray.remote(NodeAgent)
            .options(
                name=actor_name(self._run.name, f"agent:{node.node}"),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,
                max_concurrency=4,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node, soft=False),
            )
            .remote(
                AgentSpec(
                    node.node,
                    self._run.timeouts,
                    early=self._scaling.device == "cuda",
                    notices=self._run.notices,
                    memory_limit=self._run.memory_limit,
                )
            )
        )

    def find_worker(self, worker: str) -> Any | None:
        """The handle of a worker that another coordinator started; None when Ray no longer lists it."""
        try:
            return ray.get_actor(actor_name(self._run.name, worker), namespace=NAMESPACE)
        except ValueError:
            return None


def watch_ref(ref: Any, done: Callable[[Any, BaseException | None], None]) -> None:
    """Call `done(value, None)` or `done(None, error)` when a Ray call has finished."""

    def finished(future: Any) -> None:
        error = future.exception()
        done(None if error else future.result(), error)

    ref.future().add_done_callback(finished)


def why_not_begun(error: BaseException | None) -> str:
    """The last line, and the host, of an actor whose creation failed, in which case the next one would, too; empty for
    another error."""
    if not isinstance(error, ActorDiedError) or "creation task" not in (text := printable(str(error))):
        return ""
    host = re.search(r"ip=([^,)]+)", text)
    return f"on {host[1] if host else 'its node'}: {text.strip().splitlines()[-1]}"


def clear(run: str, *, keep: str, timeout_s: float) -> list[str]:
    """Kill every actor and remove every placement group of a run except the actor `keep`.

    Returns the names of what still exists after `timeout_s`.
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
    """Names of the run's actors and placement groups that exist now, without the actor `keep`."""
    return _actors(run, keep) + [f"placement group {group_id}" for group_id in _groups(run)]


def _actors(run: str, keep: str) -> list[str]:
    prefix = actor_name(run, "")
    return sorted(
        actor["name"]
        for actor in list_named_actors(all_namespaces=True)
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix) and actor["name"] != keep
    )


def built_generation(run: str, wait_s: float) -> int:
    """The newest generation that a worker of the run has built, by the answers that come in time; 0 for none."""
    answers = []
    for name in _actors(run, actor_name(run, "coordinator")):
        if not name.startswith(actor_name(run, "agent:")):
            with suppress(ValueError):  # it has gone meanwhile
                answers.append(ray.get_actor(name, namespace=NAMESPACE).generation.remote())
    generations = [0]
    for answer in ray.wait(answers, num_returns=len(answers), timeout=wait_s)[0] if answers else ():
        with suppress(RayError):  # its process is gone
            generations.append(ray.get(answer))
    return max(generations)


def num_started(run: str) -> int:
    """How many workers the run has started at least, by the names of those that exist."""
    names = _actors(run, actor_name(run, "coordinator"))
    return max((1 + int(match[1]) for name in names if (match := re.search(r":w(\d+)\.t\d+$", name))), default=0)


def _groups(run: str) -> list[str]:
    prefix = actor_name(run, "")
    return sorted(
        group_id
        for group_id, group in placement_group_table().items()
        if group["name"].startswith(prefix) and group["state"] != "REMOVED"
    )


def drain(node: str | None, deadline_s: float) -> list[str]:
    """Tell Ray that a node leaves and wait until no run has a worker there, as before a machine goes. Names of the
    workers that are still on the node at the deadline; none if all have left before it.

    `node`: Ray's id of it in hexadecimal; None for the one that this process is on. Raises: ValueError for the head,
    for a node that Ray does not list, dead or alive, and where no cluster lets this process in; RunFailed when Ray
    refuses.
    """
    access.connect(namespace=NAMESPACE, logging_level="ERROR")
    try:
        node = ray.get_runtime_context().get_node_id() if node is None else node
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
        if not nodes[node]["Alive"]:
            return []
        deadline = time.monotonic() + deadline_s
        give_notice(node, deadline_s)
        while (left := workers_on(node)) and time.monotonic() < deadline:
            time.sleep(DRAIN_LOOK_S)
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
