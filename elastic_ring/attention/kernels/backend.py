"""What an attention backend is and what it says of itself. No choosing and no testing may enter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata

import torch

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Backend:
    """A kernel and what it can do.

    `forward(q, k, v, *, causal, scale) -> (out, lse)`: q, out (B, Sq, H, D); k, v (B, Sk, Hkv, D); lse
    (B, Sq, H), natural log, fp32 or fp64. `backward(dout, q, k, v, out, lse, *, causal, scale) ->
    (dq, dk, dv)` takes the *merged* out and lse, so that shares of different tiles add up exactly.
    `causal` tiles are square. `max_head_dim` None means no limit.

    `deterministic_backward` is the bitwise repeatable form of a backend whose fast form is not.
    `min_capability` is the least compute capability of a CUDA device. `keeps_type` says that results come
    in the inputs' type, already rounded (else in the accumulation type); `writes_gradients`, that `backward`
    also takes `dk` and `dv` to write to; `grouped_heads`, that K/V heads are not repeated in memory.
    `by_length` says that it is compiled anew for each length of queries and of keys; `graphable`, that its calls use
    no device memory but what they are given or take, so that a CUDA graph of them stays true. `package` is what must
    be installed beside torch.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None
    sparse: bool
    deterministic: bool
    forward: Forward = field(repr=False)
    backward: Backward = field(repr=False)
    deterministic_backward: Backward | None = field(default=None, repr=False)
    min_capability: tuple[int, int] | None = None
    head_dim_multiple: int = 1
    grouped_heads: bool = True
    keeps_type: bool = False
    writes_gradients: bool = False
    by_length: bool = False
    graphable: bool = True
    package: str | None = None

    def refusal(self, device: torch.device | str, dtype: torch.dtype, head_dim: int, deterministic: bool) -> str | None:
        """Why this backend cannot serve such a call, or None when it can."""
        device = torch.device(device)
        if device.type not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {device.type}"
        if dtype not in self.dtypes:
            return f"takes {', '.join(map(str, self.dtypes))}, not {dtype}"
        if self.max_head_dim is not None and head_dim > self.max_head_dim:
            return f"takes head_dim up to {self.max_head_dim}, not {head_dim}"
        if head_dim % self.head_dim_multiple:
            return f"takes multiples of {self.head_dim_multiple} as head_dim, not {head_dim}"
        if deterministic and not self.deterministic and self.deterministic_backward is None:
            return "is not deterministic"
        if self.package is not None and self.version() is None:
            return f"needs {self.package}, which is not installed"
        if self.min_capability is not None:
            capability = torch.cuda.get_device_capability(device)
            if capability < self.min_capability:
                needed, found = (".".join(map(str, pair)) for pair in (self.min_capability, capability))
                return f"needs compute capability {needed}, and this device has {found}"
        return None

    def version(self) -> str | None:
        """The version of the package behind it, or of torch; None when the package is not installed."""
        try:
            return metadata.version(self.package) if self.package is not None else torch.__version__
        except metadata.PackageNotFoundError:
            return None
