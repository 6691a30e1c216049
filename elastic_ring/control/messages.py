"""Input (events) and output (commands) of the control core: frozen data, to and from JSON.

No Ray, torch, clocks or sockets here. Every event carries a `cause`: an id that the commands it leads to, and their
log lines, repeat. Events of members and most commands carry (term, generation); receivers ignore older ones than
they have seen.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic_ring.mesh import Mesh

T = TypeVar("T")


@dataclass(frozen=True)
class Vote:
    """The result of one step's vote, from which a rank that missed it can apply the same update.

    `values` is the float64 vector that all ranks agree on (`train.vote.Tally`); opaque here. `membership_id` is the
    (term, generation) of the `Build` whose members voted. A vote fits only the gradient that these members reduced:
    another mesh sums in another order.
    """

    step: int
    values: tuple[float, ...]
    membership_id: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Checkpoint:
    """A durable checkpoint: the state after `step` steps, in `folder` of the run's storage, written on `mesh`."""

    step: int
    folder: str
    mesh: Mesh


@dataclass(frozen=True)
class CorpusVersion:
    """From `first_step` on the run uses the corpus of the manifest `uri`, which has this `digest`."""

    first_step: int
    uri: str
    digest: str


@dataclass(frozen=True)
class BatchSkip:
    """From `first_step` on the order of samples leaves out `num_batches` batches: step k uses the batch after them."""

    first_step: int
    num_batches: int


@dataclass(frozen=True, order=True)
class SnapshotId:
    """The snapshots of all ranks after `step` steps, taken in the generation `membership_id`, (term, generation).

    Snapshots of one step from different generations may differ in bits, so they are never used together.
    """

    step: int
    membership_id: tuple[int, int]


@dataclass(frozen=True)
class HeldCopy:
    """A verified snapshot, copy or parity in a worker's memory.

    `cp_ranks`: of its state. `own`: the worker's own snapshot. `parity_of`: the workers whose snapshots were
    XORed, in the order of `cp_ranks`; empty for others, which have one entry in `cp_ranks`.
    """

    snapshot: SnapshotId
    cp_ranks: tuple[int, ...]
    own: bool = False
    parity_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParityGroup:
    """The global rank `holder` keeps the XOR of the snapshots of the global ranks `ranks`; it is none of them.

    Of one rank it keeps, and reports, a copy.
    """

    ranks: tuple[int, ...]
    holder: int


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Event:
    """Input of the core. The commands and log lines that it leads to repeat `cause`."""

    cause: str


@dataclass(frozen=True)
class WorkerEvent(Event):
    worker: str


@dataclass(frozen=True)
class MemberEvent(WorkerEvent):
    """An event that counts only in its own term and, once the members have met, in its own generation."""

    term: int
    generation: int


@dataclass(frozen=True)
class CoordinatorStarted(Event):
    """A coordinator started. First event of every term; `term` is larger than all before. `num_lines`: of the journal
    that it has read."""

    term: int
    num_lines: int = 0


@dataclass(frozen=True)
class NodeJoined(Event):
    """A node joined the cluster, or its capacity changed.

    `num_slots`: workers that fit on it. `num_gpus`: how many of them may be members at the same time, one for each
    GPU; None: no limit. `domains`: its failure domains, the widest first (zone, rack, host); empty: unknown.
    `is_reserved`: the cluster does not take it away as it does a spot machine.
    """

    node: str
    num_slots: int
    num_gpus: int | None = None
    domains: tuple[str, ...] = ()
    is_reserved: bool = False


