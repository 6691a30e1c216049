"""Which GPU a worker computes on: one that no other process of the node holds.

Every worker sees all GPUs of its node. A claim is a lock on a small file, which the kernel lets go of the moment
its process dies, however it dies: a standby process takes over the GPU of a dead one without asking anybody.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from elastic_ring.errors import PeerFailed
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.warm import attention_shapes, warm_up_device

log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm/elastic_ring-gpus")  # one for all runs: two of them on a node do not share a GPU either
KERNEL_CACHE = Path("/dev/shm/elastic_ring-kernels")
"""Where the node's processes leave word of kernels that passed their test."""
LOOK_S = 0.005


class DeviceClaim:
    """One worker's claim. Taken when it first gets a place in the mesh, given back when it stands by."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._fd: int | None = None
        self.device = torch.device("cpu")

    def take(self, timeout_s: float, check: Callable[[], None]) -> torch.device:
        """The device held, or the first free one. Raises PeerFailed when none gets free in time, and whatever
        `check` raises between two looks."""
        if self._kind == "cpu" or self._fd is not None:
            return self.device
        deadline = time.monotonic() + timeout_s
        while True:
            for index in range(torch.cuda.device_count()):
                if self._lock(index):
                    self.device = torch.device("cuda", index)
                    return self.device
            if time.monotonic() > deadline:
                raise PeerFailed(f"none of {torch.cuda.device_count()} GPUs got free within {timeout_s:.0f} s")
            check()
            time.sleep(LOOK_S)

    def give_back(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _lock(self, index: int) -> bool:
        FOLDER.mkdir(exist_ok=True)
        fd = os.open(FOLDER / f"gpu{index}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True


def warm_devices(task: TrainingTask, cp: int) -> None:
    """A context and the first kernels on every GPU, for rings of `cp` ranks: a standby does not know which GPU it will
    take."""
    if task.step.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Else that switch also fills every new tensor, which costs a pass over memory each time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    shapes = attention_shapes(task)
    for index in range(torch.cuda.device_count()):
        begun = time.monotonic()
        warm_up_device(task, torch.device("cuda", index), shapes, cp)
        log.info("GPU %d is warm after %.2f s", index, time.monotonic() - begun)


def let_go_of_cache(device: torch.device) -> None:
    """Give the allocator's unused blocks back: FSDP2's streams are new in each generation, and what was cached for
    the old ones would not be used again."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
