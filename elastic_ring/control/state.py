"""The state of the control core: workers, nodes, and one phase object with the data of that phase only.

No decisions here. All values are immutable; mappings are replaced, never changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from elastic_ring.control.messages import (
    BatchSkip,
    Build,
    CallbacksAnswered,
    Checkpoint,
    Command,
    CorpusGrew,
    CorpusVersion,
    EndRun,
    Event,
    KillWorker,
    Release,
    Report,
    SnapshotId,
    Status,
    Stop,
    Vote,
    with_changes,
)
from elastic_ring.control.options import ControlOptions
from elastic_ring.control.pool import Node, Pool, Versions, Worker, placeable, pool_of
from elastic_ring.mesh import Mesh

PROCESS_START = "start of the process, imports"
"""The work of a worker that has not reported yet."""
NUM_NAMED = 4
"""The most workers that a message names for one work."""


@dataclass(frozen=True)
class Membership:
    """The workers of one `Build`. `members[global_rank]` is the worker of that rank; `step` runs first.

    `leaving` are not in the mesh but may still hold state. `donors`: (donor, newcomer) pairs.
    """

    term: int
    generation: int
    mesh: Mesh
    members: tuple[str, ...]
    step: int
    leaving: tuple[str, ...] = ()
    donors: tuple[tuple[str, str], ...] = ()

    @cached_property
    def everyone(self) -> tuple[str, ...]:
        return self.members + self.leaving

    @cached_property
    def part(self) -> frozenset[str]:
        return frozenset(self.everyone)

    @cached_property
    def rank_of(self) -> dict[str, int]:
        return {worker: rank for rank, worker in enumerate(self.members)}

    @property
    def id(self) -> tuple[int, int]:
        return self.term, self.generation


@dataclass(frozen=True)
class LostWorker:
    """A lost worker. `global_rank`: in the mesh before the incident; None if it was not in it (a newcomer).

    `step`, `phase` and `signal` as in `WorkerLost`. `draining`: it was already going to leave.
    """

    worker: str
    node: str
    global_rank: int | None
    reason: str
    detail: str = ""
    step: int = -1
    phase: str = ""
    signal: str = ""
    draining: bool = False


@dataclass(frozen=True)
class Crash:
    """Deaths in one incident that the work of `step` may have caused; their ranks are those in `mesh`."""

    step: int
    mesh: Mesh
    deaths: tuple[LostWorker, ...]


@dataclass(frozen=True)
class GoBack:
    """An order to all members: restore a state from before `first_step`, then skip every batch up to `last_step`'s.

    `why`: the spike or the skipped steps, as text.
    """

    first_step: int
    last_step: int
    why: str


@dataclass(frozen=True)
class Suspects:
    """Ranks disagreed in two attempts at `step`. A spare replaces one suspect after the other, to find the wrong one.

    `left`: suspects not replaced yet. `out`: the suspect that a spare replaces now; empty if none.
    `generation`: the build without it. `why`: the difference, as text.
    """

    step: int
    left: tuple[str, ...]
    why: str
    out: str = ""
    generation: int = -1


@dataclass(frozen=True)
class Incident:
    """Everything since the last generation that ran: one recovery, with any number of losses.

    `base`: the membership that last ran. `raised_step`: the step in which the user's code raised, or that the build
    rolled forward in which it raised; None if it did not. `undone`: how many committed steps were given up for a
    snapshot or a checkpoint. `back`: steps that are to be undone on purpose; None once a build has done so.
    `saves_for`: nodes that leave, or the run's end, for which the step under way was given up to take a checkpoint in
    time.
    `replaces`: a suspect whose place a spare is to take; empty if there is none.
    """

    cause: str
    noticed_at: float
    base: Membership | None
    lost: tuple[LostWorker, ...] = ()
    planned: tuple[str, ...] = ()
    counted: bool = False
    rolled_forward: int | None = None
    raised_step: int | None = None
    undone: int = 0
    back: GoBack | None = None
    replaces: str = ""
    saves_for: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Change:
    """The facts of one generation, for the run's summary. `resumed_at` is None until all its members resumed.

    `action`: formed, rebuilt in place, healed in place, spare took its place, spares took their places, drained, mesh
    shrank, grew. `step_rerun`: the step that runs again. `rolled_forward`: the step that some members completed from
    its vote. Both are None if there is none. `source`: where the state came from that no member had: replica, copy,
    checkpoint or beginning. `restored`: the checkpoint it began from. `steps_undone`: how many committed steps were
    undone.
    """

    term: int
    generation: int
    mesh: Mesh
    previous_mesh: Mesh | None
    members: tuple[str, ...]
    step: int
    cause: str
    action: str
    promise: str
    reason: str
    lost: tuple[LostWorker, ...]
    drained: tuple[str, ...]
    newcomers: tuple[str, ...]
    survivors: tuple[str, ...]
    rolled_forward: int | None
    step_rerun: int | None
    planned: bool
    noticed_at: float
    resumed_at: float | None = None
    restored: Checkpoint | None = None
    steps_undone: int = 0
    source: str = "replica"


# ---------------------------------------------------------------- phases


@dataclass(frozen=True)
class Idle:
    """No coordinator has started yet."""


@dataclass(frozen=True)
class Forming:
    """No live state exists; wait for workers to begin from a checkpoint or the seed.

    `full_since`: since when there are enough for dp rings. `incident`: the loss that a checkpoint repairs.
    `gathers`: before the first mesh, no worker starts while nodes are `awaited`: listed by Ray, not joined. `news_at`:
    when the last was listed or joined.
    """

    since: float
    full_since: float | None = None
    incident: Incident | None = None
    gathers: bool = False
    awaited: frozenset[str] = frozenset()
    news_at: float = 0.0


@dataclass(frozen=True)
class Building:
    """A `Build` was sent: `order`, with each worker's name; again at `ask_again_at` to members that have not resumed.

    `paused`: members that already paused again.
    """

    membership: Membership
    order: Build
    incident: Incident
    deadline: float
    ask_again_at: float
    resumed: Versions[str, bool] = field(default_factory=Versions)
    paused: Versions[str, Report] = field(default_factory=Versions)
    asked_again: bool = False


@dataclass(frozen=True)
class Running:
    """Members train. `boundary`: reasons of a pending boundary request. `paused`: members at it or at the end.

    `saved_for`: nodes that leave although their members have no replacement; a checkpoint was requested for them.
    `save_by`: when the core gives up the current step (after `save_after` committed ones) to save; None: never.
    """

    membership: Membership
    boundary: tuple[str, ...] = ()
    deadline: float | None = None
    paused: Versions[str, Report] = field(default_factory=Versions)
    saved_for: frozenset[str] = frozenset()
    save_by: float | None = None
    save_after: int = 0


@dataclass(frozen=True)
class Closing:
    """`Stop` was sent under a new generation; `membership` is the old one. `waiting`: for which capacity.

    `num_settled`: so many of `membership.everyone`, from the first on, have reported or are not ready any more.
    """

    membership: Membership
    incident: Incident
    deadline: float
    reports: Versions[str, Report] = field(default_factory=Versions)
    asked_again: bool = False
    waiting: str = ""
    num_settled: int = 0


@dataclass(frozen=True)
class Finishing:
    """All steps are committed; ring 0 writes the weights. `error`: why it failed; retried at the deadline."""

    membership: Membership
    deadline: float
    error: str = ""


@dataclass(frozen=True)
class Reconnecting:
    """A new coordinator collects a `Status` from every worker. `before`: the last phase of the old coordinator.
    `back`: as in `Incident`, if members reported it meanwhile. `recipients`: of `Hello`; `num_settled`: so many of
    them, from the first on, have answered or are not ready any more."""

    before: Forming | Building | Running | Closing | Finishing
    deadline: float
    recipients: tuple[str, ...]
    num_settled: int = 0
    answers: Versions[str, Status] = field(default_factory=Versions)
    lost: tuple[LostWorker, ...] = ()
    disturbed: str = ""
    asked_again: bool = False
    back: GoBack | None = None


@dataclass(frozen=True)
class Ended:
    end: EndRun


Phase = Idle | Forming | Building | Running | Closing | Finishing | Reconnecting | Ended
P = TypeVar("P", bound=Phase)


@dataclass(frozen=True)
class Counted:
    """How often something happened consecutively at one step."""

    step: int = -1
    count: int = 0

    def again(self, step: int) -> Counted:
        return Counted(step, self.count + 1 if step == self.step else 1)


@dataclass(frozen=True)
class MemoryLadder:
    """The run's place on the memory ladder (`decisions.memory_ladder`): the first `num_reliefs` reliefs are in force.

    `generation`: the last that lacked memory. `since`: the committed steps when the reliefs last changed.
    `num_shortages`: attempts at a step that ran out of memory. `num_relaxed`: how often a relief was taken back.
    `why`: the last shortage. `pressure`: why the next relief is to be taken at a boundary, before memory runs out; else
    empty. `num_early`: how often that was done.
    """

    num_reliefs: int = 0
    generation: int = -1
    since: int = 0
    num_shortages: int = 0
    num_relaxed: int = 0
    why: str = ""
    pressure: str = ""
    num_early: int = 0


@dataclass(frozen=True)
class Moves:
    """Members that are to move (`spreading`). `newcomers_on`: (node, how many newcomers are to be ready there)."""

    leaving: tuple[str, ...] = ()
    newcomers_on: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class FirstCause:
    """What broke the step `step` off first. `is_symptom`: an exchange failed; a later cause replaces it."""

    step: int = -1
    text: str = ""
    is_symptom: bool = False


@dataclass(frozen=True)
class Callbacks:
    """`awaited`: the step at which members wait for the driver's callbacks, until `deadline`. `answered`: the newest
    answer. `kept`: the step whose checkpoint is to stay."""

    awaited: int | None = None
    deadline: float = 0.0
    answered: CallbacksAnswered | None = None
    kept: int | None = None

    @property
    def stop(self) -> str:
        """Why the run ends after the step of the answer; empty if it does not."""
        return self.answered.stop if self.answered is not None else ""

    def gone_back(self, step: int, *, differs: bool) -> Callbacks:
        """Members that begin at `step` ask again after it. Where their steps come with another result, earlier answers
        are of steps that count no more."""
        awaited = None if self.awaited is not None and self.awaited > step else self.awaited
        if not differs:
            return replace(self, awaited=awaited)
        answered = None if self.answered is not None and self.answered.step > step else self.answered
        kept = None if self.kept is not None and self.kept > step else self.kept
        return replace(self, awaited=awaited, answered=answered, kept=kept)


@dataclass(frozen=True)
class State:
    """The whole state of the control core.

    `committed`: number of committed steps, since `committed_at`. `resized_at`: when the mesh last got another size,
    but for its formation. `newest_vote`: the newest vote that the core has. `crashes`: the latest, all of one step
    (see `crash_loop`). `rounds`: builds since a step beyond `reached` was committed. `user_errors`: errors of the
    user's code in one step without a commit; `user_detail`: the last traceback. `first_cause`: why the step that runs
    next was broken off first. `promise`: the weakest of all changes so far. `gives_up`: the run was scaled down, and
    surplus workers have not left yet. `checkpoints`: the valid ones, by step; `damaged`: folders of those that failed
    to verify. `given_up`: step and (term, generation) of the newest `Build` that went back; live state older than that,
    and older snapshots of later steps, count no more. `corpus`: the later manifests of the corpus, by step; `grown`:
    one that waits for the next build. `reached`: the most steps that ever were committed, by earlier submissions as
    well. `skips`: the batches that are left out, by step. `rollbacks`: how often everyone went back on purpose from
    about one step, the last of these. `num_restarts`: how often the run began again because a shard was lost without a
    checkpoint. `suspects`: workers that may have computed the last step wrongly. `warm_up_s`: how long the worker that
    became ready last took to start. `write_s`: the duration of the last checkpoint's write. `num_lines`: as in
    `CoordinatorStarted`. `moves`: planned for `moves_of`, the versions of the pool and the members; `moved_at`: when
    members were last asked to move, infinite once a boundary was too late; `movers`: the workers that were started for
    moves, or gave their places up. `pool_changed_at`, `nodes_changed_at`: when a worker or a node, or a node's room,
    last changed. `story`: the last (event, reason) pairs that changed the state. `pool`: both, counted.
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
    crashes: tuple[Crash, ...] = ()
    user_errors: Counted = field(default_factory=Counted)
    user_detail: str = ""
    rounds: Counted = field(default_factory=Counted)
    first_cause: FirstCause = field(default_factory=FirstCause)
    fruitless_builds: int = 0
    finalize_failures: int = 0
    pool_changed_at: float = 0.0
    nodes_changed_at: float = 0.0
    last_change: Change | None = None
    promise: str = "bit-exact"
    gives_up: bool = False
    committed_at: float = 0.0
    resized_at: float | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    damaged: tuple[str, ...] = ()
    given_up: SnapshotId | None = None
    memory: MemoryLadder = field(default_factory=MemoryLadder)
    corpus: tuple[CorpusVersion, ...] = ()
    grown: CorpusGrew | None = None
    reached: int = 0
    skips: tuple[BatchSkip, ...] = ()
    callbacks: Callbacks = field(default_factory=Callbacks)
    rollbacks: Counted = field(default_factory=Counted)
    num_restarts: int = 0
    suspects: Suspects | None = None
    warm_up_s: float = 0.0
    write_s: float = 0.0
    moves: Moves = field(default_factory=Moves)
    moves_of: object = field(default=None, compare=False, repr=False)
    moved_at: float | None = None
    movers: tuple[str, ...] = ()
    num_lines: int = 0
    story: tuple[tuple[str, str], ...] = ()
    pool: Pool = field(default_factory=Pool, compare=False, repr=False)

    def __post_init__(self) -> None:
        pool, num_spares, size = self.pool, self.options.scaling.spares, self.options.scaling.mesh.size
        is_known = pool.workers is self.workers and pool.nodes is self.nodes
        if not is_known or (pool.num_spares, pool.mesh_size) != (num_spares, size):
            pool = pool_of(self.workers, self.nodes, num_spares, size)
            for name, value in (("pool", pool), ("workers", pool.workers), ("nodes", pool.nodes)):
                object.__setattr__(self, name, value)