@dataclass(frozen=True)
class NodesListed(Event):
    """The nodes that Ray lists and that have room for a worker; most have yet to join. Sent whenever they change."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class NodeLost(Event):
    """A node and all its workers are gone, confirmed by a second source."""

    node: str


@dataclass(frozen=True)
class NodeDraining(Event):
    """A node will leave (preemption, autoscaler): its workers hand over their state at the next boundary.

    `leaves_at`: when it is gone, in seconds on the coordinator's clock; 0: unknown.
    """

    node: str
    leaves_at: float = 0.0


@dataclass(frozen=True)
class WorkerStarting(WorkerEvent):
    """A worker's process runs and warms up. `cpu_s`: CPU seconds that it and its compilers have used so far. `doing`:
    its present work, in words. `compiles`: a compiler runs, here or in another process for which this one waits.
    """

    cpu_s: float
    doing: str = ""
    compiles: bool = False


@dataclass(frozen=True)
class WorkerReady(WorkerEvent):
    """A started worker is warm: imports done, device initialised. It can become a member."""

    node: str
    pid: int


@dataclass(frozen=True)
class WorkerLost(WorkerEvent):
    """A worker's process is gone or written off. `reason`: died, hung, exited, start-failed, unreachable.

    `step` and `phase`: what it did last. `signal`: what ended it ("SIGKILL"). -1 and empty: unknown.
    """

    reason: str
    detail: str = ""
    step: int = -1
    phase: str = ""
    signal: str = ""


@dataclass(frozen=True)
class DrainRequested(WorkerEvent):
    """One worker is to leave at the next boundary."""


@dataclass(frozen=True)
class StragglerFound(WorkerEvent):
    """A member worked `ratio` times as long as its peers for a whole window: straggler=act replaces it by a spare."""

    ratio: float


@dataclass(frozen=True)
class MemoryTight(Event):
    """Memory (`place`: device or host) has been nearly full for some steps up to `step`, as `text` says: with
    memory_pressure=act a relief is taken before it runs out."""

    place: str
    step: int
    text: str


@dataclass(frozen=True)
class ScaleRequested(Event):
    """New limits: at most `max_dp` rings, and `spares` spares; None leaves a number as it is."""

    max_dp: int | None = None
    spares: int | None = None


@dataclass(frozen=True)
class MemberFailed(MemberEvent):
    """A member's step loop stopped with an error.

    `kind`: `peer` (an exchange failed: all abort, but it does not show which peer died), `user` (the model, loss or
    data raised; `detail` is the traceback), `device` (this worker's device failed or lacked memory for a newcomer: the
    worker is killed and replaced), `memory` (the step ran out of memory: it runs again with the next relief of
    `memory_ladder`), `skipped` (too many skipped steps), `spike` (the loss rose too often), `back` (for one of these
    two reasons all must go back to before `first_step`, and leave out the batches up to the one of `step`),
    `check` (the start-up check refused the model, or the weights could not be written), `checkpoint` (the checkpoint of
    this build cannot be used; `detail` says why), `storage` (the storage of data, checkpoint or weights was waited for
    and stays away; `detail` names the place).
    `corrupt`: ranks that must agree do not; `accused` are the workers that computed wrongly, none if the step must run
    again to tell; one of the `suspects` is, then.
    `step` is the step that ran or that the ring was built for, not the worker's own count: a newcomer has applied none.
    """

    kind: str
    step: int
    detail: str = ""
    accused: tuple[str, ...] = ()
    first_step: int = -1
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report(MemberEvent):
    """State of a paused member: the answer to `Stop`, or unasked at a boundary or after the last step.

    `kind`: aborted, boundary, finished. `applied`: number of steps in the shard, so also the next step to run. `vote`:
    result of step `applied` if the member has it. `shard`: `cp_rank` of its verified state; None if it has none (a
    newcomer, or it failed in apply or during a heal). `has_gradient`: it keeps the reduced gradient of step `applied`
    and can apply a vote for it. `gradient_membership_id`: (term, generation) of the `Build` in which that gradient was
    reduced. `healthy`: result of the device probe. `last_vote`: the vote of step `applied - 1`, if it was applied in
    this generation; members one step behind can apply it. `copies`: the snapshots, copies and parities that it holds,
    complete and verified. `state_id`: (term, generation) of the last `Build` in which its shard became or stayed valid;
    (0, 0): unknown.
    """

    kind: str
    applied: int
    vote: Vote | None
    shard: int | None
    has_gradient: bool
    healthy: bool = True
    last_vote: Vote | None = None
    gradient_membership_id: tuple[int, int] = (0, 0)
    copies: tuple[HeldCopy, ...] = ()
    state_id: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Published(Event):
    """The newest vote that the coordinator received.

    It counts only if `vote.membership_id` names the last `Build`: an older vote may belong to a step that runs
    again.
    """

    vote: Vote


@dataclass(frozen=True)
class Resumed(MemberEvent):
    """A member finished its `Build`: groups built, state rolled forward, healed and verified. It trains on."""

    step: int


@dataclass(frozen=True)
class BuildFailed(MemberEvent):
    """A member could not finish its `Build` (a peer was lost, a digest differed). It is paused again."""

    detail: str


@dataclass(frozen=True)
class Finalized(MemberEvent):
    """The unsharded weights are written and digested."""

    weights_sha256: str


@dataclass(frozen=True)
class Status(MemberEvent):
    """The answer to `Hello`. `activity`: spare, running, paused, building, finished."""

    activity: str


@dataclass(frozen=True)
class CheckpointsKnown(Event):
    """The checkpoints that count, by step. Sent when a coordinator starts, and whenever one is added or removed.

    `write_s`: the duration of the last write; 0 if none was written yet."""

    checkpoints: tuple[Checkpoint, ...]
    write_s: float = 0.0


@dataclass(frozen=True)
class CheckpointDue(Event):
    """The last checkpoint was not written, or the run is to end: the members take the next one after the step under
    way; `at_once`: that step is given up for it."""

    at_once: bool = False


@dataclass(frozen=True)
class CallbacksAwaited(MemberEvent):
    """From global rank 0: the validation after `step` steps is over, and all members wait for an `Answer`."""

    step: int


@dataclass(frozen=True)
class CallbacksAnswered(Event):
    """From the driver: its callbacks have received all events up to the validation after `step` steps. `stop`: why they
    end the run there, empty if it goes on. `saves`: they want a checkpoint of these steps. `keeps`: that checkpoint
    stays until they want to keep another."""

    step: int
    stop: str = ""
    saves: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class CorpusRecalled(Event):
    """Decisions of earlier submissions of this lineage: the versions of the corpus after the first, also those that
    hold from a step after the checkpoint on, and which batches are left out. They ran `num_steps` steps in all, from
    step 0 on."""

    versions: tuple[CorpusVersion, ...]
    num_steps: int = 0
    skips: tuple[BatchSkip, ...] = ()


@dataclass(frozen=True)
class CorpusGrew(Event):
    """The preparation of the corpus has written a longer manifest, which begins with the shards in use."""

    uri: str
    digest: str


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed: check the deadlines."""


