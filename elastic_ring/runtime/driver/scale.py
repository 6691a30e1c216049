"""Sets how many rings and spares a running run may have from now on. The run decides what follows."""

from __future__ import annotations

import ray

from elastic_ring.errors import RunFailed
from elastic_ring.runtime.driver import access
from elastic_ring.runtime.driver.cluster import NAMESPACE, actor_name

ANSWER_S = 30.0


def scale(run: str, max_dp: int | None, spares: int | None) -> None:
    """None leaves a number as it is. Raises: RunFailed without such a run; ValueError for what cannot be;
    ConnectionError without a cluster that lets this process in."""
    if not ray.is_initialized():
        access.connect(namespace=NAMESPACE, logging_level="ERROR")
    try:
        coordinator = ray.get_actor(actor_name(run, "coordinator"), namespace=NAMESPACE)
    except ValueError as error:
        raise RunFailed(f"no run {run!r} trains on this cluster", run=run) from error
    try:
        ray.get(coordinator.scale.remote(max_dp, spares), timeout=ANSWER_S)
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
