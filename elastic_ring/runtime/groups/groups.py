"""Process groups of one generation, and an abort that works on gloo and NCCL.

A generation has four groups: `world` (votes), `shard` (FSDP2 inside a ring), `ring` (K/V hops) and
`replica` (gradients across rings). The training thread builds them; the control thread may abort them at any time.
They stand in torch's global tables, where alone FSDP2 and DeviceMesh find groups. How each kind of group is built and
aborted is in `gloo` and `nccl`.
"""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from elastic_ring.errors import GroupAborted, PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups import nccl
from elastic_ring.runtime.groups.gloo import Sockets
from elastic_ring.runtime.groups.nccl import BatchedGroup, LaunchGate
from elastic_ring.runtime.groups.transport import NewListeners, translated, with_secret
from elastic_ring.state.transfer import Link

_ABORT_AGAIN_S = 0.02
_STORE_TRY_S = 0.3


def self_test(groups: Groups) -> None:
    """Check a known sum over each group of several ranks, and a known number between each pair of ranks of the ring.

    Raises PeerFailed for a wrong result, GroupAborted when the groups were aborted meanwhile.
    """
    for name in ("world", "shard", "ring", "replica"):
        group: Any = getattr(groups, name)
        if group.size() == 1:
            continue
        device = groups.connector.device if name != "world" else torch.device("cpu")
        probe = torch.tensor([1.0, float(group.rank())], device=device)
        # The other groups' launches take the gate's lock themselves, and it is not reentrant.
        with groups.launching() if name == "shard" else nullcontext():
            work = group.allreduce([probe])
        work.wait()
        size = group.size()
        total = probe.tolist()
        groups.check()  # on a device an abort ends the exchange without an error
        if total != [size, size * (size - 1) / 2]:
            raise PeerFailed(f"self-test of group {name}: got {total} from {size} ranks")
    received = shift(groups.ring, groups.connector.device)
    groups.check()
    if received != [float(peer) for peer in range(len(received))]:
        raise PeerFailed(f"self-test of the hops of the ring: received {received}")


def shift(ring: Any, device: torch.device) -> list[float]:
    """Exchange ranks all-to-all, batched where the group supports it; returns the received ranks.

    NCCL connects two ranks at their first exchange, which takes as long as gigabytes do later. A hop pulls straight
    from its source, so a dense ring needs every pair.
    """
    rank, size = ring.rank(), ring.size()
    received = torch.full((size,), float(rank), device=device)
    own = torch.full((1,), float(rank), device=device)
    is_batched = isinstance(ring, BatchedGroup) and size > 1
    if is_batched:
        ring._start_coalescing()
    works = []
    for hop in range(1, size):
        source = (rank - hop) % size
        works += [ring.send([own], (rank + hop) % size, 0), ring.recv([received[source : source + 1]], source, 0)]
    if is_batched:
        works = [ring._end_coalescing()]
    for work in works:
        work.wait()
    return [float(value) for value in received.tolist()]


def register_group(
    full_name: str,
    store: PrefixStore,
    backend: Any,
    kind: str,
    device_type: str,
    ranks: Sequence[int],
    global_rank: int,
) -> dist.ProcessGroup:
    """Create a group of these global ranks over a connected `backend` of `kind` (gloo, nccl), in torch's tables."""
    group = dist.ProcessGroup(store, list(ranks).index(global_rank), len(ranks))
    backend_type = getattr(dist.ProcessGroup.BackendType, kind.upper())
    group._register_backend(torch.device(device_type), backend_type, backend)
    group._set_default_backend(backend_type)
    group._set_group_name(full_name)  # type: ignore[arg-type]
    world = c10d._world
    world.pg_map[group] = (kind, store)
    world.pg_names[group] = full_name  # type: ignore[assignment]
    world.pg_group_ranks[group] = {peer: i for i, peer in enumerate(ranks)}
    world.pg_backend_config[group] = f"{device_type}:{kind}"
    c10d._register_process_group(full_name, group)  # type: ignore[arg-type]
    return group


def forget_groups() -> None:
    """Remove the old generation's groups from torch's tables; frees their threads and sockets.

    Drop the module first: FSDP2 modules are reference cycles, which keep shards and groups until they are collected.
    """
    world = c10d._world
    # Asks whether these groups are NCCL's, not whether there is a GPU: a run on CPUs may be on a host with GPUs.
    if dist.is_initialized() and any(kind == "nccl" for kind, _ in world.pg_map.values()):
        # As `destroy_process_group`, but without waiting for NCCL's groups to shut down: they are aborted.
        c10d._update_default_pg(None)
        for table in (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
            world.tags_to_pg,
            world.pg_coalesce_state,
        ):
            table.clear()
        c10d._unregister_all_process_groups()
        world.group_count = 0
    elif dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


