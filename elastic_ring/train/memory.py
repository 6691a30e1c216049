"""Recognises an exception that means a lack of memory, however it is wrapped, and says which allocation failed, and its
size."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import psutil
import torch

CONTEXT_HAS_NO_ROOM = "out of memory"
CPU_ALLOCATOR_SAYS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
MAX_CHARS = 400


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device lacks memory: torch's error for that in the chain, or CUDA's when a context does not fit."""
    return any(_lacks_device_memory(link) for link in chain(error))


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether the host lacks memory: a MemoryError in the chain, or the error of torch's CPU allocator."""
    return any(_lacks_host_memory(link) for link in chain(error))


def describe_shortage(error: BaseException) -> str:
    """One line: who requested how much memory, and how much host memory this process holds."""
    found = next((link for link in chain(error) if _lacks_device_memory(link) or _lacks_host_memory(link)), error)
    lines = [line.strip() for line in str(found).splitlines() if line.strip()]
    asked = next((line for line in lines if CPU_ALLOCATOR_SAYS in line), lines[0] if lines else "no amount given")
    frames = traceback.extract_tb(found.__traceback__)
    place = f", in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    held_gib = psutil.Process().memory_info().rss / 2**30
    return f"{type(found).__name__}: {asked[:MAX_CHARS]}{place}; the process holds {held_gib:.2f} GiB of host memory"


def drop_frames(error: BaseException) -> None:
    """Free what the frames of an exception hold: the activations of the step that broke off."""
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, then its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _lacks_device_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, torch.AcceleratorError) and CONTEXT_HAS_NO_ROOM in str(error)
    )


def _lacks_host_memory(error: BaseException) -> bool:
    """torch's CPU allocator raises a plain RuntimeError: only that very type with the allocator's own words counts."""
    return isinstance(error, MemoryError) or (type(error) is RuntimeError and CPU_ALLOCATOR_SAYS in str(error))
