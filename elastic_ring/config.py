"""The settings of a run: frozen dataclasses, checked once; each error names setting, value and way out.

The environment is read here and nowhere else (`environment()`). No Ray, no torch: a configuration can be
built, checked, printed and compared on any machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from elastic_ring.faults import EXCHANGES, GPU_KINDS, Fault, parse_faults
from elastic_ring.files import user_folder
from elastic_ring.mesh import Mesh
from elastic_ring.validation import Flag, Must, NonNegativeInt, PositiveInt, PositiveSeconds, Seconds, settings

CpuOffload = Literal["none", "optimizer", "all"]

_WORKING_COPY = "/runtime_resources/working_dir_files/"  # where Ray unpacks what a job was submitted with
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def _faults(value: object) -> object:
    return parse_faults(value) if isinstance(value, str) else value


def _path_as_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _list_as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


@settings
class Timeouts:
    """The limits of all waits, in seconds. A limit is longer than those that it contains (checked)."""

    _prefix: ClassVar[str] = "timeouts."

    stopped_s: PositiveSeconds = 0.4
    """A process stopped (state T) this long is frozen. For the last holder of a shard this and the next are at least
    what going back would cost, up to heart_cap_s."""
    heart_floor_s: PositiveSeconds = 1.2
    """A process that is silent this long without using the CPU hangs; the limit adapts upwards."""
    heart_cap_s: PositiveSeconds = 20.0
    """The upper bound of that limit, also at start and while writing weights."""
    heart_computing_s: PositiveSeconds = 40.0
    """The same for a process that uses the CPU; adapts up to compile_s. Raise it where code holds the GIL."""
    compile_s: PositiveSeconds = 300.0
    """One announced compilation in a step."""
    park_s: PositiveSeconds = 20.0
    """From abort to the training thread's return. Above the longest kernel."""
    report_s: PositiveSeconds = 30.0
    """From Stop to a member's report; then it is killed."""
    build_s: PositiveSeconds = 60.0
    """From Build to the last Resumed, healing and a repeated update included. Raise it for large shards, slow links."""
    beat_s: PositiveSeconds = 0.5
    """Between two beats of a node agent. Raise it for very many nodes."""
    node_silent_s: PositiveSeconds = 4.0
    """An agent's silence before a second source is asked; then the node is lost."""
    coordinator_silent_s: PositiveSeconds = 15.0
    """The coordinator's silence before it is killed and restarted. Raise it for slow storage under RUN."""
    hello_s: PositiveSeconds = 30.0
    """A worker's answer to a new coordinator, and a coordinator's to a driver."""
    gather_s: PositiveSeconds = 5.0
    """How long the first workers wait for a node that Ray lists, from the last sign of one on."""
    start_s: PositiveSeconds = 120.0
    """A worker's start, or its next sign of progress. Raise it for slow imports and large corpora."""
    start_max_s: PositiveSeconds = 1800.0
    """A start that shows progress (its process uses CPU)."""
    boundary_s: PositiveSeconds = 600.0
    """From a boundary request (drain, growth, stop) to the boundary. Above the longest step."""
    finalize_s: PositiveSeconds = 600.0
    """Gathering and writing the weights, and the last checkpoint's end."""
    restore_s: PositiveSeconds = 1800.0
    """Reading a checkpoint, beside build_s."""
    collective_s: PositiveSeconds = 900.0
    """One exchange; park_s later, a step in which nothing moves."""
    lease_s: PositiveSeconds = 60.0
    """How long a run outlives its driver, and a driver waits for a coordinator."""
    storage_s: PositiveSeconds = 60.0
    """Retries of a failing storage request, then StorageFailed. Above your storage's outages."""
    callback_s: PositiveSeconds = 60.0
    """At a validation, the answer of callbacks with `controls`."""
    clear_s: PositiveSeconds = 30.0
    """The end of actors and placement groups; at a start, the removal of stamps."""
    stop_save_s: PositiveSeconds = 2.0
    """From SIGTERM, SIGHUP or SIGUSR1 to the last checkpoint; a run that needs longer ends without. To raise it, set
    Ray's RAY_JOB_STOP_WAIT_TIME_S (3) above it."""
    probe_s: PositiveSeconds = 20.0
    """A host's answer to `elastic-ring doctor`."""

    def __post_init__(self) -> None:
        ordered = (
            ("stopped_s", "heart_floor_s"),
            ("heart_floor_s", "heart_cap_s"),
            ("heart_cap_s", "report_s"),
            ("heart_cap_s", "heart_computing_s"),
            ("heart_computing_s", "compile_s"),
            ("heart_computing_s", "collective_s"),
            ("park_s", "report_s"),
            ("park_s", "hello_s"),
            ("report_s", "build_s"),
            ("beat_s", "node_silent_s"),
            ("beat_s", "coordinator_silent_s"),
            ("gather_s", "start_s"),
            ("start_s", "start_max_s"),
            ("build_s", "boundary_s"),
            ("heart_cap_s", "collective_s"),
            ("build_s", "collective_s"),
            ("build_s", "restore_s"),
            ("stop_save_s", "boundary_s"),
        )
        for shorter, longer in ordered:
            if getattr(self, shorter) >= getattr(self, longer):
                raise ValueError(
                    f"timeouts.{shorter}={getattr(self, shorter)} must be less than "
                    f"timeouts.{longer}={getattr(self, longer)}: raise the second or lower the first"
                )

    @property
    def stall_s(self) -> float:
        """A step in which neither thread nor device moves is given up after this long: an exchange has ended by its own
        timeout by then, and its thread has had `park_s` to return."""
        return self.collective_s + self.park_s


