"""A scripted run for scenario tests: the control core with workers that answer as told, at chosen times."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from elastic_ring.control import coordination, invariants, replay
from elastic_ring.control.messages import (
    Build,
    Command,
    CoordinatorStarted,
    EndRun,
    Event,
    NodeJoined,
    Published,
    Report,
    Resumed,
    Tick,
    Vote,
    WorkerLost,
    WorkerReady,
)
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.state import Change, crew_of, members, phase_name

C = TypeVar("C")


class Bench:
    def __init__(self, nodes: dict[str, int], seats: dict[str, int] | None = None, **options: Any) -> None:
        """`nodes`: how many workers fit on each; `seats`: how many GPUs those have that limit their members."""
        wanted: dict[str, Any] = {"run": "scripted", "dp": 2, "cp": 2, "total_steps": 100, "restart_delay_s": 0.0}
        self.options = ControlOptions(**{**wanted, **options})
        self.state = coordination.initial(self.options)
        self.now, self.sent, self.reason = 0.0, (), ""
        self.sent: tuple[Command, ...]
        self.journal: list[str] = []
        self.say(CoordinatorStarted("c", 1))
        for node, slots in nodes.items():
            self.say(NodeJoined("n", node, slots, (seats or {}).get(node)))

    def say(self, event: Event, after_s: float = 0.01) -> tuple[Command, ...]:
        self.now += after_s
        decision = coordination.advance(self.state, event, self.now)
        invariants.check(self.state, event, decision)
        if decision.state is not self.state or decision.commands:
            self.journal.append(json.dumps(replay.journal_line(event, decision, self.now)))
        self.state, self.sent, self.reason = decision.state, decision.commands, decision.reason
        return self.sent

    def wait(self, seconds: float) -> tuple[Command, ...]:
        return self.say(Tick("t"), seconds)

    def all_ready(self) -> tuple[Command, ...]:
        """Everything that is starting becomes warm."""
        said: tuple[Command, ...] = ()
        for worker in [w for w in self.state.workers.values() if w.life == "starting"]:
            said += self.say(WorkerReady("w", worker.worker, worker.node, 1))
        return said

    def form(self) -> Bench:
        self.all_ready()
        if self.phase == "forming":
            self.wait(self.options.spare_grace_s)
        self.resume_all()
        return self

    def resume_all(self) -> tuple[Command, ...]:
        crew = crew_of(self.state)
        assert crew is not None
        said: tuple[Command, ...] = ()
        for worker in crew.seats:
            said += self.say(Resumed("w", worker, self.state.term, crew.generation, crew.step))
        return said

    def lose(self, *ranks: int, reason: str = "died") -> tuple[Command, ...]:
        said: tuple[Command, ...] = ()
        crew = members(self.state)
        for rank in ranks:
            said += self.say(WorkerLost("a", crew[rank], reason, "signal 9"))
        return said

    def vote(self, step: int) -> Vote:
        crew = crew_of(self.state)
        assert crew is not None
        return Vote(step, (float(step),), crew.cast)

    def commit(self, step: int) -> None:
        self.say(Published("w", self.vote(step)))

    def report(self, rank: int, applied: int, kind: str = "aborted", **more: Any) -> tuple[Command, ...]:
        crew = crew_of(self.state)
        assert crew is not None
        more.setdefault("shard", rank % crew.mesh.cp)
        last = self.vote(applied - 1) if applied > crew.step else None
        fields = {"vote": None, "has_gradient": True, "last_vote": last, "gradient_cast": crew.cast, **more}
        return self.say(
            Report("w", crew.seats[rank], self.state.term, self.state.generation, kind, applied, **fields)
        )

    def report_all(self, applied: int, kind: str = "aborted") -> tuple[Command, ...]:
        crew = members(self.state)
        said: tuple[Command, ...] = ()
        for rank, worker in enumerate(crew):
            if worker in self.state.workers and self.state.workers[worker].life == "ready":
                said += self.report(rank, applied, kind)
        return said

    @property
    def phase(self) -> str:
        return phase_name(self.state)

    @property
    def change(self) -> Change:
        assert self.state.last_change is not None
        return self.state.last_change


def only(kind: type[C], commands: tuple[Command, ...]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def build_in(commands: tuple[Command, ...]) -> Build:
    builds = only(Build, commands)
    assert builds, commands
    return builds[0]


def end_in(commands: tuple[Command, ...]) -> EndRun:
    (end,) = only(EndRun, commands)
    return end
