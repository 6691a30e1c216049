"""Letting go of the GPUs that a member will not compute on.

A standby has a context on every GPU of its node, since it does not know which one it will take; a process ends the
later the more contexts it has, and each takes memory.

`cudaDeviceReset` ends all that this process has on a GPU, whoever made it. What is relied on, torch 2.11 to 2.13:

- Memory. What torch still has in use on a GPU keeps it; its caches are emptied. Pinned host memory belongs to the
  context that was current when it was made, and ends with it: torch's cache of it is emptied too, and what is still in
  use keeps all GPUs, since nobody can tell whose it is. Later it is made where the calling thread computes.
- Handles (streams, cuBLAS, cuDNN, modules of Triton and CuTe) lie in tables by device. The rows of the others stay as
  they are and are never looked up again. Events are freed on their own device, which would make its context anew: those
  that are garbage are collected before. Those that NCCL's groups used go with the thread that warmed, at the very end.
- autograd, `empty_cache`, the seeding of all generators, `memory_stats` and `get_device_properties` ask first whether a
  GPU has a context, or need none. `mem_get_info` of another GPU would make one.
- A thread that has chosen no GPU means the first: what calls CUDA beside the training thread chooses one (`nccl.probe`,
  `devices.let_go_of_cache`, `standstill`), else it would make that context again.
- NCCL maps the memory of peers into the own context.

So the process is bound to its own GPU from then on (`DeviceClaim.bind`).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import time
from collections.abc import Callable
from typing import Protocol

import torch

from elastic_ring.runtime.devices import DeviceClaim

log = logging.getLogger(__name__)

SETTLED_STEPS = 2
"""A newcomer's first step is what everyone waits for; it has other things to do before the second one is done."""


class Contexts(Protocol):
    """What is asked of CUDA."""

    def having(self) -> list[int]:
        """The GPUs on which this process has a context."""

    def empty(self, others: list[int]) -> int:
        """Wait for these GPUs and empty all of torch's caches; the bytes of pinned memory that are still in use."""

    def reserved(self, index: int) -> int:
        """Bytes that torch still has on a GPU."""

    def reset(self, index: int) -> int:
        """End the context there; CUDA's answer, 0 for success. Raises OSError where there is no such call."""


class CudaContexts:
    """The real ones."""

    def having(self) -> list[int]:
        has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
        return [index for index in range(torch.cuda.device_count()) if has_context(index)]

    def empty(self, others: list[int]) -> int:
        gc.collect()
        torch.cuda.synchronize()  # what the own GPU still copies from pinned memory has it in use
        for index in others:
            torch.cuda.synchronize(index)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])

    def reserved(self, index: int) -> int:
        return torch.cuda.memory_reserved(index)

    def reset(self, index: int) -> int:
        runtime = loaded_runtime()
        with torch.cuda.device(index):
            code = int(runtime.cudaDeviceReset())
        if code:
            runtime.cudaGetLastError()  # else torch takes it for the error of the next kernel
        return code


def loaded_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded, and no other. Raises OSError where torch brings it in another form."""
    major = str(torch.version.cuda).partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOW | os.RTLD_NOLOAD)


def let_go_of_others(device: torch.device, contexts: Contexts | None = None) -> int:
    """End this process's contexts on all GPUs but `device`, the calling thread's; how many were ended.

    To be called with nothing under way on the others. One that is still in use is left alone, and so is one that CUDA
    does not let go of: both are told in the log, and nothing is raised, for training needs none of this. Afterwards the
    process must not touch the others again.
    """
    contexts = CudaContexts() if contexts is None else contexts
    num_ended = 0
    try:
        others = [index for index in contexts.having() if index != device.index]
        pinned_bytes = contexts.empty(others) if others else 0
        if pinned_bytes:
            log.warning("no other GPU is let go of: %d bytes of pinned memory in use may be its", pinned_bytes)
            return 0
        for index in others:
            if in_use := contexts.reserved(index):
                log.warning("GPU %d is not let go of: %d bytes of this process are in use there", index, in_use)
            elif code := contexts.reset(index):
                log.warning("GPU %d is not let go of: cudaDeviceReset answers %d", index, code)
            else:
                num_ended += 1
    except (RuntimeError, OSError, AttributeError, KeyError) as error:  # also a torch that has other private calls
        log.warning("other GPUs are not let go of: %s: %s", type(error).__name__, error)
    return num_ended


class Settling:
    """Lets go of the other GPUs once in a process's life: after the second step since it took its seat."""

    def __init__(self, wanted: bool, let_go: Callable[[torch.device], int] = let_go_of_others) -> None:
        self._wanted, self._let_go = wanted, let_go
        self._num_steps = 0

    def stood(self) -> None:
        """It has no seat any more."""
        self._num_steps = 0

    def committed(self, claim: DeviceClaim, generation: int, step: int, rank: int) -> None:
        """`rank` has committed `step`, and nothing is under way. The training thread's."""
        self._num_steps += 1
        if not self._wanted or self._num_steps < SETTLED_STEPS:
            return
        self._wanted = False
        begun = time.monotonic()
        claim.bind()  # first: whatever comes of it, the others may be half ended
        num_ended = self._let_go(claim.device)
        log.info("generation %d, step %d, rank %d: let go of %d other GPUs in %.3f s",
                 generation, step, rank, num_ended, time.monotonic() - begun)  # fmt: skip
