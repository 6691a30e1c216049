"""Takes, warms and probes a worker's GPU: no other process of the node owns it, it works, and its memory is free.

Every worker sees all GPUs of its node and locks its own. The CUDA calls are here; `runtime.gpu.leases` decides which
GPU a worker takes."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_ring.config import CpuOffload, environment
from elastic_ring.errors import PeerFailed, RunFailed
from elastic_ring.files import private_folder, user_folder
from elastic_ring.model import liger
from elastic_ring.runtime.gpu import leases
from elastic_ring.runtime.gpu.leases import (
    Gpu,
    GpuLease,
    bad_ones,
    record_failure,
    record_failure_if_free,
    wait_for_memory,
)
from elastic_ring.runtime.groups.nccl import probe
from elastic_ring.train.memory import is_out_of_memory
from elastic_ring.train.startup.kernels import KernelMismatch
from elastic_ring.train.startup.layouts import attention_shapes
from elastic_ring.train.startup.warm import warm_up_device
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.vote import ComputedWrongly

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
MUCH_BYTES = 1 << 30
COMPILERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attn",
    "CUTE_DSL_CACHE_DIR": "cute-dsl",
}
"""Variables with the folders of compiled kernels. Triton's, CUDA's and torch's extensions lie in the home."""


def kernel_cache() -> Path | None:
    """The folder of the kernels' self-test results, which this user's processes of a node share: they decide which
    kernel runs. None if another user has the folder's name: then each process tests for itself."""
    try:
        return private_folder(user_folder(SHARED_MEMORY) / "kernels")
    except (ValueError, OSError) as error:
        log.warning("cannot share the results of kernels' self-tests; each process tests its own: %s", error)
        return None


def keep_caches_private() -> None:
    """Set compilers' caches to a folder of this user alone, unless they are set: the default is a predictable name in
    the temporary folder, whose files are executed."""
    unset = {name: folder for name, folder in COMPILERS.items() if name not in environment()}
    if not unset:
        return
    try:
        parent = user_folder()
    except (ValueError, OSError) as error:
        parent = Path(tempfile.mkdtemp(prefix="elastic_ring-"))
        log.warning("this process keeps its compiled kernels in %s, for itself: %s", parent, error)
    for name, folder in unset.items():
        environment()[name] = str(parent / folder)


def newcomer_bytes(cpu_offload: CpuOffload) -> int:
    """Bytes that a newcomer allocates on its GPU per parameter of its shard: the value and two moments of Adam, unless
    they are in host memory, and the gradient."""
    on_gpu = {"none": 4 + 8, "optimizer": 4, "all": 0}[cpu_offload]
    return on_gpu + 4


