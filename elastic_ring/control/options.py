"""Settings of the control core: the user's, and the core's own timeouts and limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_ring.config import RunConfig, ScalingConfig, Timeouts
from elastic_ring.mesh import Mesh

MAX_COPIES = 2
AUTO = "auto"
"""One copy of each shard wherever it has one holder, a mesh of one ring; none on all others."""


@dataclass(frozen=True)
class CopyMode:
    """`num_copies` full copies of each shard, or one parity for each group of up to `group_size` ranks."""

    num_copies: int = 0
    group_size: int = 0

    def __bool__(self) -> bool:
        return self.num_copies > 0 or self.group_size > 0

    @property
    def num_ranks_needed(self) -> int:
        """The smallest mesh on which no rank holds a copy of its own state."""
        return 1 + max(self.num_copies, self.group_size)


@dataclass(frozen=True)
class ControlOptions:
    """Settings of one run. `memory_reliefs`: those of `memory_ladder` that the workers' device has.

    In seconds: `handover_s` that a hand-over, or the beginning of a checkpoint, may take before a node that leaves is
    gone; `spare_grace_s` that the first formation waits for spares, where `waits_for_spares` or they would be on other
    nodes than those that are ready; `backoff_s` before the next start on a node whose workers fail to start, or the
    next try to write the weights; `restart_delay_s` from the end of a recovery to the start of replacements.
    """

    run: RunConfig
    scaling: ScalingConfig
    total_steps: int
    memory_reliefs: tuple[str, ...] = ("caches", "recompute")
    handover_s: float = 10.0
    spare_grace_s: float = 5.0
    backoff_s: float = 30.0
    restart_delay_s: float = 1.0
    start_failure_limit: int = 3
    build_failure_limit: int = 10
    round_limit: int = 25
    finalize_limit: int = 3
    waits_for_spares: bool = True

    @property
    def timeouts(self) -> Timeouts:
        return self.run.timeouts

    def building_s(self, *, restores: bool) -> float:
        """The limit for one build, with the reading of a checkpoint or without."""
        return self.timeouts.build_s + (self.timeouts.restore_s if restores else 0.0)

    def copy_mode(self, mesh: Mesh) -> CopyMode:
        """The copies that members of `mesh` hold of each other."""
        return parse_copies(self.run.copies, mesh.dp)

    def scaled(self, *, dp_limit: int, spares: int) -> ControlOptions:
        """A copy with other limits."""
        dp = min(self.scaling.dp, dp_limit)
        return replace(self, scaling=replace(self.scaling, dp=dp, max_dp=dp_limit, spares=spares))


def parse_copies(text: str, dp: int = 1) -> CopyMode:
    """The mode of the setting `copies` on a mesh of `dp` rings: "0", "1", "2", "parity:G" with G of at least 2, or
    "auto".

    Raises: ValueError naming the setting, its value and what is allowed.
    """
    if text == AUTO:
        return CopyMode(num_copies=int(dp == 1))
    allowed = f"must be auto, 0 to {MAX_COPIES}, or parity:G with a group of G >= 2 ranks"
    kind, _, size = text.partition(":")
    if kind == "parity" and size.isdecimal() and int(size) >= 2:
        return CopyMode(group_size=int(size))
    if text.isdecimal() and int(text) <= MAX_COPIES:
        return CopyMode(num_copies=int(text))
    raise ValueError(f"copies={text!r}: {allowed}")