@settings
class ScalingConfig:
    """The mesh: how many ranks, on which devices, and the bounds within which it grows and shrinks.

    On GPUs (`device="cuda"`) every worker sees all GPUs of its node and takes a free one when it joins the mesh. A
    spare holds none until it replaces a dead worker and takes over its GPU, so give at least one spare for each node.
    """

    _instead: ClassVar[Mapping[str, str]] = {
        "num_workers": "the mesh is dp rings of cp ranks; set dp and cp, and spares beside them",
        "use_gpu": "set device='cuda'",
        "trainer_resources": "the driver and the coordinator need none; leave it out",
        "placement_strategy": "rings are packed onto nodes and replicas spread over them; leave it out",
    }

    dp: Annotated[PositiveInt, Flag("dp")] = 2
    """Rings side by side (data parallel)."""
    cp: Annotated[PositiveInt, Flag("cp")] = 2
    """Ranks of a ring, over which a sequence is split (context parallel)."""
    spares: Annotated[NonNegativeInt, Flag("spares")] = 1
    """Warm workers that wait to take a dead one's place."""
    min_dp: Annotated[PositiveInt, Flag("min_dp")] = 1
    """The mesh shrinks to no fewer rings than this."""
    max_dp: Annotated[PositiveInt | None, Flag("max_dp")] = None
    """The mesh grows to no more rings than this; dp if left out."""
    resources_per_worker: Annotated[
        Mapping[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]],
        Must("a mapping such as {'CPU': 1} or {'GPU': 1}, with amounts that are numbers and not negative"),
    ] = field(default_factory=lambda: {"CPU": 1.0})
    """What Ray reserves for each worker."""
    num_threads: PositiveInt = 1
    """Threads of a worker's computations on a CPU."""
    device: Annotated[Literal["cpu", "cuda"], Flag("device")] = "cpu"
    """Where workers compute."""
    cpu_offload: Annotated[CpuOffload, Flag("cpu_offload")] = "none"
    """The part of a rank's state that is kept in host memory and copied to its GPU when needed, with equal bits: none,
    the optimizer's moments (8 bytes a parameter), or all but the gradients that are summed over the rings (16)."""
    keep_activations: Annotated[bool | Literal["auto"], Must("auto, true or false")] = "auto"
    """Keep activations that layers would compute again in backward: faster, with equal bits. "auto": if the plan of a
    rank with them fits the run's GPU, decided at each submission. For presets and Hugging Face decoders."""
    release_contexts: bool = True
    """Members on GPUs destroy their unused CUDA contexts after step 2; such a worker exits instead of becoming a
    spare again."""
    domain_labels: Annotated[tuple[str, ...], BeforeValidator(_list_as_tuple)] = (
        "ray.io/availability-zone",
        "rack",
        "host",
    )
    """Labels of Ray's nodes that name failure domains, the widest first; labels that a node lacks are skipped."""
    wait_for_resources_s: Annotated[Seconds, Flag("wait_for_resources_s")] = 0.0
    """How long to wait at the start for a cluster that is still too small."""

    def __post_init__(self) -> None:
        if self.min_dp > self.dp:
            raise ValueError(f"min_dp={self.min_dp} is more than dp={self.dp}: lower min_dp or raise dp")
        if self.max_dp is not None and self.max_dp < self.dp:
            raise ValueError(f"max_dp={self.max_dp} is less than dp={self.dp}: raise max_dp or leave it out")
        if not any(self.resources_per_worker.values()):
            raise ValueError(
                f"resources_per_worker={dict(self.resources_per_worker)}: name at least one resource, "
                "for example {'CPU': 1} or {'GPU': 1}, with an amount of more than 0"
            )
        if "object_store_memory" in self.resources_per_worker:
            raise ValueError(
                f"resources_per_worker={dict(self.resources_per_worker)}: Ray gives no actor object_store_memory; "
                "leave it out: the workers keep nothing in Ray's object store"
            )

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.dp, self.cp)

    @property
    def most_rings(self) -> int:
        return self.max_dp or self.dp

    @property
    def num_workers(self) -> int:
        """Members and spares at the start."""
        return self.dp * self.cp + self.spares


