"""The description of an attention backend: functions and capabilities. No selection and no tests in this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata

import torch

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Backend:
    """A kernel and its capabilities.

    `forward(q, k, v, *, causal, scale) -> (out, lse)`: q, out (B, Sq, H, D); k, v (B, Sk, Hkv, D); lse
    (B, Sq, H), natural log, fp32 or fp64. `backward(dout, q, k, v, out, lse, *, causal, scale) ->
    (dq, dk, dv)` takes the *merged* out and lse, so that the gradients of all tiles add up to the exact total.
    `causal` tiles are square.

    - `max_head_dim`: None means no limit.
    - `deterministic_backward`: a bitwise repeatable form, for a backend whose `backward` is not.
    - `min_capability`: the lowest CUDA compute capability.
    - `keeps_type`: results have the inputs' type, already rounded; otherwise the accumulation type.
    - `writes_gradients`: `backward` also takes output tensors `dk` and `dv`.
    - `by_length`: compiled once per number of queries and of keys.
    - `tile_tokens`: tile sizes in tokens; lengths up to and above a tile size are compiled separately. Query heads that
      share a K/V head may count as tokens.
    - `graphable`: calls use only memory that they receive or allocate, so they may be captured in a CUDA graph.
    - `package`: the package required besides torch.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None
    deterministic: bool
    forward: Forward = field(repr=False)
    backward: Backward = field(repr=False)
    deterministic_backward: Backward | None = field(default=None, repr=False)
    min_capability: tuple[int, int] | None = None
    head_dim_multiple: int = 1
    keeps_type: bool = False
    writes_gradients: bool = False
    by_length: bool = False
    tile_tokens: tuple[int, ...] = ()
    graphable: bool = True
    package: str | None = None

    def refusal(self, device: torch.device | str, dtype: torch.dtype, head_dim: int, deterministic: bool) -> str | None:
        """The reason why this backend does not support such a call, or None if it does."""
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
        """The version of `package` (None if it is not installed), or of torch for a backend without a package."""
        return version_of(self.package)


def version_of(package: str | None) -> str | None:
    """The version of `package`, None if it is not installed; torch's for None."""
    try:
        return metadata.version(package) if package is not None else torch.__version__
    except metadata.PackageNotFoundError:
        return None