# ---------------------------------------------------------------- queries


def end_step(state: State) -> int:
    """How many steps the run has: those of the settings, or fewer where a callback has stopped it."""
    answer = state.callbacks.answered
    return answer.step if answer is not None and answer.stop else state.options.total_steps


def expect(state: State, kind: type[P]) -> P:
    assert isinstance(state.phase, kind), state.phase
    return state.phase


def membership_of(state: State) -> Membership | None:
    """The membership of the last `Build`, even if it failed; None before the first and after the end."""
    phase = state.phase.before if isinstance(state.phase, Reconnecting) else state.phase
    return None if isinstance(phase, Idle | Forming | Ended) else phase.membership


def mesh_of(state: State) -> Mesh | None:
    membership = membership_of(state)
    return membership.mesh if membership else None


def members(state: State) -> tuple[str, ...]:
    """The workers of the last `Build` by global rank, including those lost since."""
    membership = membership_of(state)
    return membership.members if membership else ()


def spares(state: State) -> tuple[str, ...]:
    """Ready workers that are not draining and not in the last membership, in the order of their start; those on
    avoided nodes last."""
    return _available(state)[0]


def gpus_on(state: State) -> dict[str, int]:
    """Node → maximum number of members, for nodes with a limit."""
    return {node.node: node.num_gpus for node in state.nodes.values() if node.num_gpus is not None}