@settings
class StepConfig:
    """What one optimizer step is, whatever the mesh: `global_batch` sequences of `context_tokens`."""

    IDENTITY: ClassVar[tuple[str, ...]] = ("seed", "global_batch", "context_tokens", "param_dtype")
    """Settings that a run keeps for good."""

    steps: Annotated[PositiveInt, Flag("steps")] = 40
    """Optimizer steps to train."""
    global_batch: Annotated[PositiveInt, Flag("global_batch")] = 4
    """Sequences in a step."""
    sequences_per_pass: Annotated[PositiveInt | Literal["auto"], Must("auto, or a whole number of at least 1")] = "auto"
    """Sequences that a ring computes in one forward and backward pass. More than one: fewer gathers and exchanges, and
    activations of so many sequences in memory. A ring's last pass has the rest of its share. "auto": the fewest
    within 2 % of the fastest step that the forecast finds among those that fit the run's GPU; on CPUs as many as have
    1,024 tokens a rank. A run on record keeps its number."""
    context_tokens: Annotated[PositiveInt, Flag("context")] = 2048
    """Tokens of a sequence."""
    seed: Annotated[int, Field(ge=0, lt=2**64), Must("a whole number of at least 0 and below 2**64"), Flag("seed")] = 0
    """Seed of the initial values, of random numbers in the model and of the order of samples."""
    layout: Annotated[Literal["contiguous", "zigzag", "auto"], Flag("layout")] = "zigzag"
    """How a ring splits a sequence. "auto" chooses by the bytes that the pattern's layers send and by their balance of
    work, the same for the same ring in every process (zigzag without a pattern)."""
    val_every_steps: Annotated[NonNegativeInt, Flag("val_every")] = 0
    """Steps between validations; 0 for none."""
    val_every_tokens: Annotated[NonNegativeInt, Flag("val_every_tokens")] = 0
    """Tokens between validations, in place of steps: one follows each step that completes so many."""
    num_val_sequences: PositiveInt = 4
    """Sequences held out for validation."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """The type in which the model computes; master weights stay float32."""
    check_model: bool = True
    """Compare the model on a ring with the model on one rank before training."""
    deterministic: bool = True
    """Take bitwise repeatable kernels: the promise of equal bits needs them, and they cost some speed on a GPU."""
    kernel: Annotated[str, Flag("kernel")] = ""
    """Pin one attention kernel by name; empty for the best that passes its self-test."""
    kv_wire: Annotated[Literal["native", "fp8"], Flag("kv_wire")] = "native"
    """How keys and values cross a ring: in their own type; or in 8 bits with a scale for each head's vector, about half
    the bytes, where each element is off by at most 1/16 of itself or 2.2e-6 of the vector's largest."""
    linears: Annotated[Literal["native", "fp8"], Flag("linears")] = "native"
    """The type in which linear layers multiply: param_dtype; or 8 bits (e4m3, a scale for each row and call), but for
    the gradients of weights, the first layer, the last one and the head. For an H100 or newer."""
    experts: Literal["auto", "gather", "send"] = "auto"
    """Gather the weights of experts like all others, or send tokens to the rank that holds their experts. "auto":
    whichever sends fewer bytes, the same on all ranks."""

    def __post_init__(self) -> None:
        if self.val_every_steps and self.val_every_tokens:
            raise ValueError(
                f"val_every_steps={self.val_every_steps} beside val_every_tokens={self.val_every_tokens}: give one"
            )
        if self.micro_batch > self.global_batch:
            raise ValueError(
                f"sequences_per_pass={self.sequences_per_pass} is more than global_batch={self.global_batch}: no ring "
                "has so many sequences in a step; lower sequences_per_pass or raise global_batch"
            )
        if self.linears == "fp8" and self.param_dtype != "bfloat16":
            raise ValueError(
                f"linears='fp8' and param_dtype={self.param_dtype!r}: what is not multiplied in 8 bits is computed in "
                "bfloat16 then; set param_dtype='bfloat16', or leave linears out"
            )

    @property
    def micro_batch(self) -> int:
        """`sequences_per_pass` as a number; 1 until "auto" is resolved."""
        return 1 if self.sequences_per_pass == "auto" else self.sequences_per_pass

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.context_tokens

    def rank_tokens(self, cp: int) -> int:
        """The most tokens of a sequence that a rank of a ring of `cp` has."""
        return -(-self.context_tokens // cp)

    @property
    def longest_ring(self) -> int:
        """Each rank of a ring needs a token."""
        return self.context_tokens

    def check_ring(self, cp: int) -> None:
        """Raises ValueError for rings with more ranks than a sequence has tokens."""
        if cp > self.longest_ring:
            raise ValueError(
                f"context_tokens={self.context_tokens} is less than cp={cp}: every rank of a ring needs at least "
                "one token; raise context_tokens or lower cp"
            )

    @property
    def validates(self) -> bool:
        return bool(self.val_every_steps or self.val_every_tokens)

    def validates_after(self, num_steps: int) -> bool:
        """Whether a validation follows so many steps; with any, one follows the last."""
        if not self.validates or num_steps == 0:
            return False
        if num_steps == self.steps or not self.val_every_tokens:
            return num_steps == self.steps or num_steps % self.val_every_steps == 0
        tokens, every = self.tokens_per_step, self.val_every_tokens
        return num_steps * tokens // every > (num_steps - 1) * tokens // every


@settings
class OptimConfig:
    """AdamW or Muon, with warm-up and a schedule."""

    _prefix: ClassVar[str] = "OptimConfig "

    peak_lr: Annotated[float, Field(gt=0, allow_inf_nan=False), Must("a number above 0")] = 3e-4
    """Learning rate after the warm-up."""
    min_lr: Annotated[float, Field(allow_inf_nan=False)] = 3e-5
    """Learning rate of the last step and of all later ones; unused by schedule="constant"."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the rate falls after the warm-up: half a cosine; a line; not at all; not until the last decay_steps, then a
    line (warm-up, stable, decay). The trainer's lr_schedule takes a function instead."""
    decay_steps: PositiveInt | None = None
    """Steps over which "wsd" decays; a fifth of total_steps if left out."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly to peak_lr."""
    total_steps: PositiveInt = 1000
    """Steps of the schedule."""
    replanned: Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_list_as_tuple), Must("pairs of steps")] = ()
    """Earlier schedules of an extended run, one after another: the step at which one ended, and the one at which the
    next began. --extend --replan sets it."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False), Must("a number of 0 or more")] = 0.1
    """For parameters of two or more dimensions."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        BeforeValidator(_list_as_tuple),
        Must("two numbers, both in [0, 1)"),
    ] = (0.9, 0.95)
    """Adam's decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False), Must("a number above 0")] = 1e-8
    """Added to Adam's denominator."""
    clip_norm: Annotated[float, Field(gt=0), Must("a number above 0, or None")] | None = 1.0
    """Bound on the norm of the gradient of the mean loss over the global batch; None for no clipping."""
    max_skipped: NonNegativeInt = 10
    """Steps in a row that may be skipped for a non-finite gradient."""
    optimizer: Annotated[Literal["adamw", "muon"], Flag("optimizer")] = "adamw"
    """muon: Muon for the matrices of the layers, with AdamW's rate and weight decay, and AdamW for the rest."""

    @property
    def plans(self) -> list[tuple[int, int]]:
        """(first step, step at which the decay has ended) of each schedule."""
        edges = (0, *self.replanned, self.total_steps)
        return list(zip(edges[::2], edges[1::2], strict=False))

    def __post_init__(self) -> None:
        begins = [first for first, _ in self.plans]
        if len(self.replanned) % 2 or begins != sorted(set(begins)) or any(first >= last for first, last in self.plans):
            raise ValueError(
                f"OptimConfig replanned={self.replanned}: must be pairs of steps, each schedule's end after its "
                f"beginning, up to total_steps={self.total_steps}; leave it to --extend --replan"
            )
        if not 0.0 <= self.min_lr <= self.peak_lr:
            raise ValueError(f"OptimConfig min_lr={self.min_lr}: must be in [0, peak_lr={self.peak_lr}]")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ValueError(
                f"OptimConfig warmup_steps={self.warmup_steps}: must be in [0, total_steps={self.total_steps}]"
            )
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ValueError(
                f"OptimConfig decay_steps={self.decay_steps}: schedule={self.schedule!r} has no such part; leave it "
                "out, or set schedule='wsd'"
            )
        if self.decay_steps is not None and self.decay_steps > self.total_steps - self.warmup_steps:
            raise ValueError(
                f"OptimConfig decay_steps={self.decay_steps}: must be at most total_steps - warmup_steps="
                f"{self.total_steps - self.warmup_steps}"
            )


