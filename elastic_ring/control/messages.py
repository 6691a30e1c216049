"""What the control core hears (events) and says (commands). Plain frozen data, JSON both ways.

Nothing here knows of Ray, torch, clocks or sockets. Every event carries a `cause`, an id that the
commands it leads to and their log lines repeat. Members' events and all commands carry (term, generation);
whoever receives one that is older than what it has seen ignores it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

from elastic_ring.mesh import Mesh


@dataclass(frozen=True)
class Vote:
    """The result of one step's vote: enough for a rank that missed it to apply the same update.

    `values` is the float64 vector that all ranks agree on (see `train.step` for its fields); opaque here.
    `cast` is the (term, generation) of the `Build` whose members cast it: a vote fits only the gradient
    that was reduced by the same members, since another mesh sums in another order.
    """

    step: int
    values: tuple[float, ...]
    cast: tuple[int, int] = (0, 0)


# ---------------------------------------------------------------- events: facts going in


@dataclass(frozen=True)
class CoordinatorStarted:
    """A coordinator begins to speak. First event of every term; `term` is larger than any before."""

    cause: str
    term: int


@dataclass(frozen=True)
class NodeJoined:
    """A node with room for `num_slots` workers in all is in the cluster (again: its room has changed).

    `num_seats`: how many of them may be members at once, one for each GPU; None where nothing limits that.
    """

    cause: str
    node: str
    num_slots: int
    num_seats: int | None = None


@dataclass(frozen=True)
class NodeLost:
    """A node is gone, confirmed by a second source; so is everything on it."""

    cause: str
    node: str


@dataclass(frozen=True)
class NodeDraining:
    """A node will leave (preemption, autoscaler): its workers hand over at the next boundary."""

    cause: str
    node: str


@dataclass(frozen=True)
class WorkerReady:
    """A started worker is warm: imports done, device up, waiting for a place."""

    cause: str
    worker: str
    node: str
    pid: int


@dataclass(frozen=True)
class WorkerLost:
    """A worker's process is gone or was fenced. `reason`: died, hung, exited, start-failed, unreachable."""

    cause: str
    worker: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class DrainRequested:
    """One worker shall leave at the next boundary."""

    cause: str
    worker: str


@dataclass(frozen=True)
class StopRequested:
    """The user wants the run to end now (Ctrl-C, job stop)."""

    cause: str
    reason: str


@dataclass(frozen=True)
class Trouble:
    """A member's step loop stopped by itself.

    kind: `peer` (an exchange failed: triggers the abort, proves nothing about who is dead),
    `user` (the model, loss or data raised: `detail` is the traceback), `device` (this worker's own device erred, or
    had no room for a newcomer: the worker is killed and replaced), `skipped` (too many skipped steps),
    `check` (the start-up check refused the model). `step` is the step that was under way or that the ring was
    being built for, whatever the worker itself has applied: a newcomer has applied none.
    """

    cause: str
    worker: str
    term: int
    generation: int
    kind: str
    step: int
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """A parked member's answer to `Stop`, or on its own at a boundary or the last step.

    `kind`: aborted, boundary, finished. `applied` is the number of steps whose update is in the shard
    (the next step to run). `vote` is the held result of step `applied`, if any. `shard` is the `cp_rank`
    whose verified state it holds, None if none (never had one, or failed inside apply, or mid-heal).
    `has_gradient`: it still holds the reduced gradient of step `applied`, so it could apply a vote for it.
    `healthy` is the device probe's answer. `last_vote` is the result that made it step `applied - 1` →
    `applied` in this generation's groups, so that members one step behind can follow. `gradient_cast` is the
    (term, generation) of the `Build` in which the kept gradient was reduced.
    """

    cause: str
    worker: str
    term: int
    generation: int
    kind: str
    applied: int
    vote: Vote | None
    shard: int | None
    has_gradient: bool
    healthy: bool = True
    last_vote: Vote | None = None
    gradient_cast: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Published:
    """The newest vote result that the coordinator itself has seen; it counts as one more holder of it.

    Only while `vote.cast` names the last `Build`: a vote of an older one may belong to a step that was
    decided to run again.
    """

    cause: str
    vote: Vote


@dataclass(frozen=True)
class Resumed:
    """A member finished its `Build`: groups up, rolled forward, healed and verified; it trains on."""

    cause: str
    worker: str
    term: int
    generation: int
    step: int


