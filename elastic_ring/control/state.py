"""What the control core knows: workers, nodes, and one phase object that carries exactly its own data.

Nothing here decides; every value is frozen and treated as such (the mappings are never changed in place).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_ring.control.messages import Build, EndRun, Report, Status, Vote
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.seats import able_to_sit
from elastic_ring.mesh import Mesh


@dataclass(frozen=True)
class Worker:
    """One started process. `life`: starting, ready, dying (told to leave or killed, not yet confirmed).

    `deadline` is when a starting worker counts as failed, or a dying one is (again) killed. `written_off`:
    dying for so long that nobody waits for it any more; it still fills its slot.
    """

    worker: str
    node: str
    life: str
    deadline: float
    draining: bool = False
    written_off: bool = False


@dataclass(frozen=True)
class Node:
    """`num_slots` workers fit in all, of which `num_seats` may be members at once (None: no limit).

    `start_failures` counts in a row, `last_failure` is what the last worker itself answered; no worker is started
    here before `backoff_until`."""

    node: str
    num_slots: int
    draining: bool = False
    start_failures: int = 0
    backoff_until: float = 0.0
    last_failure: str = ""
    num_seats: int | None = None


@dataclass(frozen=True)
class Crew:
    """Who was told to build one generation. `leaving` have no seat but may still hold state."""

    term: int
    generation: int
    mesh: Mesh
    seats: tuple[str, ...]
    step: int
    leaving: tuple[str, ...] = ()
    donors: tuple[tuple[str, str], ...] = ()

    @property
    def everyone(self) -> tuple[str, ...]:
        return self.seats + self.leaving

    @property
    def cast(self) -> tuple[int, int]:
        return self.term, self.generation


@dataclass(frozen=True)
class Loss:
    """`global_rank` in the mesh before the incident; None for one that had no seat in it (a newcomer)."""

    worker: str
    node: str
    global_rank: int | None
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Incident:
    """All that happened since the last generation that ran; one recovery, however many deaths it took.

    `raised_step`: the step in which the user's code raised; None if it did not.
    """

    cause: str
    noticed_at: float
    base: Crew | None
    lost: tuple[Loss, ...] = ()
    planned: tuple[str, ...] = ()
    counted: bool = False
    rolled_forward: int | None = None
    raised_step: int | None = None


@dataclass(frozen=True)
class Change:
    """The facts of one generation, for the run's summary. `resumed_at` is None until all its members resumed.

    `action`: formed, rebuilt in place, healed in place, spare took its place, spares took their places,
    drained, mesh shrank, grew. `step_rerun` is the step that runs again, `rolled_forward` the one whose vote
    travelled; None if there was none.
    """

    term: int
    generation: int
    mesh: Mesh
    previous_mesh: Mesh | None
    seats: tuple[str, ...]
    step: int
    cause: str
    action: str
    promise: str
    reason: str
    lost: tuple[Loss, ...]
    drained: tuple[str, ...]
    newcomers: tuple[str, ...]
    survivors: tuple[str, ...]
    rolled_forward: int | None
    step_rerun: int | None
    planned: bool
    noticed_at: float
    closed_at: float
    resumed_at: float | None = None


# ---------------------------------------------------------------- phases


@dataclass(frozen=True)
class Idle:
    """No coordinator has spoken yet."""


@dataclass(frozen=True)
class Forming:
    """Nobody holds state; workers gather for a fresh start. `full_since`: since when there are dp rings."""

    since: float
    full_since: float | None = None


@dataclass(frozen=True)
class Building:
    """`order` is sent to everyone (its `worker` is empty). `parked`: who was faster than the others' news."""

    crew: Crew
    order: Build
    incident: Incident
    deadline: float
    resumed: frozenset[str] = frozenset()
    parked: Mapping[str, Report] = field(default_factory=dict)
    asked_again: bool = False


@dataclass(frozen=True)
class Running:
    """`boundary` are the reasons of a boundary request on its way; `parked` who has reached it or the end."""

    crew: Crew
    boundary: tuple[str, ...] = ()
    deadline: float | None = None
    parked: Mapping[str, Report] = field(default_factory=dict)


@dataclass(frozen=True)
class Closing:
    """`Stop` is sent under a new generation; `crew` is the last one. `waiting`: for which capacity."""

    crew: Crew
    incident: Incident
    deadline: float
    reports: Mapping[str, Report] = field(default_factory=dict)
    asked_again: bool = False
    waiting: str = ""


@dataclass(frozen=True)
class Finishing:
    """Every step is committed and ring 0 writes the weights. `trouble`: why it could not; the deadline tries again."""

    crew: Crew
    deadline: float
    trouble: str = ""


@dataclass(frozen=True)
class Reconnecting:
    """A new coordinator asks round; `before` is the phase in which the old one fell silent."""

    before: Forming | Building | Running | Closing | Finishing
    deadline: float
    answers: Mapping[str, Status] = field(default_factory=dict)
    lost: tuple[Loss, ...] = ()
    disturbed: str = ""
    asked_again: bool = False


@dataclass(frozen=True)
class Ended:
    end: EndRun


Phase = Idle | Forming | Building | Running | Closing | Finishing | Reconnecting | Ended