@settings
class CheckpointConfig:
    """Durable checkpoints in the run's storage: how often, and how many are kept.

    Without `every_steps` and `every_s` the run chooses the interval itself, from what a checkpoint costs and how often
    members are lost (Young, CACM 1974; Daly, FGCS 2006), and logs it.
    """

    _prefix: ClassVar[str] = "checkpoint."
    _instead: ClassVar[Mapping[str, str]] = {
        "num_to_keep": "use keep_last",
        "checkpoint_frequency": "use every_steps",
        "checkpoint_at_end": "the weights are written at the end; use every_steps for a checkpoint at the last step",
        "checkpoint_score_attribute": "give the trainer the callback KeepBest; keep_last and keep_every go by age",
    }

    every_steps: Annotated[NonNegativeInt | None, Flag("checkpoint_every_steps")] = None
    """Steps between checkpoints; 0 for none at all."""
    every_s: PositiveSeconds | None = None
    """Seconds between checkpoints, in place of every_steps."""
    keep_last: Annotated[PositiveInt, Flag("checkpoint_keep_last")] = 2
    """How many of the newest checkpoints are kept."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are multiples of this are kept for good, too; 0 for none."""
    fail_after_s: PositiveSeconds = 3600.0
    """End the run when for this long no checkpoint could be written, or its storage did not answer whether another
    submission has taken the run over."""

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_s is not None:
            raise ValueError(
                f"checkpoint.every_steps={self.every_steps} and checkpoint.every_s={self.every_s}: give one of them"
            )

    @property
    def is_on(self) -> bool:
        return self.every_steps != 0


