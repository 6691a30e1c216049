"""Messages between node agents and the coordinator: frozen data, in the codec of the core's messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from elastic_ring.control.messages import from_json

Reading = dict[str, float]
"""Of one GPU, by `health.GPU_KEYS`; readings that it lacks are missing."""


@dataclass(frozen=True)
class CoordinatorEndpoint:
    """Where an agent connects to the coordinator: its server, the server's key, and its own process and node."""

    host: str
    port: int
    key: str
    pid: int
    node: str


class WorkerReading(TypedDict, total=False):
    """A worker's progress (`agent.progress`), and its memory as `host_memory.ProcessMemory`."""

    at_step: int
    phase: str
    in_phase_s: float
    clock: dict[str, float]
    rss_bytes: int
    peak_rss_bytes: int
    shared_bytes: int


class NodeHealth(TypedDict):
    """A reading of `agent.health`: the network's counters, and GPUs by their index."""

    network: dict[str, int]
    gpus: dict[str, Reading]


@dataclass(frozen=True)
class FromAgent:
    """A message of an agent about its node."""


@dataclass(frozen=True)
class Hello(FromAgent):
    """The first line of a connection. `reconnect_s`: how long Ray's processes of the node wait for a lost head."""

    node: str
    key: str
    pid: int
    reconnect_s: float


@dataclass(frozen=True)
class NodeReading:
    """`memory_share`: the used share of the node's memory. `limit`: the share at which the agent's guard acts, below
    that of Ray's own monitor. `pressure`: `some` and `full` of `host_memory.Pressure`, {} without kernel support."""

    workers: Mapping[str, WorkerReading]
    memory_share: float
    limit: float
    pressure: Mapping[str, float]


@dataclass(frozen=True)
class Beat(FromAgent):
    """The agent runs. `reading` and `health` come only in some beats."""

    reading: NodeReading | None = None
    health: NodeHealth | None = None


@dataclass(frozen=True)
class Death(FromAgent):
    """A worker's process has ended, or begins to: a second notice of the same worker has the cause. `monotonic_s`: of
    the agent's host. `still_s`: how long before that a hung one gave its last sign of life."""

    worker: str
    pid: int
    reason: str
    how: str
    monotonic_s: float
    step: int = -1
    phase: str = "unknown"
    log_lines: tuple[str, ...] = ()
    signal: str = ""
    still_s: float = 0.0


@dataclass(frozen=True)
class BadGpus(FromAgent):
    """The GPUs of the node that must not be used; replaces the last such message."""

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
    """A message of the coordinator to an agent."""


@dataclass(frozen=True)
class Echo(ToAgent):
    """Answers a beat from the deciding thread."""


@dataclass(frozen=True)
class Watch(ToAgent):
    """Watch this worker: by pidfd, and by its stamps. `gpus`: names of the GPUs that its process sees."""

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


@dataclass(frozen=True)
class BePatient(ToAgent):
    """How long workers may be silent at least, in seconds; others as usual. Replaces the last such message."""

    limits_s: Mapping[str, float]


_KINDS: dict[str, type] = {kind.__name__: kind for base in (FromAgent, ToAgent) for kind in base.__subclasses__()}


def message_of(data: Mapping[str, Any]) -> Any:
    """The inverse of `control.messages.to_json`. Raises as `control.messages.from_json`."""
    return from_json(data, _KINDS)