# ---------------------------------------------------------------- commands


@dataclass(frozen=True)
class Command:
    cause: str


@dataclass(frozen=True)
class WorkerCommand(Command):
    worker: str


@dataclass(frozen=True)
class MemberCommand(WorkerCommand):
    term: int
    generation: int


@dataclass(frozen=True)
class StartWorker(WorkerCommand):
    """Start a worker with this id on this node. Agents ignore commands of an older term."""

    node: str
    term: int = 0


@dataclass(frozen=True)
class DrainNode(Command):
    """The run leaves this node for good, and its cluster may remove it. No worker of the run is started there again."""

    node: str
    term: int = 0


@dataclass(frozen=True)
class KillWorker(WorkerCommand):
    """SIGKILL by the node's agent; `WorkerLost` follows. Agents ignore commands of an older term."""

    reason: str
    term: int = 0


@dataclass(frozen=True)
class Hello(WorkerCommand):
    """Sent by a new coordinator; the worker adopts the term and answers `Status`."""

    term: int


@dataclass(frozen=True)
class Stop(MemberCommand):
    """Stop training.

    `mode` `abort`: abort every group, pause, probe the device, answer `Report`; a repeated `Stop` gets a repeated
    answer. It precedes the `Build` of the same generation, so a worker that has that `Build` ignores it as late.
    `mode` `boundary`: request a boundary in the next vote and train on; all members pause after that step.
    `mode` `save`: take a checkpoint after this step, where checkpoints are taken at all, and train on.
    """

    mode: str


@dataclass(frozen=True)
class Answer(MemberCommand):
    """To all members that wait after `step` steps: whether the run ends there, and whether they first save."""

    step: int
    stops: bool
    saves: bool


@dataclass(frozen=True)
class Heal:
    """`donor` rolls forward, then sends its verified state of `cp_rank` to each of `newcomers`.

    The donor need not be in the new mesh (a drained worker hands over its state). In a `Build` that steps back it sends
    its snapshot or copy of `cp_rank`. With `parity_from` it sends a parity, and those workers their own snapshots; the
    only newcomer XORs all of them, and uses its own memory for its own part if it is one of the senders.
    """

    cp_rank: int
    donor: str
    newcomers: tuple[str, ...]
    parity_from: tuple[str, ...] = ()

    @property
    def senders(self) -> tuple[str, ...]:
        return (self.donor, *self.parity_from)


