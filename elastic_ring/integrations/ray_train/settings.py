"""The settings of ZeRO-3 in Ray Train, and the DeepSpeed configuration that they give. Neither DeepSpeed, Ray nor torch
is imported here; what only DeepSpeed knows is checked in `ops`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from elastic_ring.config import OptimConfig, StepConfig
from elastic_ring.files import plain_json, private_folder, read_small, user_folder
from elastic_ring.mesh import Mesh
from elastic_ring.validation import Must, NonNegativeInt, settings

Place = Literal["none", "cpu", "nvme"]
STAGE = 3
NEVER = 1 << 30
BUFFER_COUNT = 5  # DeepSpeed's own number of buffers for parameters on their way from NVMe

# Keys of a DeepSpeed configuration that elastic_ring sets, and by which setting.
DECIDED = {
    "train_batch_size": "step_config.global_batch (--global-batch)",
    "train_micro_batch_size_per_gpu": "a rank computes one sequence at a time",
    "gradient_accumulation_steps": "it follows from global_batch and the mesh",
    "managed_gradient_accumulation": "a step is the last sequence of its batch",
    "gradient_clipping": "optim_config.clip_norm (--optim.clip-norm)",
    "scheduler": "optim_config.schedule (--optim.schedule)",
    "bf16": "step_config.param_dtype (--step.param-dtype)",
    "bfloat16": "step_config.param_dtype (--step.param-dtype)",
    "fp16": "step_config.param_dtype (--step.param-dtype), which is float32 or bfloat16",
    "amp": "step_config.param_dtype (--step.param-dtype)",
    "checkpoint": "checkpoints go through Ray Train",
    "elasticity": "the number of workers is Ray Train's (--workers MIN:MAX)",
    "zero_allow_untested_optimizer": "it is always on",
    "zero_force_ds_cpu_optimizer": "it is always off, so that offloading does not change the optimizer",
    "tensor_parallel": "the mesh is data x context parallel; leave it out",
    "autotp_size": "the mesh is data x context parallel; leave it out",
    "pipeline": "the mesh is data x context parallel; leave it out",
    "sequence_parallel_size": "cp (--cp), whose ring replaces DeepSpeed's sequence parallelism",
}
# Settings of ZeRO that keep more than one copy of a shard, for groups of so many ranks.
GROUPS = {"zero_hpz_partition_size": 1, "mics_shard_size": -1}
OFFLOADS = {"offload_optimizer": "--offload-optimizer", "offload_param": "--offload-param"}


@settings
class Zero3Config:
    """ZeRO-3 over all dp x cp ranks: what is kept outside of the devices, and how often a checkpoint is reported."""

    _prefix: ClassVar[str] = "Zero3Config "

    offload_optimizer: Place = "none"
    """Where moments and fp32 masters are kept between steps; the optimizer computes on the CPU if not none."""
    offload_param: Place = "none"
    """Where parameters are kept while no layer computes with them."""
    nvme_path: Annotated[
        str,
        BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path),
        Must("a folder on a local disk"),
    ] = ""
    """For "nvme": a folder of each node; elastic_ring/nvme in the system's temporary folder if left out."""
    checkpoint_every_steps: NonNegativeInt = 10
    """Steps between checkpoints; 0 for one at the end only."""
    loss_spike: Literal["off", "log", "act"] = "log"
    """What follows a loss far above those before: nothing, a line in the log, or loss_spike_actions."""
    loss_spike_actions: Annotated[
        tuple[Literal["clip", "skip", "stop"], ...],
        BeforeValidator(lambda actions: tuple(actions) if isinstance(actions, list) else actions),
        Field(min_length=1),
        Must("one or more of clip, skip, stop; back needs the elastic ring, which keeps its workers when it goes back"),
    ] = ("clip", "skip", "skip", "stop")
    """What the first, second, ... spike within 64 steps leads to, the last for all later ones, as in RunConfig."""
    deepspeed: Annotated[Mapping[str, Any], Must("a mapping, DeepSpeed's configuration")] = field(default_factory=dict)
    """More of DeepSpeed's own configuration; what is set here or by other settings must not be in it."""

    def __post_init__(self) -> None:
        if self.offload_param != "none" and self.offload_optimizer == "none":
            raise ValueError(
                f"offload_param={self.offload_param!r} with offload_optimizer='none': the masters would stay on the "
                "device and be larger than what leaves it; set offload_optimizer='cpu' or 'nvme' too"
            )
        config = "deepspeed configuration"
        for key, setting in DECIDED.items():
            if self.deepspeed.get(key, "auto") != "auto":
                raise ValueError(
                    f"{config} {key}={self.deepspeed[key]!r}: elastic_ring sets it ({setting}); leave it out"
                )
        zero = self.deepspeed.get("zero_optimization", {})
        if not isinstance(zero, Mapping):
            raise ValueError(f"{config} zero_optimization={zero!r}: must be an object")
        if zero.get("stage", STAGE) not in (STAGE, "auto"):
            raise ValueError(
                f"{config} zero_optimization.stage={zero['stage']!r}: this is the door for stage 3; leave it out"
            )
        for key, flag in OFFLOADS.items():
            part, place = zero.get(key) or {}, getattr(self, key)
            if part.get("device", place) != place:
                raise ValueError(
                    f"{config} zero_optimization.{key}.device={part['device']!r} with {key}={place!r}: set {flag} "
                    f"{part['device']}, and leave it out there"
                )
            if "nvme_path" in part:
                raise ValueError(
                    f"{config} zero_optimization.{key}.nvme_path={part['nvme_path']!r}: set nvme_path (--nvme-path), "
                    "and leave it out there"
                )

    @property
    def swap_folder(self) -> Path:
        return Path(self.nvme_path) if self.nvme_path else private_folder(user_folder() / "nvme")

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.offload_optimizer, self.offload_param)


