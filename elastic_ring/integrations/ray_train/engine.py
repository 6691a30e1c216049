"""A DeepSpeed engine over all ranks of a worker group: first values, one update, checkpoints, the whole weights.

DeepSpeed holds torch's default group, so an engine lives as long as its worker group: another number of workers is a
checkpoint in DeepSpeed's universal format and a new engine. DeepSpeed unpickles its files with `weights_only=False`:
here they are read as data only. No ring, no data and no Ray in here.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
import secrets
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_ring.config import environment
from elastic_ring.errors import CheckpointDamaged
from elastic_ring.files import user_folder
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

TAG = "zero3"
MASTER = "fp32"
FRAGMENTS = "fragments-{rank:05d}.pt"
FP32_BYTES = 4
_ONLY_DATA = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FILE = re.compile(r"(bf16_)?zero_pp_rank_[0-9]+_mp_rank_00_(model|optim)_states\.pt")
_NAMES = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "module")
_EXPERTS = ("ds_autoep_layers", "autoep_layers", "universal_checkpoint_info")


class Fragments(TypedDict):
    """One rank's part of a checkpoint with swapped optimizer state.

    slices: by parameter, its flat masters (MASTER) and optimizer state. plain: state that is the same for all (steps).
    """

    slices: dict[str, dict[str, Tensor]]
    plain: dict[str, object]


class Zero3Engine:
    """The module of a task, sharded over the default group, with its optimizer."""

    def __init__(self, task: TrainingTask, config: Mapping[str, Any], *, fill: bool) -> None:
        """Collective. `fill` gives parameters their first values, one whole tensor at a time."""
        import deepspeed

        offload = config["zero_optimization"].get("offload_optimizer") or {}
        self._swaps_optimizer = offload.get("device") == "nvme"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(task.step.seed)  # where the task has no initial values, the module's own are used
            # The type comes from the configuration: where a device has no fp16, DeepSpeed 0.19 ignores `dtype=`.
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = task.model()
        for unit in (task.units or largest_list)(model):
            # Its layers may read each other's parameters, as under FSDP2: gathered and released as one.
            deepspeed.utils.set_z3_leaf_module(unit, True)
        initial = task.initial if fill else None
        for name, param in model.named_parameters():
            if initial is None:
                break
            # First values as the elastic ring has them; rank 0 draws each tensor, DeepSpeed deals it out.
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
                if dist.get_rank() == 0:
                    param.copy_(initial.tensor(name, tuple(param.shape)))
        named: list[Any] = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        ndims = {name: len(param.ds_shape) for name, param in named}
        groups, optimizer = None, None
        if "optimizer" in config:  # one of DeepSpeed's, with the groups that the elastic ring has
            own_groups = make_optimizer(named, task.optim, ndims).param_groups
            groups = [{key: group[key] for key in ("params", "weight_decay")} for group in own_groups]
        elif task.optimizer is not None:
            optimizer = make_own_optimizer(task.optimizer, named)
        else:
            optimizer = make_optimizer(named, task.optim, ndims)
        self._engine, *_ = deepspeed.initialize(
            model=model, config=config, dist_init_required=False, model_parameters=groups, optimizer=optimizer
        )
        self.module: nn.Module = self._engine  # its forward calls the module's between DeepSpeed's hooks
        self._named: list[tuple[str, Any]] = sorted(self._engine.module.named_parameters())
        self._skips = False
        self._clip_norm = self._engine.optimizer.clip_grad
        self._engine.optimizer._overflow_check_and_loss_scale_update = self._is_skipped
        if initial is not None and task.step.param_dtype != "float32":
            # DeepSpeed has made the masters from parameters that were rounded: they get the first values themselves.
            for index, group in enumerate(self._engine.optimizer.fp16_groups):
                with self._swapped_in(index, changed=True) as flat:
                    offset = 0
                    for param in group:
                        size, first = param.partition_numel(), dist.get_rank() * param.partition_numel()
                        whole = initial.tensor(self._engine.param_names[param], tuple(param.ds_shape)).flatten()
                        piece = whole[first : first + size]
                        flat.data[offset : offset + len(piece)].copy_(piece)
                        offset += size

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
        trained = [param for _, param in self._named if param.requires_grad]
        gradients = [safe_get_local_grad(param).detach().reshape(-1).double() for param in trained]
        self._engine.optimizer._overflow_clean_up(self._engine.optimizer.loss_scale)
        self._engine.set_gradient_accumulation_boundary(is_boundary=None)
        return gradients

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
        module, is_same_size = self._engine.module, num_saved == dist.get_world_size()
        with data_only(folder):
            if self._swaps_optimizer:
                self._restore_fragments(folder, num_saved)
                return
            names = {name for name, _ in module.named_parameters()} | set(module.state_dict())
            check_names(folder / TAG, names, dist.get_rank() if is_same_size else None)
            if is_same_size:
                self._engine.load_checkpoint(str(folder), tag=TAG)
                return
            optimizer = self._engine.optimizer.optimizer
            settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            from deepspeed.checkpoint.ds_to_universal import main as convert

            token = torch.tensor(secrets.randbits(62), device=self._engine.device)
            dist.broadcast(token, 0)
            # DeepSpeed's universal format, converted once on each node in its temporary folder.
            converted = user_folder() / f"universal-{int(token):x}"
            converts = environment().get("LOCAL_RANK", "0") == "0"
            try:
                if converts:
                    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
                    places = {"input_folder": str(folder / TAG), "output_folder": str(converted / TAG)}
                    convert(Namespace(**places, **options, strict=True, inject_missing_state=False))
                dist.barrier()
                self._engine.load_checkpoint(str(converted), tag=TAG)
                dist.barrier()  # before anybody removes it
            finally:
                if converts:
                    shutil.rmtree(converted, ignore_errors=True)
        # DeepSpeed's load of a universal checkpoint gives every group the first one's settings (its weight decay), and
        # all shards one tensor as their count of steps, which each of them would advance.
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    def _fragments(self) -> Fragments:
        """This rank's slices of masters and optimizer state. DeepSpeed's own checkpoints copy swap files, which fit the
        same number of ranks, and leave out what is too small to be swapped."""
        zero, slices, plain = self._engine.optimizer, dict[str, dict[str, Tensor]](), dict[str, object]()
        for index, group in enumerate(zero.fp16_groups):
            with self._swapped_in(index, changed=False) as flat:
                state, sharded = zero.optimizer.state.get(flat, {}), {MASTER: flat}
                for key, value in state.items():
                    is_sharded = isinstance(value, Tensor) and value.numel() == flat.numel() > 1
                    (sharded if is_sharded else plain)[key] = value
                offset = 0
                for param in group:
                    size = param.partition_numel()
                    slices[self._engine.param_names[param]] = {
                        key: value.detach()[offset : offset + size].cpu().clone() for key, value in sharded.items()
                    }
                    offset += size
        return {"slices": slices, "plain": plain}

    def _restore_fragments(self, folder: Path, num_saved: int) -> None:
        saved: list[Fragments] = [
            torch.load(folder / FRAGMENTS.format(rank=rank), mmap=True) for rank in range(num_saved)
        ]
        zero, rank = self._engine.optimizer, dist.get_rank()
        for index, group in enumerate(zero.fp16_groups):
            names = [self._engine.param_names[param] for param in group]
            values: dict[str, Tensor] = {}
            for key in saved[0]["slices"][names[0]]:
                mine = []
                for name, param in zip(names, group, strict=True):
                    slices = [part["slices"].get(name, {}).get(key) for part in saved]
                    tensors = [part for part in slices if isinstance(part, Tensor) and part.dim() == 1]
                    size, num_saved_elements = param.partition_numel(), sum(map(len, tensors))
                    if len(tensors) != len(slices) or num_saved_elements < param.ds_numel:  # the rest would be zeros
                        files = folder / FRAGMENTS.format(rank=0)
                        raise CheckpointDamaged(
                            f"{files} and those beside it have {num_saved_elements} of {param.ds_numel} elements of "
                            f"{name}",
                            path=str(files),
                        )
                    piece = torch.cat(tensors)[: param.ds_numel][rank * size : (rank + 1) * size]
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

        for name, param in self._named:
            yield name, safe_get_full_fp32_param(param).detach().reshape(param.ds_shape).float().cpu()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The unsharded shape of every parameter, in name order."""
        return {name: tuple(param.ds_shape) for name, param in self._named}


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
                total.update(raw_bytes(tensor))
        if storage is not None:
            digest = {"sha256": total.hexdigest()} if file == WEIGHTS else {}
            storage.replace(file, safetensors_chunks(kept, {"format": "pt", **digest}))
    if storage is not None:
        if WEIGHTS not in files:
            placed = {name: file for file, names in files.items() for name in names}
            metadata = {"total_size": sum(sizes.values()), "sha256": total.hexdigest()}
            storage.replace(WEIGHTS_INDEX, index_text(placed, metadata))
        remove_others(storage, [WEIGHTS] if WEIGHTS in files else [WEIGHTS_INDEX, *files])
    return total.hexdigest()


