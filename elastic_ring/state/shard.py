"""One rank's share of the training state: what a newcomer must receive, and nothing else.

Parameters (fp32 local slices of the FSDP2 shards), the optimizer's state and the counters. Random numbers
are not in it: they are reseeded for every sequence. No communication and no FSDP2 here.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_ring.state.device_digest import device_digests


@dataclass(frozen=True)
class Counters:
    """`applied`: steps whose result is in the shard, i.e. the next step to run. Skips are results too."""

    applied: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class Shard:
    """The state of one `cp_rank`. `params` maps names to this rank's slices, in the module's order."""

    cp_rank: int
    params: dict[str, Tensor]
    optimizer: Optimizer
    counters: Counters = field(default_factory=Counters)

    def rebind(self, params: Mapping[str, Tensor]) -> None:
        """Move the values into other tensors (a freshly wrapped module's) and point the optimizer at them."""
        assert list(params) == list(self.params), "the module's parameters changed between generations"
        moved: dict[Tensor, Tensor] = {}
        with torch.no_grad():
            for name, old in self.params.items():
                params[name].copy_(old)
                moved[old] = params[name]
        for group in self.optimizer.param_groups:
            group["params"] = [moved[p] for p in group["params"]]
        state = dict(self.optimizer.state)
        self.optimizer.state.clear()
        self.optimizer.state.update({moved[p]: value for p, value in state.items()})
        self.params = dict(params)

    def apply(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """One optimizer step on the local slices. No communication; must not be interrupted."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        for name, param in self.params.items():
            param.grad = gradients[name]
        self.optimizer.step()
        for param in self.params.values():
            param.grad = None

    def advance(self, *, skipped: bool) -> None:
        """Count one finished step."""
        old = self.counters
        in_a_row = old.skipped_in_a_row + 1 if skipped else 0
        self.counters = replace(
            old, applied=old.applied + 1, skipped=old.skipped + skipped, skipped_in_a_row=in_a_row
        )

    # ------------------------------------------------------------ moving it

    def pack(self) -> tuple[bytes, list[Tensor]]:
        """(header, tensors): the tensors in a fixed order, the header says what they are and their digest."""
        tensors: list[Tensor] = []
        skeleton = _take_tensors({"params": self.params, "optimizer": self.optimizer.state_dict()}, tensors)
        layout = [(t.dtype, tuple(t.shape), t.is_cuda) for t in tensors]
        header = {
            "cp_rank": self.cp_rank,
            "counters": self.counters,
            "skeleton": skeleton,
            "layout": layout,
            "digest": digest_of(self.counters, tensors),
        }
        return pickle.dumps(header), tensors

    def load(self, header: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Become what `pack` described. The caller has verified the digest."""
        state = _put_tensors(header["skeleton"], tensors)
        with torch.no_grad():
            for name, value in state["params"].items():
                self.params[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        # load_state_dict casts state to its parameter's type; what was verified must arrive as it was.
        order = [param for group in self.optimizer.param_groups for param in group["params"]]
        for index, value in state["optimizer"]["state"].items():
            self.optimizer.state[order[index]] = value
        self.cp_rank, self.counters = header["cp_rank"], header["counters"]

    def digest(self) -> str:
        """sha256 over counters, parameters and optimizer state; equal for equal bits."""
        _, tensors = self.pack()
        return digest_of(self.counters, tensors)


def digest_of(counters: Counters, tensors: Sequence[Tensor]) -> str:
    """sha256 over the counters and the tensors in order: the raw bytes of those in host memory, sums over those on
    a device (`state.device_digest`), which are read there."""
    total = hashlib.sha256(repr(counters).encode())
    on_device = iter(device_digests([tensor for tensor in tensors if tensor.is_cuda]))
    for tensor in tensors:
        if tensor.is_cuda:
            total.update(next(on_device))
        else:
            for chunk in raw_bytes([tensor]):
                total.update(chunk)
    return total.hexdigest()


def raw_bytes(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """The bytes of each tensor, without a copy where it is contiguous and in host memory."""
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class _Slot:
    """Stands for tensor `index` in a skeleton."""

    index: int


def _take_tensors(tree: Any, out: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        out.append(tree)
        return _Slot(len(out) - 1)
    if isinstance(tree, dict):
        return {key: _take_tensors(value, out) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_take_tensors(value, out) for value in tree)
    return tree


def _put_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(tree, _Slot):
        return tensors[tree.index]
    if isinstance(tree, dict):
        return {key: _put_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_put_tensors(value, tensors) for value in tree)
    return tree
