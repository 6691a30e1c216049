"""Classifies an exception of the training thread: whose failure it is, and the text to report.

The control core decides what follows.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from elastic_ring.errors import (
    CheckpointDamaged,
    DigestMismatch,
    ElasticRingError,
    LossSpike,
    StorageFailed,
    TooManySkipped,
    WeightsDamaged,
)
from elastic_ring.runtime.groups.transport import is_transport_error
from elastic_ring.train.memory import chain, describe_shortage, is_out_of_host_memory, is_out_of_memory
from elastic_ring.train.startup.check import ModelRefused
from elastic_ring.train.startup.kernels import KernelMismatch
from elastic_ring.train.vote import ComputedWrongly, MustGoBack, ReplicasDiverged


def error_kind(
    error: BaseException, device_failed: Callable[[], bool] = lambda: False, *, healing: bool = False
) -> str:
    """Which kind of `MemberFailed` an exception is.

    `device_failed` probes the device; it is called only before the user's code is blamed. `healing`: in a build that
    brings this worker the state which others have. There the model fits and its kernel runs on other devices, so a
    device without memory and a kernel mismatch are this device's failures. Elsewhere a lack of memory is neither the
    device's failure nor the user's. A host's lack never is the device's: a replacement would share the host.
    """
    if isinstance(error, TooManySkipped):
        return "skipped"
    if isinstance(error, LossSpike):
        return "spike"
    if isinstance(error, MustGoBack):
        return "back"
    if isinstance(error, DigestMismatch):
        return "peer"  # what arrived is not used; the next build sends it again
    if isinstance(error, CheckpointDamaged):
        return "checkpoint"
    if isinstance(error, StorageFailed):
        return "storage"  # it was waited for
    if isinstance(error, ComputedWrongly):
        return "corrupt"
    if isinstance(error, (ModelRefused, ReplicasDiverged, WeightsDamaged)):
        return "check"
    if isinstance(error, KernelMismatch):
        return "device" if healing else "check"
    if is_transport_error(error) and not is_out_of_memory(error) and not is_out_of_host_memory(error):
        return "peer"  # what ran out of memory first, and failed its exchange then, is no peer's failure
    if is_out_of_memory(error):
        return "device" if healing or device_failed() else "memory"
    if is_out_of_host_memory(error):
        return "memory"
    if is_device_error(error) or device_failed():
        return "device"
    return "user"


def error_text(error: BaseException, kind: str = "user") -> str:
    """The user's traceback, what an error of ours says, the first line of a device's, or who asked for how much."""
    if kind == "memory":
        return describe_shortage(error)
    if isinstance(error, ElasticRingError):
        return str(error)
    if kind == "device":
        lines = str(error).splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return "".join(traceback.format_exception(error))


def is_device_error(error: BaseException) -> bool:
    """Whether a device failed under what it was given, somewhere in this chain of exceptions."""
    return any(isinstance(link, torch.AcceleratorError) for link in chain(error))
