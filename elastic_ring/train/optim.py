"""The optimizer of a rank's local shards and its learning-rate schedule.

The schedule is a function of the step alone, so nothing of it needs healing; the optimizer sees plain
tensors, never a DTensor, so its step runs without a collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from elastic_ring.config import CpuOffload, OptimConfig
from elastic_ring.experts.exchange import BIAS
from elastic_ring.train.muon import Muon

__all__ = ["OptimConfig", "OptimizerFactory", "Schedule", "learning_rate", "make_optimizer"]

# Replaces `make_optimizer`: takes named local shards, without empty ones, and returns an optimizer over all or some.
OptimizerFactory = Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer]
Schedule = Callable[[int], float]
"""The learning rate of a step, counted from 0: a pure function, the same in every process."""

NUM_CHECKED_STEPS = 10_000
BALANCE_SCALE = 3.0
"""A step moves the bias of an expert with too many or too few tokens by this times the learning rate: 0.001 at the
usual peak of 3e-4 (DeepSeek-V3, arXiv:2412.19437), more where routers learn faster, and less at the end."""
SIGN_EPS = 1e-20
NEED_WHOLE = frozenset({"Muon", "Shampoo", "DistributedShampoo", "SOAP", "Dion", "GaLoreAdamW", "KFACOptimizer"})
NEED_CLOSURE = frozenset({"LBFGS"})


def learning_rate(step: int, config: OptimConfig, schedule: Schedule | None = None) -> float:
    """The rate of a step (counted from 0): linear up to peak_lr over warmup_steps, then as `config.schedule` says.

    The first step has peak_lr / warmup_steps, the last of total_steps has min_lr (with "constant" peak_lr), and so has
    every later one. After a new plan of the schedule the rate rises from the last rate, over the same share of the
    steps. A `schedule` function replaces all that; raises ValueError if it returns no rate.
    """
    if schedule is not None:
        return _checked(schedule, step)
    begin, last = next(plan for plan in reversed(config.plans) if plan[0] <= step)
    before = learning_rate(begin - 1, config) if begin else 0.0
    step, last = step - begin, last - begin
    first = config.warmup_steps if not begin else config.warmup_steps * last // config.plans[0][1]
    if step < first:
        return before + (config.peak_lr - before) * (step + 1) / first
    match config.schedule:
        case "constant":
            return config.peak_lr
        case "wsd":
            first = max(first, last - (config.decay_steps or max(1, last // 5)))
    progress = min(1.0, max(0.0, (step - first + 1) / max(1, last - first)))
    kept = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
    return config.min_lr + (config.peak_lr - config.min_lr) * kept


def _checked(schedule: Schedule, step: int) -> float:
    rate: object = schedule(step)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
        raise ValueError(f"lr_schedule gives {rate!r} for step {step}: must be a finite number of 0 or more")
    return float(rate)


def check_schedule(schedule: Schedule | None, config: OptimConfig, num_steps: int) -> None:
    """Raises ValueError for a function that returns no rate for some step, or beside a schedule by name."""
    if schedule is None:
        return
    if config.schedule != "cosine":
        raise ValueError(
            f"lr_schedule and OptimConfig schedule={config.schedule!r} are both given: the function decides every "
            "rate, so leave the name out"
        )
    for step in range(0, num_steps, max(1, num_steps // NUM_CHECKED_STEPS)):
        _checked(schedule, step)


def is_balance(name: str) -> bool:
    """Whether a parameter is a bias that balances experts (`experts.exchange`)."""
    return name.rpartition(".")[2] == BIAS


def make_own_optimizer(factory: OptimizerFactory, local_shards: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """The user's optimizer over the shards that have rows: some optimizers divide by a tensor's size.

    Raises ValueError as `check_optimizer`.
    """
    named = [(name, tensor) for name, tensor in local_shards if tensor.numel()] or local_shards
    optimizer = factory(named)
    check_optimizer(optimizer, named)
    return optimizer


def check_cpu_offload(cpu_offload: CpuOffload, factory: OptimizerFactory | None, config: OptimConfig) -> None:
    """Raises ValueError for Muon or a user's optimizer with offloaded state, which is updated a few parameters at a
    time: it might count its steps, or look at all parameters together."""
    if cpu_offload != "none" and (factory is not None or config.optimizer != "adamw"):
        name = "one of your own" if factory is not None else config.optimizer
        raise ValueError(
            f"cpu_offload={cpu_offload!r}: serves the built-in AdamW, and optimizer= gives {name}: leave one of them "
            "out"
        )


def check_optimizer(optimizer: object, local_shards: Sequence[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a user's optimizer that cannot work on slices, or has other parameters than these.

    It gets this rank's rows of each parameter and steps without a collective. So its update of a row must not need the
    other rows, or the result depends on how many ranks share the parameter.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer returned a {type(optimizer).__name__}: it must return a torch.optim.Optimizer")
    if balancing := [name for name, _ in local_shards if is_balance(name)]:
        raise ValueError(
            f"optimizer= gives one of your own, and {balancing[0]} moves by a rule of the built-in AdamW: leave it out"
        )
    named = {kind.__name__ for kind in type(optimizer).__mro__}
    for names, why in (
        (NEED_WHOLE, "computes with whole matrices, and a rank holds some rows of each"),
        (NEED_CLOSURE, "computes the gradient several times in a step"),
    ):
        for name in sorted(named & names):
            raise ValueError(
                f"optimizer {name} {why}: take one that works element by element or row by row, such as "
                "AdamW, Adam, SGD, RMSprop, Adagrad or Lion, or the built-in Muon, optimizer='muon'"
            )
    own = {id(tensor): name for name, tensor in local_shards}
    held = [id(param) for group in optimizer.param_groups for param in group["params"]]
    if any(key not in own for key in held) or len(set(held)) != len(held):
        raise ValueError(
            "the optimizer has other parameters than the shards that it was given: build it over exactly "
            "these tensors, each once"
        )


def make_optimizer(
    local_shards: list[tuple[str, Tensor]],
    config: OptimConfig,
    full_ndims: Mapping[str, int],
    device: torch.device | None = None,
    matrices: Collection[str] = (),
) -> torch.optim.AdamW:
    """AdamW over a rank's shards, which may be empty: plain tensors in groups, each in the given order.

    Biases that balance experts move against their gradient's sign. Weight decay applies to parameters
    of two or more dimensions; `full_ndims` has those of each whole parameter, since a shard may be flat. Steps are
    computed on `device`, by default the shards'. `matrices` are Muon's. Raises ValueError for a name that
    `full_ndims` lacks.
    """
    missing = [name for name, _ in local_shards if name not in full_ndims]
    if missing:
        raise ValueError(f"full_ndims has no entry for {', '.join(missing)}; give the dimensions of every parameter")
    decayed = [tensor for name, tensor in local_shards if full_ndims[name] >= 2 and name not in matrices]
    balancing = [tensor for name, tensor in local_shards if is_balance(name)]
    undecayed = [tensor for name, tensor in local_shards if full_ndims[name] < 2 and not is_balance(name)]
    whole = [tensor for name, tensor in local_shards if name in matrices]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
        # Without memory Adam's step is the gradient's sign: scaling and clipping change nothing.
        {"params": balancing, "weight_decay": 0.0, "betas": (0.0, 0.0), "eps": SIGN_EPS, "lr_scale": BALANCE_SCALE},
        {"params": whole, "weight_decay": config.weight_decay, "muon": True},
    ]
    groups = [group for group in groups if group["params"]]
    # Fused: one pass over memory instead of a dozen. On a CPU it would change the bits for no gain.
    fused = any((device or tensor.device).type == "cuda" for _, tensor in local_shards)
    return (Muon if matrices else torch.optim.AdamW)(
        groups, lr=learning_rate(0, config), betas=config.betas, eps=config.eps, foreach=not fused, fused=fused
    )