@dataclass(frozen=True)
class Counted:
    """How often something happened in a row at one step."""

    step: int = -1
    count: int = 0

    def again(self, step: int) -> Counted:
        return Counted(step, self.count + 1 if step == self.step else 1)


@dataclass(frozen=True)
class State:
    """`committed` steps are known to be committed; `newest_vote` is the newest result the core itself holds.

    `rounds` counts builds in a row that no commit followed. `user_errors` counts what the user's code raised in a step
    that no commit followed, `user_detail` is the last traceback of it.
    `promise` is the weakest of all changes so far. `story` is the last (event, reason) pairs that mattered.
    """

    options: ControlOptions
    phase: Phase = field(default_factory=Idle)
    term: int = 0
    generation: int = 0
    workers: Mapping[str, Worker] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    num_started: int = 0
    committed: int = 0
    newest_vote: Vote | None = None
    crashes: Counted = field(default_factory=Counted)
    user_errors: Counted = field(default_factory=Counted)
    user_detail: str = ""
    rounds: Counted = field(default_factory=Counted)
    fruitless_builds: int = 0
    finalize_failures: int = 0
    pool_changed_at: float = 0.0
    stop_reason: str = ""
    last_change: Change | None = None
    promise: str = "bit-exact"
    story: tuple[tuple[str, str], ...] = ()


# ---------------------------------------------------------------- questions


def crew_of(state: State) -> Crew | None:
    """The last crew that was told to build, whatever became of it; None before the first and after the end."""
    phase = state.phase.before if isinstance(state.phase, Reconnecting) else state.phase
    return None if isinstance(phase, Idle | Forming | Ended) else phase.crew


def mesh_of(state: State) -> Mesh | None:
    crew = crew_of(state)
    return crew.mesh if crew else None


def members(state: State) -> tuple[str, ...]:
    """Workers by global rank in the last crew; dead ones stay listed until the next one is built."""
    crew = crew_of(state)
    return crew.seats if crew else ()


def spares(state: State) -> tuple[str, ...]:
    """Ready, staying, and without any part in the last crew; in the order of their start."""
    crew = crew_of(state)
    taken = set(crew.everyone) if crew else set()
    return tuple(
        worker.worker for worker in state.workers.values()
        if worker.life == "ready" and not worker.draining and worker.worker not in taken
    )


def seats_on(state: State) -> dict[str, int]:
    """How many members may sit on each node that has a limit."""
    return {node.node: node.num_seats for node in state.nodes.values() if node.num_seats is not None}


def node_of(state: State) -> dict[str, str]:
    """The node of every worker."""
    return {worker.worker: worker.node for worker in state.workers.values()}


def able_to_form(state: State) -> list[str]:
    """Who of the last crew and the spares can sit in the next mesh at once, leaving aside whoever is to go."""
    crew = crew_of(state)
    part = [name for name in crew.everyone if name in state.workers] if crew else []
    staying = [name for name in part if not state.workers[name].draining]
    limits = seats_on(state)
    return able_to_sit((*staying, *spares(state)), part, node_of(state) if limits else {}, limits)


def phase_name(state: State) -> str:
    if isinstance(state.phase, Closing) and state.phase.waiting:
        return "waiting"
    return type(state.phase).__name__.lower()


def describe(state: State) -> dict[str, Any]:
    """A flat picture for the status page; plain JSON values only."""
    mesh, seated = mesh_of(state), members(state)
    return {
        "run": state.options.run,
        "phase": phase_name(state),
        "waiting_for": state.phase.waiting if isinstance(state.phase, Closing) else "",
        "term": state.term,
        "generation": state.generation,
        "mesh": None if mesh is None else {"dp": mesh.dp, "cp": mesh.cp},
        "members": [
            {"global_rank": rank, "worker": name, "node": state.workers[name].node if name in state.workers else None}
            for rank, name in enumerate(seated)
        ],
        "spares": list(spares(state)),
        "starting": [worker.worker for worker in state.workers.values() if worker.life == "starting"],
        "leaving": [worker.worker for worker in state.workers.values() if worker.life == "dying" or worker.draining],
        "nodes": {
            node.node: {"num_slots": node.num_slots, "num_seats": node.num_seats, "draining": node.draining}
            for node in state.nodes.values()
        },
        "committed_steps": state.committed,
        "total_steps": state.options.total_steps,
        "promise": state.promise,
        "story": [list(entry) for entry in state.story],
    }


def waiting_for(state: State, now: float) -> str:
    """What a run that does not train is short of, for its driver; empty while there is nothing to say."""
    phase = state.phase
    if isinstance(phase, Closing) and phase.waiting:
        return f"waiting, with every shard held, for {phase.waiting}"
    if not isinstance(phase, Forming) or now < phase.since + state.options.start_s / 4:
        return ""
    ready, able, wanted = len(spares(state)), len(able_to_form(state)), state.options.dp * state.options.cp
    failures = [f"{node.node}: {node.last_failure}" for node in state.nodes.values() if node.last_failure]
    last = f"; last failed start on {failures[-1]}" if failures else ""
    crowded = f", but GPUs for {able} of them only" if able < min(ready, wanted) else ""
    return f"waiting for workers: {ready} of {wanted} ready on {len(state.nodes)} node(s) with an agent{crowded}{last}"