# ------------------------------------------------------------ files of others, as data


@contextmanager
def data_only(folder: Path) -> Iterator[None]:
    """Restricts torch.load, here and in child processes, to tensors, plain values and three classes of DeepSpeed.
    Raises CheckpointDamaged, with the reason, for a file in `folder` with more."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    variables = environment()
    before = variables.get(_ONLY_DATA)
    variables[_ONLY_DATA] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum]):
            yield
    except UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), str(error)[:300])
        raise CheckpointDamaged(
            f"{folder} holds more than tensors and numbers, and was not read: {reason}", path=str(folder)
        ) from error
    finally:
        if before is None:
            del variables[_ONLY_DATA]
        else:
            variables[_ONLY_DATA] = before


def check_names(folder: Path, names: Set[str], rank: int | None = None) -> None:
    """DeepSpeed's conversion makes paths of keys in its files: those must be `names` of the model. Files must be of
    stage 3: of others it takes other keys. `rank`: look at this one's files only, which alone DeepSpeed reads then.

    Call it in `data_only`. Raises CheckpointDamaged.
    """
    for path in sorted(folder.glob("*_states.pt" if rank is None else f"*zero_pp_rank_{rank}_*_states.pt")):
        kind = _FILE.fullmatch(path.name)
        state = torch.load(path, map_location="cpu", mmap=True) if kind else None
        if not kind or not isinstance(state, dict):
            reason = "is no file of ZeRO stage 3"
        elif kind[2] == "optim":
            optimizer = state.get("optimizer_state_dict")
            is_right = isinstance(optimizer, dict) and optimizer.get("zero_stage") == 3
            reason = "" if is_right else "is not of ZeRO stage 3"
        else:
            values = (state.get(key) or [] for key in _NAMES)
            parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
            keys = [key for part in parts for key in (part if isinstance(part, dict) else [part])]
            odd = [key for key in keys if not isinstance(key, str) or key not in names]
            odd += [key for key in _EXPERTS if state.get(key)]
            is_right = not odd and isinstance(state.get("param_shapes"), list)
            reason = "" if is_right else f"names {str(odd[:1])[:200]}, which the model does not have"
        if reason:
            raise CheckpointDamaged(f"{path} {reason}, and was not loaded", path=str(path))
