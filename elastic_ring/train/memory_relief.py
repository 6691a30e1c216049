"""The reliefs of the memory ladder on one worker: what each of them does to free memory. All but the last two,
`passes` and `chunks`, keep the bits.

`control.decisions.memory_ladder` decides which are in force; all members have the same ones. No process groups in here.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CHUNK_DIVISOR = 8


class MemoryRelief:
    """The reliefs in force."""

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
    """Undo the choice to recompute of a layer of the built-in decoder, unless it moves activations to host memory."""
    if hasattr(unit, "checkpoint_activations") and not getattr(unit, "offload_activations", False):
        unit.checkpoint_activations = False  # type: ignore[assignment]


def recompute(unit: nn.Module) -> None:
    """Make a module keep its input only and compute the rest again in backward. Uses the module's own switch if it has
    one. A module that does so already, or whose `forward` its maker has replaced, stays as it is.

    Wraps `forward`, within which FSDP2's hooks on the module see one call.
    """
    if hasattr(unit, "checkpoint_activations"):
        unit.checkpoint_activations = True  # type: ignore[assignment]
    elif not getattr(unit, "gradient_checkpointing", False) and "forward" not in vars(unit):
        unit.forward = _recomputing(unit.forward)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def call(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        # The random numbers come again, so dropout keeps its bits.
        return checkpoint(partial(forward, **options), *args, use_reentrant=False, preserve_rng_state=True)

    return call


def free_caches(device: torch.device) -> None:
    """Collect garbage and give the allocators' free blocks back."""
    gc.collect()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