def read_deepspeed(path: Path) -> dict[str, object]:
    """DeepSpeed's configuration of a file. Raises ValueError where it is no JSON object."""
    try:
        content = plain_json(read_small(path, is_asked=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"--deepspeed-config {path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"--deepspeed-config {path}: must be an object, as DeepSpeed's own configuration is")
    return content


def check_mesh(num_workers: tuple[int, int], cp: int, step: StepConfig, own: Zero3Config) -> None:
    """Raises ValueError where no mesh of these workers runs such steps: `num_workers` is (fewest, most)."""
    if step.micro_batch > 1:
        raise ValueError(
            f"sequences_per_pass={step.sequences_per_pass}: ZeRO-3 in Ray Train computes one sequence at "
            "a time; set it to 1"
        )
    fewest, most = num_workers
    if not 1 <= fewest <= most:
        raise ValueError(f"workers={fewest}:{most}: must be MIN:MAX with 1 <= MIN <= MAX")
    if cp < 1:
        raise ValueError(f"cp={cp}: must be at least 1")
    if fewest < cp:
        raise ValueError(
            f"workers={fewest} is less than cp={cp}: a ring needs cp workers; raise --workers or lower --cp"
        )
    step.check_ring(cp)
    if fewest == most and most % cp:
        raise ValueError(
            f"workers={most} is no multiple of cp={cp}: the mesh is dp rings of cp workers; give "
            f"--workers {most - most % cp} or {most - most % cp + cp}"
        )
    if fewest == most and step.global_batch % (most // cp):
        raise ValueError(
            f"global_batch={step.global_batch} is no multiple of dp={most // cp} (workers={most}, cp={cp}): ZeRO-3 "
            "needs equally many sequences on every ring; change --global-batch or --workers"
        )
    zero = own.deepspeed.get("zero_optimization", {})
    for key, off in GROUPS.items():
        size = zero.get(key, off)
        odd = next((number for number in range(fewest, most + 1) if size != off and number % size), None)
        if odd is not None:
            raise ValueError(
                f"deepspeed configuration zero_optimization.{key}={size!r} does not divide workers={odd}: ZeRO-3 "
                "shards over all dp x cp workers; leave it out or let it divide them"
            )


def mesh_of(num_workers: int, cp: int, global_batch: int) -> Mesh:
    """The mesh of so many workers: of `cp`, or of the next larger one with which rings and sequences come out even.

    Ray Train may start any number between its bounds. A ring of all workers always fits.
    """
    for size in range(cp, num_workers + 1):
        if num_workers % size == 0 and global_batch % (num_workers // size) == 0:
            return Mesh(num_workers // size, size)
    raise ValueError(f"workers={num_workers} is less than cp={cp}: a ring needs cp workers")


def deepspeed_config(
    own: Zero3Config,
    step: StepConfig,
    optim: OptimConfig,
    mesh: Mesh,
    *,
    swap_folder: Path,
    universal: bool,
    largest_elements: int,
    pin_memory: bool,
) -> dict[str, object]:
    """DeepSpeed's configuration for one worker group. `largest_elements`: of one parameter, for buffers of NVMe."""
    config = {key: value for key, value in copy.deepcopy(dict(own.deepspeed)).items() if key not in DECIDED}
    # DeepSpeed's own linear layer would round differently from the elastic ring's.
    zero = {"memory_efficient_linear": False, **config.get("zero_optimization", {}), "stage": STAGE}
    for key in OFFLOADS:
        place = getattr(own, key)
        if place == "none":
            continue
        zero[key] = {"pin_memory": pin_memory, **(zero.get(key) or {}), "device": place}
        if place == "nvme":
            zero[key]["nvme_path"] = str(swap_folder)
            if key == "offload_param":
                buffers = {"buffer_count": BUFFER_COUNT, "buffer_size": largest_elements, "max_in_cpu": 0}
                zero[key] = buffers | zero[key]
    return {
        # Gradients are summed in fp32, as in the elastic ring; with bf16 parameters DeepSpeed's own choice is bf16.
        "steps_per_print": NEVER,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        **config,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": step.global_batch // mesh.dp,
        "gradient_clipping": optim.clip_norm or 0.0,
        "bf16": {"enabled": step.param_dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": universal},
        "zero_optimization": zero,
    }
