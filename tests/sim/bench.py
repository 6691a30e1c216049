"""A scripted run for scenario tests: the control core with workers that answer as told, at chosen times."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from elastic_ring.control import coordination
from elastic_ring.control.capacity.worker_pool import STANDBY_AFTER_S
from elastic_ring.control.facts import Fact
from elastic_ring.control.messages import (
    Build,
    Command,
    CoordinatorStarted,
    EndRun,
    Event,
    MemberFailed,
    NodeJoined,
    Published,
    Report,
    Resumed,
    Tick,
    Vote,
    WorkerLost,
    WorkerReady,
)
from elastic_ring.control.state import Change, members, membership_of, phase_name
from tests.sim import invariants
from tests.sim.simulator.options import simulated

C = TypeVar("C")


class Bench:
    def __init__(self, nodes: dict[str, int], members: dict[str, int] | None = None, **options: Any) -> None:
        """`nodes`: how many workers fit on each; `members`: how many GPUs those have that limit their members."""
        wanted: dict[str, Any] = {"name": "scripted", "dp": 2, "cp": 2, "total_steps": 100, "restart_delay_s": 0.0}
        self.options = simulated(**{**wanted, **options})
        self.state = coordination.initial(self.options)
        self.now, self.sent, self.reason = 0.0, (), ""
        self.sent: tuple[Command, ...]
        self.journal: list[str] = []
        self.handle(CoordinatorStarted("c", 1))
        for node, slots in nodes.items():
            self.handle(NodeJoined("n", node, slots, (members or {}).get(node)))
        if members:
            self.wait(STANDBY_AFTER_S)

    def handle(self, event: Event | Fact, after_s: float = 0.01) -> tuple[Command, ...]:
        self.now += after_s
        decision = coordination.advance(self.state, event, self.now)
        invariants.check(self.state, event, decision)
        if decision.state is not self.state or decision.commands or isinstance(event, Fact):
            self.journal.append(json.dumps(coordination.journal_line(event, decision, self.now)))
        self.state, self.sent, self.reason = decision.state, decision.commands, decision.reason
        return self.sent

    def wait(self, seconds: float) -> tuple[Command, ...]:
        return self.handle(Tick("t"), seconds)

    def all_ready(self) -> tuple[Command, ...]:
        """Everything that is starting becomes warm."""
        said: tuple[Command, ...] = ()
        for worker in [w for w in self.state.workers.values() if w.status == "starting"]:
            said += self.handle(WorkerReady("w", worker.worker, worker.node, 1))
        return said

    def form(self) -> Bench:
        self.all_ready()
        if self.phase == "forming":
            self.wait(self.options.spare_grace_s)
        self.resume_all()
        return self

    def resume_all(self) -> tuple[Command, ...]:
        membership = membership_of(self.state)
        assert membership is not None
        said: tuple[Command, ...] = ()
        for worker in membership.members:
            said += self.handle(Resumed("w", worker, self.state.term, membership.generation, membership.step))
        return said

    def recover(self, applied: int, kind: str = "aborted") -> Build:
        """All members report and resume; returns the order of their build."""
        order = build_in(self.report_all(applied, kind))
        self.resume_all()
        return order

    def fail(self, rank: int, kind: str, step: int, detail: str = "", **more: Any) -> tuple[Command, ...]:
        state = self.state
        failure = MemberFailed("w", members(state)[rank], state.term, state.generation, kind, step, detail, **more)
        return self.handle(failure)

    def lose(
        self, *ranks: int, reason: str = "died", step: int = -1, phase: str = "idle", signal: str = "SIGKILL"
    ) -> tuple[Command, ...]:
        said: tuple[Command, ...] = ()
        membership = members(self.state)
        for rank in ranks:
            said += self.handle(WorkerLost("a", membership[rank], reason, f"{signal} in {phase}", step, phase, signal))
        return said

    def vote(self, step: int) -> Vote:
        membership = membership_of(self.state)
        assert membership is not None
        return Vote(step, (float(step),), membership.id)

    def commit(self, step: int) -> None:
        self.handle(Published("w", self.vote(step)))

    def report(self, rank: int, applied: int, kind: str = "aborted", **more: Any) -> tuple[Command, ...]:
        membership = membership_of(self.state)
        assert membership is not None
        more.setdefault("shard", rank % membership.mesh.cp)
        last = self.vote(applied - 1) if applied > membership.step else None
        fields = {
            "vote": None,
            "has_gradient": True,
            "last_vote": last,
            "gradient_membership_id": membership.id,
            **more,
        }
        return self.handle(
            Report("w", membership.members[rank], self.state.term, self.state.generation, kind, applied, **fields)
        )

    def report_all(self, applied: int, kind: str = "aborted") -> tuple[Command, ...]:
        membership = members(self.state)
        said: tuple[Command, ...] = ()
        for rank, worker in enumerate(membership):
            if worker in self.state.workers and self.state.workers[worker].status == "ready":
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
