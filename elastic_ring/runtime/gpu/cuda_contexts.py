"""Destroys the CUDA contexts of the GPUs that a member does not compute on.

A spare has a context on every GPU of its node, because it does not know which one it will take. Each context takes
memory and makes the process exit later.

`cudaDeviceReset` destroys everything that this process has on a GPU. Assumptions, for torch 2.11 to 2.13:

- Memory: a GPU on which torch has memory in use is kept; torch's caches are emptied. Pinned host memory belongs to the
  context that was current at its allocation, and is freed with it. So its cache is emptied too, and if any is still in
  use all GPUs are kept, because its context is unknown. Memory of `state.pinned` is registered under the own GPU's
  context, is not among torch's, and stays.
- Handles (streams, cuBLAS, cuDNN, modules of Triton and CuTe) are kept per device, and those of the other devices are
  not looked up again. Freeing an event creates its device's context again, so garbage is collected before. Events of
  NCCL's groups are freed with the thread that did the warm-up, at process exit.
- autograd, `empty_cache`, the seeding of all generators, `memory_stats` and `get_device_properties` check for a context
  first, or need none. `mem_get_info` of another GPU would create one.
- Threads default to GPU 0: code that calls CUDA outside the training thread selects a device first (`nccl.probe`,
  `device.empty_cache`, `stall_watchdog`).
- NCCL maps the memory of peers into the process's own context.

Afterwards the process can use no other GPU, so it exits instead of becoming a spare (`Worker`).
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic_ring.state.pinned import loaded_runtime

log = logging.getLogger(__name__)

SETTLED_STEPS = 2
"""A newcomer's first step is on the critical path of a recovery."""
REPINNED_BYTES = 1 << 28
"""This much pinned memory is allocated again quickly; with more, as for offloaded activations, all GPUs are kept."""


class CudaContexts:
    """The CUDA calls."""

    def having(self) -> list[int]:
        """GPUs on which this process has a context."""
        has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
        return [index for index in range(torch.cuda.device_count()) if has_context(index)]

    def empty(self, indices: list[int]) -> int:
        """Synchronise all GPUs and empty torch's caches of `indices`; returns the bytes of pinned memory left."""
        gc.collect()
        torch.cuda.synchronize()  # copies under way keep pinned memory in use
        for index in indices:
            torch.cuda.synchronize(index)
        if any(self.reserved(index) for index in indices):  # otherwise the own GPU keeps its cache for the next step
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        stats = torch.cuda.host_memory_stats
        if stats()["allocated_bytes.current"] <= REPINNED_BYTES:  # in use and in torch's cache
            torch._C._host_emptyCache()
        return int(stats()["allocated_bytes.current"])

    def reserved(self, index: int) -> int:
        return torch.cuda.memory_reserved(index)

    def reset(self, index: int) -> int:
        """Destroy the context of a GPU; returns CUDA's error code. Raises OSError if the runtime is not found."""
        runtime = loaded_runtime()
        with torch.cuda.device(index):
            # Select the device explicitly: torch skips that for GPU 0, the default of a thread, and a reset without a
            # bound device does nothing and reports no error.
            code = int(runtime.cudaSetDevice(index)) or int(runtime.cudaDeviceReset())
        if code:
            runtime.cudaGetLastError()  # or torch reports it as the error of the next kernel
        return code


def unused_others(device: torch.device, contexts: CudaContexts) -> list[int]:
    """The other GPUs on which this process has a context and nothing else. Runs in the training thread and takes
    milliseconds, because this part may touch those GPUs."""
    unused = []
    with _logged_only():
        indices = [index for index in contexts.having() if index != device.index]
        pinned_bytes = contexts.empty(indices) if indices else 0
        if pinned_bytes:
            log.info("keeping all GPUs: %d bytes of pinned memory may belong to any of them", pinned_bytes)
            return []
        for index in indices:
            if in_use := contexts.reserved(index):
                log.warning("GPU %d is kept: %d bytes of this process are in use there", index, in_use)
            else:
                unused.append(index)
    return unused


def end_contexts(unused: list[int], contexts: CudaContexts) -> int:
    """Destroy this process's contexts on these GPUs, in any thread; returns their number. Takes tenths of a second."""
    num_ended = 0
    with _logged_only():
        for index in unused:
            if code := contexts.reset(index):
                log.warning("GPU %d is kept: cudaDeviceReset returned %d", index, code)
            elif index in contexts.having():
                log.warning("GPU %d is kept: it still has a context after cudaDeviceReset", index)
            else:
                num_ended += 1
    return num_ended


@contextmanager
def _logged_only() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, AttributeError, KeyError) as error:  # also a torch that has other private calls
        log.warning("other GPUs are kept: %s: %s", type(error).__name__, error)


class ContextReleaser:
    """Destroys the other GPUs' contexts once in a process's life: after the second step since it joined the mesh, in a
    thread of its own."""

    def __init__(self, is_due: bool, contexts: CudaContexts | None = None) -> None:
        self._is_due = is_due
        self._contexts = CudaContexts() if contexts is None else contexts
        self._num_steps = 0
        self.released = False  # from now on this process can compute on its own GPU only

    def left_mesh(self) -> None:
        """The process has become a spare."""
        self._num_steps = 0

    def committed(self, device: torch.device, generation: int, step: int, rank: int) -> None:
        """`rank` on `device` has committed `step`, and nothing is under way. Called in the training thread."""
        self._num_steps += 1
        if not self._is_due or self._num_steps < SETTLED_STEPS:
            return
        self._is_due, begun = False, time.monotonic()
        unused = unused_others(device, self._contexts)
        self.released = bool(unused)  # also if destroying one fails later
        if not unused:
            return
        found_at = time.monotonic()

        def end() -> None:
            num_ended = end_contexts(unused, self._contexts)
            released = f"released {num_ended} other GPUs in {time.monotonic() - found_at:.3f} s"
            waited = f"the next step waited for {found_at - begun:.3f} s"
            log.info(f"generation {generation}, step {step}, rank {rank}: {released}; {waited}")

        threading.Thread(target=end, name="other contexts", daemon=True).start()
