"""One rank's share of the training state: what a newcomer must receive, and nothing else.

Parameters (fp32 local slices of the FSDP2 shards), the optimizer's state and the counters. Random numbers
are not in it: they are reseeded for every sequence. No communication and no FSDP2 here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic_ring.config import CpuOffload
from elastic_ring.errors import DigestMismatch
from elastic_ring.state.device.digest import device_digests
from elastic_ring.state.header import NO_DIGEST, Counters, Header, TensorSpec, matching, put_tensors, take_tensors
from elastic_ring.state.host_optimizer import step_from_host

__all__ = ["Counters", "Shard", "digest_of", "raw_bytes"]


@dataclass
class Shard:
    """The state of one `cp_rank`. `params` maps names to this rank's slices, in the module's order.

    With `cpu_offload` the optimizer's state, or that and the parameters, stay in host memory between steps; the
    optimizer must treat each parameter by itself then. `computes_on` is None where that is the parameters' device.
    """

    cp_rank: int
    params: dict[str, Tensor]
    optimizer: Optimizer
    counters: Counters = field(default_factory=Counters)
    cpu_offload: CpuOffload = "none"
    computes_on: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """Where its steps are computed."""
        return self.computes_on or next(iter(self.params.values())).device

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
        if self.cpu_offload != "none":
            by_param = {param: gradients[name] for name, param in self.params.items()}
            step_from_host(self.optimizer, by_param, self.device, with_params=self.cpu_offload == "all")
            return
        for name, param in self.params.items():
            param.grad = gradients[name]
        self.optimizer.step()
        for param in self.params.values():
            param.grad = None

    def advance(self, *, skipped: bool) -> None:
        """Count one finished step."""
        old = self.counters
        in_a_row = old.skipped_in_a_row + 1 if skipped else 0
        self.counters = replace(old, applied=old.applied + 1, skipped=old.skipped + skipped, skipped_in_a_row=in_a_row)

    # ------------------------------------------------------------ moving it

    def describe(self) -> tuple[Header, list[Tensor]]:
        """The tensors in a fixed order, and a header with their layout, without a digest."""
        skeleton, tensors = self._flatten()
        layout = tuple(TensorSpec.of(tensor) for tensor in tensors)
        return Header(self.cp_rank, self.counters, skeleton, layout, NO_DIGEST), tensors

    def pack(self) -> tuple[Header, list[Tensor]]:
        """As `describe`, with the digest."""
        header, tensors = self.describe()
        return replace(header, digest=digest_of(self.counters, tensors, self.device)), tensors

    def check_header(self, header: Header) -> None:
        """Raises DigestMismatch for a shard that does not fit this one's parameters."""
        own = {name: (param.dtype, tuple(param.shape)) for name, param in self.params.items()}
        try:
            specs = {name: header.layout[slot.index] for name, slot in header.skeleton["params"].items()}
            optimizer = header.skeleton["optimizer"]
            fits = {name: (spec.dtype, spec.shape) for name, spec in specs.items()} == own
            fits = fits and isinstance(optimizer["state"], dict) and isinstance(optimizer["param_groups"], list)
        except (TypeError, KeyError, AttributeError, IndexError):
            fits = False
        if not fits:
            raise DigestMismatch(
                f"the header of a healed shard of cp_rank {header.cp_rank} is of other parameters than this model's",
                cp_rank=header.cp_rank,
            )

    def places(self, header: Header) -> list[Tensor]:
        """Memory for each tensor of a header, in its order: this shard's own where that fits, as a device may have no
        room for a second copy of the state. Who has filled some of it must fill all, and then `load`."""
        own: dict[int, Tensor] = {}
        matching(header.skeleton, {"params": self.params, "optimizer": self.optimizer.state_dict()}, own)
        device = next(iter(self.params.values())).device
        places = []
        for index, spec in enumerate(header.layout):
            mine = own.get(index)
            fits = mine is not None and mine.is_contiguous() and TensorSpec.of(mine) == spec
            there = device if spec.is_cuda else torch.device("cpu")
            places.append(mine.detach() if fits else torch.empty(spec.shape, dtype=spec.dtype, device=there))  # type: ignore[union-attr]
        return places

    def load(self, header: Header, tensors: Sequence[Tensor]) -> None:
        """Become what `pack` described; `tensors` may be `places`. The caller has verified the digest."""
        state = put_tensors(header.skeleton, tensors)
        with torch.no_grad():
            for name, value in state["params"].items():
                self.params[name].copy_(value)
        # load_state_dict moves state to its parameter's device, where there may be no room for it.
        moved = {} if self.cpu_offload != "none" else state["optimizer"]["state"]
        self.optimizer.load_state_dict({**state["optimizer"], "state": moved})
        # And it casts state to its parameter's type; what was verified must arrive as it was.
        order = [param for group in self.optimizer.param_groups for param in group["params"]]
        for index, value in state["optimizer"]["state"].items():
            self.optimizer.state[order[index]] = value
        self.cp_rank, self.counters = header.cp_rank, header.counters

    def digest(self) -> str:
        """sha256 over counters, parameters and optimizer state; equal for equal bits."""
        return digest_of(self.counters, self._flatten()[1], self.device)

    def _flatten(self) -> tuple[Any, list[Tensor]]:
        """The state with a `Slot` for each tensor, and the tensors."""
        tensors: list[Tensor] = []
        state = {"params": self.params, "optimizer": self.optimizer.state_dict()}
        return take_tensors(state, tensors), tensors


def digest_of(counters: Counters, tensors: Sequence[Tensor], device: torch.device | None = None) -> str:
    """sha256 over the counters and the tensors in order: raw bytes, or for a shard on a GPU (`device`) sums that are
    computed there (`state.device.digest`), also over large tensors that wait in host memory."""
    total = hashlib.sha256(repr(counters).encode())
    device = device or (tensors[0].device if tensors else torch.device("cpu"))
    sums = iter(device_digests([tensor for tensor in tensors if uses_device(tensor, device)], device))
    for tensor in tensors:
        if uses_device(tensor, device):
            total.update(next(sums))
        else:
            for chunk in raw_bytes([tensor]):
                total.update(chunk)
    return total.hexdigest()


def uses_device(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor of a shard that computes on `device` is digested and sent from there: on a GPU all but what is
    small and in host memory."""
    return tensor.is_cuda or (device.type == "cuda" and tensor.numel() > 1)


def raw_bytes(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """The bytes of each tensor, without a copy where it is contiguous and in host memory."""
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        yield flat.view(torch.uint8).numpy().data
