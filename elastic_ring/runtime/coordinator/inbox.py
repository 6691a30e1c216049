"""Data that threads exchange with the coordinator's deciding thread: the messages in its queue, and the driver's feed.

The queue gives the calls of workers and drivers, the agents' messages and the clock one order: a step that is published
before a failure is part of the quorum that follows. So Ray's threads and the connections' thread hand over what they
get, and stay free for heartbeats and leases while the deciding thread waits for a disk. `agent.messages.Death` and
`Said`, and parts of checkpoints, go into the queue, too. No decisions here.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from elastic_ring.config import CheckpointConfig
from elastic_ring.control.messages import CallbacksAnswered, Checkpoint, Event
from elastic_ring.control.state import State
from elastic_ring.monitor.metrics import CheckpointEvent, StepMetrics
from elastic_ring.runtime.coordinator.folds.recovery_log import LinesHeard
from elastic_ring.runtime.notices import Notice
from elastic_ring.runtime.worker.coordinator_client import WorkerDescription


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

    described: WorkerDescription


@dataclass(frozen=True)
class Abandoned:
    """The driver ends the run; if it `saves`, after a checkpoint where there is time for one."""

    reason: str
    saves: bool = False


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
class SavesAs:
    """A submission that attached has other intervals or another retention of checkpoints."""

    config: CheckpointConfig


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

KEPT_STEPS = 256


class End(TypedDict, total=False):
    """The end of an `attempt`. `error`: a class name of `elastic_ring.errors`, or empty. `saved_step`: of a checkpoint
    that a stop waited for. `left_behind`: actors and placement groups that could not be removed."""

    error: str
    message: str
    facts: Mapping[str, Any]
    attempt: str
    saved_step: int
    summary: dict[str, Any]
    left_behind: list[str]


class News(TypedDict, total=False):
    """The answer to a driver that follows the run: new steps and lines, which lines it has then, the present phase,
    and the end."""

    steps: list[StepMetrics]
    lines: list[str]
    heard: LinesHeard
    phase: str
    generation: int
    term: int
    awaited: int | None
    ended: End | None


class DriverFeed:
    """Written by the deciding thread, read by the threads in which drivers call; and the lease that they renew.

    Values are replaced, never changed in place, so that readers can iterate without a lock.
    """

    def __init__(self) -> None:
        self.ended: End | None = None
        self.stopping = math.inf, ""
        """The step after which a checkpoint ends the run, and the reason of a driver that waits for it."""
        self._renewed_at = time.monotonic()
        self._steps: tuple[StepMetrics, ...] = ()
        self._outline: News = {"phase": "starting"}

    def renew(self) -> None:
        """Renew the lease: a driver has called."""
        self._renewed_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since a driver last called."""
        return time.monotonic() - self._renewed_at

    def publish(self, steps: Sequence[StepMetrics]) -> None:
        """Add committed steps; the newest KEPT_STEPS are kept."""
        self._steps = (*self._steps, *steps)[-KEPT_STEPS:]

    def outline(self, state: State) -> None:
        """Take the present phase."""
        self._outline = {
            "phase": type(state.phase).__name__.lower(),
            "generation": state.generation,
            "term": state.term,
            "awaited": state.callbacks.awaited,
        }

    def news(self, after_step: int, generation: int = 0) -> News:
        """What a driver lacks that has `after_step` of this generation; one that went back has earlier steps again."""
        ended = self.ended  # first: what comes with it is then complete
        newest = (generation, after_step)
        steps = [m for m in self._steps if ((m.generation if generation else 0), m.step) > newest]
        return {"steps": steps, **self._outline, "ended": ended}
