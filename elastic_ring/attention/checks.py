"""Argument checks that run before the first message: a rank that raises between messages blocks the others.

Local checks only; no communication in this file. All of them raise `ValueError`.
"""

from __future__ import annotations

import math
from numbers import Integral, Real

import numpy as np
import torch

from elastic_ring.attention.comm.exchange import Group
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.plan.schedule import Schedule


def check_group(schedule: Schedule, cp_rank: int, group: Group | None) -> None:
    if not 0 <= cp_rank < schedule.cp:
        raise ValueError(f"cp_rank={cp_rank}: the schedule has ranks 0 to {schedule.cp - 1}")
    if group is None:
        if schedule.cp > 1:
            raise ValueError(f"group=None: a schedule for cp={schedule.cp} needs a group of as many ranks")
    elif group.size() != schedule.cp:
        raise ValueError(f"the group has {group.size()} ranks, the schedule has cp={schedule.cp}; plan anew")
    elif group.rank() != cp_rank:
        raise ValueError(f"cp_rank={cp_rank}, but this process is rank {group.rank()} of the group; use that")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}: give a tensor (B, S_local, heads, D)")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{shapes}: each must be (B, S_local, heads, D)")
    if k.shape != v.shape:
        raise ValueError(f"{shapes}: k and v must have the same shape")
    if (q.size(0), q.size(1), q.size(3)) != (k.size(0), k.size(1), k.size(3)):
        raise ValueError(f"{shapes}: q and k must agree in B, S_local and D")
    if min(q.size(0), q.size(2), q.size(3), k.size(2)) < 1:
        raise ValueError(f"{shapes}: B, heads and D must be at least 1")
    if q.size(2) % k.size(2) != 0:
        raise ValueError(f"{shapes}: {q.size(2)} query heads do not divide among {k.size(2)} K/V heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes q {q.dtype}, k {k.dtype}, v {v.dtype}: cast them to one type")
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {q.dtype}: use float64, float32, bfloat16 or float16")
    if not q.device == k.device == v.device:
        raise ValueError(f"devices q {q.device}, k {k.device}, v {v.device}: move them to one device")


def check_options(causal: object, seq_len: object, scale: object) -> None:
    """Check the options of a call; a wrong one gives a wrong result or an error inside a kernel."""
    if torch.compiler.is_compiling():  # numbers may be symbolic
        return
    if not isinstance(causal, bool | np.bool_):
        raise ValueError(f"causal={causal!r}: must be True or False")
    if seq_len is not None and (isinstance(seq_len, bool) or not isinstance(seq_len, Integral)):
        raise ValueError(f"seq_len={seq_len!r}: a whole number of tokens, or leave it out where all ranks hold as many")
    if scale is not None and (isinstance(scale, bool) or not (isinstance(scale, Real) and math.isfinite(scale))):
        raise ValueError(f"scale={scale!r}: must be a finite number, float(scale) of a tensor; left out: 1 / sqrt(D)")


def check_local_length(q: torch.Tensor, layout: Layout, cp_rank: int) -> None:
    if q.size(1) != layout.num_tokens(cp_rank):
        raise ValueError(
            f"S_local={q.size(1)}: layout {layout.name} of {layout.seq_len} tokens over cp={layout.cp} gives"
            f" cp_rank {cp_rank} {layout.num_tokens(cp_rank)} tokens; slice with layout.scatter, or pass the"
            " seq_len of the whole sequence"
        )
