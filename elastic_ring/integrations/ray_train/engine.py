"""A DeepSpeed engine over all ranks of a worker group: first values, one update, checkpoints, the whole weights.

DeepSpeed holds torch's default group, so an engine lives as long as its worker group: another number of workers is a
checkpoint in DeepSpeed's universal format and a new engine. No ring, no data and no Ray in here.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import secrets
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_ring.config import environment
from elastic_ring.errors import CheckpointDamaged
from elastic_ring.files import name_below, user_folder
from elastic_ring.integrations.ray_train.untrusted import check_names, data_only, gathered
from elastic_ring.state.checkpoints.weight_files import (
    MAX_FILE_BYTES,
    WEIGHTS,
    WEIGHTS_INDEX,
    file_names,
    grouped,
    index_text,
    remove_others,
)
from elastic_ring.state.safetensors import raw_bytes, safetensors_chunks
from elastic_ring.state.storage.folder import Storage
from elastic_ring.train.optim import make_optimizer, make_own_optimizer
from elastic_ring.train.task import TrainingTask
from elastic_ring.train.wrap import largest_list

log = logging.getLogger(__name__)

TAG = "zero3"
MASTER = "fp32"
FRAGMENTS = "fragments-{rank:05d}.pt"


class Zero3Engine:
    """The module of a task, sharded over the default group, with its optimizer."""

    def __init__(self, task: TrainingTask, config: dict[str, Any], *, fill: bool) -> None:
        """Collective. `fill` gives parameters their first values, one whole tensor at a time."""
        import deepspeed

        self._task, self._zero = task, config["zero_optimization"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.step.seed)  # where the task has no initial values, the module's own are used
            # The type comes from the configuration: where a device has no fp16, DeepSpeed 0.19 ignores `dtype=`.
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = task.model()
        for unit in (task.units or largest_list)(model):
            # Its layers may read each other's parameters, as under FSDP2: gathered and released as one.
            deepspeed.utils.set_z3_leaf_module(unit, True)
        if fill and task.initial is not None:
            _fill(model, task.initial)
        own: dict[str, Any] = {"model_parameters": _groups(task, model)} if "optimizer" in config else {}
        if not own:
            own = {"optimizer": _optimizer(task, model)}
        self._engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False, **own)
        self._skips = False
        self._clip_norm = self._engine.optimizer.clip_grad
        self._engine.optimizer._overflow_check_and_loss_scale_update = self._is_skipped
        if fill and task.initial is not None and task.step.param_dtype != "float32":
            self._fill_masters(task.initial)

    @property
    def module(self) -> nn.Module:
        return self._engine  # its forward calls the module's between DeepSpeed's hooks

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`; DeepSpeed averages over the ranks."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, rate: float, *, skip: bool = False, clip_share: float = 1.0) -> None:
        """After each `backward`; updates after the last of a batch, with this learning rate. `skip`: the last of a
        batch changes nothing, as after an overflow in fp16. `clip_share`: of the usual bound on the gradient's norm."""
        zero = self._engine.optimizer
        for group in zero.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        self._skips, zero.clip_grad = skip, self._clip_norm * clip_share
        self._engine.step()

    def _is_skipped(self, update_scale: bool = True) -> bool:
        """In place of DeepSpeed's check, which looks for overflow in fp16 only. Of bf16 and fp32 it skips a step whose
        norm is not finite later on, by itself, and trains on where only the loss is not: the doors decide alike."""
        zero = self._engine.optimizer
        zero.overflow = self._skips
        if self._skips and update_scale:
            zero._overflow_clean_up(zero.loss_scale)
        return self._skips

    def gradient_norm(self) -> float:
        """The norm of the whole batch's gradient, before clipping; not a number where it is not finite. Before the last
        `step` of a batch. Collective."""
        norms = [float(norm) for norm in self._engine.optimizer._get_norm_groups()]
        # DeepSpeed says -1 for a norm that is not finite.
        return math.hypot(*norms) if all(norm >= 0 for norm in norms) else math.nan

    def gradients_of(self, loss: Tensor) -> list[Tensor]:
        """This rank's shards of the gradient of `loss` alone, averaged over the ranks; nothing is left of it.
        Collective."""
        from deepspeed.utils import safe_get_local_grad

        self._engine.set_gradient_accumulation_boundary(is_boundary=True)
        self.backward(loss)
        found = [
            safe_get_local_grad(param).detach().reshape(-1).double()
            for _, param in self._named()
            if param.requires_grad
        ]
        self._engine.optimizer._overflow_clean_up(self._engine.optimizer.loss_scale)
        self._engine.set_gradient_accumulation_boundary(is_boundary=None)
        return found

    def _fill_masters(self, initial: Any) -> None:
        """Give the masters the first values themselves: DeepSpeed has made them from parameters that were rounded."""
        rank = dist.get_rank()
        for index, group in enumerate(self._engine.optimizer.fp16_groups):
            with self._swapped_in(index, changed=True) as flat:
                offset = 0
                for param in group:
                    size = param.partition_numel()
                    whole = initial.tensor(self._engine.param_names[param], tuple(param.ds_shape)).flatten()
                    piece = whole[rank * size : (rank + 1) * size]
                    flat.data[offset : offset + len(piece)].copy_(piece)
                    offset += size

    # ------------------------------------------------------------ checkpoints

    def save(self, folder: Path) -> None:
        """This rank's part of a checkpoint. Collective; the ranks' files are to lie in one folder when it is read."""
        if self._swaps_optimizer:
            torch.save(self._fragments(), folder / FRAGMENTS.format(rank=dist.get_rank()))
        else:
            self._engine.save_checkpoint(str(folder), tag=TAG)

    def load(self, folder: Path, num_saved: int) -> None:
        """Collective. `num_saved`: the number of ranks that saved. An engine for another number than its own must have
        been made with `checkpoint.load_universal`."""
        if self._swaps_optimizer != (folder / FRAGMENTS.format(rank=0)).exists():
            raise ValueError(
                f"{folder}: was saved {'without' if self._swaps_optimizer else 'with'} offload_optimizer='nvme', whose "
                "checkpoints are in another format: resume with the setting that it was saved with"
            )
        with data_only(folder):
            self._load(folder, num_saved)

    def _load(self, folder: Path, num_saved: int) -> None:
        if self._swaps_optimizer:
            self._restore_fragments(folder, num_saved)
            return
        module, is_same_size = self._engine.module, num_saved == dist.get_world_size()
        names = {name for name, _ in module.named_parameters()} | set(module.state_dict())
        check_names(folder / TAG, names, dist.get_rank() if is_same_size else None)
        if is_same_size:
            self._engine.load_checkpoint(str(folder), tag=TAG)
        else:
            groups = [
                {k: v for k, v in group.items() if k != "params"}
                for group in self._engine.optimizer.optimizer.param_groups
            ]
            with _universal(folder, self._engine.device) as converted:
                self._engine.load_checkpoint(str(converted), tag=TAG)
                dist.barrier()  # before anybody removes it
            self._mend_universal(groups)

    def _mend_universal(self, groups: list[dict[str, Any]]) -> None:
        """What DeepSpeed's load of a universal checkpoint leaves wrong: every group gets the first one's settings (its
        weight decay), and all shards share one tensor as their count of steps, which each of them would advance."""
        optimizer = self._engine.optimizer.optimizer
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    @property
    def _swaps_optimizer(self) -> bool:
        return bool((self._zero.get("offload_optimizer") or {}).get("device") == "nvme")

    def _fragments(self) -> dict[str, Any]:
        """This rank's slices of masters and optimizer state of each parameter, and what is the same for all (steps).

        DeepSpeed's own checkpoints copy swap files, which fit the same number of ranks, and leave out what is too small
        to be swapped.
        """
        zero, slices, plain = self._engine.optimizer, dict[str, dict[str, Tensor]](), dict[str, Any]()
        for index, group in enumerate(zero.fp16_groups):
            with self._swapped_in(index, changed=False) as flat:
                state = zero.optimizer.state.get(flat, {})
                sharded = {key: value for key, value in state.items() if _is_like(value, flat)}
                plain |= {key: value for key, value in state.items() if key not in sharded}
                offset = 0
                for param in group:
                    size = param.partition_numel()
                    slices[self._engine.param_names[param]] = {
                        key: value.detach()[offset : offset + size].cpu().clone()
                        for key, value in {MASTER: flat, **sharded}.items()
                    }
                    offset += size
        return {"slices": slices, "plain": plain}

    def _restore_fragments(self, folder: Path, num_saved: int) -> None:
        saved = [torch.load(folder / FRAGMENTS.format(rank=rank), mmap=True) for rank in range(num_saved)]
        zero, rank = self._engine.optimizer, dist.get_rank()
        for index, group in enumerate(zero.fp16_groups):
            names = [self._engine.param_names[param] for param in group]
            values: dict[str, Tensor] = {}
            for key in saved[0]["slices"][names[0]]:
                mine = []
                for name, param in zip(names, group, strict=True):
                    size = param.partition_numel()
                    whole = _joined(folder, [part["slices"].get(name, {}).get(key) for part in saved], name, param)
                    piece = whole[rank * size : (rank + 1) * size]
                    mine.append(torch.cat([piece, piece.new_zeros(size - len(piece))]))  # the last rank's is padded
                values[key] = torch.cat(mine)
            with self._swapped_in(index, changed=True) as flat:
                flat.data.copy_(values.pop(MASTER))
                plain = {key: copy.deepcopy(value) for key, value in saved[0]["plain"].items()}
                zero.optimizer.state[flat] = {**plain, **values}
                zero._reassign_or_swap_out_partitioned_parameters(index)

    @contextmanager
    def _swapped_in(self, index: int, *, changed: bool) -> Iterator[Tensor]:
        """The masters of one of DeepSpeed's sub-groups, with their optimizer state, in memory meanwhile."""
        zero = self._engine.optimizer
        swaps = zero._swappable_optimizer_subgroup(index)
        if swaps:
            zero._optimizer_states_and_gradient_swap_in(index)
        yield zero.fp32_partitioned_groups_flat[index]
        if swaps and changed:
            zero._optimizer_states_and_gradient_swap_out(index)
        elif swaps:
            zero._release_swap_buffers(index)

    # ------------------------------------------------------------ weights

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, fp32 tensor on the CPU) of every parameter in name order, one at a time. Collective."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, param in self._named():
            yield name, safe_get_full_fp32_param(param).detach().reshape(param.ds_shape).float().cpu()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The unsharded shape of every parameter, in name order."""
        return {name: tuple(param.ds_shape) for name, param in self._named()}

    def _named(self) -> list[tuple[str, Any]]:
        return sorted(self._engine.module.named_parameters())


def largest_parameter(task: TrainingTask) -> int:
    """Elements of the model's largest parameter, counted on the meta device."""
    with torch.device("meta"):
        return max(param.numel() for param in task.model().parameters())


