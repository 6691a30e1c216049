"""Initial values of parameters: a function of (seed, name, shape) alone, not of mesh, order or device.

Values are drawn on the CPU in blocks of rows, each with its own generator, so a rank that holds some rows of a large
parameter draws little more than these.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# (name, tensor, generator): fills the whole parameter (fp32, CPU) in place, with numbers from this generator only.
InitFn = Callable[[str, Tensor, torch.Generator], None]

_BLOCK_ELEMENTS = 2**20
_MOST_THREADS = 16
_STD = 0.02
_GAINS = re.compile(r"(^|\.)(weight|scale|gain|gamma|g)$")
_BIASES = re.compile(r"bias$|(^|\.|_)(b|beta)$")
# Projections into the residual stream, by this model's names and those of common decoders.
_RESIDUAL = re.compile(r"(^|\.)(output|down|wo|w2|o_proj|out_proj|down_proj|c_proj)\.weight$|\.experts\.down$")


def seed_of(key: str) -> int:
    """A generator's seed, as different keys have different ones."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little", signed=True)


@dataclass(frozen=True)
class Initialiser:
    """Biases 0, one-dimensional weights (norms) 1, all others normal(0, 0.02).

    Projections into the residual stream are scaled by 1 / sqrt(2 num_layers) (GPT-2). `init_fn` replaces these rules;
    it always draws the whole parameter, even where only some rows are needed.
    """

    seed: int
    num_layers: int = 1
    init_fn: InitFn | None = None

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers={self.num_layers}: must be at least 1")

    def tensor(self, name: str, shape: Sequence[int], rows: tuple[int, int] | None = None) -> Tensor:
        """The initial fp32 value of a parameter on the CPU, or its rows [start, stop) along dim 0.

        `name` is the parameter's name in the unwrapped module.
        """
        shape = tuple(shape)
        if self.init_fn is not None:
            whole = torch.zeros(shape, dtype=torch.float32, device="cpu")
            self.init_fn(name, whole, torch.Generator("cpu").manual_seed(seed_of(f"{self.seed} {name} {shape} 0")))
            return whole if rows is None else whole[rows[0] : rows[1]].clone()
        kept = shape if rows is None else (rows[1] - rows[0], *shape[1:])
        if _BIASES.search(name):
            return torch.zeros(kept, dtype=torch.float32, device="cpu")
        if len(shape) <= 1 and _GAINS.search(name):
            return torch.ones(kept, dtype=torch.float32, device="cpu")
        std = _STD / math.sqrt(2 * self.num_layers) if _RESIDUAL.search(name) else _STD
        start, stop = rows if rows is not None else (0, shape[0] if shape else 1)
        return self._normal(name, shape, start, stop, std).view(kept)

    def _normal(self, name: str, shape: tuple[int, ...], start: int, stop: int, std: float) -> Tensor:
        num_columns = math.prod(shape[1:])
        block_rows = max(1, _BLOCK_ELEMENTS // max(1, num_columns))
        out = torch.empty(stop - start, num_columns, dtype=torch.float32, device="cpu")

        def draw(block: int) -> None:
            # Draw whole blocks: torch's numbers depend on the tensor's size.
            first = block * block_rows
            drawn = torch.empty(block_rows, num_columns, dtype=torch.float32, device="cpu")
            generator = torch.Generator("cpu").manual_seed(seed_of(f"{self.seed} {name} {shape} {block}"))
            drawn.normal_(0.0, std, generator=generator)
            low, high = max(start, first), min(stop, first + block_rows)
            out[low - start : high - start] = drawn[low - first : high - first]

        blocks = range(start // block_rows, -(-stop // block_rows))
        num_threads = torch.get_num_threads()
        if num_gpus := torch.cuda.device_count():  # a GPU's share of the host's cores
            num_threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // num_gpus))
        if min(len(blocks), num_threads) == 1:
            for block in blocks:
                draw(block)
            return out
        with ThreadPoolExecutor(num_threads) as pool:  # drawing holds no GIL
            list(pool.map(draw, blocks))
        return out


def initialise_module(module: nn.Module, initialiser: Initialiser) -> None:
    """Fill every parameter of an unsharded, materialised module in place; a tied one under its first name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(initialiser.tensor(name, parameter.shape))
