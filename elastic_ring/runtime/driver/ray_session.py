"""A driver's Ray session: one that runs already, or a local one for as long as the driver needs it.

Light to import: a command starts Ray beside the imports of torch. No run in here.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray

from elastic_ring.config import ScalingConfig, environment
from elastic_ring.errors import RunFailed
from elastic_ring.gpus import GPUS, gpu_type
from elastic_ring.runtime.agent.memory_guard import RAY_THRESHOLD_VARIABLE
from elastic_ring.runtime.driver import access
from elastic_ring.runtime.driver.access import NAMESPACE
from elastic_ring.runtime.driver.stops import LEFT, StopSignal, heeding
from elastic_ring.runtime.ray_head import RECONNECT, RECONNECT_S

log = logging.getLogger(__name__)

LONGEST_FOLDER_BYTES = 107 - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
ACCELERATOR = "accelerator_type:"
"""How Ray's resources name a node's type of GPU."""
LEAVE_S = 10.0
OUTLAST_S = 10.0  # Ray ends a process without a word, so the driver must give up first


@contextmanager
def ray_session(scaling: ScalingConfig, lease_s: float) -> Iterator[None]:
    """`cluster` with as many CPUs as the workers of a run ask for."""
    need = scaling.resources_per_worker.get("CPU", 0.0) * (scaling.most_rings * scaling.cp + scaling.spares)
    with cluster(max(1, -(-int(need * 1000) // 1000)), lease_s):
        yield


@contextmanager
def cluster(num_cpus: int | None, lease_s: float = 0.0) -> Iterator[None]:
    """Attach to an existing cluster (`access.find`), else run a local one within, which counts `num_cpus` CPUs (None:
    this host's). The head of an existing one may be away for `lease_s`.

    Raises: ValueError when RAY_ADDRESS does not answer, and where this host lacks what a local one needs;
    RunFailed where a local one does not start.
    """
    if ray.is_initialized():
        access.warn_if_open(ray.get_runtime_context().gcs_address)
        yield
        return
    try:
        _join(num_cpus, lease_s)
    except SystemExit:  # of Ray's handler of SIGTERM, while it starts
        raise StopSignal from None
    try:
        access.warn_if_open(ray.get_runtime_context().gcs_address)
        with heeding():
            yield
    finally:
        with leaving():
            leave_ray()


def _join(num_cpus: int | None, lease_s: float) -> None:
    if not (address := access.find(starts=True)):
        check_host(environment())
        # Its monitor takes the coordinator first: it is the last resort behind the guard of the node's agent.
        environment().setdefault(RAY_THRESHOLD_VARIABLE, "0.98")
        _start_local(num_cpus)
        log.info("started a Ray of this machine, which ends with this command")
        return
    outlast_head(lease_s)
    access.connect(address, namespace=NAMESPACE, logging_level=logging.WARNING)
    log.info("joined the Ray at %s", address)


def gpu_of_run(scaling: ScalingConfig) -> str | None:
    """The smallest type among the GPUs of Ray's nodes, or of those that the workers ask for; None where one of them has
    no forecast, or where no node has a GPU yet. Logs which."""
    if scaling.device != "cuda":
        return None
    names = {name for name in scaling.resources_per_worker if name.startswith(ACCELERATOR)}
    if not names:
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) > 0]
        names = {name for node in resources for name in node if name.startswith(ACCELERATOR)}
    types = {name: gpu_type(name) for name in sorted(names)}
    if not types or None in types.values():
        unknown = ", ".join(name.removeprefix(ACCELERATOR) for name, kind in types.items() if kind is None)
        log.info("%s: set step.sequences_per_pass for more than one", unknown or "no GPU has joined the cluster yet")
        return None
    return min((kind for kind in types.values() if kind), key=lambda kind: GPUS[kind].gib)


def _start_local(num_cpus: int | None) -> None:
    try:
        access.start(num_cpus=num_cpus, namespace=NAMESPACE, include_dashboard=False, logging_level=logging.WARNING)
    except ray.exceptions.AuthenticationError as error:
        raise ValueError(
            f"Ray finds no token ({error}): set {access.TOKEN_FILE} to a file that has one, or unset it"
        ) from error
    except ValueError:  # a wrong setting of Ray's, in its own words
        raise
    except Exception as error:  # Ray has no class of its own for it
        raise RunFailed(
            f"Ray could not be started on this host, or its processes took too long on a host that is too busy: {error}"
        ) from error


def check_host(variables: Mapping[str, str], shared_memory: str = "/dev/shm") -> None:
    """Raises ValueError where Ray could not start a cluster here: it would say so by a traceback."""
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in variables else "TMPDIR"
    folder = variables.get(name, "/tmp")
    if len(os.fsencode(folder)) > LONGEST_FOLDER_BYTES:
        raise ValueError(
            f"{name}={folder!r}: is longer than the {LONGEST_FOLDER_BYTES} bytes that leave room for names of Ray's "
            "sockets: set RAY_TMPDIR=/tmp, or another short folder"
        )
    if sys.platform == "linux" and not os.access(shared_memory, os.R_OK | os.W_OK):
        raise ValueError(
            f"{shared_memory}: is not there or cannot be written, and Ray keeps objects in it: mount it (Docker: "
            "--shm-size=2g; Kubernetes: an emptyDir of medium Memory), or set RAY_ADDRESS to a cluster elsewhere"
        )


def outlast_head(lease_s: float) -> None:
    """Have Ray keep this process alive for longer than a driver waits for the head; a value of the user's stays.

    Ray reads the variable once, when this process connects.
    """
    environment().setdefault(RECONNECT, str(math.ceil(max(RECONNECT_S, lease_s) + OUTLAST_S)))


def leave_ray() -> None:
    """`ray.shutdown`, for LEAVE_S at most: without a head or a raylet it would wait for a minute, and once more at the
    end of the process."""
    shutdown = threading.Thread(target=ray.shutdown, name="leave-ray", daemon=True)
    shutdown.start()
    try:
        shutdown.join(LEAVE_S)
        if shutdown.is_alive():
            log.warning(
                "Ray has not let this command go within %g s, so it goes by itself: part of that Ray is gone", LEAVE_S
            )
    finally:
        if shutdown.is_alive():
            atexit.unregister(ray.shutdown)


@contextmanager
def leaving() -> Iterator[None]:
    """A signal raises StopSignal at once: the run has ended or is cleared, and only Ray is still being shut down. The
    processes of a Ray that this process started end with it."""

    def leave(number: int, frame: object) -> None:
        raise StopSignal(f"{LEFT} (signal {number}); the run is over, or left to its coordinator")

    with heeding(leave):
        yield
