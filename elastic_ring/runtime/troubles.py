"""What an exception of the training thread means: whose trouble it is, and what is told of it.

Only naming; who stays and who goes is the control core's to decide.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from elastic_ring.errors import DigestMismatch, ElasticRingError, TooManySkipped
from elastic_ring.runtime.transport import is_transport_error
from elastic_ring.train.check import ModelRefused
from elastic_ring.train.kernels import KernelMismatch
from elastic_ring.train.memory import chain, is_out_of_memory
from elastic_ring.train.vote import ReplicasDiverged


def trouble_kind(
    error: BaseException, device_failed: Callable[[], bool] = lambda: False, *, healing: bool = False
) -> str:
    """Which kind of `Trouble` an exception is.

    `device_failed` asks the device whether it still answers; it is asked only before the user's code is blamed.
    `healing`: in a build for a run that has state already. The model has had room elsewhere, and its kernel has run
    there, so that they do not here is this device's trouble; no room in a step, or at the start, is the user's.
    """
    if isinstance(error, TooManySkipped):
        return "skipped"
    if isinstance(error, DigestMismatch):
        return "peer"  # what arrived is not used; the next build sends it again
    if isinstance(error, (ModelRefused, ReplicasDiverged)):
        return "check"
    if isinstance(error, KernelMismatch):
        return "device" if healing else "check"
    if is_transport_error(error):
        return "peer"
    if is_out_of_memory(error):
        return "device" if healing or device_failed() else "user"
    if is_device_error(error) or device_failed():
        return "device"
    return "user"


def trouble_text(error: BaseException, kind: str = "user") -> str:
    """The user's traceback, or what an error of ours says, or the first line of a device's."""
    if isinstance(error, ElasticRingError):
        return str(error)
    if kind == "device":
        said = str(error).splitlines()
        return f"{type(error).__name__}: {said[0] if said else ''}"
    return "".join(traceback.format_exception(error))


def is_device_error(error: BaseException) -> bool:
    """Whether a device failed under what it was given, somewhere in this chain of exceptions."""
    return any(isinstance(link, torch.AcceleratorError) for link in chain(error))
