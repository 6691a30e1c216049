"""Messages of other threads to the coordinator's deciding thread, through its queue. Data only.

`agent.messages.Death` and `Said` go there, too.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_ring.control.messages import CallbacksAnswered, Checkpoint, Event
from elastic_ring.monitor.metrics import CheckpointEvent
from elastic_ring.runtime.notices import CheckpointLeftOut, CheckpointPart, Notice


@dataclass(frozen=True)
class Happened:
    """An event for the core. `extra` came with it and changes no decision."""

    event: Event
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepsPublished:
    """Records of committed steps, and notices beside them, from a worker."""

    records: Sequence[Notice]


@dataclass(frozen=True)
class CallbacksSaid:
    """`counts` is the reply: True if accepted."""

    event: CallbacksAnswered
    counts: queue.Queue[bool]


@dataclass(frozen=True)
class FaultAsked:
    """`answer` is the reply: True if this planned fault may fire now."""

    index: int
    worker: str
    answer: queue.Queue[bool]


@dataclass(frozen=True)
class NodeBeat:
    node: str


@dataclass(frozen=True)
class AgentAttached:
    """`reconnect_s`: as in `agent.messages.Hello`."""

    node: str
    reconnect_s: float


@dataclass(frozen=True)
class WorkerFound:
    """A worker that an earlier coordinator started, as it describes itself."""

    described: Mapping[str, Any]


@dataclass(frozen=True)
class Abandoned:
    """The driver ends the run; if it `saves`, after a checkpoint where there is time for one."""

    reason: str
    saves: bool = False


@dataclass(frozen=True)
class PartSaved:
    """A rank's part of a checkpoint is written, or failed."""

    part: CheckpointPart | CheckpointLeftOut


@dataclass(frozen=True)
class CheckpointCounts:
    """A checkpoint has been committed."""

    checkpoint: CheckpointEvent


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint of `step` was due, and does not count."""

    step: int
    reason: str


@dataclass(frozen=True)
class CheckpointsListed:
    """The checkpoints that count now."""

    checkpoints: tuple[Checkpoint, ...]


@dataclass(frozen=True)
class DemandNoted:
    """The request to the autoscaler has changed: a note for the journal."""

    text: str
    num_workers: int


Inbox = queue.Queue[Any]
Put = Callable[[Any], None]
