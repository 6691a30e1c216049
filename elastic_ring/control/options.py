"""Settings of the control core: sizes, limits and timeouts. Plain data; no environment and no clock."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ring.control.placement.copies import CopyMode, parse_copies
from elastic_ring.mesh import Mesh


@dataclass(frozen=True)
class ControlOptions:
    """Settings of one run. `dp`, `cp`, `spares` are the wanted sizes; the mesh has `min_dp` to `max_dp` rings.

    Timeouts, all in seconds: `report_s` for a member to answer `Stop` and for a killed worker to be gone; `build_s` to
    build the groups; `restore_s` to read a checkpoint beside that; `start_s` for a worker to be ready or to show
    progress; `start_max_s` to be ready in spite of progress; `hello_s` to answer a new coordinator; `boundary_s` from a
    boundary request until all members have paused; `handover_s` that a hand-over, or the beginning of a checkpoint,
    may take before a node that leaves is gone; `callback_s` for the driver's callbacks to answer at a validation;
    `finalize_s` to write the weights.
    Delays, all in seconds: `spare_grace_s` that the first formation waits for spares, where `waits_for_spares` or they
    would be on other nodes than those that are ready; `grow_delay_s` without a change
    of the worker pool before the mesh grows; `grow_interval_s` from a change of the mesh's size to its next growth;
    `grow_cost_s` that a growth must save at least, None for what the last build and warm-up took; `backoff_s` before
    the next start on a node whose workers fail to start, or the next try to write the weights; `restart_delay_s` from
    the end of a recovery to the start of replacements.
    `takes_checkpoints`: whether the run takes any. `memory_reliefs`: those of `memory_ladder` that the workers'
    device has. `memory_relax_steps`: steps without a shortage after which one of them goes; 0: never.

    Raises: ValueError naming the setting, its value and what is allowed.
    """

    run: str
    dp: int
    cp: int
    total_steps: int
    spares: int = 1
    min_dp: int = 1
    max_dp: int | None = None
    report_s: float = 2.0
    build_s: float = 60.0
    start_s: float = 120.0
    start_max_s: float = 1800.0
    hello_s: float = 5.0
    boundary_s: float = 60.0
    handover_s: float = 10.0
    finalize_s: float = 600.0
    spare_grace_s: float = 5.0
    grow_delay_s: float = 3.0
    grow_interval_s: float = 0.0
    grow_cost_s: float | None = 0.0
    backoff_s: float = 30.0
    restart_delay_s: float = 1.0
    callback_s: float = 60.0
    crash_loop_limit: int = 3
    user_error_limit: int = 2
    start_failure_limit: int = 3
    build_failure_limit: int = 10
    round_limit: int = 25
    finalize_limit: int = 3
    rollback_limit: int = 3
    takes_checkpoints: bool = False
    restore_s: float = 1800.0
    copies: str = "0"
    copy_every_steps: int = 10
    memory_reliefs: tuple[str, ...] = ("caches", "recompute")
    memory_relax_steps: int = 200
    waits_for_spares: bool = True

    def __post_init__(self) -> None:
        for name in (
            "dp",
            "cp",
            "total_steps",
            "min_dp",
            "crash_loop_limit",
            "user_error_limit",
            "start_failure_limit",
            "build_failure_limit",
            "round_limit",
            "finalize_limit",
            "rollback_limit",
            "copy_every_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.memory_relax_steps < 0:
            raise ValueError(f"memory_relax_steps={self.memory_relax_steps}: must not be negative; 0 keeps the reliefs")
        if self.spares < 0:
            raise ValueError(f"spares={self.spares}: must not be negative; 0 means that a loss shrinks the mesh")
        for name in (
            "report_s",
            "build_s",
            "start_s",
            "hello_s",
            "boundary_s",
            "handover_s",
            "finalize_s",
            "backoff_s",
            "restore_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be a positive number of seconds")
        for name in ("spare_grace_s", "grow_delay_s", "grow_interval_s", "grow_cost_s", "restart_delay_s"):
            if (getattr(self, name) or 0.0) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")
        if self.start_max_s < self.start_s:
            raise ValueError(f"start_max_s={self.start_max_s} with start_s={self.start_s}: raise the first")
        if self.min_dp > self.dp:
            raise ValueError(f"min_dp={self.min_dp} with dp={self.dp}: lower min_dp or ask for more rings")
        if self.max_dp is not None and self.max_dp < self.dp:
            raise ValueError(f"max_dp={self.max_dp} with dp={self.dp}: raise max_dp or leave it out")
        parse_copies(self.copies)

    def copy_mode(self, mesh: Mesh) -> CopyMode:
        """What members of `mesh` hold of each other."""
        return parse_copies(self.copies, mesh.dp)

    @property
    def dp_limit(self) -> int:
        """The maximum number of rings."""
        return self.dp if self.max_dp is None else self.max_dp

    @property
    def num_workers_wanted(self) -> int:
        return self.dp_limit * self.cp + self.spares