def domains_of(state: State) -> dict[str, tuple[str, ...]]:
    """Node → its failure domains, the widest first; empty unless every node names them."""
    domains = {node.node: node.domains for node in state.nodes.values() if node.num_slots}
    return domains if all(domains.values()) else {}


def reserved(state: State) -> frozenset[str]:
    """Nodes that are no spot machines; none where all are alike."""
    nodes = [node for node in state.nodes.values() if node.num_slots]
    names = frozenset(node.node for node in nodes if node.is_reserved)
    return names if len(names) < len(nodes) else frozenset()


def avoided(state: State) -> frozenset[str]:
    return frozenset(node.node for node in state.nodes.values() if node.avoided)


def node_of(state: State) -> dict[str, str]:
    return {worker.worker: worker.node for worker in state.workers.values()}


def able_to_form(state: State) -> tuple[str, ...]:
    """Members and spares, not draining, that can all be members of the next mesh."""
    return _available(state)[1]


def num_able_to_form(state: State) -> int:
    pool = state.pool
    if membership_of(state) is not None or state.suspects is not None:
        return len(able_to_form(state))
    # No members yet: the ready workers, without those beyond their node's GPUs.
    limits = [(pool.counts_on(name).ready, pool.nodes[name].num_gpus or 0) for name in pool.crowded]
    return pool.total.ready - sum(max(0, ready - num_gpus) for ready, num_gpus in limits)


