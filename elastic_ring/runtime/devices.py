"""Which GPU a worker computes on: one that no other process of the node holds, that computes, and whose memory is free.

Every worker sees all GPUs of its node and locks the one that it takes (`runtime.chips`). Here is what is asked of CUDA
itself; what follows from the answers is decided there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_ring.attention.device_blocks import forget_plans
from elastic_ring.errors import PeerFailed, RunFailed
from elastic_ring.runtime import chips
from elastic_ring.runtime.chips import Chip, Claim, bad_ones, shared_folder, strike, strike_if_free, wait_for_memory
from elastic_ring.runtime.nccl import probe
from elastic_ring.train.kernels import KernelMismatch
from elastic_ring.train.memory import is_out_of_memory
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.warm import attention_shapes, warm_up_device

log = logging.getLogger(__name__)

KERNEL_CACHE = Path("/dev/shm/elastic_ring-kernels")
"""Where the node's processes leave word of kernels that passed their test."""
STATE_BYTES = 2 * (4 + 8) + 4
"""What a newcomer allocates for each parameter of its shard: values and Adam's two, once more as they arrive, and the
buffer for the gradient."""
MUCH_BYTES = 1 << 30


class DeviceClaim:
    """One worker's claim. Taken when it first gets a place in the mesh, given back when it stands by."""

    def __init__(self, kind: str, run: str = "", folder: Path = chips.FOLDER) -> None:
        self._kind = kind
        self._claim = Claim(run, folder)
        self.device = torch.device("cpu")
        self.avoided: frozenset[str] = frozenset()  # GPUs that failed in this process before it took one
        self.broken = False  # the GPU that it took has failed: this process is to be replaced

    @property
    def chip(self) -> str:
        """The name of the GPU held; empty for none."""
        return self._claim.chip.name if self._claim.chip is not None else ""

    def take(self, place: int, num_parameters: int, timeout_s: float, check: Callable[[], None]) -> torch.device:
        """The device held, or a free one, for global rank `place` and a shard of so many parameters.

        Raises PeerFailed when none gets free in time or the one that did fails, and whatever `check` raises between
        two looks.
        """
        if self._kind == "cpu":
            return self.device
        if self.broken:
            raise PeerFailed(f"GPU {self.device.index} ({self.chip}) has failed in this process before")
        if self._claim.chip is not None:
            self._claim.seize((), place, timeout_s, check)  # it may sit elsewhere now
            return self.device
        seen = [chip for chip in visible_chips() if chip.name not in self.avoided]
        chip = self._claim.seize(seen, place, timeout_s, check)
        self.device = torch.device("cuda", chip.index)
        if not probe(self.device):
            self.failed("it failed its probe when it was taken")
            raise PeerFailed(f"GPU {chip.index} ({chip.name}) failed its probe when it was taken")
        need_bytes = STATE_BYTES * num_parameters
        free = wait_for_memory(
            lambda: _free_bytes(chip.index), need_bytes, lambda: self._claim.predecessor_is_there, check, timeout_s
        )
        if free < need_bytes:
            gib = (free / 2**30, need_bytes / 2**30)
            log.warning("GPU %d has %.1f GiB free, and a shard may need %.1f: others use it", chip.index, *gib)
        return self.device

    def healthy(self) -> bool:
        """Whether the GPU held still computes; one that does not gets a strike, and this process is done for."""
        if not self.broken and not probe(self.device):
            self.failed("it failed its probe after an abort")
        return not self.broken

    def erred(self, error: BaseException) -> None:
        """It erred in a step or a build. A full memory or a kernel that does not run here says nothing of the chip."""
        if self._kind != "cpu" and not isinstance(error, KernelMismatch) and not is_out_of_memory(error):
            said = str(error).splitlines()
            self.failed(f"{type(error).__name__} in a step or a build: {said[0] if said else ''}")

    def failed(self, why: str) -> None:
        """The GPU held does not compute here any more."""
        self.broken = True
        if self._claim.chip is not None:
            strike(self._claim.folder, self._claim.chip, why)

    def give_back(self) -> None:
        """Once nothing of this process is in its memory any more but the context."""
        if self._claim.chip is None:
            return
        try:
            forget_plans()
            let_go_of_cache(self.device)
            left = torch.cuda.memory_reserved(self.device)
            if left > MUCH_BYTES:
                log.warning("%s is given back with %.1f GiB of this process in it", self.device, left / 2**30)
        except RuntimeError as error:
            self.failed(f"it failed when its memory was given back: {error}")
        finally:
            self._claim.give_back()


