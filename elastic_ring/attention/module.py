"""Multi-head ring attention as an nn.Module, and `set_up`, which chooses its pattern, layout and kernel.

`RingSelfAttention` has the weights and receives the attention callable (`ring.RingAttention` or
`SparseRingAttention`) in each call, so a resize only changes the callable. The module must hold no process group
and no plan: it can be built on the meta device, wrapped, saved and restored like any other layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic_ring.attention.choice import Choice, CostModel, Sizes, choose
from elastic_ring.attention.exchange import Group, HopLedger
from elastic_ring.attention.families import BigBird, longnet
from elastic_ring.attention.kernel_choice import TILES, Kind, SelectedKernel, choose_kernel
from elastic_ring.attention.layers import AttentionFn
from elastic_ring.attention.pattern import Pattern
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.rules import Dense, Rule, Sinks, Window
from elastic_ring.attention.schedule import plan
from elastic_ring.attention.sparse import SparsePattern
from elastic_ring.attention.sparse_ring import SparseRingAttention

Rotate = Callable[[torch.Tensor], torch.Tensor]


class RingSelfAttention(nn.Module):
    """Self-attention of this rank's tokens over the whole sequence, with one fused projection to q, k and v.

    `num_kv_heads` must divide `num_heads` (default: equal). `head_dim` D defaults to width / num_heads. Raises
    `ValueError` if the sizes do not fit.
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

    def forward(self, x: torch.Tensor, attention: AttentionFn, rotate: Rotate | None = None) -> torch.Tensor:
        """x (B, S_local, width) to the same shape. `rotate` encodes positions into q and k, (B, S_local, heads, D),
        using the global positions of this rank's tokens (`Layout.positions`).
        """
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        out: torch.Tensor = self.output(attention(q, k, v).flatten(2))
        return out


@dataclass(frozen=True)
class Setup:
    """The result of `set_up`. `kernel` is a name in the table of `kernels` or `block_kernels`, or "sparse-cpu"; `kind`
    is the ring that runs it. `why` gives the reasons in words; `choice` lists every layout and exchange considered.
    """

    pattern: SparsePattern
    choice: Choice
    kernel: str
    why: str
    kind: Kind
    deterministic: bool = True

    def attention(self, cp_rank: int, group: Group | None, *, ledger: HopLedger | None = None) -> AttentionFn:
        """The attention callable of one rank, with this kernel. Slice tensors with `choice.schedule.layout`.

        The callable raises `ValueError` for tensors on another type of device.
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
    cost_model: CostModel = CostModel(),  # noqa: B008 (frozen)
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    deterministic: bool = True,
) -> Setup:
    """Choose pattern, layout, exchange and kernel for sequences of `seq_len` tokens on `cp` ranks, with reasons.

    A given `pattern` is used as it is. Without one attention is dense if `max_density` is 1: sparsity changes what a
    model can learn, so it is opt-in. Below 1 the pattern is sinks, a window and LongNet's dilated segments (Ding et
    al. 2023, arXiv:2307.02486), the widest whose density is at most `max_density`; on GPUs the window has whole
    blocks. `cost_model` prices layouts and exchanges; `CostModel.read` loads a measured one. `dtype` is the type of
    q, k and v, by default bfloat16 on GPUs and float32 on CPUs. `deterministic` excludes kernels whose gradients are
    not bitwise repeatable. Kernels are self-tested if `device` is present. Raises `ValueError` if no pattern or no
    dense kernel fits.
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
        choice = choose(pattern, seq_len, cp, sizes, cost_model, whole_blocks=kernel.kind == "blocks")
    except ValueError as error:
        if kernel.kind != "blocks":
            raise
        kernel = SelectedKernel("tiles", TILES, f"tiles on CPUs, because no kernel of GPUs takes a layout: {error}")
        choice = choose(pattern, seq_len, cp, sizes, cost_model)
    why = f"{reason}; {kernel.name} kernels: {kernel.why}; {choice.why}"
    return Setup(pattern, choice, kernel.name, why, kernel.kind, deterministic)


def _of_density(seq_len: int, sizes: Sizes, max_density: float, *, whole_blocks: bool) -> tuple[SparsePattern, str]:
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
