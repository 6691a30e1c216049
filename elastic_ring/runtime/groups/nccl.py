"""NCCL backends for one generation: built in parallel on one device, aborted from another thread, probed afterwards.

An abort ends any NCCL kernel that waits for a peer; the streams go on, with garbage in the buffers that were being
filled. So a reader of a result must check afterwards whether the groups were aborted (`Groups.check`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from elastic_ring.train.memory import is_out_of_memory

log = logging.getLogger(__name__)

PROBE_ELEMENTS = 256
LOOK_S = 0.05
ENVIRONMENT = {
    # The control thread decides what happens to a process whose peers have died, not NCCL's watchdog. NCCL has no
    # timeouts then: `runtime.worker.stall_watchdog` detects stalls.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Between hosts NCCL itself sees a peer's connection end. That watchdog then prints stacks from its flight recorder
    # (5 s) and waits a minute for a dump that is never written, and the group's abort waits for it
    # (benchmarks/results/hosts/2026-11-26-4xH100.md).
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",  # a thread that listens on the network, and calls peers that are gone
    # Buffers that peers map through the driver's newer calls take a second to connect, the older ones a third
    # (benchmarks/results/training/2026-11-21-training-4xH200.md); between hosts it makes no difference.
    "NCCL_CUMEM_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # a spare loads the kernels that another process has compiled
    # Short-lived threads build and abort groups, and glibc keeps the memory that each freed in its own arena: 30 MiB a
    # generation, none with one arena for all (benchmarks/results/training/2026-11-21-training-4xH200.md).
    "MALLOC_ARENA_MAX": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS may add up in another order each time
}
"""Environment variables of a worker's process."""


def create_backend(store: PrefixStore, rank: int, size: int, device: torch.device, collective_s: float) -> Any:
    """A `ProcessGroupNCCL` that is not connected. Does not block."""
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=collective_s)
    # Hops must not wait for the blocks of a kernel that is running: 0.967 -> 0.989 of Ulysses at 512K tokens
    # (benchmarks/results/ring/2026-11-21-ring-4xH200.md).
    options.is_high_priority_stream = True
    torch.cuda.set_device(device)
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)


def connect_now(backend: Any, device: torch.device, given_up: Callable[[], bool]) -> None:
    """Connect, unless `given_up()` already; abort if it is true afterwards, because an abort before the communicator
    exists has no effect and is not repeated."""
    if given_up():
        return
    backend.eager_connect_single_device(device)
    if given_up():
        end(backend)


def end(backend: Any) -> None:
    """Abort a backend; takes about half a second, whatever waits in it."""
    begun = time.monotonic()
    try:
        backend.abort()
    except RuntimeError as error:
        log.warning("abort of an NCCL group: %s", error)
    log.info("an NCCL group was aborted in %.3f s", time.monotonic() - begun)


def first_exchange(group: Any, device: torch.device) -> None:
    """Send one element from rank 0 to every other rank: NCCL connects two ranks at their first exchange, which takes as
    long as gigabytes do later."""
    if group.size() == 1:
        return
    token = torch.zeros(1, device=device)
    group._start_coalescing()
    for peer in range(1, group.size()) if group.rank() == 0 else ():
        group.send([token], peer, 0)
    if group.rank() != 0:
        group.recv([token], 0, 0)
    group._end_coalescing().wait()
    torch.cuda.current_stream(device).synchronize()


class Builds:
    """Several builds in parallel, each in a daemon thread, so that the caller may do something else meanwhile.

    A build that is never waited for does no harm and ends with the process.
    """

    def __init__(self, builds: Sequence[Callable[[], Any]]) -> None:
        self._futures = [Future[Any]() for _ in builds]

        def run(build: Callable[[], Any], future: Future[Any]) -> None:
            try:
                future.set_result(build())
            except BaseException as error:
                future.set_exception(error)

        for index, (build, future) in enumerate(zip(builds, self._futures, strict=True)):
            threading.Thread(target=run, args=(build, future), name=f"nccl-{index}", daemon=True).start()

    def results(self, check: Callable[[], None]) -> list[Any]:
        """The results in order, once all builds have ended; raises the first error.

        `check` is called every LOOK_S and at the end, and raises to end the wait: a communicator cannot be aborted
        before it exists, and it does not exist before all peers connect.
        """
        running = set(self._futures)
        while running:
            check()
            ended, running = wait(running, LOOK_S, FIRST_COMPLETED)
            for future in ended:
                future.result()
        check()
        return [future.result() for future in self._futures]