@dataclass(frozen=True)
class Build(MemberCommand):
    """Rendezvous under (term, generation), build the groups, roll forward, heal, train on.

    `members[global_rank]` is the worker of that rank; `step` runs next. Members still at `step - 1` first apply the
    vote `roll_forward`. `fresh`: no state exists; it comes from the checkpoint `restore`, or
    from the seed or the start weights without one.

    `step_back`: the live state is given up; every member begins from this snapshot: a member that no heal names loads
    its own part or copy of its `cp_rank`. `keep`: the snapshot that is held most often. Newer ones than `step_back`, or
    than `keep` without it, are dropped at once (all, if both are None); older ones stay until the first snapshot of
    this build is complete.
    `copy_holders[global_rank]`: the ranks that hold copies of that rank's snapshots from here on. `parity_groups`: the
    ranks whose parity a rank keeps. Both empty: no copies. `memory_reliefs`: the reliefs of `memory_ladder` in force.
    `saves`: every member takes a checkpoint of `step` before it trains on, where checkpoints are taken at all.
    `corpus`: the later manifests of a corpus that grows, by step. `skips`: which batches are left out, by step.
    `nodes[global_rank]`: the node of that rank. `undone`: how many committed steps this recovery has given up.
    """

    mesh: Mesh
    members: tuple[str, ...]
    step: int
    roll_forward: Vote | None
    heals: tuple[Heal, ...]
    fresh: bool
    restore: Checkpoint | None = None
    step_back: SnapshotId | None = None
    keep: SnapshotId | None = None
    copy_holders: tuple[tuple[int, ...], ...] = ()
    parity_groups: tuple[ParityGroup, ...] = ()
    memory_reliefs: tuple[str, ...] = ()
    corpus: tuple[CorpusVersion, ...] = ()
    skips: tuple[BatchSkip, ...] = ()
    saves: bool = False
    nodes: tuple[str, ...] = ()
    undone: int = 0

    @property
    def goes_back(self) -> bool:
        """Whether committed steps are given up: steps of older generations from `step` on count no more."""
        return self.restore is not None or self.step_back is not None or (self.fresh and self.undone > 0)


@dataclass(frozen=True)
class Standby(MemberCommand):
    """Become a spare: drop the groups and the state of older generations."""


@dataclass(frozen=True)
class Release(WorkerCommand):
    """Exit cleanly. Sent at the end of a drain and of the run. `wrong`: the wrong result of this worker, which
    then marks its GPU as bad first; empty if there is none."""

    term: int = 0
    wrong: str = ""


@dataclass(frozen=True)
class Finalize(MemberCommand):
    """All members have finished the last step: gather, digest and write the weights."""


@dataclass(frozen=True)
class EndRun(Command):
    """The run is over. `error` names a class of `elastic_ring.errors`, or is empty on success."""

    error: str
    message: str
    facts: tuple[tuple[str, str], ...] = ()
    term: int = 0


# ---------------------------------------------------------------- JSON for the journal

_BASES = (Event, WorkerEvent, MemberEvent, Command, WorkerCommand, MemberCommand)
_KINDS: dict[str, type] = {
    kind.__name__: kind for base in _BASES for kind in base.__subclasses__() if kind not in _BASES
}


def to_json(message: object) -> dict[str, Any]:
    """The fields of the message, with its class name under "type". `from_json` is the inverse."""
    return {"type": type(message).__name__, **_plain(message)}


def _plain(value: Any) -> Any:
    """`dataclasses.asdict` without deep copies: all values are immutable."""
    if isinstance(value, tuple):
        return tuple([_plain(item) for item in value])
    return {name: _plain(item) for name, item in vars(value).items()} if hasattr(value, "__dict__") else value


def from_json(data: Mapping[str, Any], kinds: Mapping[str, type] = _KINDS) -> Any:
    """The message of one of these kinds whose fields `to_json` gave.

    Raises: KeyError for an unknown type, TypeError for unknown or missing fields.
    """
    fields = dict(data)
    return _decode(kinds[fields.pop("type")], fields)


def _decode(kind: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(kind, types.UnionType):
        (inner,) = [option for option in typing.get_args(kind) if option is not types.NoneType]
        return _decode(inner, value)
    if typing.get_origin(kind) is tuple:
        options = typing.get_args(kind)
        inners = [options[0]] * len(value) if options[-1] is Ellipsis else options
        return tuple(_decode(inner, item) for inner, item in zip(inners, value, strict=True))
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(type, kind))
        return kind(**{name: _decode(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    return value


_hints = functools.cache(typing.get_type_hints)


class CauseIds:
    """Issues `PREFIX.PID.1`, `PREFIX.PID.2`, ... without repetition. Thread-safe."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}.{os.getpid()}"
        self._numbers = itertools.count(1)  # `next` is atomic; `+= 1` on an attribute is not

    def __call__(self) -> str:
        return f"{self._prefix}.{next(self._numbers)}"


def with_changes(value: T, **changes: Any) -> T:
    """`dataclasses.replace` for a class that derives nothing from its fields: it runs several times per event."""
    fields = value.__dict__.copy()
    fields.update(changes)
    assert len(fields) == len(value.__dict__), changes.keys() - value.__dict__.keys()
    new = object.__new__(type(value))
    object.__setattr__(new, "__dict__", fields)
    return new