@settings
class RunConfig:
    """The run's name, its folder, its timeouts and, for drills, its planned faults.

    The name is the identity: submitting it again attaches to the live run. Its folder is `storage_path`/`name`, or
    `run_dir` where that is given. It must be visible to every node that may host the coordinator or global rank 0; a
    relative path starts at the working directory (`check_lasting` refuses folders that Ray deletes).
    """

    _instead: ClassVar[Mapping[str, str]] = {
        "failure_config": "every failure is recovered from; set crash_loop_limit and user_error_limit for when to stop",
        "callbacks": "give them to the trainer: ElasticRingTrainer(..., callbacks=[...])",
        "verbose": "set progress=False to hide the progress line",
        "storage_filesystem": "give a storage_path that every node sees",
        "stop": "set step_config.steps; `ray job stop` or Ctrl-C ends a run earlier",
        "sync_config": "nothing is synchronised; storage_path is a folder that every node sees, or s3://bucket/prefix",
        "log_to_file": "Ray has the workers' logs",
    }

    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$"),
        Must("up to 80 letters, digits, '.', '_' and '-', beginning with a letter or digit"),
        Flag("run_name"),
    ] = "elastic-ring"
    """One name, one run: the same name again follows the run or goes on with it."""
    storage_path: Annotated[str, BeforeValidator(_path_as_text), Flag("storage_path")] = "runs"
    """Where the run's folder is made: a path that every node sees, or s3://bucket/prefix."""
    run_dir: Annotated[str | None, BeforeValidator(_path_as_text), Flag("run_dir")] = None
    """The run's folder itself, in place of storage_path/name."""
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Durable checkpoints."""
    copies: Annotated[
        str,
        BeforeValidator(_number_as_text),
        Field(pattern=r"^(auto|[012]|parity:([2-9]|[1-9][0-9]+))$"),
        Must("auto, 0, 1, 2 or parity:G, with G of at least 2"),
        Flag("copies"),
    ] = "auto"
    """Copies of each rank's state in the host memory of other ranks, on other nodes where there are some: 0, 1 or 2
    whole ones, or parity:G, one XOR for each G ranks, which covers a failure of one of them. auto: one while the mesh
    is a single ring, so that no other rank holds a shard, if the nodes have the memory (48 bytes x parameters / cp a
    rank); else none."""
    copy_every_steps: PositiveInt = 10
    """Steps between copies: at most so many run again after a failure that a copy covers."""
    resume: Annotated[
        str, Field(min_length=1), Must("auto, never, a step such as 1200, or the path of a checkpoint"), Flag("resume")
    ] = "auto"
    """Where to begin: auto (the newest checkpoint of this run that verifies, else step 0), never (step 0), a step
    that has a checkpoint, or the path of a run's checkpoint."""
    code_changed: bool = False
    """Go on with a run whose model, loss or other code is not what it began with."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    faults: Annotated[
        tuple[Fault, ...], BeforeValidator(_faults), Must("a schedule as text, or a tuple of Fault"), Flag("faults")
    ] = ()
    """Planned faults: kill@step=21,phase=backward,rank=3; freeze@step=30"""
    crash_loop_limit: PositiveInt = 3
    """A step that kills members this often ends the run."""
    loss_spike: Literal["off", "log", "act"] = "log"
    """What follows a loss far above those before: nothing, a line in the log, or loss_spike_actions."""
    loss_spike_actions: Annotated[
        tuple[Literal["clip", "skip", "back", "stop"], ...],
        BeforeValidator(_list_as_tuple),
        Field(min_length=1),
        Must("one or more of clip, skip, back, stop"),
    ] = ("clip", "skip", "skip", "stop")
    """Actions at the first, second, ... spike within 64 steps, the last for all later ones: clip (ten steps at a tenth
    of clip_norm), skip (the step changes nothing), back (to the newest copies or checkpoint from before it, and
    on with later batches; so also after max_skipped steps in a row), stop (the run ends)."""
    rollback_limit: PositiveInt = 3
    """How often the run goes back from about the same step, or begins again because no checkpoint exists yet, before it
    ends."""
    skip_batches: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[0-9]+\+[1-9][0-9]*$")], ...],
        BeforeValidator(_list_as_tuple),
        Must("entries such as 60+21, by rising step: from step 60 on, 21 batches are left out"),
    ] = ()
    """Batches that are left out of the order of samples: 60+21 leaves out 21 from step 60 on. With the entries in the
    journal of a run that went back, another run uses the same batches."""
    straggler: Literal["off", "log", "act"] = "log"
    """What follows when one rank is slower than its peers for minutes: nothing, a line in the log, or a spare takes its
    place."""
    straggler_factor: Annotated[float, Field(gt=1, allow_inf_nan=False), Must("a finite number above 1")] = 1.5
    """A rank is slow if it works this many times as long as its peers for its sequences."""
    straggler_window_s: PositiveSeconds = 180.0
    """Seconds of steps over which a rank is judged slow."""
    corruption: Literal["off", "log", "act"] = "log"
    """What follows when ranks that must agree do not: the run ends if replicas would differ, else a line in the log;
    with act the step runs again, and the rank that computed wrongly is replaced."""
    corruption_every_steps: NonNegativeInt = 200
    """In one step of so many each ring computes one pass of another ring, too, and replicas compare their state; 0
    for never. Norms of reduced gradients are compared in every step."""
    user_error_limit: PositiveInt = 2
    """A step on which the user's code raises this often ends the run."""
    memory_limit: Annotated[float, Field(ge=0, lt=1), Must("a share of the node's memory from 0 to below 1")] = 0.93
    """The share of a node's memory, or of its container's, at which the node's agent kills the worker that grew; 0 for
    never."""
    peak_tflops: Annotated[float, Field(gt=0, allow_inf_nan=False), Must("a number above 0")] | None = None
    """Peak TFLOP/s of one device, for the metric of utilisation (MFU); by the GPU's name if left out."""
    memory_pressure: Literal["off", "log", "act"] = "log"
    """What follows when memory is nearly full for eight steps: nothing, a line in the log, or the memory ladder's next
    relief is taken at a boundary, before memory runs out."""
    memory_pressure_share: Annotated[float, Field(gt=0, le=1), Must("a share above 0, at most 1")] = 0.95
    """Memory counts as nearly full at this share of a device's memory, or of `memory_limit` on a host."""
    memory_relax_steps: NonNegativeInt = 200
    """Steps without a shortage after which the memory ladder goes one relief down; 0 for never."""
    grow_delay_s: Annotated[Seconds, Flag("grow_delay_s")] = 2.0
    """How long new capacity must last before the mesh grows."""
    grow_interval_s: Annotated[Seconds, Flag("grow_interval_s")] = 0.0
    """The mesh grows no sooner than this after its size has changed; 0 for no limit."""
    grow_cost_s: Annotated[Seconds | None, Flag("grow_cost_s")] = None
    """Seconds that a growth must save until the end of the run, at the pace so far; if left out, the time of the last
    build and of the last new worker's start."""
    corpus_look_s: Annotated[Seconds, Flag("corpus_look_s")] = 5.0
    """Seconds between looks for a longer manifest, while `data prepare` goes on; 0: the corpus stays as it is."""
    notices: str = ""
    """Source of reclaim notices that each node polls: aws, gcp, azure, or MODULE:FUNCTION, which returns None or the
    seconds that are left; none if left out."""
    progress: bool = True
    """Show each step."""
    env: Annotated[Mapping[str, str], Must("a mapping of text to text, for example {'NCCL_DEBUG': 'INFO'}")] = field(
        default_factory=dict
    )
    """Variables for the workers' processes; they win over those that elastic_ring sets by itself on GPUs
    (docs/operating/gpus.md lists these)."""

    def __post_init__(self) -> None:
        # Resolved where the user wrote it: other processes have other working directories.
        for setting in ("storage_path", "run_dir"):
            value = getattr(self, setting)
            if value is None or re.match("s3://[^/]", value):
                continue
            if not value or value.startswith("s3://"):
                raise ValueError(f"{setting}={value!r}: give a folder, or s3://bucket/prefix with the bucket's name")
            if _URI.match(value):
                raise ValueError(
                    f"{setting}={value!r}: give s3://bucket/prefix, or a path on a shared file system, "
                    "that every node sees"
                )
            object.__setattr__(self, setting, str(Path(value).expanduser().absolute()))
        if self.resume not in ("auto", "never") and not self.resume.isdigit() and not _URI.match(self.resume):
            object.__setattr__(self, "resume", str(Path(self.resume).expanduser().absolute()))

    @property
    def storage_uri(self) -> str:
        """Where the run's checkpoints, weights and records are: s3://bucket/prefix/NAME, or a folder."""
        return self.run_dir or f"{self.storage_path.rstrip('/')}/{self.name}"

    @property
    def is_remote(self) -> bool:
        """Whether that is an object store: records are then written on the coordinator's node, and mirrored."""
        return self.storage_uri.startswith("s3://")

    @property
    def folder(self) -> Path:
        """Where the coordinator writes the run's records."""
        return self._local("coordinator") if self.is_remote else Path(self.storage_uri)

    @property
    def driver_folder(self) -> Path:
        """Where a driver reads and writes the run's records: the same folder, or a copy of its own."""
        return self._local("driver") if self.is_remote else Path(self.storage_uri)

    def _local(self, role: str) -> Path:
        suffix = hashlib.sha256(self.storage_uri.encode()).hexdigest()[:12]
        return user_folder() / f"{self.name}-{suffix}" / role


