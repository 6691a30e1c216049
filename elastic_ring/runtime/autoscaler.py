"""Asks the cluster's autoscaler for what a run wants, through Ray's own actor for that.

`ray.autoscaler.sdk.request_resources` is one value for the whole cluster: the last caller wins. So Ray Train and Ray
Data ask through one actor, which adds up their requests and forgets those that nobody renews; so does a run. Without an
autoscaler a request has no effect. No decision on how much: see `demand`.
"""

from __future__ import annotations

import logging
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


class Autoscaler:
    """Requests of one run. Each call waits for Ray: not for a thread that decides.

    `need`: what one worker takes. `ring`: how many members of a ring need a GPU of their own, whatever `need` says; of
    at most `most_rings` rings, which may change.
    """

    def __init__(self, run: str, need: Mapping[str, float], ring: int = 0, most_rings: int = 0) -> None:
        self._requester, self._need, self._ring = f"elastic_ring-{run}", dict(need), ring
        self.most_rings = most_rings
        self._asked_at_version = 0

    def ask(self, num_workers: int) -> None:
        """Ask for room for `num_workers` in the whole cluster, until EXPIRES_S from now; 0 withdraws the request.

        Raises: what Ray raises when its head does not answer.
        """
        actor = _actor()
        if num_workers == 0:
            call = actor.cancel_request.remote(self._requester)
        else:
            call = actor.request_resources.remote(
                requester_id=self._requester, resources=self.bundles(num_workers), expire_after_s=EXPIRES_S
            )
        ray.get(call, timeout=ANSWER_S)
        self._asked_at_version = _cluster_status().cluster_resource_state.cluster_resource_state_version

    def bundles(self, num_workers: int) -> list[dict[str, float]]:
        """What `num_workers` take, each for itself; standbys beyond the members need no GPU."""
        num_rings = min(num_workers // self._ring, self.most_rings) if self._ring else 0
        num_with_gpu = num_rings * self._ring
        with_gpu = {**self._need, "GPU": max(1.0, self._need.get("GPU", 0.0))}
        return [dict(with_gpu) for _ in range(num_with_gpu)] + [
            dict(self._need) for _ in range(num_workers - num_with_gpu)
        ]

    def is_refused(self, num_workers: int) -> bool:
        """Whether the autoscaler has seen the last request and says that it cannot bring what all together ask for.

        One that says nothing of requests (Ray's v1) refuses none.
        """
        told = _cluster_status().autoscaling_state
        if told.last_seen_cluster_resource_state_version <= self._asked_at_version:
            return False
        bundles = self.bundles(num_workers)
        return any(
            covers(refused.resource_requests, bundles) for refused in told.infeasible_cluster_resource_constraints
        )


def covers(refused: Sequence[Any], bundles: Sequence[Mapping[str, float]]) -> bool:
    """Whether a refused request of the whole cluster contains these bundles. `refused`: Ray's requests by count."""
    counts = {tuple(sorted(by.request.resources_bundle.items())): by.count for by in refused}
    asked: dict[tuple[tuple[str, float], ...], int] = {}
    for bundle in bundles:
        shape = tuple(sorted(bundle.items()))
        asked[shape] = asked.get(shape, 0) + 1
    return bool(asked) and all(counts.get(shape, 0) >= number for shape, number in asked.items())


def _cluster_status() -> Any:
    """What Ray's head knows of the cluster and of the autoscaler's last look at it; each look has a version."""
    reply = autoscaler_pb2.GetClusterStatusReply()
    address = ray.get_runtime_context().gcs_address
    reply.ParseFromString(GcsClient(address=address).get_cluster_status(timeout_s=ANSWER_S))
    return reply


def _actor() -> Any:
    """Ray's actor, found, or created on the head: it stays there, and would keep another node from going idle."""
    try:
        return ray.get_actor(NAME, namespace=NAME)
    except ValueError:
        ray.get(_create.options(resources=ON_HEAD).remote(), timeout=START_S)
        return ray.get_actor(NAME, namespace=NAME)


@ray.remote(num_cpus=0)
def _create() -> None:
    """In a process of its own: the import takes a second or two, and a lot of memory."""
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        get_or_create_autoscaling_coordinator,
    )

    actor = get_or_create_autoscaling_coordinator()
    ray.get(actor.__ray_ready__.remote(), timeout=START_S)