class DeviceLease:
    """One worker's lease on its device: taken when it first joins the mesh, given back when it becomes a spare."""

    def __init__(
        self, kind: str, run: str = "", folder: Path = leases.FOLDER, *, state_bytes: int = newcomer_bytes("none")
    ) -> None:
        """`state_bytes`: as `newcomer_bytes`."""
        self._kind, self._state_bytes = kind, state_bytes
        self._lease = GpuLease(run, folder)
        self.device = torch.device("cpu")
        self.avoided: frozenset[str] = frozenset()  # GPUs that failed in this process before it took one
        self.broken = False  # its GPU has failed: this process must be replaced
        self.has_erred = False  # in a step or a build: a probe may still pass

    @property
    def gpu(self) -> str:
        """The name of the GPU owned; empty for none."""
        return self._lease.gpu.name if self._lease.gpu is not None else ""

    def take(self, place: int, num_parameters: int, timeout_s: float, check: Callable[[], None]) -> torch.device:
        """The device owned already, or a free one, for global rank `place` and a shard of `num_parameters`.

        Raises PeerFailed if none gets free in time or the new one fails its probe. `check` is called in each poll, and
        raises to end the wait.
        """
        if self._kind == "cpu":
            return self.device
        if self.broken:
            raise PeerFailed(f"GPU {self.device.index} ({self.gpu}) has failed in this process before")
        if self._lease.gpu is not None:
            self._lease.acquire((), place, timeout_s, check)  # it may sit elsewhere now
            return self.device
        seen = [gpu for gpu in visible_gpus() if gpu.name not in self.avoided]
        gpu = self._lease.acquire(seen, place, timeout_s, check)
        self.device = torch.device("cuda", gpu.index)
        if not probe(self.device):
            self.failed("it failed its probe when it was taken")
            raise PeerFailed(f"GPU {gpu.index} ({gpu.name}) failed its probe when it was taken")
        need_bytes, previous_is_alive = self._state_bytes * num_parameters, self._lease.previous_owner_is_alive
        free = wait_for_memory(
            lambda: int(torch.cuda.mem_get_info(gpu.index)[0]), need_bytes, previous_is_alive, check, timeout_s
        )
        if free < need_bytes:
            gib = (free / 2**30, need_bytes / 2**30)
            log.warning("GPU %d has %.1f GiB free, and a shard may need %.1f: other processes use it", gpu.index, *gib)
        return self.device

    def healthy(self) -> bool:
        """Whether the GPU owned still computes. If not, its failure is recorded and this process must be replaced."""
        if self.has_erred:
            return False
        if not self.broken and not probe(self.device):
            self.failed("it failed its probe after an abort")
        return not self.broken

    def erred(self, error: BaseException) -> None:
        """Record an error in a step or a build, unless it proves nothing: a lack of memory, or a kernel mismatch."""
        self.has_erred = True
        if self._kind != "cpu" and not isinstance(error, KernelMismatch) and not is_out_of_memory(error):
            lines = str(error).splitlines()
            why = f"{type(error).__name__} in a step or a build: {lines[0] if lines else ''}"
            self.failed(why, is_proven=isinstance(error, ComputedWrongly))

    def failed(self, why: str, *, is_proven: bool = False) -> None:
        """Record a failure of the GPU owned; this process uses no other."""
        self.broken = True
        if self._lease.gpu is not None:
            record_failure(self._lease.folder, self._lease.gpu, why, is_proven)

    def give_back(self) -> None:
        """Release the GPU; call once this process has freed everything there but the context."""
        if self._lease.gpu is None:
            return
        try:
            empty_cache(self.device)
            left = torch.cuda.memory_reserved(self.device)
            if left > MUCH_BYTES:
                log.warning("%s is released with %.1f GiB of this process still allocated", self.device, left / 2**30)
        except RuntimeError as error:
            self.failed(f"it failed when its memory was given back: {error}")
        finally:
            self._lease.give_back()


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process sees; this makes no context."""
    indices = range(torch.cuda.device_count())
    return tuple(Gpu(index, name_of(torch.cuda.get_device_properties(index), index)) for index in indices)


def name_of(properties: Any, index: int) -> str:
    """The name of a GPU (or a part of one) on its host: its UUID, else its PCI address."""
    uuid = str(getattr(properties, "uuid", ""))
    if uuid.strip("0-"):
        return f"GPU-{uuid}"
    if hasattr(properties, "pci_bus_id"):
        place = [getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")]
        return "PCI-" + "-".join(f"{number:02x}" for number in place)
    log.warning("GPU %d has neither a UUID nor a PCI address: processes that see other GPUs may take it too", index)
    return f"index-{index}"


@dataclass(frozen=True)
class Warmed:
    """`kernels`: those of attention, from `train.startup.warm.warm_up_device`. `failed`: names of GPUs."""

    kernels: dict[str, str]
    failed: frozenset[str] = frozenset()


NO_PROBE = "it failed its probe"
Shapes = Sequence[tuple[int, int, int]]
Warm = Callable[[TrainingTask, torch.device, Shapes, int, Path | None, dict[str, str]], str]


def poison(device: torch.device) -> None:
    """Fail an assertion in a kernel, as a planned fault: CUDA's error stays in this process's context, the GPU is well.

    Raises RuntimeError, now or in the next call.
    """
    torch._assert_async(torch.zeros((), dtype=torch.bool, device=device))
    torch.cuda.synchronize(device)


def warm_devices(
    task: TrainingTask,
    seen: Sequence[Gpu],
    cp: int,
    folder: Path = leases.FOLDER,
    warm: Warm = warm_up_device,
    computes: Callable[[torch.device], bool] = probe,
) -> Warmed:
    """Create a context and run the first kernels on every GPU, for rings of `cp` ranks: a spare does not know which GPU
    it will take.

    If another process computes there, no sequence length is warmed up (`cp` 0), because that needs memory. A bad GPU is
    skipped. A GPU that fails now has its failure recorded; a GPU without free memory stays cold. Raises the errors of
    `warm` on a healthy GPU, and RunFailed when a second GPU fails: then this process or its software is at fault."""
    shapes, kernels, failures = attention_shapes(task), dict[str, str](), dict[Gpu, str]()
    cache, bad = kernel_cache(), bad_ones(folder, [gpu.name for gpu in seen])
    liger.kernels()  # a first step would import it otherwise, and all ranks would wait
    for gpu in seen:
        if gpu.name in bad:
            log.error("skipped: %s", leases.describe(folder, [gpu]))
            continue
        begun, device = time.monotonic(), torch.device("cuda", gpu.index)
        try:
            # First something small: the verdict on a kernel is this process's, whichever GPU it was tried on.
            lease = GpuLease("", folder)
            alone = lease.lock(gpu)
            lease.release()
            failure = warm(task, device, shapes, cp if alone else 0, cache, kernels) if computes(device) else NO_PROBE
        except RuntimeError as error:
            if is_out_of_memory(error):
                log.warning("GPU %d is not warmed, its memory is full: %s", gpu.index, error)
                continue
            if computes(device):
                raise
            failure = f"{type(error).__name__}: {error}"
        if not failure:
            log.info("GPU %d is warm after %.2f s", gpu.index, time.monotonic() - begun)
            continue
        failures[gpu] = failure
        if len(failures) > 1:
            reasons = "; ".join(f"GPU {failed.index} ({failed.name}): {why}" for failed, why in failures.items())
            raise RunFailed(f"more than one GPU fails in this process: {reasons}")
    for gpu, failure in failures.items():  # recorded now that it is known that not every GPU fails here
        recorded = record_failure_if_free(folder, gpu, failure)
        owned = "" if recorded else ", and owned by another process"
        log.error("not warmed%s: GPU %d (%s): %s", owned, gpu.index, gpu.name, failure)
    return Warmed(kernels, frozenset(gpu.name for gpu in failures))


def be_deterministic(task: TrainingTask) -> None:
    """Select torch's deterministic operators, if the task asks for them; an operator that has none warns."""
    if task.step.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Else that switch also fills every new tensor, which costs a pass over memory each time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def empty_cache(device: torch.device) -> None:
    """Free the allocator's cached blocks: FSDP2 has new streams in each generation, and blocks cached for the old ones
    are not used again. Selects `device`, because threads default to GPU 0."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