def num_staying(state: State) -> int:
    """How many of the last membership do not leave."""
    return _available(state)[2]


_Available = tuple[tuple[str, ...], tuple[str, ...], int]
_newest: list[tuple[object, Membership | None, str, _Available]] = []


def _available(state: State) -> _Available:
    """`spares`, `able_to_form` and `num_staying`; computed once per version of the pool, membership and suspect."""
    membership = membership_of(state)
    suspect = "" if state.suspects is None else state.suspects.out
    for version, cached_membership, cached_suspect, available in _newest:
        if version is state.pool.version and cached_membership is membership and cached_suspect == suspect:
            return available
    part = membership.part if membership is not None else frozenset()
    shunned = avoided(state)
    unplaced = [
        worker
        for worker in state.workers.values()
        if worker.status == "ready" and not worker.draining and worker.worker not in part and worker.worker != suspect
    ]
    free = tuple(worker.worker for worker in sorted(unplaced, key=lambda worker: worker.node in shunned))
    placed = [name for name in membership.everyone if name in state.workers] if membership else []
    staying = [name for name in placed if not state.workers[name].draining]
    limits = gpus_on(state)
    able = tuple(placeable((*staying, *free), placed, node_of(state) if limits else {}, limits))
    available = free, able, len(staying)
    _newest[:] = [(state.pool.version, membership, suspect, available)]
    return available


