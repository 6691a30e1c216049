"""Pinned host memory, allocated without blocking the process's other GPU threads.

`torch.empty(pin_memory=True)` calls cudaHostAlloc, which holds the driver's lock while the system finds every page: on
an H100 host no thread of the process could launch a kernel for 4.6 s while 6 GiB were pinned. Here the pages are found
first, by threads, without CUDA; cudaHostRegister then takes 0.02 s a GiB. Sizes are not rounded up to powers of two,
and the memory goes back to the system with its last tensor. Same idea as torch's `pinned_use_cuda_host_register`, which
is a setting of the whole process.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod

import torch
from torch import Tensor
from torch.cuda import cudart

log = logging.getLogger(__name__)

_NUM_THREADS = 4
_NO_MEMORY = 2  # cudaErrorMemoryAllocation
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class Pinning:
    """A thread that allocates pinned memory for `purpose` before it is needed. If it fails, it is allocated later."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, device: torch.device, pin: Callable[[], None]) -> None:
        def work() -> None:
            torch.cuda.set_device(device)
            try:
                pin()
            except (MemoryError, RuntimeError, ValueError) as error:
                log.warning("no pinned memory for %s yet: %s", self._purpose, error)

        self._thread = threading.Thread(target=work, name="pinning", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread = None


def empty(num_bytes: int) -> Tensor:
    """`num_bytes` of pinned memory (uint8). Raises MemoryError, or RuntimeError where CUDA refuses to pin it."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = _Registered(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {num_bytes / 1e9:.2f} GB of host memory: {error}") from error
    with suppress(OSError):  # a kernel without huge pages finds small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)  # a child would have to copy pinned pages at once
    data = torch.frombuffer(memory, dtype=torch.uint8)
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pages") as threads:  # touches every page
        list(threads.map(lambda part: part[:: mmap.PAGESIZE].zero_(), data.chunk(_NUM_THREADS)))
    memory.register(data.data_ptr())
    return data


def empty_like(tensor: Tensor) -> Tensor:
    """Host memory of a tensor's shape and type, pinned if the tensor is on a GPU. Raises as `empty`."""
    if not tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return empty(prod(tensor.shape) * tensor.element_size()).view(tensor.dtype).view(tensor.shape)


class _Registered(mmap.mmap):
    """Memory registered with CUDA; unregistered before it goes back to the system."""

    _address, _device = 0, 0

    def register(self, address: int) -> None:
        """Raises MemoryError where the system cannot pin so much, and RuntimeError for any other reason."""
        code = int(cudart().cudaHostRegister(address, len(self), _PORTABLE))
        if code:
            _forget_error()
            message = f"cudaHostRegister of {len(self) / 1e9:.2f} GB returned {code}"
            raise MemoryError(message) if code == _NO_MEMORY else RuntimeError(message)
        self._address, self._device = address, torch.cuda.current_device()

    def __del__(self) -> None:
        if self._address and torch.cuda.is_initialized():
            with torch.cuda.device(self._device):  # threads default to GPU 0, and would open a context there
                if int(cudart().cudaHostUnregister(self._address)):
                    _forget_error()


def loaded_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded. Raises OSError if it is not loaded under its usual name."""
    major = str(torch.version.cuda).partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOW | os.RTLD_NOLOAD)


def _forget_error() -> None:
    """Clear CUDA's last error, which torch would report as the error of this thread's next kernel."""
    with suppress(OSError):
        loaded_runtime().cudaGetLastError()
