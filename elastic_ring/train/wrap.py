"""Wraps the user's module: sharded by FSDP2 inside a ring of several, whole on a ring of one; its values as local
tensors.

A fresh module is wrapped for every generation: an exception during a forward or backward pass leaves FSDP2's modules
gathered, and its groups no longer exist. The values stay in `state.Shard`.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_parameter_registration_hook

from elastic_ring.costs import MOST_SHARES
from elastic_ring.experts.exchange import expert_layers, sends, spread
from elastic_ring.model.fp8 import ALIGNED, use_fp8
from elastic_ring.state.checkpoints.manifest import rows_of
from elastic_ring.train.muon import matrix_parts
from elastic_ring.train.optim import check_optimizer
from elastic_ring.train.task import FrozenValues, Initial, TrainingTask

log = logging.getLogger(__name__)


class ModuleMaker:
    """Wraps modules for one worker, and caches the values of their buffers."""

    def __init__(self, task: TrainingTask, device: torch.device | None = None) -> None:
        self._task = task
        self.device = device or torch.device("cpu")
        self.params_in_host = False
        """Whether parameters and gradients are in host memory; a unit's are on the device while it is gathered."""
        self.sent: list[Any] = []
        """Layers of the last wrapped module that have their own experts and need an exchange."""
        self.most_rows = 0
        """Most rows of these layers that a rank gets at a time."""
        self._buffers: dict[str, Tensor] | None = None

    def wrap(self, device_mesh: DeviceMesh, dp: int = 1) -> nn.Module:
        """The module, sharded over `device_mesh` (one dimension, one of `dp` rings), its parameters uninitialised.

        Gradients are summed over the ring, never averaged: rings may process different numbers of sequences.
        """
        model = meta_model(self._task)
        _check_parameters(model)
        if self._task.step.linears == "fp8":
            use_fp8((self._task.units or largest_list)(model))
        dtype = getattr(torch, self._task.step.param_dtype)
        self.sent = []
        if device_mesh.size() == 1 and not self.params_in_host:
            keep_whole(model, self.device, dtype, keeps_frozen=self._task.frozen is None)
        else:
            self._shard(model, device_mesh, dtype, dp)
        if self._buffers is None and any(True for _ in model.buffers()):
            self.keep_buffers()
        for name, buffer in model.named_buffers():
            assert self._buffers is not None
            if buffer.device != self.device:  # `to_empty` may not have moved it
                buffer.data = torch.empty_like(buffer, device=self.device)
            buffer.copy_(self._buffers[name])
        model.train()
        return model

    def _shard(self, model: nn.Module, device_mesh: DeviceMesh, dtype: torch.dtype, dp: int) -> None:
        from torch.distributed.fsdp import (  # takes seconds to import, which drivers and coordinators do not need
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        in_host = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        offload = in_host if self.params_in_host else OffloadPolicy()
        choose = self._task.units or largest_list
        if not self.params_in_host and (layers := list(expert_layers(model))):
            step, cp = self._task.step, device_mesh.size()
            tokens = min(step.micro_batch, -(-step.global_batch // dp)) * step.rank_tokens(cp)
            self.sent = [layer for layer in layers if sends(step.experts, layer, cp, tokens, dtype.itemsize)]
            self.most_rows = max([int(MOST_SHARES * tokens * layer.experts_per_token) for layer in self.sent] or [0])
            counts = len(self.sent), len(layers)
            log.info("experts=%s: %d of %d layers send tokens to their experts", step.experts, *counts)
        own = spread(self.sent, device_mesh)
        for whole in (*choose(model), model):
            parts: Sequence[nn.Module] = whole.own_units() if hasattr(whole, "own_units") else ()  # type: ignore[operator]
            for unit in (*parts, whole):
                fully_shard(unit, mesh=device_mesh, mp_policy=policy, offload_policy=offload, ignored_params=own)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.to_empty(device="cpu" if self.params_in_host else self.device)

    def keep_buffers(self) -> None:
        """Compute the buffers' values ahead of time: building the model again would slow a recovery down.

        With `initial` parameters stay on the meta device; without, the whole model is in memory for a moment.
        """
        if not any(True for _ in meta_model(self._task).buffers()) or self._buffers is not None:
            return
        with parameters_on_meta() if self._task.initial is not None else nullcontext():
            buffers = {name: value.clone() for name, value in self._build().named_buffers()}
        if any(value.is_meta for value in buffers.values()):  # computed from parameters
            buffers = {name: value.clone() for name, value in self._build().named_buffers()}
        self._buffers = buffers

    def first_values(self, model: nn.Module, cp_rank: int, cp: int) -> None:
        """Fill a wrapped module's slices from the seed; the values do not depend on the mesh. Frozen parameters that
        are no state are left as they are."""
        params = dict(model.named_parameters())
        names = [name for name, param in params.items() if param.requires_grad or self._task.frozen is None]
        if self._task.initial is not None:
            self.read(model, self._task.initial, names, cp_rank, cp)
            return
        own, locals_ = dict(self._build().named_parameters()), local_params(model)
        for name in names:
            start, stop = rows_of(tuple(params[name].shape), cp_rank, cp)
            if stop > start:
                locals_[name].copy_(own[name].detach()[start:stop])

    def read(self, model: nn.Module, values: Initial, names: Iterable[str], cp_rank: int, cp: int) -> None:
        """Fill this rank's slices of the parameters `names` of a wrapped module with `values`."""
        params, locals_ = dict(model.named_parameters()), local_params(model)
        reads: dict[str, Callable[[], Tensor]] = {}
        for name in names:
            shape = tuple(params[name].shape)
            rows = rows_of(shape, cp_rank, cp)
            if rows[1] > rows[0]:
                reads[name] = partial(values.tensor, name, shape, rows=rows)
        if self.device.type != "cuda":
            for name, read in reads.items():
                locals_[name].copy_(read().reshape(locals_[name].shape))
            return

        for name, value in zip(reads, read_ahead(list(reads.values()), self.device), strict=True):
            locals_[name].copy_(value.reshape(locals_[name].shape))

    def _build(self) -> nn.Module:
        """The module in host memory with its own initialisation, the same on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._task.step.seed)
            return self._task.model()


def read_ahead(reads: Sequence[Callable[[], Tensor]], device: torch.device) -> Iterator[Tensor]:
    """The value of each read in order; the next one is read while the caller copies one to `device`. Not on CPUs: there
    is nothing to wait for, and memory that a thread frees stays in its arena, 150 MB."""

    def set_thread_defaults() -> None:  # of torch, per thread
        torch.set_grad_enabled(False)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    with ThreadPoolExecutor(1, initializer=set_thread_defaults) as pool:
        coming = [pool.submit(read) for read in reads[:1]]
        for position in range(1, len(reads) + 1):
            value = coming.pop().result()
            coming += [pool.submit(read) for read in reads[position : position + 1]]
            yield value


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built within have their parameters on the meta device and their buffers where they belong.

    A constructor's tensor lives until it is registered, so that memory holds one parameter at a time. Counts for every
    thread of the process: build no other model meanwhile.
    """

    def drop_values(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return param
        return nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    handle = register_module_parameter_registration_hook(drop_values)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


MASTERS = "_elastic_ring_masters"
CASTS = "_elastic_ring_casts"


def keep_whole(model: nn.Module, device: torch.device, dtype: torch.dtype, *, keeps_frozen: bool = True) -> None:
    """On a ring of one nothing is sharded: the module computes with parameters of `dtype`, for which `copy_masters`
    brings the values of fp32 masters. FSDP2 does that layer by layer in every pass, which keeps the host longer than
    short sequences keep the GPU. Without `keeps_frozen` frozen parameters have no masters: they are read in `dtype`.
    """
    uses: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # (module, name) of each parameter; several if tied
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            uses.setdefault(param, []).append((module, name))
    model.to_empty(device=device)
    for (first, name), *ties in uses.values():
        for module, its_name in ties:  # `to_empty` makes a parameter of each use of one on the meta device
            module.register_parameter(its_name, getattr(first, name))
    masters = {name: param.detach() for name, param in model.named_parameters()}
    setattr(model, MASTERS, masters)
    setattr(model, CASTS, ([], []))
    if dtype == torch.float32:
        return
    computed = {
        param: nn.Parameter(torch.empty_like(param, dtype=dtype), requires_grad=param.requires_grad)
        for param in model.parameters()
    }
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, computed[param])
    if not keeps_frozen:
        masters |= {name: param.detach() for name, param in model.named_parameters() if not param.requires_grad}
    pairs = [(param, masters[name]) for name, param in model.named_parameters()]
    changed = [(param, master) for param, master in pairs if param.dtype != master.dtype]
    setattr(model, CASTS, ([param for param, _ in changed], [master for _, master in changed]))


def copy_masters(model: nn.Module) -> None:
    """Copy the masters to the parameters of a whole module, before each pass that may follow a change. Called
    explicitly: a loss that calls `model.forward` or a part skips hooks."""
    casts: tuple[list[Tensor], list[Tensor]] = getattr(model, CASTS, ([], []))
    if casts[0]:
        with torch.no_grad():
            torch._foreach_copy_(*casts)


def local_params(model: nn.Module) -> dict[str, Tensor]:
    """This rank's slice of every parameter in fp32, as plain tensors: the module's own, or the masters of its casts."""
    whole: dict[str, Tensor] | None = getattr(model, MASTERS, None)
    if whole is not None:
        return dict(whole)
    return {name: local_of(param) for name, param in model.named_parameters()}


def local_of(tensor: Any) -> Tensor:
    """This rank's slice of a parameter or a gradient."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def meta_model(task: TrainingTask) -> nn.Module:
    """The model on the meta device."""
    with torch.device("meta"):
        return task.model()


def num_parameters(task: TrainingTask) -> int:
    """The number of parameters of the whole model without frozen ones, counted on the meta device."""
    return sum(p.numel() for p in meta_model(task).parameters() if p.requires_grad or task.frozen is None)


def num_frozen(task: TrainingTask) -> int:
    """The number of frozen parameters of the whole model."""
    return 0 if task.frozen is None else sum(p.numel() for p in meta_model(task).parameters()) - num_parameters(task)


def largest_list(model: nn.Module) -> Sequence[nn.Module]:
    """The items of the `ModuleList` with the most parameters: the blocks of a transformer."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        return ()
    largest = max(lists, key=lambda group: sum(p.numel() for p in group.parameters()))
    return list(largest)


def _other_list(model: nn.Module) -> str:
    """The name of a `ModuleList` outside of the largest with layers of the same kind, or an empty text."""
    layers = largest_list(model)
    kinds, inside = {type(layer) for layer in layers}, {id(each) for layer in layers for each in layer.modules()}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and any(type(each) in kinds and id(each) not in inside for each in module):
            return path
    return ""


def check_buildable(task: TrainingTask) -> None:
    """Build the model once on the meta device. Raises ValueError if that fails or a parameter is unsupported."""
    try:
        model = meta_model(task)
    except Exception as error:
        raise ValueError(
            f"model={textwrap.shorten(repr(task.model), 200)} cannot be built on the meta device: "
            f"{type(error).__name__}: {error}. "
            "Build only layers in the factory; give initial values as `initial`, or rely on the layers' own "
            "initialisation"
        ) from error
    _check_parameters(model)
    if task.step.experts != "auto" and not any(True for _ in expert_layers(model)):
        raise ValueError(
            f"experts={task.step.experts!r}: says how tokens meet experts, and the model has none: leave it out"
        )


def check_linears(task: TrainingTask) -> None:
    """Raises ValueError for linears="fp8" and a model none of whose linear layers can compute in 8 bits."""
    if task.step.linears == "native":
        return
    model = meta_model(task)
    if task.frozen is not None or any(True for _ in expert_layers(model)):
        reason = "adapters on a frozen base" if task.frozen is not None else "experts"
        raise ValueError(f"linears='fp8': is for models that train all they multiply with, and this one has {reason}")
    layers = (task.units or largest_list)(model)
    if not use_fp8(layers):
        raise ValueError(
            f"linears='fp8': none of the model's {len(layers)} layers would compute in 8 bits: the first and the last "
            f"do not, nor do others than torch's nn.Linear with widths that are multiples of {ALIGNED}; leave it out"
        )


def check_own_optimizer(task: TrainingTask) -> None:
    """Raises ValueError for a user's optimizer that cannot work on shards, tried on the meta device.

    An optimizer that reads values when it is made is tried by the workers only.
    """
    if task.optim.optimizer == "muon":
        model = meta_model(task)
        if task.optimizer is not None or not matrix_parts(model, (task.units or largest_list)(model)):
            reason = "optimizer= gives one of your own" if task.optimizer else "no layer has an nn.Linear or experts"
            raise ValueError(f"OptimConfig optimizer='muon': {reason}: leave it out")
        if task.units is None and (path := _other_list(model)):
            kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
            raise ValueError(
                f"OptimConfig optimizer='muon': {kind} has a second list of layers, {path}, and Muon would train one "
                "of them: give units=, a function to all layers, or optimizer='adamw'"
            )
    if task.optimizer is None:
        return
    params = [(name, param.detach()) for name, param in meta_model(task).named_parameters() if param.requires_grad]
    try:
        optimizer = task.optimizer(params)
    except Exception as error:
        log.debug("the optimizer could not be tried on the meta device: %s", error)
        return
    check_optimizer(optimizer, params)


def _check_parameters(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.dtype != torch.float32:  # gradients are reduced in float32, whatever the model computes in
            raise ValueError(
                f"parameter {name} is {param.dtype}: build the model in float32 (the master shards) and set "
                "param_dtype='bfloat16' to compute in a smaller type"
            )
        if param.dim() == 0:
            raise ValueError(f"parameter {name} has no dimension: FSDP2 cannot shard it; give it the shape (1,)")
    for owner, module in model.named_modules():
        registered = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and all(value is not tensor for tensor in registered):
                raise ValueError(
                    f"{'.'.join(filter(None, (owner, name)))} is a plain tensor of {type(module).__name__}, which gets "
                    f"no values on a worker: use self.register_buffer({name!r}, ...) and make them there"
                )


# ---------------------------------------------------------------- frozen parameters


def trained_shapes(model: nn.Module, frozen: FrozenValues | None) -> dict[str, tuple[int, ...]]:
    """The unsharded shape of every parameter that is state: of all of them where no values are `frozen`."""
    params = model.named_parameters()
    return {name: tuple(param.shape) for name, param in params if frozen is None or param.requires_grad}


class FrozenRows:
    """A rank's rows of the frozen parameters, kept between generations.

    Frozen parameters are no state: they are in no shard, gradient, checkpoint, heal or copy, and a member reads its own
    rows of them when it joins the mesh.
    """

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}
        self._place: tuple[int, int] | None = None  # (cp_rank, cp) whose rows they are

    def fill(self, maker: ModuleMaker, model: nn.Module, values: FrozenValues, place: tuple[int, int]) -> None:
        """Fill the frozen parameters of a wrapped module for `place`, (cp_rank, cp): from the last generation if it had
        the same place, else by reading `values`. Raises ValueError."""
        params = local_params(model)
        rows = {name: params[name] for name, param in model.named_parameters() if not param.requires_grad}
        with torch.no_grad():
            if place == self._place:
                for name, row in rows.items():
                    row.copy_(self._rows[name])
            else:
                self.drop()
                values.check()
                maker.read(model, values, rows, *place)
        self._rows, self._place = rows, place

    def drop(self) -> None:
        self._rows, self._place = {}, None
