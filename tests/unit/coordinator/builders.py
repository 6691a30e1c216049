"""What the coordinator's tests begin with: a recorder of a run, a state in which it trains, a change of its mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_ring.config import RunConfig
from elastic_ring.control.facts import Fact
from elastic_ring.control.pool import Worker
from elastic_ring.control.state import Change, LostWorker, Membership, Running, State
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.coordinator.recorder import Begin, RunRecorder
from elastic_ring.runtime.coordinator.run_spec import Clock
from tests.sim.simulator.options import simulated


def opened_recorder(
    folder: Path,
    note: Callable[[Fact], None] = lambda note: None,
    now: Callable[[], float] = lambda: 100.0,
    begin: Begin | None = None,
) -> RunRecorder:
    recorder = RunRecorder(RunConfig("records", run_dir=str(folder)), note, Clock(now, 0.0))
    recorder.open(begin or Begin())
    return recorder


def training() -> State:
    """Two rings of one member, and a spare."""
    workers = {name: Worker(name, "node", "ready", 0.0) for name in ("w-0", "w-1", "w-2")}
    membership = Membership(1, 1, Mesh(2, 1), ("w-0", "w-1"), 0)
    return State(simulated("records", 2, 1, 4), Running(membership), 1, 1, workers)


def change(step: int = 3, **more: Any) -> Change:
    """A spare for a rank that died, between the last result of `step` and the next."""
    fields: dict[str, Any] = {
        "term": 1,
        "generation": 2,
        "mesh": Mesh(2, 2),
        "previous_mesh": Mesh(2, 2),
        "members": ("a", "e", "c", "d"),
        "step": step,
        "cause": "died: b",
        "action": "spare took its place",
        "promise": "bit-exact",
        "reason": "",
        "lost": (LostWorker("b", "node", 1, "died", "signal 9"),),
        "drained": (),
        "newcomers": ("e",),
        "survivors": ("a", "c", "d"),
        "rolled_forward": None,
        "step_rerun": step,
        "planned": False,
        "noticed_at": 10.2,
        "resumed_at": 10.5,
        **more,
    }
    return Change(**fields)
