"""What committed steps show of a slow rank and of memory that is nearly full. Pure: no clock, no torch, no I/O.

One object for coordinator and simulation. What follows from a finding the core decides (`stragglers`, `memory_ladder`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.data_waits import DataWatch
from elastic_ring.control.decisions.stragglers import Straggler, StragglerWatch
from elastic_ring.mesh import Mesh

NUM_STEPS = 8
"""Steps of one generation in a row that must be above the limit."""
SLACK = 0.05
"""How far a share must fall below the limit before memory is found tight again in the same generation."""
STALLED = 0.2
"""A node all of whose tasks wait for memory this share of the time (PSI) is full, whatever it says."""


@dataclass(frozen=True)
class Tight:
    """`what`: the device of `global_rank`, or a host. `share`: of what there is, or of the share at which the guard of
    the node kills."""

    what: Literal["device", "host"]
    share: float
    global_rank: int = -1


class PressureWatch:
    """The newest steps of one generation."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._generation: tuple[int, int] = (0, 0)
        self._num_tight = 0
        self._armed = True
        self.device_share = self.host_share = 0.0
        """The shares of the fullest device and host at the newest step; 0 if unknown."""

    def saw(self, membership_id: tuple[int, int], shares: Sequence[float], host_share: float) -> Tight | None:
        """A committed step: the shares of each rank and of the fullest node. A finding comes once until there is room
        again, or in each generation."""
        if membership_id != self._generation:
            self._generation, self._num_tight, self._armed = membership_id, 0, True
        self.device_share, self.host_share = max(shares, default=0.0), host_share
        fullest = max(self.device_share, host_share)
        if fullest < self._limit:
            self._num_tight = 0
            self._armed = self._armed or fullest < self._limit - SLACK
            return None
        self._num_tight += 1
        if self._num_tight < NUM_STEPS or not self._armed:
            return None
        self._armed = False
        if self.device_share >= host_share:
            return Tight("device", self.device_share, max(range(len(shares)), key=lambda rank: shares[rank]))
        return Tight("host", host_share)


def host_share(used: float, guard_limit: float, pressure: Mapping[str, float]) -> float:
    """How full a node is, as a share of what its guard allows; 1 where all of its tasks wait for memory."""
    if pressure.get("full", 0.0) >= STALLED:
        return 1.0
    return used / guard_limit if guard_limit else used


Found = Straggler | Tight


class Detectors:
    """`stragglers` and `memory`: None where the run's settings have them off."""

    def __init__(self, run: RunConfig) -> None:
        is_on = run.straggler != "off"
        self.stragglers = StragglerWatch(run.straggler_window_s, run.straggler_factor) if is_on else None
        self.memory = PressureWatch(run.memory_pressure_share) if run.memory_pressure != "off" else None
        self.data = DataWatch()
        self._found: list[tuple[Found, tuple[int, int]]] = []  # by which members

    def saw(
        self,
        membership_id: tuple[int, int],
        mesh: Mesh,
        step_s: float,
        work_s: Sequence[float],
        memory_shares: Sequence[float],
        host_share: float,
    ) -> None:
        """A committed step: how long it took, each rank's work and share of its device, the fullest node's share."""
        slow = None if self.stragglers is None else self.stragglers.saw(membership_id, mesh, step_s, work_s)
        tight = None if self.memory is None else self.memory.saw(membership_id, memory_shares, host_share)
        self._found += [(found, membership_id) for found in (slow, tight) if found is not None]

    def take(self, membership_id: tuple[int, int] | None) -> list[Found]:
        """What was found since the last call, of these members; what others did counts no more."""
        found, self._found = self._found, []
        return [one for one, of in found if of == membership_id]
