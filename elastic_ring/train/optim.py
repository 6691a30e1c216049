"""The optimizer of a rank's local shards and its learning-rate schedule.

The schedule is a function of the step alone, so nothing of it needs healing; the optimizer sees plain
tensors, never a DTensor, so its step runs without a collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# What the trainer accepts in place of `make_optimizer`: named local shards in, an optimizer over exactly
# these out.
OptimizerFactory = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with warm-up and cosine decay.

    `clip_norm` bounds the norm of the gradient of the mean loss over the global batch (None: no clipping);
    `max_skipped` is how many steps in a row may be skipped for a non-finite gradient. Raises ValueError for
    numbers that cannot be meant.
    """

    peak_lr: float = 3e-4
    min_lr: float = 3e-5
    warmup_steps: int = 0
    total_steps: int = 1000
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    max_skipped: int = 10

    def __post_init__(self) -> None:
        # Each row is (name, is it right, what is allowed); a NaN is never right.
        beta_1, beta_2 = self.betas
        rules = (
            ("peak_lr", 0.0 < self.peak_lr < math.inf, "above 0"),
            ("min_lr", 0.0 <= self.min_lr <= self.peak_lr, f"in [0, peak_lr={self.peak_lr}]"),
            ("total_steps", self.total_steps >= 1, "at least 1"),
            (
                "warmup_steps",
                0 <= self.warmup_steps <= self.total_steps,
                f"in [0, total_steps={self.total_steps}]",
            ),
            ("weight_decay", 0.0 <= self.weight_decay < math.inf, "0 or more"),
            ("betas", 0.0 <= beta_1 < 1.0 and 0.0 <= beta_2 < 1.0, "both in [0, 1)"),
            ("eps", 0.0 < self.eps < math.inf, "above 0"),
            ("clip_norm", self.clip_norm is None or self.clip_norm > 0.0, "above 0, or None for no clipping"),
            ("max_skipped", self.max_skipped >= 0, "0 or more"),
        )
        for name, right, allowed in rules:
            if not right:
                raise ValueError(f"OptimConfig {name}={getattr(self, name)}: must be {allowed}")


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
        raise ValueError(
            f"full_ndims has no entry for {', '.join(missing)}; give the dimensions of every parameter"
        )
    decayed = [tensor for name, tensor in local_shards if full_ndims[name] >= 2]
    others = [tensor for name, tensor in local_shards if full_ndims[name] < 2]
    groups = [
        {"params": tensors, "weight_decay": decay}
        for tensors, decay in ((decayed, config.weight_decay), (others, 0.0))
        if tensors
    ]
    # One pass over memory instead of a dozen; on a CPU its bits would be others than before, for no gain.
    fused = any(tensor.is_cuda for _, tensor in local_shards)
    return torch.optim.AdamW(
        groups, lr=learning_rate(0, config), betas=config.betas, eps=config.eps, foreach=not fused, fused=fused
    )
