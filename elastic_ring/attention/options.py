"""Options of a ring, and the checks before its first message: a rank that raises between messages blocks its peers.

Local checks only; no communication in this file. All of them raise `ValueError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastic_ring.attention.comm.exchange import HopBuffers, Wire
from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.comm.messages import Group
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.plan.schedule import Direction, Schedule
from elastic_ring.attention.plan.traffic import Hosts

STAGE_LIMIT_BYTES = 1 << 29
"""Upper bound, per stage, of the K and V bytes that a rank fetches, and of the bytes that it serves. Every further
stage costs one more round of kernels and one more merge, but overlaps with the exchange of the next stage."""

Observer = Callable[[Direction, int, int], None]
"""Called as observer(direction, call_index, hop) just before a hop's kernels run."""


@dataclass(frozen=True, eq=False)
class RingOptions:
    """How rings compute and send. Rings with the same object share its ledger and buffers, and run one after another.
    For all schedules:

    - `deterministic` selects bitwise repeatable kernels, which are slower on a GPU.
    - `cache_dir` stores that a kernel passed its self-test, for later processes.
    - `ledger` counts bytes and waits; `observer` is called for every hop.
    - `abandoned` holds the buffers that the group may still write to after a call that raised.
    - `coalesced` posts the messages of a stage as one operation (None: on a GPU).
    - `hosts`: the host of each rank. Keys that several ranks of a host read cross to it once (`plan.traffic`), with
      the same bits. Equal on all ranks; None: not known.
    - `softcap` caps the scores (Gemma 2): s becomes softcap * tanh(s / softcap); 0 for none.
    - `kv_wire` "fp8" sends keys and values in 8 bits (`comm.packing`); equal on all ranks.
    - `sequence_seeds`: a word of 64 bits for each sequence of the pass, for a model's dropout; attention reads none.

    For dense schedules:

    - `backend`: a `Kernel`, its name, or None for the first that passes its self-test.
    - `hops_per_stage`: how many hops share one round of kernels (None: 1 on a CPU; on a GPU as many as fit into
      `rectangles.GATHER_LIMIT_BYTES`), equal on all ranks.

    For sparse schedules, which run over tables of blocks of 128 tokens on a GPU or with a `kernel` over tables or its
    name, and else over tiles of any shape. Blocks that layout, documents or rules cut are padded (`plan.padded_blocks`)
    and a kernel that covers masks runs them:

    - `ahead` hops are posted before their kernels run, in tiles: 1 overlaps hop by hop, cp - 1 posts all at once.
    - `partials` is the type in which dK and dV are sent (None: the kernel's).
    - `stage_bytes` bounds the bytes fetched and the bytes served per stage. Hops share a stage while both fit on every
      rank; a single hop may exceed the bound.
    - `keep_keys` keeps fetched keys for backward, which then does not fetch them again. None: if they are one stage and
      at most a quarter of any rank's own keys. `stage_bytes` and `keep_keys` must be the same on all ranks.
    - `check` is called after content-chosen blocks were read; it must raise if the group has been aborted, which a GPU
      does not report otherwise.
    """

    backend: Kernel | str | None = None
    kernel: Kernel | str | None = None
    deterministic: bool = True
    hops_per_stage: int | None = None
    ahead: int = 1
    partials: torch.dtype | None = None
    stage_bytes: int = STAGE_LIMIT_BYTES
    keep_keys: bool | None = None
    cache_dir: Path | None = None
    coalesced: bool | None = None
    softcap: float = 0.0
    kv_wire: Wire = "native"
    hosts: Hosts | None = None
    sequence_seeds: tuple[int, ...] = ()
    observer: Observer | None = None
    check: Callable[[], None] | None = None
    ledger: HopLedger = field(default_factory=HopLedger)
    buffers: HopBuffers = field(default_factory=HopBuffers)
    abandoned: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.hops_per_stage is not None and self.hops_per_stage < 1:
            raise ValueError(f"hops_per_stage={self.hops_per_stage}: a stage is at least one hop; leave it out")
        if self.ahead < 1:
            raise ValueError(f"ahead={self.ahead}: at least the next hop is posted; use 1")
        if self.stage_bytes < 1:
            raise ValueError(f"stage_bytes={self.stage_bytes}: a stage is at least one hop; leave it out")

    @property
    def plan_key(self) -> tuple[Any, ...]:
        """The options that plans and kernels depend on."""
        return self.backend, self.kernel, self.deterministic, self.softcap, self.kv_wire, self.hosts


def check_group(schedule: Schedule, cp_rank: int, group: Group | None, hosts: Hosts | None) -> None:
    if not 0 <= cp_rank < schedule.cp:
        raise ValueError(f"cp_rank={cp_rank}: the schedule has ranks 0 to {schedule.cp - 1}")
    if group is None:
        if schedule.cp > 1:
            raise ValueError(f"group=None: a schedule for cp={schedule.cp} needs a group of as many ranks")
    elif group.size() != schedule.cp:
        raise ValueError(f"the group has {group.size()} ranks, the schedule has cp={schedule.cp}; plan anew")
    elif group.rank() != cp_rank:
        raise ValueError(f"cp_rank={cp_rank}, but this process is rank {group.rank()} of the group; use that")
    if hosts is not None and len(hosts) != schedule.cp:
        raise ValueError(f"hosts={hosts}: one for each of the {schedule.cp} ranks, or leave it out")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, latent: bool = False) -> None:
    """Raise `ValueError` for tensors that do not fit each other. With `latent`, k and v are the halves of latents."""
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}: give a tensor (B, S_local, heads, D)")
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{_shapes(q, k, v)}: each must be (B, S_local, heads, D)")
    if k.shape != v.shape:
        raise ValueError(f"{_shapes(q, k, v)}: k and v must have the same shape")
    if q.shape[:2] != k.shape[:2] or not (latent or q.size(3) == k.size(3)):
        raise ValueError(f"{_shapes(q, k, v)}: q and k must agree in B, S_local and D")
    if min(q.size(0), q.size(2), q.size(3), k.size(2)) < 1:
        raise ValueError(f"{_shapes(q, k, v)}: B, heads and D must be at least 1")
    if q.size(2) % k.size(2) != 0:
        raise ValueError(f"{_shapes(q, k, v)}: {q.size(2)} query heads do not divide among {k.size(2)} K/V heads")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes q {q.dtype}, k {k.dtype}, v {v.dtype}: cast them to one type")
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype {q.dtype}: use float64, float32, bfloat16 or float16")
    if not q.device == k.device == v.device:
        raise ValueError(f"devices q {q.device}, k {k.device}, v {v.device}: move them to one device")


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


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
