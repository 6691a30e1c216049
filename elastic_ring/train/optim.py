"""The optimizer of a rank's local shards and its learning-rate schedule.

The schedule is a function of the step alone, so nothing of it needs healing; the optimizer sees plain
tensors, never a DTensor, so its step runs without a collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from elastic_ring.config import OptimConfig

__all__ = ["OptimConfig", "OptimizerFactory", "learning_rate", "make_optimizer"]

# Replaces `make_optimizer`: takes named local shards and returns an optimizer over exactly these.
OptimizerFactory = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]


def learning_rate(step: int, config: OptimConfig) -> float:
    """The rate of a step (counted from 0): linear up to peak_lr over warmup_steps, then half a cosine to
    min_lr.

    The first step has peak_lr / warmup_steps, the last of total_steps has min_lr, and so has every later one.
    """
    if step < config.warmup_steps:
        return config.peak_lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps + 1) / max(1, config.total_steps - config.warmup_steps))
    return config.min_lr + (config.peak_lr - config.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_optimizer(
    local_shards: list[tuple[str, Tensor]], config: OptimConfig, full_ndims: Mapping[str, int]
) -> torch.optim.AdamW:
    """AdamW over a rank's shards, which may be empty: plain tensors, two groups, each in the given order.

    Weight decay applies to parameters of two or more dimensions; `full_ndims` has those of each whole
    parameter, since a shard may be flat. Raises ValueError for a name that it lacks.
    """
    missing = [name for name, _ in local_shards if name not in full_ndims]
    if missing:
        raise ValueError(f"full_ndims has no entry for {', '.join(missing)}; give the dimensions of every parameter")
    decayed = [tensor for name, tensor in local_shards if full_ndims[name] >= 2]
    others = [tensor for name, tensor in local_shards if full_ndims[name] < 2]
    groups = [
        {"params": tensors, "weight_decay": decay}
        for tensors, decay in ((decayed, config.weight_decay), (others, 0.0))
        if tensors
    ]
    # Fused: one pass over memory instead of a dozen. On a CPU it would change the bits for no gain.
    fused = any(tensor.is_cuda for _, tensor in local_shards)
    return torch.optim.AdamW(
        groups, lr=learning_rate(0, config), betas=config.betas, eps=config.eps, foreach=not fused, fused=fused
    )