def next_awaited(state: State, expected: tuple[str, ...], heard: Mapping[str, object], begin: int) -> int:
    """The first place in `expected`, from `begin` on, of a ready worker that `heard` lacks; behind the last if none.

    It never goes back, so a phase looks at each worker once.
    """
    for place in range(begin, len(expected)):
        worker = state.workers.get(expected[place])
        if worker is not None and worker.status == "ready" and expected[place] not in heard:
            return place
    return len(expected)


def phase_name(state: State) -> str:
    if isinstance(state.phase, Closing) and state.phase.waiting:
        return "waiting"
    return type(state.phase).__name__.lower()


def waiting_for(state: State, now: float) -> str:
    """The reason why a run does not train, as text for its driver; empty if there is none."""
    phase = state.phase
    if isinstance(phase, Closing) and phase.waiting:
        return f"waiting, with every shard held, for {phase.waiting}"
    if not isinstance(phase, Forming) or now < phase.since + state.options.timeouts.start_s / 4:
        return ""
    ready, able, size = len(spares(state)), num_able_to_form(state), state.options.scaling.mesh.size
    crowded = f", but GPUs for {able} of them only" if able < min(ready, size) else ""
    starting = f", {num} starting" if (num := state.pool.total.visible) else ""
    failures = [f"{node.node}: {node.last_failure}" for node in state.nodes.values() if node.last_failure]
    failed = f"; last failed start on {failures[-1]}" if failures else ""
    by_work: dict[str, list[str]] = {}
    for worker in state.workers.values():
        if worker.status == "starting":
            work = PROCESS_START if worker.start_cpu_s is None else worker.doing or "first calls"
            by_work.setdefault(work, []).append(worker.worker)
    works = ""
    for work, names in by_work.items():
        more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
        works += f"; {work}: {', '.join(names[:NUM_NAMED])}{more}"
    where = f"{ready} of {size} ready on {len(state.nodes)} node(s) with an agent"
    return f"waiting for workers: {where}{crowded}{starting}{failed}{works}"