class Aborter:
    """Aborts each backend once, each in a thread of its own, and keeps a reference until then.

    An abort takes about half a second; the next generation is built meanwhile.
    """

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Any, threading.Thread]] = {}

    def abort(self, backends: Sequence[Any]) -> None:
        for backend in backends:
            if id(backend) not in self._begun:
                thread = threading.Thread(target=end, args=(backend,), name="nccl-abort", daemon=True)
                self._begun[id(backend)] = (backend, thread)
                thread.start()

    def has_begun(self, backend: Any) -> bool:
        return id(backend) in self._begun

    def wait(self, timeout_s: float) -> bool:
        """Whether all aborts have ended within this time; until then the backends may keep memory."""
        deadline = time.monotonic() + timeout_s
        threads = [thread for _, thread in list(self._begun.values())]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def link_error(backend: Any) -> str:
    """A broken link, from the group's watchdog, which takes no action itself (`ENVIRONMENT`); empty if there is none.

    Its timeouts are ignored: they count from when an operation is queued, long before it may run.
    """
    get_error = getattr(backend, "get_error", None)  # not in every build of torch
    name = "" if get_error is None else str(get_error().name)
    return f"NCCL reports {name}" if name in ("COMM_ERROR", "REMOTE_ERROR") else ""


def has_failed(device: torch.device) -> bool:
    """Whether the device has a sticky error; does not wait for queued work, which may wait for a peer."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError as error:
        if is_out_of_memory(error):
            return False  # full, not broken
        log.error("%s has failed: %s", device, error)
        return True
    return False


def probe(device: torch.device) -> bool:
    """Whether the device still computes: a sticky CUDA error shows in the next call."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        return float(torch.ones(PROBE_ELEMENTS, device=device).sum()) == PROBE_ELEMENTS
    except torch.OutOfMemoryError:
        return True  # full, not broken: a failed allocation leaves no sticky error
    except RuntimeError as error:
        if is_out_of_memory(error):
            return True  # full, not broken: another process may use it
        log.error("%s failed its probe: %s", device, error)
        return False


LAUNCH_S = 0.2  # the limit of an abort's wait: the launch may itself wait for a dead peer


class LaunchGate:
    """Serialises launches with the abort of their group. `check` raises once the group is aborted."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._lock = Lock()

    @contextmanager
    def launching(self) -> Iterator[None]:
        with self._lock:
            self._check()
            yield

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Inside, no launch is under way, unless it did not end within LAUNCH_S."""
        acquired = self._lock.acquire(timeout=LAUNCH_S)
        try:
            yield
        finally:
            if acquired:
                self._lock.release()


class BatchedGroup:
    """Posts a backend's sends and receives one by one, and launches them together at the end."""

    def __init__(self, backend: Any, launching: Callable[[], AbstractContextManager[None]]) -> None:
        self.backend = backend
        self._launching = launching
        self._posted: list[tuple[Callable[..., Any], list[Tensor], int, int]] = []

    def rank(self) -> int:
        return int(self.backend.rank())

    def size(self) -> int:
        return int(self.backend.size())

    def allreduce(self, tensors: list[Tensor]) -> Any:
        with self._launching():
            return self.backend.allreduce(tensors)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> None:
        self._posted.append((self.backend.send, tensors, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> None:
        self._posted.append((self.backend.recv, tensors, src, tag))

    def _start_coalescing(self) -> None:
        self._posted = []

    def drop(self) -> None:
        """Discard the posted operations after an error."""
        self._posted = []

    def _end_coalescing(self) -> Any:
        posted, self._posted = self._posted, []
        with self._launching():
            self.backend._start_coalescing()
            try:
                for operation, tensors, peer, tag in posted:
                    operation(tensors, peer, tag)
            finally:
                work = self.backend._end_coalescing()
            return work
