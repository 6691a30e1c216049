"""The description of an attention kernel: its covers, devices and functions. No selection and no tests in this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Literal

import torch

from elastic_ring.attention.kernels.block_tables import BlockTables


@dataclass(frozen=True, eq=False)
class Documents:
    """The lower triangles of documents that lie end to end; a call's rows and keys are the same tokens.

    Document i is tokens cuts[i] to cuts[i + 1]; `cuts` int32, on the device, from 0 to the number of rows. `longest`:
    tokens of the longest."""

    cuts: torch.Tensor
    longest: int


Cover = Literal["full", "causal"] | Documents | torch.Tensor | BlockTables
"""Which pairs of a call's rows and keys are seen: all, the lower triangle, each document's triangle, a mask (rows,
keys), or tables of blocks."""

CoverKind = Literal["full", "causal", "documents", "mask", "tables", "masked_tables"]
DENSE: tuple[CoverKind, ...] = ("full", "causal")

Pair = tuple[torch.Tensor, torch.Tensor]
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Kernel:
    """A kernel and its capabilities.

    `forward(q, k, v, *, causal, scale) -> (out, lse)`: q, out (B, Sq, H, D); k, v (B, Sk, Hkv, D); lse
    (B, Sq, H), natural log, fp32 or fp64. `backward(dout, q, k, v, out, lse, *, causal, scale) ->
    (dq, dk, dv)` takes the *merged* out and lse, so that the gradients of all calls add up to the exact total.
    Causal tiles are square. A query that sees none of these keys gets out 0 and lse -inf; a query that sees no key in
    any call has lse +inf in backward. A kernel that covers a mask also takes `mask` (Sq, Sk); a kernel that covers
    documents takes `documents`, of one sequence (B = 1), with `causal`; a kernel over tables takes `tables` in place
    of `causal`. `attend` and `gradients` make the call for any cover.

    - `covers`: the kinds of calls that it serves; "masked_tables" are tables with partial blocks.
    - `max_head_dim`: None means no limit. `head_dims`: the only supported dimensions, if not None.
    - `deterministic_backward`: a bitwise repeatable form, for a kernel whose `backward` is not.
    - `min_capability`: the lowest CUDA compute capability.
    - `keeps_type`: results have the inputs' type, already rounded; otherwise the accumulation type.
    - `writes_gradients`: `backward` also takes output tensors `dk` and `dv` of the inputs' type, of any strides.
    - `by_length`: compiled once per number of queries and of keys.
    - `tile_tokens`: tile sizes in tokens; lengths up to and above a tile size are compiled separately. Query heads that
      share a K/V head may count as tokens.
    - `package`: the package required besides torch.
    - `only_by_name`: used only where its name is given.
    - `capped_covers`: the covers for which its functions take `softcap` (`capped`); `softcap`: the one that they have.
    """

    name: str
    covers: tuple[CoverKind, ...]
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None
    deterministic: bool
    forward: Callable[..., Pair] = field(repr=False)
    backward: Callable[..., Grads] = field(repr=False)
    deterministic_backward: Callable[..., Grads] | None = field(default=None, repr=False)
    min_capability: tuple[int, int] | None = None
    head_dim_multiple: int = 1
    head_dims: tuple[int, ...] | None = None
    keeps_type: bool = False
    writes_gradients: bool = False
    by_length: bool = False
    tile_tokens: tuple[int, ...] = ()
    package: str | None = None
    only_by_name: bool = False
    capped_covers: tuple[CoverKind, ...] = ()
    softcap: float = 0.0

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cover: Cover, scale: float) -> Pair:
        """(out, lse) of one call."""
        return self.forward(q, k, v, **_cover_arguments(cover), scale=scale)

    def gradients(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        cover: Cover,
        scale: float,
        **places: torch.Tensor,
    ) -> Grads:
        """(dq, dk, dv) of one call."""
        return self.backward(dout, q, k, v, out, lse, **_cover_arguments(cover), scale=scale, **places)

    def refusal(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        head_dim: int,
        deterministic: bool,
        *,
        cover: CoverKind | None = None,
        softcap: float = 0.0,
    ) -> str | None:
        """The reason why this kernel does not support such a call, or None if it does."""
        device, sparse = torch.device(device), "tables" in self.covers
        if softcap and (cover or self.covers[0]) not in self.capped_covers:
            return f"has no softcap, and the model caps its scores at {softcap:g}"
        if device.type not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {device.type}"
        if dtype not in self.dtypes:
            return f"takes {', '.join(map(str, self.dtypes))}, not {dtype}"
        if self.head_dims is not None and head_dim not in self.head_dims:
            return f"takes head_dim {', '.join(map(str, self.head_dims))}, not {head_dim}"
        if self.max_head_dim is not None and head_dim > self.max_head_dim:
            return f"takes head_dim up to {self.max_head_dim}, not {head_dim}"
        if head_dim % self.head_dim_multiple:
            return f"takes multiples of {self.head_dim_multiple} as head_dim, not {head_dim}"
        if deterministic and not self.deterministic and self.deterministic_backward is None:
            return "has no deterministic sparse backward on this device" if sparse else "is not deterministic"
        if self.package is not None and self.version() is None:
            return f"needs {self.package}, which is not installed"
        if self.min_capability is not None:
            capability = torch.cuda.get_device_capability(device)
            if capability < self.min_capability:
                needed, present = (".".join(map(str, pair)) for pair in (self.min_capability, capability))
                return f"needs compute capability {needed}, and this device has {present}"
        return None

    def repeatable(self) -> Kernel:
        """The form whose equal calls give bitwise equal results."""
        if self.deterministic:
            return self
        assert self.deterministic_backward is not None
        return replace(self, deterministic=True, backward=self.deterministic_backward)

    def capped(self, softcap: float) -> Kernel:
        """The form for scores s that become softcap * tanh(s / softcap) before the softmax; this one for 0."""
        if not softcap:
            return self
        again = self.deterministic_backward
        return replace(
            self,
            covers=self.capped_covers,
            softcap=softcap,
            forward=partial(self.forward, softcap=softcap),
            backward=partial(self.backward, softcap=softcap),
            deterministic_backward=None if again is None else partial(again, softcap=softcap),
        )

    def version(self) -> str | None:
        """The version of `package` (None if it is not installed), or of torch for a kernel without a package."""
        try:
            return metadata.version(self.package) if self.package is not None else torch.__version__
        except metadata.PackageNotFoundError:
            return None


def _cover_arguments(cover: Cover) -> dict[str, bool | torch.Tensor | Documents | BlockTables]:
    if isinstance(cover, BlockTables):
        return {"tables": cover}
    if isinstance(cover, Documents):
        return {"causal": True, "documents": cover}
    if isinstance(cover, torch.Tensor):
        return {"causal": False, "mask": cover}
    return {"causal": cover == "causal"}


def native_inputs(inputs: tuple[torch.Tensor, ...], documents: Documents | None = None) -> tuple[torch.Tensor, ...]:
    """dout, q, k, v, out and lse of a backward pass as flash kernels take them: lse contiguous (B, H, Sq); of packed
    documents each without its first dimension."""
    *wide, lse = inputs
    native = (*wide, lse.transpose(1, 2).contiguous())
    return native if documents is None else tuple(x[0] for x in native)