# ---------------------------------------------------------------- one call


class Transition:
    """The context of one `advance` call: the state so far, the commands and the reasons.

    The only mutable object in the control core; it must not outlive the call.
    """

    def __init__(self, state: State, event: Event, now: float) -> None:
        self.state = state
        self.now = now
        self.cause = event.cause
        self.commands: list[Command] = []
        self.reasons: list[str] = []

    @property
    def options(self) -> ControlOptions:
        return self.state.options

    @property
    def phase(self) -> Phase:
        return self.state.phase

    def set(self, **changes: Any) -> None:
        self.state = with_changes(self.state, **changes)

    def enter(self, phase: Phase) -> None:
        self.state = with_changes(self.state, phase=phase)

    def edit_phase(self, **changes: Any) -> None:
        self.enter(with_changes(self.state.phase, **changes))

    def commit(self, num_steps: int) -> None:
        """Record `num_steps` steps as committed if that is more than before; forget user errors in these steps."""
        if num_steps > self.state.committed:
            errors, is_new = self.state.user_errors, num_steps > self.state.reached
            self.set(
                committed=num_steps,
                committed_at=self.now,
                reached=max(self.state.reached, num_steps),
                user_errors=errors if errors.step >= num_steps else Counted(),
                rounds=Counted() if is_new else self.state.rounds,
            )

    def explain(self, reason: str) -> None:
        self.reasons.append(reason)

    def send(self, command: Command) -> None:
        self.commands.append(command)

    # ------------------------------------------------------------ workers

    def put(self, *workers: Worker) -> None:
        self.set_pool(self.state.pool.having({worker.worker: worker for worker in workers}))

    def put_node(self, node: Node) -> None:
        self.set_pool(self.state.pool.having_nodes({node.node: node}))

    def set_pool(self, pool: Pool) -> None:
        self.set(pool=pool, workers=pool.workers, nodes=pool.nodes)

    def ready_among(self, workers: Iterable[str]) -> list[str]:
        pool = self.state.workers
        return [name for name in workers if name in pool and pool[name].status == "ready"]

    def kill(self, names: Iterable[str], why: str, written_off: bool = False) -> None:
        """Kill workers. Their slots stay in use until the death is confirmed; `written_off`: do not wait for it."""
        names = tuple(names)
        for name in names:
            self.send(KillWorker(self.cause, name, why, self.state.term))
        self._let_stop(names, written_off)

    def release(self, names: Iterable[str]) -> None:
        """Let workers exit cleanly. No recovery waits for them; they are killed after `report_s`."""
        names = tuple(names)
        for name in names:
            self.send(Release(self.cause, name, self.state.term))
        self._let_stop(names, written_off=True)
        self.set(pool_changed_at=self.now)

    def _let_stop(self, names: tuple[str, ...], written_off: bool) -> None:
        pool, deadline = self.state.workers, self.now + self.options.timeouts.report_s
        self.put(
            *(replace(pool[name], status="stopping", deadline=deadline, written_off=written_off) for name in names)
        )

    def stop(self, names: Iterable[str], mode: str) -> None:
        for name in names:
            self.send(Stop(self.cause, name, self.state.term, self.state.generation, mode))

    # ------------------------------------------------------------ the end

    def end(self, error: str, message: str, **facts: object) -> None:
        """End the run and release all workers. `error`: a class name of `elastic_ring.errors`, or empty."""
        membership = membership_of(self.state)
        mesh = {} if membership is None else {"mesh": membership.mesh}
        progress = {"committed_steps": self.state.committed, "generation": self.state.generation, **mesh}
        pairs = tuple((name, str(value)) for name, value in {**progress, **facts}.items())
        starting = [name for name, worker in self.state.workers.items() if worker.status == "starting"]
        self.release(self.ready_among(self.state.workers))
        self.kill(starting, "the run is over", written_off=True)
        end = EndRun(self.cause, error, message, pairs, self.state.term)
        self.send(end)
        self.enter(Ended(end))
        self.explain(f"run ended: {error or 'success'}: {message.splitlines()[0] if message else ''}")