@dataclass(frozen=True)
class Rendezvous:
    """Where and under which name the ranks of one generation meet. `prefix` carries (term, generation), `secret` is
    the store's. `hosts`: where all of the ranks are; empty if some are unknown."""

    host: str
    port: int
    prefix: str
    address: str  # of this worker's node, for its listening device
    timeout_s: float
    collective_s: float
    secret: str = ""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """Some `ranks` of a group, counted from 0, for sends and receives between them."""

    group: Any
    ranks: tuple[int, ...]

    def rank(self) -> int:
        return self.ranks.index(self.group.rank())

    def size(self) -> int:
        return len(self.ranks)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        return self.group.send(tensors, self.ranks[dst], tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        return self.group.recv(tensors, self.ranks[src], tag)

    def _start_coalescing(self) -> None:
        self.group._start_coalescing()

    def _end_coalescing(self) -> Any:
        return self.group._end_coalescing()


@dataclass
class Groups:
    """One rank's groups of one generation. `abort()` may be called from any thread, at any time, twice."""

    mesh: Mesh
    global_rank: int
    world: dist.ProcessGroup
    shard: dist.ProcessGroup
    ring: dist.ProcessGroup | BatchedGroup
    replica: dist.ProcessGroup | BatchedGroup
    device_mesh: DeviceMesh
    connector: Connector

    def among(self, ranks: tuple[int, ...]) -> Part:
        """Some ranks of `world`, for sends and receives in host memory."""
        return Part(self.world, ranks)

    def check(self) -> None:
        """Raises GroupAborted once these groups have been aborted."""
        self.connector.raise_if_aborted()

    def launching(self) -> AbstractContextManager[None]:
        """Wraps each launch, so that an abort waits for it. Raises as `check`."""
        return self.connector.gate.launching()

    def link(self, ranks: Sequence[int]) -> Link | None:
        """The link of a heal between members, by global rank, the donor first: parts of `world` and, on a device, of
        `replica`. None unless all of them hold the same shard in this mesh. Raises GroupAborted, PeerFailed."""
        replicas = self.mesh.replicas(self.mesh.coordinate(self.global_rank).cp_rank)
        if not set(ranks) <= set(replicas):
            return None
        host = Part(self.world, tuple(ranks))
        if self.connector.device.type != "cuda":
            return Link(host)
        device = Part(self.replica, tuple(replicas.index(rank) for rank in ranks))
        with translated(self.connector):
            nccl.first_exchange(device, self.connector.device)
            self.check()  # an abort ends the exchange and raises nothing
        return Link(host, device)


@dataclass
class Connector:
    """Builds the groups of one generation in the training thread; the control thread may cancel it.

    `open` starts and `join` completes it; in between only `world` may be used. Groups on a
    device connect in parallel, groups of one rank not at all: `timings` has `shard_s`, `ring_s` and `replica_s`, and
    `groups_s` until the last of them is connected. A link of its own has `link_group_s`.
    """

    where: Rendezvous
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    aborted: bool = False
    timings: dict[str, float] = field(default_factory=dict)
    gate: LaunchGate = field(init=False)
    _sockets: Sockets = field(init=False)
    _nccl: list[Any] = field(default_factory=list)
    _connecting: nccl.Builds | None = None
    _opened: NewListeners | None = None
    _aborter: nccl.Aborter = field(default_factory=nccl.Aborter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.gate = LaunchGate(self.raise_if_aborted)
        self._sockets = Sockets(self.where.address, self.raise_if_aborted, self.where.hosts)

    def connect(self, mesh: Mesh, global_rank: int) -> Groups:
        """All groups of this rank. Raises GroupAborted, PeerFailed (a peer did not connect in time)."""
        groups = self.open(mesh, global_rank)
        self.join(groups)
        return groups

    def open(self, mesh: Mesh, global_rank: int) -> Groups:
        """All groups of this rank; until `join` they may still connect, and only `world` may be used. Raises as
        `connect`."""
        with translated(self), self._sockets.admitting():
            begun = time.monotonic()
            store = self._meet(mesh, global_rank)
            met = time.monotonic()
            coordinate = mesh.coordinate(global_rank)
            everyone, ring = range(mesh.size), mesh.ring(coordinate.dp_rank)
            replicas = mesh.replicas(coordinate.cp_rank)
            world = self._group(store, "world", everyone, global_rank)
            c10d._update_default_pg(world)
            voting = time.monotonic()
            row, column = coordinate.dp_rank, coordinate.cp_rank
            named = ((f"shard{row}", ring), (f"ring{row}", ring), (f"replica{column}", replicas))
            hops: dist.ProcessGroup | BatchedGroup
            sums: dist.ProcessGroup | BatchedGroup
            if self.device.type == "cuda":
                shard, *batched = self._open_nccl(named, global_rank, voting)
                hops, sums = (BatchedGroup(group._get_backend(self.device), self.gate.launching) for group in batched)
            else:
                shard, hops, sums = (self._group(store, *name_ranks, global_rank) for name_ranks in named)
                self.timings["groups_s"] = time.monotonic() - voting
            self.timings |= {"meet_s": met - begun, "world_s": voting - met}
            device_mesh = DeviceMesh.from_group(shard, self.device.type)
            return Groups(mesh, global_rank, world, shard, hops, sums, device_mesh, self)

    def join(self, groups: Groups) -> None:
        """Wait until all groups are connected and test them. Every rank must call it. Raises as `connect`."""
        with translated(self):
            if self._connecting is not None:
                self.timings["groups_s"] = max(self._connecting.results(self._look), default=0.0)
                self._connecting = None
            connected = time.monotonic()
            self_test(groups)
            self.timings["test_s"] = time.monotonic() - connected

    def link(self, name: str, workers: Sequence[str], worker: str) -> Link:
        """Groups of their own for a donor (first) and its newcomers, by worker id; they need no rank."""
        begun, host = time.monotonic(), self.host_link(name, workers, worker)
        if self.device.type != "cuda":
            return Link(host)
        with translated(self):
            _, backend = self._nccl_backend(f"link/{name}/nccl", list(workers).index(worker), len(workers))
            device_group = BatchedGroup(backend, self.gate.launching)
            self._opened = NewListeners(self.where.address, self.where.hosts)
            nccl.Builds([partial(self._connect, backend, "link_group", begun)]).results(self._look)
            nccl.first_exchange(device_group, self.device)
            self.raise_if_aborted()  # an abort ends the exchange and raises nothing
        return Link(host, device_group)

    def host_link(self, name: str, workers: Sequence[str], worker: str) -> Any:
        """A connected group of `workers`, by worker id, for host memory alone; they need no rank."""
        with translated(self), self._sockets.admitting():
            prefixed = PrefixStore(f"{self.where.prefix}/link/{name}", self._open_store())
            index = list(workers).index(worker)
            self._sockets.listen()
            self._sockets.exchange_ports(prefixed, index, range(len(workers)))
            return self._gloo(prefixed, index, len(workers))

    def abort(self) -> None:
        """Fail every operation of this generation, blocked or to come; the peers see it once `close` is called."""
        self._give_up()
        if not self._nccl:
            return  # gloo's calls wait inside the gate for their peers, and know of the abort
        with self.gate.shut():
            self._aborter.abort(self._nccl)  # after the votes' connections: no vote may count garbage

    def _give_up(self) -> None:
        """Fail the operations over sockets, and all that have not begun."""
        self.aborted = True  # first: a socket that is opened from here on finds it so
        self._sockets.shut_down()

    def close(self) -> None:
        """Close the connections of an aborted generation, once no thread waits for them."""
        self._sockets.close()
        # Of groups that a boundary left up: freeing them would abort them too, but one after another.
        self._aborter.abort(self._nccl)

    def wait_closed(self, timeout_s: float) -> bool:
        """After `close`: whether every group on the device has freed its memory within this time."""
        return self._aborter.wait(timeout_s)

    def retire(self, link: Link) -> None:
        """Abort the device group of a finished heal, if it has its own: it would keep memory for the generation."""
        if isinstance(link.device, BatchedGroup):
            self._aborter.abort([link.device.backend])

    def abort_until(self, paused: threading.Event, timeout_s: float) -> bool:
        """Abort until the training thread is `paused`; returns whether it was in time.

        Once is not enough: a group that is connecting opens sockets which the abort has not seen.
        """
        deadline = time.monotonic() + timeout_s
        self._give_up()
        if self._nccl:
            # A call on an NCCL group waits for its abort, half a second; a thread that does not wait for the device
            # reaches a check within milliseconds.
            paused.wait(_ABORT_AGAIN_S)
        self.abort()
        while not paused.wait(_ABORT_AGAIN_S):
            if time.monotonic() > deadline:
                return False
            self.abort()
        return True

    # ------------------------------------------------------------ parts, in the order of `connect`

    def _open_store(self) -> Store:
        """In short attempts, because a client that is connecting cannot be cancelled by an abort."""
        deadline = time.monotonic() + self.where.timeout_s
        while True:
            self.raise_if_aborted()
            left = max(0.001, deadline - time.monotonic())
            try:
                store = TCPStore(
                    self.where.host,
                    self.where.port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=min(_STORE_TRY_S, left)),
                )
                break
            except dist.DistNetworkError:
                if time.monotonic() >= deadline:
                    raise
        store.set_timeout(timedelta(seconds=self.where.timeout_s))
        self._sockets.add_peer(socket.gethostbyname(self.where.host), self.where.port)
        return with_secret(store, self.where.secret)

    def _meet(self, mesh: Mesh, global_rank: int) -> Store:
        """Open the store, listen, and exchange addresses with the other ranks."""
        store = self._open_store()
        self._sockets.listen()
        self._sockets.exchange_ports(PrefixStore(self.where.prefix, store), global_rank, range(mesh.size))
        return store

    def _group(self, store: Store, name: str, ranks: Sequence[int], global_rank: int) -> dist.ProcessGroup:
        """Connect and register one group, so that FSDP2 and DeviceMesh find it by name."""
        full_name = f"{self.where.prefix}/{name}"
        prefixed = PrefixStore(full_name, store)
        backend = self._gloo(prefixed, list(ranks).index(global_rank), len(ranks))
        return register_group(full_name, prefixed, backend, "gloo", "cpu", ranks, global_rank)

    def _gloo(self, store: PrefixStore, rank: int, size: int) -> Any:
        return self._sockets.connect(store, rank, size, self.where.timeout_s, self.where.collective_s)

    def _open_nccl(
        self, named: Sequence[tuple[str, Sequence[int]]], global_rank: int, since: float
    ) -> list[dist.ProcessGroup]:
        """Start to connect all NCCL groups; `join` waits for them. One of a single rank is not used."""
        groups, connects = [], []
        for name, ranks in named:
            store, backend = self._nccl_backend(name, list(ranks).index(global_rank), len(ranks))
            full_name = f"{self.where.prefix}/{name}"
            groups.append(register_group(full_name, store, backend, "nccl", "cuda", ranks, global_rank))
            if len(ranks) > 1:
                connects.append(partial(self._connect, backend, name.rstrip("0123456789"), since))
        self._opened = NewListeners(self.where.address, self.where.hosts)
        self._connecting = nccl.Builds(connects)
        return groups

    def _nccl_backend(self, name: str, rank: int, size: int) -> tuple[PrefixStore, Any]:
        """A backend that is not connected yet, with its own connection to the store: a waiting client blocks."""
        store = PrefixStore(f"{self.where.prefix}/{name}", self._open_store())
        backend = nccl.create_backend(store, rank, size, self.device, self.where.collective_s)
        with self._lock:
            self._nccl.append(backend)
        self.raise_if_aborted()  # an earlier abort has missed this backend
        return store, backend

    def _connect(self, backend: Any, kind: str, since: float) -> float:
        """Runs in a thread of its own; returns the seconds since `since`. Raises GroupAborted."""
        torch.cuda.set_device(self.device)  # the current device belongs to a thread
        nccl.connect_now(backend, self.device, lambda: self.aborted)
        self.raise_if_aborted()
        self.timings[f"{kind}_s"] = time.monotonic() - since
        return self.timings[f"{kind}_s"]

    def _look(self) -> None:
        """While NCCL's groups connect, and once they have. Raises GroupAborted."""
        self.raise_if_aborted()
        if self._opened is not None:
            self._opened.keep_out_strangers()

    def exchange_error(self) -> str:
        """NCCL's own report of a broken link in these groups; empty if there is none."""
        with self._lock:
            backends = [] if self.aborted else [own for own in self._nccl if not self._aborter.has_begun(own)]
        return next((error for error in map(nccl.link_error, backends) if error), "")

    def raise_if_aborted(self) -> None:
        """Raises GroupAborted once the control thread has aborted this generation."""
        if self.aborted:
            raise GroupAborted(f"generation {self.where.prefix} was aborted")
