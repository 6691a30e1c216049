"""What a user may set: frozen dataclasses, each checked once, each refusal naming setting, value and way out.

The environment is read here and nowhere else (`environment()`). No Ray, no torch: a configuration can be
built, checked, printed and compared on any machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from elastic_ring.faults import Fault, parse_faults
from elastic_ring.mesh import Mesh

_WORKING_COPY = "/runtime_resources/working_dir_files/"  # where Ray unpacks what a job was submitted with
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")


@dataclass(frozen=True)
class Timeouts:
    """Everything that waits, in seconds. Each bound must outlast the ones that it contains (checked)."""

    stopped_s: float = 0.4  # a process in state T for this long is frozen
    heart_floor_s: float = 1.2  # the least silence of a worker's heart that counts as a hang
    heart_cap_s: float = 20.0  # the most that the adaptive limit may grow to
    park_s: float = 20.0  # from abort to the training thread's return
    report_s: float = 30.0  # from Stop to a member's report
    build_s: float = 60.0  # from Build to the last Resumed, healing included
    beat_s: float = 0.5  # node agents' beat
    node_silent_s: float = 4.0  # no beat for this long (and a second source): the node is lost
    coordinator_silent_s: float = 15.0  # no answer to beats for this long: its process is killed and starts anew
    hello_s: float = 30.0  # for workers to answer a new coordinator
    start_s: float = 120.0  # for a worker's process to become a warm spare
    boundary_s: float = 600.0  # from a boundary request to the boundary
    finalize_s: float = 600.0  # gathering and writing the weights
    collective_s: float = 900.0  # one exchange between workers
    lease_s: float = 60.0  # how long a run outlives its driver
    clear_s: float = 30.0  # for actors and placement groups to be gone at the end, and for stamps that are removed

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"timeouts.{spec.name}={value!r}: must be a positive number of seconds")
        ordered = (
            ("stopped_s", "heart_floor_s"),
            ("heart_floor_s", "heart_cap_s"),
            ("heart_cap_s", "report_s"),
            ("park_s", "report_s"),
            ("park_s", "hello_s"),
            ("report_s", "build_s"),
            ("beat_s", "node_silent_s"),
            ("beat_s", "coordinator_silent_s"),
            ("build_s", "boundary_s"),
            ("heart_cap_s", "collective_s"),
            ("build_s", "collective_s"),
        )
        for shorter, longer in ordered:
            if getattr(self, shorter) >= getattr(self, longer):
                raise ValueError(
                    f"timeouts.{shorter}={getattr(self, shorter)} must be less than "
                    f"timeouts.{longer}={getattr(self, longer)}: raise the second or lower the first"
                )

    @property
    def standstill_s(self) -> float:
        """How long a step may stand still, neither its thread nor its device moving, before it is given up.

        An exchange that can end by itself has ended by then, and its thread has had `park_s` to come back from it.
        """
        return self.collective_s + self.park_s


@dataclass(frozen=True)
class ScalingConfig:
    """How many ranks, where, and within which bounds the mesh may move.

    `dp` rings of `cp` ranks are wanted; the mesh may shrink to `min_dp` rings and grow to `max_dp`.
    `spares` warm workers wait beside it. `resources_per_worker` is what Ray reserves for each. With
    `device="cuda"` every worker sees all GPUs of its node and takes one that no other holds when it gets a place
    in the mesh; a spare holds none, and takes that of a process that died: on several nodes give at least one for each.
    `release_contexts`: a member on GPUs lets go of those that it does not compute on, once it has settled, and ends
    when it would stand by again.
    """

    dp: int = 2
    cp: int = 2
    spares: int = 1
    min_dp: int = 1
    max_dp: int | None = None
    resources_per_worker: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    num_threads: int = 1
    device: str = "cpu"
    release_contexts: bool = True
    wait_for_resources_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("dp", 1), ("cp", 1), ("spares", 0), ("min_dp", 1), ("num_threads", 1)):
            _integer(name, getattr(self, name), least)
        _choice("device", self.device, ("cpu", "cuda"))
        if not isinstance(self.release_contexts, bool):
            raise ValueError(f"release_contexts={self.release_contexts!r}: must be True or False")
        if self.min_dp > self.dp:
            raise ValueError(f"min_dp={self.min_dp} is more than dp={self.dp}: lower min_dp or raise dp")
        if self.max_dp is not None:
            _integer("max_dp", self.max_dp, 1)
        if self.max_dp is not None and self.max_dp < self.dp:
            raise ValueError(f"max_dp={self.max_dp} is less than dp={self.dp}: raise max_dp or leave it out")
        if not 0 <= self.wait_for_resources_s < math.inf:
            raise ValueError(f"wait_for_resources_s={self.wait_for_resources_s!r}: must be 0 seconds or more")
        amounts = self.resources_per_worker.values()
        numbers = [amount for amount in amounts if isinstance(amount, Real) and amount >= 0]
        if len(numbers) < len(amounts) or not any(numbers):
            raise ValueError(
                f"resources_per_worker={dict(self.resources_per_worker)}: name at least one resource, "
                "for example {'CPU': 1} or {'GPU': 1}, with amounts that are numbers and not negative, and one that is "
                "more than 0"
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


@dataclass(frozen=True)
class StepConfig:
    """What one optimizer step is, whatever the mesh: `global_batch` sequences of `context_tokens`.

    `deterministic` takes bitwise repeatable kernels, which the promise of equal bits needs and which cost some
    speed on a GPU. `kernel` pins one attention kernel by name; left empty, the best that passes its test serves.
    `layout` is how a ring splits a sequence: "zigzag", "contiguous", or "auto", by what the pattern's layers send and
    compute together, the same for the same ring in every process (zigzag without a pattern).
    """

    steps: int = 40
    global_batch: int = 4
    context_tokens: int = 2048
    seed: int = 0
    layout: str = "zigzag"
    val_every_steps: int = 0
    num_val_sequences: int = 4
    param_dtype: str = "float32"
    check_model: bool = True
    deterministic: bool = True
    kernel: str = ""

    def __post_init__(self) -> None:
        _integer("steps", self.steps, 1)
        _integer("global_batch", self.global_batch, 1)
        _integer("context_tokens", self.context_tokens, 1)
        _integer("seed", self.seed, 0)
        _integer("val_every_steps", self.val_every_steps, 0)
        _integer("num_val_sequences", self.num_val_sequences, 1)
        _choice("layout", self.layout, ("contiguous", "zigzag", "auto"))
        _choice("param_dtype", self.param_dtype, ("float32", "bfloat16"))


@dataclass(frozen=True)
class RunConfig:
    """The run's name, its folder, its timeouts and, for drills, its planned faults.

    The name is the identity: submitting it again attaches to the live run. `run_dir` must be visible to
    every node that may host the coordinator or global rank 0; a relative one is taken from the working directory
    (`check_lasting` says where a run is not to be started). `env`: variables for the workers' processes; they win
    over those that elastic_ring sets by itself on GPUs (docs/operating.md lists these).
    """

    name: str = "elastic-ring"
    run_dir: str = "runs/elastic-ring"
    timeouts: Timeouts = field(default_factory=Timeouts)
    faults: tuple[Fault, ...] = ()
    crash_loop_limit: int = 3
    user_error_limit: int = 2
    grow_delay_s: float = 2.0
    progress: bool = True
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _RUN_NAME.fullmatch(self.name):
            raise ValueError(
                f"name={self.name!r}: use up to 80 letters, digits, '.', '_' and '-', beginning with a letter or digit"
            )
        # Resolved where the user wrote it: other processes have other working directories.
        object.__setattr__(self, "run_dir", str(Path(self.run_dir).expanduser().absolute()))
        if isinstance(self.faults, str):
            object.__setattr__(self, "faults", parse_faults(self.faults))
        _integer("crash_loop_limit", self.crash_loop_limit, 1)
        _integer("user_error_limit", self.user_error_limit, 1)
        if not 0 <= self.grow_delay_s < math.inf:
            raise ValueError(f"grow_delay_s={self.grow_delay_s!r}: must be 0 seconds or more")
        odd = [name for name, value in self.env.items() if not (isinstance(name, str) and isinstance(value, str))]
        if odd:
            raise ValueError(f"env: {odd[0]!r} or its value is no text; write {{'NCCL_DEBUG': 'INFO'}}, both as text")

    @property
    def folder(self) -> Path:
        return Path(self.run_dir)


def check_lasting(folder: Path) -> None:
    """Raises ValueError for a run folder that Ray would delete. Asked before a run starts, not when its settings are
    made: that happens in a job's workers and for a plan, too, and records nothing there."""
    if _WORKING_COPY in f"{folder.as_posix()}/":
        raise ValueError(
            f"run_dir={str(folder)!r} lies in Ray's temporary copy of a job's working directory, which Ray deletes: "
            "give an absolute path that every node sees (--run-dir /shared/runs/NAME)"
        )


