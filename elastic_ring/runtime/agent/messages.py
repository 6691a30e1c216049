"""What node agents and the coordinator say to each other: frozen data, in the codec of the core's messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_ring.control.messages import decoded


@dataclass(frozen=True)
class FromAgent:
    """What an agent says of its node."""


@dataclass(frozen=True)
class Hello(FromAgent):
    """The first line of a connection. `reconnect_s`: how long Ray's processes of the node wait for a head that is
    gone."""

    node: str
    key: str
    pid: int
    reconnect_s: float


@dataclass(frozen=True)
class NodeReading:
    """`workers`: what each does (`agent.progress`), and its memory. `memory_share`: of the node's memory, used;
    `limit`: where the agent's guard acts, lower where Ray's own monitor would act first. `pressure`: `some` and `full`
    of `host_memory.Pressure`, {} without kernel support."""

    workers: Mapping[str, Any]
    memory_share: float
    limit: float
    pressure: Mapping[str, float]


@dataclass(frozen=True)
class Beat(FromAgent):
    """The agent runs. `reading` and `health` (`agent.health`) only in some beats."""

    reading: NodeReading | None = None
    health: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Death(FromAgent):
    """A worker's process has ended, or begins to: a second notice of the same worker has the cause. `monotonic_s`: of
    the agent's host."""

    worker: str
    pid: int
    reason: str
    how: str
    monotonic_s: float
    step: int = -1
    phase: str = "unknown"
    log_lines: tuple[str, ...] = ()
    signal: str = ""


@dataclass(frozen=True)
class BadGpus(FromAgent):
    """The GPUs of the node that must not be used; replaces what was said before."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Resolved(FromAgent):
    """How long the node's resolver takes for the agent's own address."""

    address: str
    took_s: float


@dataclass(frozen=True)
class Said(FromAgent):
    """A sentence for the run's log."""

    text: str


@dataclass(frozen=True)
class Leaves(FromAgent):
    """The provider takes the machine away."""

    in_s: float


@dataclass(frozen=True)
class HungUp(FromAgent):
    """The connection has ended; the server says so, not the agent."""


@dataclass(frozen=True)
class ToAgent:
    """What the coordinator says to an agent."""


@dataclass(frozen=True)
class Echo(ToAgent):
    """Answers a beat from the deciding thread."""


@dataclass(frozen=True)
class Watch(ToAgent):
    """Watch this worker: by pidfd, and by its stamps. `gpus`: the names of those that its process sees."""

    worker: str
    pid: int
    stamp_path: str
    log_path: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kill(ToAgent):
    worker: str
    reason: str


@dataclass(frozen=True)
class Forget(ToAgent):
    """Stop watching a worker."""

    worker: str


_KINDS: dict[str, type] = {kind.__name__: kind for base in (FromAgent, ToAgent) for kind in base.__subclasses__()}


def message_of(data: Mapping[str, Any]) -> Any:
    """The inverse of `control.messages.to_json`. Raises as `decoded`."""
    return decoded(data, _KINDS)
