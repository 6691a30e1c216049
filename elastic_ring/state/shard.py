"""One rank's share of the training state: parameters (fp32 slices of FSDP2's shards), optimizer state and counters.

Heals, copies and checkpoints hold it in one form: tensors by name and `ShardMeta`. Random numbers are not in it: they
are reseeded for every sequence. No communication and no FSDP2 here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.optim import Optimizer

from elastic_ring.config import CpuOffload
from elastic_ring.errors import DigestMismatch
from elastic_ring.state.device_sums import device_digests
from elastic_ring.state.header import (
    NO_DIGEST,
    OPTIMIZER,
    PARAMS,
    Counters,
    Header,
    ShardMeta,
    TensorSpec,
    plain_value,
)
from elastic_ring.state.host_optimizer import step_from_host
from elastic_ring.state.safetensors import raw_bytes

OWN_TO_A_DEVICE = ("params", "fused", "foreach", "capturable")
"""Settings of an optimizer's groups that are never restored: another device may compute otherwise."""


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
        """The device of its optimizer steps."""
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

    def advance(self, *, skipped: bool, in_a_row: int = 0) -> None:
        """A step is over. `in_a_row`: skipped ones up to it."""
        old = self.counters
        self.counters = replace(old, applied=old.applied + 1, skipped=old.skipped + skipped, skipped_in_a_row=in_a_row)

    # ------------------------------------------------------------ moving it

    def tensors(self) -> dict[str, Tensor]:
        """All tensors: `params/NAME`, then `optimizer/NAME/FIELD`, in the module's order."""
        tensors = {f"{PARAMS}/{name}": param for name, param in self.params.items()}
        for name, param in self.params.items():
            state = self.optimizer.state.get(param, {})
            tensors |= {f"{OPTIMIZER}/{name}/{key}": v for key, v in state.items() if isinstance(v, Tensor)}
        return tensors

    def meta(self) -> ShardMeta:
        """Everything but the tensors. Raises ValueError, which names the value, for values that JSON cannot hold."""
        names = {id(param): name for name, param in self.params.items()}
        kind = f"optimizer={type(self.optimizer).__name__}"
        if strangers := [key for key in self.optimizer.state if id(key) not in names]:
            raise ValueError(f"{kind} keeps state by {strangers[0]!r:.200}: it may keep state by parameter only")
        groups: list[dict[str, JsonValue]] = []
        for index, group in enumerate(self.optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            params: list[JsonValue] = [names[id(param)] for param in group["params"]]
            groups.append({k: plain_value(v, f"{kind}: {k} of group {index}") for k, v in settings.items()})
            groups[-1]["params"] = params
        plain = {
            name: {
                key: plain_value(value, f"{kind}: {key} of {name}")
                for key, value in self.optimizer.state.get(param, {}).items()
                if not isinstance(value, Tensor)
            }
            for name, param in self.params.items()
        }
        return ShardMeta(self.counters, tuple(groups), {name: values for name, values in plain.items() if values})

    def describe(self) -> tuple[Header, list[Tensor]]:
        """The tensors in a fixed order, and a header with their layout, without a digest."""
        tensors = self.tensors()
        layout = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
        return Header(self.cp_rank, self.meta(), layout, NO_DIGEST), list(tensors.values())

    def pack(self) -> tuple[Header, list[Tensor]]:
        """As `describe`, with the digest."""
        header, tensors = self.describe()
        return replace(header, digest=digest_of(self.counters, tensors, self.device)), tensors

    def check_header(self, header: Header) -> None:
        """Raises DigestMismatch for a shard that does not fit this one's parameters and optimizer."""
        own = {f"{PARAMS}/{name}": TensorSpec.of(param)[:2] for name, param in self.params.items()}
        try:
            if own != {name: spec[:2] for name, spec in header.layout.items() if name.startswith(f"{PARAMS}/")}:
                raise ValueError("it is of other parameters than this model's")
            self._group_settings(header.meta)
        except ValueError as error:
            raise DigestMismatch(
                f"the header of a healed shard of cp_rank {header.cp_rank} does not fit: {error}",
                cp_rank=header.cp_rank,
            ) from error

    def places(self, header: Header) -> list[Tensor]:
        """Memory for each tensor of a header: this shard's own where it fits, as a device may have no room for a second
        copy of the state. A caller that has filled some of it must fill all, and then `load`."""
        own, device = self.tensors(), next(iter(self.params.values())).device
        places = []
        for name, spec in header.layout.items():
            mine = own.get(name)
            if mine is None or not mine.is_contiguous() or TensorSpec.of(mine) != spec:
                there = device if spec.is_cuda else torch.device("cpu")
                mine = torch.empty(spec.shape, dtype=spec.torch_dtype, device=there)
            places.append(mine.detach())
        return places

    def load(self, header: Header, tensors: Sequence[Tensor]) -> None:
        """Become what `pack` described; `tensors` may be `places`. The caller has verified digest and header."""
        named = dict(zip(header.layout, tensors, strict=True))
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(named.pop(f"{PARAMS}/{name}"))
        self.restore_optimizer(header.meta, named)
        self.cp_rank, self.counters = header.cp_rank, header.meta.counters

    def restore_optimizer(self, meta: ShardMeta, tensors: Mapping[str, Tensor]) -> None:
        """Take over settings and state of the optimizer; `tensors`: `optimizer/NAME/FIELD`, used where they are.

        Not by `load_state_dict`, which casts state to its parameter's type and moves it to its device, where there may
        be no room. Raises ValueError for settings that do not fit this optimizer.
        """
        for group, settings in zip(self.optimizer.param_groups, self._group_settings(meta), strict=True):
            group.update(settings)
        self.optimizer.state.clear()
        states: dict[str, dict[str, object]] = {name: dict(values) for name, values in meta.plain.items()}
        for key, value in tensors.items():
            name, _, entry = key.removeprefix(f"{OPTIMIZER}/").rpartition("/")
            states.setdefault(name, {})[entry] = value
        for name, param in self.params.items():
            if name in states:
                self.optimizer.state[param] = states[name]

    def _group_settings(self, meta: ShardMeta) -> list[dict[str, object]]:
        """For each of the optimizer's groups the settings of the saved group that has its first parameter."""
        saved = {str(name): group for group in meta.groups for name in group["params"]}  # type: ignore[union-attr]
        names = {id(param): name for name, param in self.params.items()}
        restored: list[dict[str, object]] = []
        for group in self.optimizer.param_groups:
            settings: dict[str, object] = {}
            for name in sorted(names[id(param)] for param in group["params"])[:1]:
                if name not in saved:
                    raise ValueError(f"it has no group of the optimizer with {name}")
                for key, value in saved[name].items():
                    if key in OWN_TO_A_DEVICE:
                        continue
                    present = group.get(key)
                    if not _fits(present, value):
                        raise ValueError(f"it has {key}={str(value)[:200]!r} for {name}")
                    # JSON has lists for tuples, and numbers for tensors of one element.
                    if isinstance(present, tuple) and isinstance(value, list):
                        settings[key] = tuple(value)
                    elif isinstance(present, Tensor) and isinstance(value, (int, float)):
                        settings[key] = torch.full_like(present, value)
                    else:
                        settings[key] = value
            restored.append(settings)
        return restored

    def digest(self) -> str:
        """sha256 over counters, parameters and optimizer state; equal for equal bits."""
        return digest_of(self.counters, list(self.tensors().values()), self.device)


def _fits(present: object, value: object) -> bool:
    """Whether a setting of an optimizer may become `value`: a number for a number, a list for a tuple of as many."""
    if present is None or value is None:
        return True
    if isinstance(present, (tuple, list)):
        return isinstance(value, (list, tuple)) and len(value) == len(present) and all(map(_fits, present, value))
    numbers = isinstance(present, (bool, int, float, Tensor)), isinstance(value, (bool, int, float))
    return numbers[0] == numbers[1] if any(numbers) else type(present) is type(value)


def digest_of(counters: Counters, tensors: Sequence[Tensor], device: torch.device | None = None) -> str:
    """sha256 over the counters and the tensors in order: raw bytes, or for a shard on a GPU (`device`) sums computed
    there (`state.device_sums`), also of large tensors in host memory."""
    total = hashlib.sha256(repr(counters).encode())
    device = device or (tensors[0].device if tensors else torch.device("cpu"))
    sums = iter(device_digests([tensor for tensor in tensors if uses_device(tensor, device)], device))
    for tensor in tensors:
        if uses_device(tensor, device):
            total.update(next(sums))
        else:
            total.update(raw_bytes(tensor))
    return total.hexdigest()


def uses_device(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor of a shard that computes on `device` is digested and sent from there: on a GPU all but scalars
    in host memory."""
    return tensor.is_cuda or (device.type == "cuda" and tensor.numel() > 1)