@dataclass(frozen=True)
class BuildFailed:
    """A member could not finish its `Build` (a peer vanished, a digest differed). It is parked again."""

    cause: str
    worker: str
    term: int
    generation: int
    detail: str


@dataclass(frozen=True)
class Finalized:
    """The unsharded weights are written and digested."""

    cause: str
    worker: str
    term: int
    generation: int
    weights_sha256: str


@dataclass(frozen=True)
class Status:
    """Answer to `Hello`. `activity`: spare, running, parked, building, finished."""

    cause: str
    worker: str
    term: int
    generation: int
    activity: str


@dataclass(frozen=True)
class Tick:
    """Time has passed; deadlines are looked at."""

    cause: str


Event = (
    CoordinatorStarted
    | NodeJoined
    | NodeLost
    | NodeDraining
    | WorkerReady
    | WorkerLost
    | DrainRequested
    | StopRequested
    | Trouble
    | Report
    | Published
    | Resumed
    | BuildFailed
    | Finalized
    | Status
    | Tick
)

# ---------------------------------------------------------------- commands: orders going out


@dataclass(frozen=True)
class StartWorker:
    """Start a worker under this id on this node. Agents ignore one of an older term."""

    cause: str
    worker: str
    node: str
    term: int = 0


@dataclass(frozen=True)
class KillWorker:
    """Fence: SIGKILL by the node's agent. A `WorkerLost` follows. Agents ignore one of an older term."""

    cause: str
    worker: str
    reason: str
    term: int = 0


@dataclass(frozen=True)
class Hello:
    """A new coordinator introduces itself; the worker adopts the term and answers `Status`."""

    cause: str
    worker: str
    term: int


@dataclass(frozen=True)
class Stop:
    """mode `abort`: abort every group, park, probe, answer `Report`. Sent before the `Build` of the same
    generation, so a worker that has that `Build` already ignores it: it is a late copy. Asked twice, it
    answers twice.

    mode `boundary`: put a boundary request into the next vote and go on; all members park after that step.
    """

    cause: str
    worker: str
    term: int
    generation: int
    mode: str


@dataclass(frozen=True)
class Heal:
    """`donor` sends its verified state of `cp_rank` to each of `newcomers`, once it has rolled forward.

    The donor may have no seat in the new mesh (a drained worker that hands over).
    """

    cp_rank: int
    donor: str
    newcomers: tuple[str, ...]


@dataclass(frozen=True)
class Build:
    """Close the ring: rendezvous under (term, generation), build groups, roll forward, heal, go on.

    `seats[global_rank]` is the worker of that rank. `step` is the next step to run. `roll_forward` is the
    vote that members still at `step - 1` apply first. `fresh`: nobody holds state; initialise from the seed.
    """

    cause: str
    worker: str
    term: int
    generation: int
    mesh: Mesh
    seats: tuple[str, ...]
    step: int
    roll_forward: Vote | None
    heals: tuple[Heal, ...]
    fresh: bool


@dataclass(frozen=True)
class Stand:
    """Stand by as a spare: drop groups and state of older generations."""

    cause: str
    worker: str
    term: int
    generation: int


@dataclass(frozen=True)
class Release:
    """Leave: exit cleanly. Sent at the end of a drain and of the run."""

    cause: str
    worker: str
    term: int = 0


@dataclass(frozen=True)
class Finalize:
    """All members have finished the last step: gather, digest and write the weights."""

    cause: str
    worker: str
    term: int
    generation: int


@dataclass(frozen=True)
class EndRun:
    """The run is over. `error` names a class of `elastic_ring.errors`, or is empty on success."""

    cause: str
    error: str
    message: str
    facts: tuple[tuple[str, str], ...] = ()
    term: int = 0


Command = (
    StartWorker | KillWorker | Hello | Stop | Build | Stand | Release | Finalize | EndRun
)

# ---------------------------------------------------------------- JSON both ways, for the journal

_KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (*typing.get_args(Event), *typing.get_args(Command))
}


def to_json(message: Event | Command) -> dict[str, Any]:
    """A flat mapping with the message's class name under "type"; `from_json` is its inverse."""
    return {"type": type(message).__name__, **dataclasses.asdict(message)}


def from_json(data: dict[str, Any]) -> Event | Command:
    """Raises: KeyError for an unknown type, TypeError for unknown or missing fields."""
    fields = dict(data)
    message: Event | Command = _decode(_KINDS[fields.pop("type")], fields)
    return message


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
        hints = typing.get_type_hints(kind)
        return kind(**{name: _decode(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    return value
