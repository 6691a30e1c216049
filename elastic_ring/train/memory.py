"""Memory of a worker: errors that mean a lack of it, the used share of it in a step, and the reliefs that free it.

`control.decisions.memory_ladder` decides which reliefs are in force; all members have the same. No process groups here.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import traceback
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CONTEXT_HAS_NO_ROOM = "out of memory"
CPU_ALLOCATOR_SAYS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
MAX_CHARS = 400
CHUNK_DIVISOR = 8


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device lacks memory: torch's error for that in the chain, or CUDA's when a context does not fit."""
    return any(_lacks_device_memory(link) for link in chain(error))


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether the host lacks memory: a MemoryError in the chain, or the error of torch's CPU allocator."""
    return any(_lacks_host_memory(link) for link in chain(error))


def describe_shortage(error: BaseException) -> str:
    """One line: the failed request, its place, and the host memory of this process."""
    shortage = next((link for link in chain(error) if _lacks_device_memory(link) or _lacks_host_memory(link)), error)
    lines = [line.strip() for line in str(shortage).splitlines() if line.strip()]
    request = next((line for line in lines if CPU_ALLOCATOR_SAYS in line), lines[0] if lines else "no amount given")
    frames = traceback.extract_tb(shortage.__traceback__)
    place = f", in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    held_gib = psutil.Process().memory_info().rss / 2**30
    kind = type(shortage).__name__
    return f"{kind}: {request[:MAX_CHARS]}{place}; the process holds {held_gib:.2f} GiB of host memory"


def drop_frames(error: BaseException) -> None:
    """Free the locals of an exception's frames: the activations of the step that failed."""
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
    # torch's CPU allocator raises a plain RuntimeError: only that very type with the allocator's own words counts.
    return isinstance(error, MemoryError) or (type(error) is RuntimeError and CPU_ALLOCATOR_SAYS in str(error))


class MemoryGauge:
    """The share of memory that a rank used in a step; it is reported in the vote.

    On a GPU: the peak of tensors, and the free pieces between them that no large tensor fits into, of the memory that
    torch holds or could still get. On a CPU under a limit (RLIMIT_DATA): the process's data after each forward pass,
    when all activations are there. The node's agent reports how full the node is.
    """

    def __init__(self) -> None:
        self._share = 0.0

    def begin(self, device: torch.device) -> None:
        self._share = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def look(self, device: torch.device) -> None:
        """Call it after each forward pass."""
        if device.type == "cpu":
            limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
            if limit not in (resource.RLIM_INFINITY, 0):
                self._share = max(self._share, psutil.Process().memory_info().data / limit)

    def share(self, device: torch.device) -> float:
        """The share used in this step so far, from 0 to about 1; 0 where nothing limits the device."""
        if device.type != "cuda":
            return self._share
        stats = torch.cuda.memory_stats(device)
        free, _ = torch.cuda.mem_get_info(device)
        used = stats["allocated_bytes.all.peak"] + stats["inactive_split_bytes.all.current"]
        return float(used / max(1, free + stats["reserved_bytes.all.current"]))


class MemoryRelief:
    """The reliefs of the memory ladder in force. All but `passes` and `chunks` keep the bits."""

    def __init__(self, reliefs: Iterable[str] = ()) -> None:
        self.reliefs = frozenset(reliefs)

    @property
    def read_ahead(self) -> int | None:
        """How many sequences may be read ahead; None: as many as usual."""
        return 1 if "caches" in self.reliefs else None

    def together(self, sequences_per_pass: int) -> int:
        """How many sequences a pass has."""
        return 1 if "passes" in self.reliefs else sequences_per_pass

    def before_step(self, device: torch.device) -> None:
        """Called before each forward pass of a step begins."""
        if "caches" in self.reliefs:
            free_caches(device)

    def change(self, model: nn.Module, units: Iterable[nn.Module]) -> None:
        """Change a module that has just been wrapped. `units`: those that FSDP2 gathers one at a time."""
        if "recompute" in self.reliefs:
            for unit in units:
                recompute(unit)
        if "offload" in self.reliefs:
            for module in model.modules():
                if getattr(module, "checkpoint_activations", False) and hasattr(module, "offload_activations"):
                    module.offload_activations = True  # type: ignore[assignment]

        if "chunks" in self.reliefs and hasattr(model, "loss_chunk_tokens"):
            model.loss_chunk_tokens = max(1, int(model.loss_chunk_tokens) // CHUNK_DIVISOR)  # type: ignore[arg-type,assignment]

    def offloading(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context for the forward pass: with the relief in force, saved tensors wait in host memory."""
        if "offload" not in self.reliefs or device.type == "cpu":
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=True)


def keep_activations(unit: nn.Module) -> None:
    """Turn recomputation off in a layer of the built-in decoder, unless it moves activations to host memory."""
    if hasattr(unit, "checkpoint_activations") and not getattr(unit, "offload_activations", False):
        unit.checkpoint_activations = False  # type: ignore[assignment]


def recompute(unit: nn.Module) -> None:
    """Make a module keep its input only and compute the rest again in backward, by its own switch if it has one. A
    module that does so already, or whose `forward` was replaced, stays as it is.
    """
    if hasattr(unit, "checkpoint_activations"):
        unit.checkpoint_activations = True  # type: ignore[assignment]
        return
    if getattr(unit, "gradient_checkpointing", False) or "forward" in vars(unit):
        return
    forward = unit.forward  # inside FSDP2's hooks on the module, which see one call

    @wraps(forward)
    def call(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        # The random numbers come again, so dropout keeps its bits.
        return checkpoint(partial(forward, **options), *args, use_reentrant=False, preserve_rng_state=True)

    unit.forward = call


def free_caches(device: torch.device) -> None:
    """Collect garbage and give the allocators' free blocks back."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