def check_lasting(folder: Path) -> None:
    """Raises ValueError for a run folder that Ray would delete. Called before a run starts, not by the constructor,
    which also runs in a job's workers and for a plan."""
    if _WORKING_COPY in f"{folder.as_posix()}/":
        raise ValueError(
            f"run_dir={str(folder)!r} lies in Ray's temporary copy of a job's working directory, which Ray deletes: "
            "give an absolute path that every node sees (--run-dir /shared/runs/NAME)"
        )


def check_together(scaling: ScalingConfig, step: StepConfig, faults: tuple[Fault, ...]) -> None:
    """Raises ValueError for settings that contradict each other."""
    if step.global_batch < scaling.most_rings:
        raise ValueError(
            f"global_batch={step.global_batch} is less than dp={scaling.most_rings}: every ring needs at least one "
            "sequence in each step; raise global_batch or lower dp (max_dp)"
        )
    step.check_ring(scaling.cp)
    if step.linears == "fp8" and scaling.device != "cuda":
        raise ValueError(
            f"linears='fp8' and device={scaling.device!r}: only GPUs multiply in 8 bits, an H100 or newer; leave "
            "linears out"
        )
    if step.experts == "send" and scaling.cpu_offload == "all":
        raise ValueError(
            "experts='send' and cpu_offload='all': experts that tokens are sent to stay on the device; take "
            "experts='auto', or cpu_offload='optimizer'"
        )
    for fault in faults:
        if fault.kind in GPU_KINDS and scaling.device != "cuda":
            raise ValueError(f"fault {fault}: only a GPU has such a fault, and device={scaling.device!r}: leave it out")
        if fault.step is not None and fault.step >= step.steps:
            raise ValueError(
                f"fault {fault}: step={fault.step} never comes in a run of steps={step.steps}; "
                f"name one of 0 to {step.steps - 1} or raise steps"
            )
        largest = Mesh(scaling.most_rings, scaling.cp)
        if fault.rank is not None and fault.rank >= largest.size:
            raise ValueError(
                f"fault {fault}: rank={fault.rank} is not in the mesh {largest}; name one of 0 to {largest.size - 1}"
            )
        if fault.phase in EXCHANGES and step.experts == "gather":
            raise ValueError(f"fault {fault}: with experts='gather' no tokens are sent to experts: take experts='send'")
        if fault.hop is not None and fault.phase not in (*EXCHANGES, "update") and fault.hop >= scaling.cp:
            raise ValueError(
                f"fault {fault}: hop={fault.hop} never comes on rings of cp={scaling.cp}; "
                f"name one of 0 to {scaling.cp - 1}"
            )