def visible_chips() -> tuple[Chip, ...]:
    """The GPUs that this process sees; this makes no context."""
    found = range(torch.cuda.device_count())
    return tuple(Chip(index, name_of(torch.cuda.get_device_properties(index), index)) for index in found)


def name_of(properties: Any, index: int) -> str:
    """What names a GPU (or a part of one) on its host: its UUID, else where it sits on the PCI bus."""
    uuid = str(getattr(properties, "uuid", ""))
    if uuid.strip("0-"):
        return f"GPU-{uuid}"
    if hasattr(properties, "pci_bus_id"):
        place = [getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")]
        return "PCI-" + "-".join(f"{number:02x}" for number in place)
    log.warning("GPU %d tells neither its UUID nor its place: processes that see other GPUs may take it too", index)
    return f"index-{index}"


def _free_bytes(index: int) -> int:
    return int(torch.cuda.mem_get_info(index)[0])


@dataclass(frozen=True)
class Warmed:
    """`kernels`: what serves attention, as `train.warm.warm_up_device` tells it. `failed`: names of GPUs."""

    kernels: dict[str, str]
    failed: frozenset[str] = frozenset()


NO_PROBE = "it failed its probe"
Shapes = Sequence[tuple[int, int, int]]
Warm = Callable[[TrainingTask, torch.device, Shapes, int, Path | None, dict[str, str]], str]


def warm_devices(
    task: TrainingTask, seen: Sequence[Chip], cp: int, folder: Path = chips.FOLDER, warm: Warm = warm_up_device,
    computes: Callable[[torch.device], bool] = probe,
) -> Warmed:
    """A context and the first kernels on every GPU, for rings of `cp` ranks: a standby does not know which it takes.

    Where another process computes no length is rehearsed (`cp` 0): that memory is not ours. A bad GPU is left alone;
    one that fails now gets a strike, and the others are warmed. One whose memory is full is taken cold, if ever. Raises
    what `warm` raises on a GPU that is well, and RunFailed when a second one fails: then it is this process, or the
    software.
    """
    shapes, kernels, failures = attention_shapes(task), dict[str, str](), dict[Chip, str]()
    cache, bad = shared_folder(KERNEL_CACHE), bad_ones(folder, [chip.name for chip in seen])
    for chip in seen:
        if chip.name in bad:
            log.error("left alone: %s", chips.describe(folder, [chip]))
            continue
        begun, device = time.monotonic(), torch.device("cuda", chip.index)
        try:
            # First something small: the verdict on a kernel is this process's, whichever GPU it was tried on.
            alone = chips.is_free(folder, chip)
            failure = warm(task, device, shapes, cp if alone else 0, cache, kernels) if computes(device) else NO_PROBE
        except RuntimeError as error:
            if is_out_of_memory(error):
                log.warning("GPU %d is not warmed, its memory is full: %s", chip.index, error)
                continue
            if computes(device):
                raise
            failure = f"{type(error).__name__}: {error}"
        if not failure:
            log.info("GPU %d is warm after %.2f s", chip.index, time.monotonic() - begun)
            continue
        failures[chip] = failure
        if len(failures) > 1:
            told = "; ".join(f"GPU {each.index} ({each.name}): {why}" for each, why in failures.items())
            raise RunFailed(f"more than one GPU fails in this process: {told}")
    for chip, failure in failures.items():  # now it is known that not everything fails here
        struck = strike_if_free(folder, chip, failure)
        told = "" if struck else ", and held by another process"
        log.error("not warmed%s: GPU %d (%s): %s", told, chip.index, chip.name, failure)
    return Warmed(kernels, frozenset(chip.name for chip in failures))


def be_deterministic(task: TrainingTask) -> None:
    """Repeatable forms of torch's own operators, where the task asks for them; one that has none warns."""
    if task.step.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Else that switch also fills every new tensor, which costs a pass over memory each time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def let_go_of_cache(device: torch.device) -> None:
    """Give the allocator's unused blocks back: FSDP2's streams are new in each generation, and what was cached for
    the old ones would not be used again. From any thread: one that has chosen no GPU would make a context on the
    first."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
