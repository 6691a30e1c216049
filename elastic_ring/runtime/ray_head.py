"""What a run asks of the head of the Ray cluster: machines of its autoscaler, and how long it may be away.

`ray.autoscaler.sdk.request_resources` is one value for the whole cluster: the last caller wins. So Ray Train and Ray
Data ask through one actor, which adds up their requests and forgets those that nobody renews; so does a run. Without an
autoscaler a request has no effect. How much to ask for is decided in `control.capacity`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2

log = logging.getLogger(__name__)

NAME = "AutoscalingCoordinator"
"""Name and namespace of Ray's actor."""
ON_HEAD = {"node:__internal_head__": 0.001}
"""A share of this resource places an actor on the head node. Ray does not guarantee a soft affinity."""
ANSWER_S = 30.0
START_S = 120.0
"""A process that imports Ray Data; on a busy head that takes a while."""
EXPIRES_S = 60.0
RENEW_S = 15.0
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
RECONNECT_S = 60
"""Ray's default."""


def reconnect_s(environment: Mapping[str, str]) -> float:
    """Seconds after which Ray ends the processes of a machine with this environment when the head is away.

    Ray reads it where `ray start` runs, each node for itself, and hands it on to the processes that it starts there.
    """
    try:
        return float(environment.get(RECONNECT, RECONNECT_S))
    except ValueError as error:
        raise ValueError(f"{RECONNECT}={environment[RECONNECT]!r} is no number of seconds") from error


def is_kept(environment: Mapping[str, str]) -> bool:
    """Whether a head with this environment keeps the cluster's state outside its memory."""
    return environment.get("RAY_gcs_storage", "memory") == "rocksdb" or bool(environment.get("RAY_REDIS_ADDRESS"))


def warn_if_shorter(process: str, limit_s: float, lease_s: float) -> str:
    """Warn, for a head that keeps the cluster's state, of a process that Ray ends before `lease_s` is over.

    Returns the warning; empty where there is none.
    """
    if limit_s >= lease_s:
        return ""
    warning = (
        f"the head of the Ray cluster may be away for {limit_s:g} s only, not for timeouts.lease_s={lease_s:g}: Ray "
        f"then ends {process}. Set {RECONNECT}={math.ceil(lease_s)} or more there before Ray starts, or lower lease_s"
    )
    log.warning("%s", warning)
    return warning


class Autoscaler:
    """Requests of one run to the autoscaler. Each call waits for Ray, so no thread that decides may make it.

    `need`: the resources of one worker. `ring`: how many members of a ring need a GPU of their own, whatever `need`
    says; of at most `most_rings` rings, which may change.
    """

    def __init__(self, run: str, need: Mapping[str, float], ring: int = 0, most_rings: int = 0) -> None:
        self._requester, self._need, self._ring = f"elastic_ring-{run}", dict(need), ring
        self.most_rings = most_rings
        self._requested_at_version = 0

    def ask(self, num_workers: int) -> None:
        """Ask for room for `num_workers` in the whole cluster, until EXPIRES_S from now; 0 withdraws the request.

        Raises: what Ray raises when its head does not answer.
        """
        try:
            actor = ray.get_actor(NAME, namespace=NAME)
        except ValueError:
            # On the head it stays, and keeps no other node from going idle.
            ray.get(_create_actor.options(resources=ON_HEAD).remote(), timeout=START_S)
            actor = ray.get_actor(NAME, namespace=NAME)
        if num_workers == 0:
            call = actor.cancel_request.remote(self._requester)
        else:
            call = actor.request_resources.remote(
                requester_id=self._requester, resources=self.bundles(num_workers), expire_after_s=EXPIRES_S
            )
        ray.get(call, timeout=ANSWER_S)
        self._requested_at_version = cluster_status().cluster_resource_state.cluster_resource_state_version

    def bundles(self, num_workers: int) -> list[dict[str, float]]:
        """The resources of each of `num_workers`; standbys beyond the members need no GPU."""
        num_rings = min(num_workers // self._ring, self.most_rings) if self._ring else 0
        num_with_gpu = num_rings * self._ring
        with_gpu = {**self._need, "GPU": max(1.0, self._need.get("GPU", 0.0))}
        return [dict(with_gpu if index < num_with_gpu else self._need) for index in range(num_workers)]

    def is_refused(self, num_workers: int) -> bool:
        """Whether the autoscaler has seen the last request and says that it cannot bring what all together ask for.

        Ray's v1 says nothing of requests and so refuses none.
        """
        state = cluster_status().autoscaling_state
        if state.last_seen_cluster_resource_state_version <= self._requested_at_version:
            return False
        bundles = self.bundles(num_workers)
        return any(
            contains(refused.resource_requests, bundles) for refused in state.infeasible_cluster_resource_constraints
        )


def contains(refused: Sequence[Any], bundles: Sequence[Mapping[str, float]]) -> bool:
    """Whether a refused request of the whole cluster contains these bundles. `refused`: Ray's requests by count."""
    counts = {tuple(sorted(by.request.resources_bundle.items())): by.count for by in refused}
    requested = Counter(tuple(sorted(bundle.items())) for bundle in bundles)
    return bool(requested) and all(counts.get(shape, 0) >= number for shape, number in requested.items())


def gcs_client() -> GcsClient:
    return GcsClient(address=ray.get_runtime_context().gcs_address)


def cluster_status() -> Any:
    """The head's view of the cluster and of the autoscaler's last look at it; each look has a version."""
    reply = autoscaler_pb2.GetClusterStatusReply()
    reply.ParseFromString(gcs_client().get_cluster_status(timeout_s=ANSWER_S))
    return reply


@ray.remote(num_cpus=0)
def _create_actor() -> None:
    """In a process of its own: the import takes a second or two, and a lot of memory."""
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        get_or_create_autoscaling_coordinator,
    )

    actor = get_or_create_autoscaling_coordinator()
    ray.get(actor.__ray_ready__.remote(), timeout=START_S)