def _joined(folder: Path, slices: list[Any], name: str, param: Any) -> Tensor:
    """All elements of a parameter, or of its optimizer state, from the ranks' slices. Raises CheckpointDamaged where
    they do not give all of it: the rest would be zeros."""
    tensors = [one for one in slices if isinstance(one, Tensor) and one.dim() == 1]
    num_found = sum(map(len, tensors))
    if len(tensors) != len(slices) or num_found < param.ds_numel:
        files = folder / FRAGMENTS.format(rank=0)
        told = f"{files} and those beside it have {num_found} of {param.ds_numel} elements of {name}"
        raise CheckpointDamaged(told, path=str(files))
    return torch.cat(tensors)[: param.ds_numel]


def _is_like(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.numel() == flat.numel() > 1


def _fill(model: nn.Module, initial: Any) -> None:
    """First values as the elastic ring has them; rank 0 draws each tensor, DeepSpeed deals it out."""
    import deepspeed

    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                param.copy_(initial.tensor(name, tuple(param.shape)))


def _optimizer(task: TrainingTask, model: nn.Module) -> torch.optim.Optimizer:
    """The one that the elastic ring has: torch's AdamW in two groups, or the task's own."""
    named: list[Any] = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if task.optimizer is not None:
        return make_own_optimizer(task.optimizer, named)
    ndims = {name: len(param.ds_shape) for name, param in named}
    return make_optimizer(named, task.optim, ndims)


def _groups(task: TrainingTask, model: nn.Module) -> list[dict[str, Any]]:
    """The same two groups for an optimizer that DeepSpeed's configuration names."""
    params: list[Any] = [param for param in model.parameters() if param.requires_grad]
    decayed = [param for param in params if len(param.ds_shape) >= 2]
    others = [param for param in params if len(param.ds_shape) < 2]
    return [
        {"params": part, "weight_decay": decay}
        for part, decay in ((decayed, task.optim.weight_decay), (others, 0.0))
        if part
    ]


@contextmanager
def _universal(folder: Path, device: torch.device) -> Iterator[Path]:
    """A checkpoint in DeepSpeed's universal format, converted once on each node in its temporary folder. Collective."""
    from deepspeed.checkpoint.ds_to_universal import main as convert

    name = gathered(secrets.token_hex(8), device)[0]
    converted = user_folder() / name_below(f"universal-{name}")
    converts = environment().get("LOCAL_RANK", "0") == "0"
    if converts:
        convert(
            Namespace(
                input_folder=str(folder / TAG),
                output_folder=str(converted / TAG),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=False,
            )
        )
    dist.barrier()
    try:
        yield converted
    finally:
        if converts:
            shutil.rmtree(converted, ignore_errors=True)


FP32_BYTES = 4


def write_weights(engine: Zero3Engine, storage: Storage | None, max_file_bytes: int = MAX_FILE_BYTES) -> str:
    """Write them from the rank that is given the `storage`, and return `weights_sha256`. Collective.

    That rank holds the tensors of one file at a time. Raises StorageFailed.
    """
    sizes = {name: math.prod(shape) * FP32_BYTES for name, shape in engine.shapes.items()}
    groups = list(grouped(sizes, max_file_bytes))
    files = dict(zip(file_names(secrets.token_hex(8), len(groups)), groups, strict=True))
    total, tensors = hashlib.sha256(), engine.whole_weights()
    for file, names in files.items():
        kept: dict[str, Tensor] = {}
        for _ in names:
            name, tensor = next(tensors)
            if storage is not None:
                kept[name] = tensor
                for chunk in raw_bytes([tensor]):
                    total.update(chunk)
        if storage is not None:
            told = {"sha256": total.hexdigest()} if file == WEIGHTS else {}
            storage.replace(file, safetensors_chunks(kept, {"format": "pt", **told}))
    if storage is not None:
        if WEIGHTS not in files:
            placed = {name: file for file, names in files.items() for name in names}
            metadata = {"total_size": sum(sizes.values()), "sha256": total.hexdigest()}
            storage.replace(WEIGHTS_INDEX, index_text(placed, metadata))
        remove_others(storage, [WEIGHTS] if WEIGHTS in files else [WEIGHTS_INDEX, *files])
    return total.hexdigest()
