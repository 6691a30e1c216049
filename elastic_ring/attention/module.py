"""Multi-head attention as a module for the user's own model, and the factory that sets its attention up.

`RingSelfAttention` is the layer with the weights; `ring.RingAttention` and `SparseRingAttention` are the
callables over a ring that it is handed, one of another mesh after a resize. It holds no group and no plan, so
that it can be built on the meta device, wrapped, saved and healed like any other layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from elastic_ring.attention.choice import Choice, Machine, Sizes, choose
from elastic_ring.attention.exchange import Group, HopLedger
from elastic_ring.attention.families import BigBird, longnet
from elastic_ring.attention.kernel_choice import TILES, KernelChoice, Kind, choose_kernel
from elastic_ring.attention.pattern import Pattern
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.rules import Dense, Rule, Sinks, Window
from elastic_ring.attention.schedule import plan
from elastic_ring.attention.sparse import SparsePattern
from elastic_ring.attention.sparse_ring import SparseRingAttention


class Attention(Protocol):
    """q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D)."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> torch.Tensor: ...


Rotate = Callable[[torch.Tensor], torch.Tensor]


class RingSelfAttention(nn.Module):
    """Self-attention of this rank's tokens over the whole sequence, with one fused projection to q, k and v.

    `num_kv_heads` divides `num_heads`; D is `head_dim`, by default width / num_heads. Raises `ValueError`
    where the numbers do not fit.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"width": width, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name}={size}: must be at least 1")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads}, num_kv_heads={num_kv_heads}: the second must divide the first")
        if head_dim is None and width % num_heads:
            raise ValueError(f"width={width}: not a multiple of num_heads={num_heads}; give head_dim")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = width // num_heads if head_dim is None else head_dim
        options: Any = {"bias": bias, "device": device, "dtype": dtype}
        self.qkv = nn.Linear(width, (num_heads + 2 * num_kv_heads) * self.head_dim, **options)
        self.output = nn.Linear(num_heads * self.head_dim, width, **options)

    def forward(self, x: torch.Tensor, attention: Attention, rotate: Rotate | None = None) -> torch.Tensor:
        """x (B, S_local, width) to the same shape. `rotate` encodes positions into q and k, (B, S_local, heads, D),
        and must know which positions the rank holds (`Layout.positions`).
        """
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        out: torch.Tensor = self.output(attention(q, k, v).flatten(2))
        return out


@dataclass(frozen=True)
class Setup:
    """What `set_up` decided. `kernel` is the name by which the tables of `kernels` or `block_kernels` know it, or
    "sparse-cpu"; `kind` what runs it. `why` says all of it in words, `choice` keeps every layout and exchange that was
    weighed.
    """

    pattern: SparsePattern
    choice: Choice
    kernel: str
    why: str
    kind: Kind
    deterministic: bool = True

    def attention(self, cp_rank: int, group: Group | None, *, ledger: HopLedger | None = None) -> Attention:
        """The callable of one rank, over just this kernel. Its slices are those of `choice.schedule.layout`.

        Called with tensors of another device it raises `ValueError`.
        """
        schedule = self.choice.schedule
        if self.kind == "dense":
            dense = plan(Pattern(True, self.pattern.document_starts), schedule.layout)
            return RingAttention(
                dense, cp_rank, group, backend=self.kernel, deterministic=self.deterministic, ledger=ledger
            )
        return SparseRingAttention(
            schedule, cp_rank, group, ahead=self.choice.ahead, ledger=ledger, deterministic=self.deterministic,
            kernel=self.kernel if self.kind == "blocks" else None,
        )  # fmt: skip


def set_up(
    seq_len: int,
    cp: int,
    sizes: Sizes,
    *,
    pattern: SparsePattern | None = None,
    max_density: float = 1.0,
    machine: Machine = Machine(),  # noqa: B008 (frozen)
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    deterministic: bool = True,
) -> Setup:
    """Pattern, layout, exchange and kernel for sequences of `seq_len` tokens on `cp` ranks, and why.

    A given `pattern` is kept. Without one it is dense while `max_density` is 1: leaving keys out changes what
    a model can learn, so it is never done unasked. Below 1 it is sinks, a window and LongNet's dilated
    segments, the widest whose density fits; on GPUs a window of whole blocks. `machine` prices layouts and exchanges:
    `Machine.read` has what was measured. `dtype` is that of the calls, by default bfloat16 on GPUs and float32 on
    CPUs; `deterministic` leaves out kernels whose gradients do not repeat bit for bit. Kernels are tested here where
    `device` is here. Raises `ValueError` when no pattern or no dense kernel fits.
    """
    device = torch.device(device)
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if pattern is None:
        pattern, reason = _of_density(seq_len, sizes, max_density, whole_blocks=device.type == "cuda")
    else:
        reason = f"pattern as given, density {pattern.density(seq_len):.4f}"
    kernel = choose_kernel(pattern, seq_len, sizes, device, dtype, deterministic)
    try:
        choice = choose(pattern, seq_len, cp, sizes, machine, whole_blocks=kernel.kind == "blocks")
    except ValueError as error:
        if kernel.kind != "blocks":
            raise
        kernel = KernelChoice("tiles", TILES, f"tiles on CPUs, because no kernel of GPUs takes a layout: {error}")
        choice = choose(pattern, seq_len, cp, sizes, machine)
    why = f"{reason}; {kernel.name} kernels: {kernel.why}; {choice.why}"
    return Setup(pattern, choice, kernel.name, why, kernel.kind, deterministic)


def _of_density(
    seq_len: int, sizes: Sizes, max_density: float, *, whole_blocks: bool
) -> tuple[SparsePattern, str]:
    if max_density >= 1:
        return SparsePattern((Dense(),)), "dense: max_density asks for nothing less"
    sharing = sizes.num_heads // sizes.num_kv_heads
    narrowest = 1.0
    for segment in (8192, 4096, 2048, 1024, 512, 256):
        segments = [segment]
        while segments[-1] < seq_len:
            segments.append(segments[-1] * 4)
        rates = [4**i for i in range(len(segments))]
        dilated = longnet(sizes.num_heads, segments, rates, heads_per_offset=sharing, unit_tokens=128)
        near: Rule = BigBird(segment // 256, 1, 0) if whole_blocks else Sinks(128) | Window(segment // 2)
        pattern = SparsePattern(tuple(rule | near for rule in dilated))
        narrowest = pattern.density(seq_len)
        if narrowest <= max_density:
            return pattern, f"LongNet from {segment} tokens with sinks and a window, density {narrowest:.4f}"
    raise ValueError(
        f"max_density={max_density}: the sparsest pattern known for {seq_len} tokens has {narrowest:.4f}; give a"
        " pattern of your own"
    )
