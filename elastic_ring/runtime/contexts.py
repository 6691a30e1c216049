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

So the process can take no other GPU from then on, and is of no use as a spare: told to stand by, it ends (`Worker`).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

log = logging.getLogger(__name__)

SETTLED_STEPS = 2
"""A newcomer's first step is what everyone waits for; it has other things to do before the second one is done."""
REPINNED_BYTES = 1 << 28
"""So much pinned memory is soon made anew; more, as of activations that wait on the host, keeps all GPUs."""


class Contexts(Protocol):
    """What is asked of CUDA."""

    def having(self) -> list[int]:
        """The GPUs on which this process has a context."""

    def empty(self, others: list[int]) -> int:
        """Wait for all GPUs and empty torch's caches of these; the bytes of pinned memory that there still are."""

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
        if any(self.reserved(index) for index in others):  # else the own GPU's cache is of use in the next step
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        if _pinned_bytes() <= REPINNED_BYTES:
            torch._C._host_emptyCache()
        return _pinned_bytes()

    def reserved(self, index: int) -> int:
        return torch.cuda.memory_reserved(index)

    def reset(self, index: int) -> int:
        runtime = loaded_runtime()
        with torch.cuda.device(index):
            # Bound to the thread in so many words: one that has chosen nothing means the first GPU, which torch then
            # does not choose again, and the reset of what is not bound ends nothing, without an error.
            code = int(runtime.cudaSetDevice(index)) or int(runtime.cudaDeviceReset())
        if code:
            runtime.cudaGetLastError()  # else torch takes it for the error of the next kernel
        return code


def _pinned_bytes() -> int:
    """In use and in torch's cache of it."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


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
    return end_contexts(unused_others(device, contexts), contexts)


def unused_others(device: torch.device, contexts: Contexts) -> list[int]:
    """The other GPUs on which this process has a context and nothing else. What may touch those is called here, by the
    thread that computes: milliseconds."""
    unused = []
    with _told_only():
        others = [index for index in contexts.having() if index != device.index]
        pinned_bytes = contexts.empty(others) if others else 0
        if pinned_bytes:
            log.info("no other GPU is let go of: %d bytes of pinned memory, in use or much to make anew, may be its",
                     pinned_bytes)  # fmt: skip
            return []
        for index in others:
            if in_use := contexts.reserved(index):
                log.warning("GPU %d is not let go of: %d bytes of this process are in use there", index, in_use)
            else:
                unused.append(index)
    return unused


def end_contexts(unused: list[int], contexts: Contexts) -> int:
    """End this process's contexts on these GPUs, a few tenths of a second each, in any thread; how many were ended."""
    num_ended = 0
    with _told_only():
        for index in unused:
            if code := contexts.reset(index):
                log.warning("GPU %d is not let go of: cudaDeviceReset answers %d", index, code)
            elif index in contexts.having():
                log.warning("GPU %d is not let go of: its context is there after cudaDeviceReset", index)
            else:
                num_ended += 1
    return num_ended


@contextmanager
def _told_only() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, AttributeError, KeyError) as error:  # also a torch that has other private calls
        log.warning("other GPUs are not let go of: %s: %s", type(error).__name__, error)


class Settling:
    """Lets go of the other GPUs once in a process's life, after the second step since it took its seat and beside those
    that follow."""

    def __init__(self, wanted: bool, contexts: Contexts | None = None) -> None:
        self._wanted = wanted
        self._contexts = CudaContexts() if contexts is None else contexts
        self._num_steps = 0
        self.settled = False  # it can compute on no other GPU than its own any more

    def stood(self) -> None:
        """It has no seat any more."""
        self._num_steps = 0

    def committed(self, device: torch.device, generation: int, step: int, rank: int) -> None:
        """`rank` on `device` has committed `step`, and nothing is under way. The training thread's."""
        self._num_steps += 1
        if not self._wanted or self._num_steps < SETTLED_STEPS:
            return
        self._wanted, begun = False, time.monotonic()
        unused = unused_others(device, self._contexts)
        self.settled = bool(unused)  # whatever comes of it then: they may be half ended
        if not unused:
            return
        where = f"generation {generation}, step {step}, rank {rank}"
        kept_s = time.monotonic() - begun
        threading.Thread(target=self._end, args=(unused, where, kept_s), name="other contexts", daemon=True).start()

    def _end(self, unused: list[int], where: str, kept_s: float) -> None:
        begun = time.monotonic()
        num_ended = end_contexts(unused, self._contexts)
        log.info("%s: let go of %d other GPUs in %.3f s, which kept the next step waiting for %.3f s first",
                 where, num_ended, time.monotonic() - begun, kept_s)  # fmt: skip