def check_together(scaling: ScalingConfig, step: StepConfig, faults: tuple[Fault, ...]) -> None:
    """Refuse what only the settings together show. Raises ValueError before anything starts."""
    if step.global_batch < scaling.most_rings:
        raise ValueError(
            f"global_batch={step.global_batch} is less than dp={scaling.most_rings}: every ring needs at least one "
            "sequence in each step; raise global_batch or lower dp (max_dp)"
        )
    if step.context_tokens < scaling.cp:
        raise ValueError(
            f"context_tokens={step.context_tokens} is less than cp={scaling.cp}: every rank of a ring needs at least "
            "one token; raise context_tokens or lower cp"
        )
    for fault in faults:
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
        if fault.hop is not None and fault.hop >= scaling.cp:
            raise ValueError(
                f"fault {fault}: hop={fault.hop} never comes on rings of cp={scaling.cp}; "
                f"name one of 0 to {scaling.cp - 1}"
            )


def digest(*configs: Any) -> str:
    """What identifies a configuration: equal settings give equal digests on any machine."""
    plain = [dataclasses.asdict(c) if dataclasses.is_dataclass(c) and not isinstance(c, type) else c for c in configs]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def environment() -> Mapping[str, str]:
    """The one place that reads the process environment."""
    return os.environ


def _integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
