"""What committed steps show of a slow rank and of memory that is nearly full. Pure: no clock, no torch, no I/O.

One object for coordinator and simulation. What follows from a finding the core decides (`stragglers`, `memory_ladder`).
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.memory_pressure import PressureWatch, Tight
from elastic_ring.control.decisions.stragglers import Straggler, StragglerWatch
from elastic_ring.mesh import Mesh

Found = Straggler | Tight


class Detectors:
    """`stragglers` and `memory`: None where the run's settings have them off."""

    def __init__(self, run: RunConfig) -> None:
        is_on = run.straggler != "off"
        self.stragglers = StragglerWatch(run.straggler_window_s, run.straggler_factor) if is_on else None
        self.memory = PressureWatch(run.memory_pressure_share) if run.memory_pressure != "off" else None

    def saw(
        self,
        membership_id: tuple[int, int],
        mesh: Mesh,
        step_s: float,
        work_s: Sequence[float],
        memory_shares: Sequence[float],
        host_share: float,
    ) -> list[Found]:
        """A committed step: how long it took, each rank's work and share of its device, the fullest node's share."""
        slow = None if self.stragglers is None else self.stragglers.saw(membership_id, mesh, step_s, work_s)
        tight = None if self.memory is None else self.memory.saw(membership_id, memory_shares, host_share)
        return [found for found in (slow, tight) if found is not None]