def check_loss_spikes(run: RunConfig, optim: OptimConfig) -> None:
    """Raises ValueError for an action that has nothing to do under the other settings."""
    has_sources = run.checkpoint_config.is_on or run.copies not in ("auto", "0")
    if run.loss_spike == "act" and "back" in run.loss_spike_actions and not has_sources:
        raise ValueError(
            f"loss_spike_actions={run.loss_spike_actions}: there is nothing to go back to: set copies, or "
            "checkpoint_config.every_steps"
        )
    if run.loss_spike == "act" and "clip" in run.loss_spike_actions and optim.clip_norm is None:
        raise ValueError(
            f"loss_spike_actions={run.loss_spike_actions}: clip lowers clip_norm, and clip_norm=None: leave clip out, "
            "or set clip_norm"
        )


def check_copies(mesh: Mesh, copies: str) -> None:
    """Raises ValueError for copies for which the mesh has too few ranks."""
    if copies == "auto":
        return
    kind, _, size = copies.partition(":")
    needed = 1 + int(size if kind == "parity" else kind)
    if copies == "0" or mesh.size >= needed:
        return
    if kind == "parity":
        raise ValueError(
            f"copies={copies!r}: a group of {size} ranks and the rank outside of it that holds their parity make "
            f"{needed}, and the mesh {mesh} has {mesh.size}: take smaller groups, copies='1', or a larger mesh"
        )
    raise ValueError(
        f"copies={copies!r}: each goes to another rank, and the mesh {mesh} has {mesh.size - 1} other rank(s): "
        f"take copies={str(mesh.size - 1)!r}, or a larger mesh (dp, cp)"
    )


def digest(*configs: Any) -> str:
    """The digest of a configuration: equal settings give equal digests on any machine."""
    plain = [dataclasses.asdict(c) if dataclasses.is_dataclass(c) and not isinstance(c, type) else c for c in configs]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def environment() -> MutableMapping[str, str]:
    """The one place that reads the process environment."""
    return os.environ
