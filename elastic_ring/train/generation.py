"""One generation on one worker: the wrapped module with its groups and buffers, and the clock of its own work.

No step in here: `passes` runs the module, `transaction` decides what becomes of the result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.comm.ledger import HopTally
from elastic_ring.attention.lowering.call_plan import PlanCache
from elastic_ring.data.loader import Loader
from elastic_ring.experts.exchange import ExpertExchange, LoadMeter
from elastic_ring.mesh import Coordinate, Mesh
from elastic_ring.train.muon import Division


class ProcessGroups(Protocol):
    """The process groups of one generation (`runtime.groups.groups.Groups`)."""

    mesh: Mesh
    global_rank: int
    world: Any
    ring: Any
    replica: Any
    device_mesh: DeviceMesh

    def among(self, ranks: tuple[int, ...]) -> Any:
        """Some ranks of `world`, for sends and receives in host memory."""

    def check(self) -> None:
        """Raises GroupAborted once the groups have been aborted."""

    def launching(self) -> AbstractContextManager[None]:
        """A context for each launch of a collective, which an abort waits for. Raises as `check`."""


class Watch(Protocol):
    """Called at each phase of a step; stamps progress and fires planned faults."""

    def __call__(self, phase: str, step: int, hop: int | None = None) -> None: ...


@dataclass
class Generation:
    """The module wrapped in the groups of one generation, with the state of its exchanges. It is dropped as a whole, as
    an aborted exchange may still write to its buffers.

    `id`: (term, generation). `hosts`: of the ring's ranks, where known. `experts`: the exchange of the layers whose
    tokens travel to their experts. `division`: of Muon's matrices.
    """

    groups: ProcessGroups
    id: tuple[int, int]
    model: nn.Module
    hosts: tuple[str, ...] | None
    experts: ExpertExchange | None
    loads: LoadMeter | None
    buffers: HopBuffers = field(default_factory=HopBuffers)
    plans: PlanCache = field(default_factory=PlanCache)
    division: Division | None = None
    abandoned: list[Tensor] = field(default_factory=list)

    @property
    def mesh(self) -> Mesh:
        return self.groups.mesh

    @property
    def coordinate(self) -> Coordinate:
        return self.mesh.coordinate(self.groups.global_rank)


class ExchangeWaits:
    """Seconds that the host has waited for FSDP2's exchanges. On a GPU it does not wait."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - begun


def connect_experts(
    layers: Sequence[Any], groups: ProcessGroups, watch: Watch, waits: ExchangeWaits, most_rows: int
) -> ExpertExchange | None:
    """Give the layers whose tokens travel to their experts one exchange; None without such layers."""
    if not layers:
        return None
    exchange = ExpertExchange(
        groups.ring,
        groups.mesh.cp,
        groups.mesh.coordinate(groups.global_rank).cp_rank,
        check=groups.check,
        observe=watch,
        waiting=waits.waiting,
        most_rows=most_rows,
    )
    for layer in layers:
        layer.exchange = exchange
    return exchange


class WorkClock:
    """Measures a rank's own work from construction to `stop`, without its waits for other ranks and for data.

    On a CPU: wall time without the waits for hops, for FSDP2's exchanges and for data. On a GPU it runs only in steps
    whose hops are timed (`is_watched`): the stream's time without its stalls for hops; stalls for FSDP2's exchanges,
    which are prefetched, count as work.
    """

    def __init__(self, device: torch.device, waits: ExchangeWaits, loader: Loader, is_watched: bool) -> None:
        self._waits, self._loader = waits, loader
        self._begun: Any = None
        self._ended: Any = None
        self._hops: HopTally | None = None
        self._on_gpu = device.type == "cuda"
        self._work_s = 0.0
        if self._on_gpu and is_watched:
            self._begun, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._begun.record()
        elif not self._on_gpu:
            self._work_s = -self._now_s()

    def stop(self, hops: HopTally) -> None:
        self._hops = hops
        if self._ended is not None:
            self._ended.record()
        elif not self._on_gpu:
            self._work_s += self._now_s() - (hops.figures()["exposed_hop_wait_s"] or 0.0)

    def per_sequence_s(self, num_sequences: int) -> float:
        """Work for each sequence, in seconds; 0 if it was not measured. Call after the device is synchronized."""
        if self._ended is not None and self._hops is not None:
            if not self._ended.query():
                return 0.0
            stalled_s = self._hops.figures()["exposed_hop_wait_s"] or 0.0
            self._work_s = float(self._begun.elapsed_time(self._ended)) / 1e3 - stalled_s
        return max(0.0, self._work_s) / num_sequences if num_sequences else 0.0

    def _now_s(self) -> float:
        return time.perf_counter() - self._waits.waited_s - self._loader.waited_s
