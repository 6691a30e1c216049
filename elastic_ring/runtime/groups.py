"""Process groups of one generation, and an abort that works on gloo.

A generation has four groups: `world` (votes), `shard` (FSDP2 inside a ring), `ring` (K/V hops) and
`replica` (gradients across rings). Gloo itself has no abort: an operation that waits for a peer stays
blocked until its timeout. But its pairs are TCP sockets of this process, so the control thread shuts those
down (`shutdown(2)`): every blocked operation on both ends raises within milliseconds, whatever it was.
The sockets are told apart from all others by their ports: one listening device serves all groups of a
generation, and the ranks exchange their devices' ports before they connect.
"""

from __future__ import annotations

import gc
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from elastic_ring.errors import GroupAborted, PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime import nccl
from elastic_ring.runtime.joined import JoinedGroup, LaunchGate
from elastic_ring.runtime.self_test import self_test
from elastic_ring.runtime.sockets import listening, tcp_sockets
from elastic_ring.runtime.transport import is_transport_error
from elastic_ring.state.transfer import Link

_ABORT_AGAIN_S = 0.02
_STORE_TRY_S = 0.3
_listen_lock = threading.Lock()


@dataclass(frozen=True)
class Rendezvous:
    """Where and under which name the ranks of one generation meet. `prefix` carries (term, generation)."""

    host: str
    port: int
    prefix: str
    address: str  # of this worker's node, for its listening device
    timeout_s: float
    collective_s: float


@dataclass
class Groups:
    """One rank's groups of one generation. `abort()` may be called from any thread, at any time, twice."""

    mesh: Mesh
    global_rank: int
    world: dist.ProcessGroup
    shard: dist.ProcessGroup
    ring: dist.ProcessGroup | JoinedGroup
    replica: dist.ProcessGroup | JoinedGroup
    device_mesh: DeviceMesh
    connector: Connector

    def check(self) -> None:
        """Raises GroupAborted once these groups have been aborted."""
        self.connector.raise_if_aborted()

    def launching(self) -> AbstractContextManager[None]:
        """Round each launch on them, so that no abort meets it half way. Raises as `check`."""
        return self.connector.gate.launching()


@dataclass
class Connector:
    """Builds the groups of one generation in the training thread; the control thread may cancel it.

    `timings`: where `connect` spent its time.
    """

    where: Rendezvous
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    aborted: bool = False
    _device_ports: set[tuple[str, int]] = field(default_factory=set)
    _own_port: int = 0
    _num_pairs: int = 0
    _connecting: bool = False
    _kept_open: dict[tuple[object, object], socket.socket] = field(default_factory=dict)
    _device: ProcessGroupGloo.Device | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    timings: dict[str, float] = field(default_factory=dict)
    _nccl: list[Any] = field(default_factory=list)
    _aborter: nccl.Aborter = field(default_factory=nccl.Aborter)
    gate: LaunchGate = field(init=False)

    def __post_init__(self) -> None:
        self.gate = LaunchGate(self.raise_if_aborted)

    def connect(self, mesh: Mesh, global_rank: int) -> Groups:
        """All groups of this rank. Raises GroupAborted, PeerFailed (a peer did not come in time)."""
        with translated(self):
            begun = time.monotonic()
            store = self._open_store()
            device = self._listen()
            self._exchange_ports(store, mesh, global_rank)
            met = time.monotonic()
            seat = mesh.seat(global_rank)
            everyone, ring = range(mesh.size), mesh.ring(seat.dp_rank)
            replicas = mesh.replicas(seat.cp_rank)
            world = self._group(store, device, "world", everyone, global_rank)
            c10d._update_default_pg(world)
            voting = time.monotonic()
            row, column = seat.dp_rank, seat.cp_rank
            named = ((f"shard{row}", ring), (f"ring{row}", ring), (f"replica{column}", replicas))
            hops: dist.ProcessGroup | JoinedGroup
            sums: dist.ProcessGroup | JoinedGroup
            if self.device.type == "cuda":
                shard, *others = self._nccl_groups(named, global_rank)
                hops, sums = (JoinedGroup(each._get_backend(self.device), self.gate.launching) for each in others)
            else:
                shard, hops, sums = (self._group(store, device, *name_ranks, global_rank) for name_ranks in named)
            device_mesh = DeviceMesh.from_group(shard, self.device.type)
            built = time.monotonic()
            groups = Groups(mesh, global_rank, world, shard, hops, sums, device_mesh, self)
            self_test(groups)
            self.timings |= {
                "meet_s": met - begun, "world_s": voting - met, "groups_s": built - voting,
                "test_s": time.monotonic() - built,
            }  # fmt: skip
            return groups

    def link(self, name: str, workers: Sequence[str], worker: str) -> Link:
        """The groups of a donor (first) and its newcomers, by worker id; the donor may have no seat."""
        with translated(self):
            store = self._open_store()
            device = self._listen()
            index = list(workers).index(worker)
            prefixed = PrefixStore(f"{self.where.prefix}/link/{name}", store)
            self._publish_port(prefixed, index, range(len(workers)))
            host = self._gloo(prefixed, device, index, len(workers))
            if self.device.type != "cuda":
                return Link(host)
            own_store = PrefixStore(f"{self.where.prefix}/link/{name}/nccl", self._open_store())
            build = partial(self._nccl_backend, own_store, index, len(workers))
            group = JoinedGroup(nccl.in_parallel([build], self.raise_if_aborted)[0], self.gate.launching)
            nccl.first_exchange(group, self.device)
            self.raise_if_aborted()  # an abort ends the exchange and raises nothing
            return Link(host, group)

    def abort(self) -> None:
        """Fail every operation of this generation, blocked or to come; the peers see it once `close` is called."""
        self._give_up()
        if not self._nccl:
            return  # gloo's calls wait inside the gate for their peers, and have been told
        with self.gate.shut():
            self._aborter.abort(self._nccl)  # after the votes' connections: no vote may count what comes now

    def _give_up(self) -> None:
        """Fail the operations over sockets, and all that have not begun.

        Only reading is shut down, and the connections stay open until `close`: gloo forgets a message that it
        is writing when the other end goes away, and whoever waits for that one would wait until its timeout.
        """
        with self._lock:
            self.aborted = True
            ports = set(self._device_ports)
            waiting = range(self._num_pairs) if self._connecting else range(0)
        for sock in tcp_sockets():
            with sock, suppress(OSError):
                near, (host, port) = sock.getsockname()[:2], sock.getpeername()[:2]
                if near[1] == self._own_port or (host.removeprefix("::ffff:"), port) in ports:
                    sock.shutdown(socket.SHUT_RD)
                    if (near, (host, port)) not in self._kept_open:
                        self._kept_open[near, (host, port)] = sock.dup()
        for pair in waiting:
            self._knock(pair)

    def close(self) -> None:
        """Let go of the connections of an aborted generation, once nobody waits for them any more."""
        while self._kept_open:
            self._kept_open.popitem()[1].close()
        # Of groups that a boundary left up: freeing them would abort them too, but one after another.
        self._aborter.abort(self._nccl)

    def wait_closed(self, timeout_s: float) -> bool:
        """After `close`: whether every group on the device has let go of its memory within this time."""
        return self._aborter.wait(timeout_s)

    def retire(self, link: Link) -> None:
        """Take down the device's group of a heal that has ended here; it would hold memory for the whole generation."""
        if link.device is not None:
            self._aborter.abort([link.device.backend])

    def _knock(self, pair: int) -> None:
        """Connect to this process's own device as the peer of `pair` would, and hang up.

        A pair that waits for its peer to call has no socket yet which could be shut down. A caller names the
        pair by its number on the device.
        """
        with suppress(OSError), socket.create_connection((self.where.address, self._own_port), timeout=1.0) as caller:
            caller.sendall(pair.to_bytes(8, sys.byteorder))

    def abort_until(self, parked: threading.Event, timeout_s: float) -> bool:
        """Abort until the training thread is `parked`; whether it was in time.

        Once is not enough: a group that connects just then opens sockets that the abort has not seen.
        """
        deadline = time.monotonic() + timeout_s
        self._give_up()
        if self._nccl:
            # Whoever asks something of an NCCL group waits out its abort, half a second; a thread that is not
            # waiting for the device comes by a check within milliseconds.
            parked.wait(_ABORT_AGAIN_S)
        self.abort()
        while not parked.wait(_ABORT_AGAIN_S):
            if time.monotonic() > deadline:
                return False
            self.abort()
        return True

    # ------------------------------------------------------------ parts, in the order of `connect`

    def _open_store(self) -> TCPStore:
        """In short tries, between which an abort is noticed: a client that is connecting cannot be cancelled."""
        deadline = time.monotonic() + self.where.timeout_s
        while True:
            self.raise_if_aborted()
            left = max(0.001, deadline - time.monotonic())
            try:
                store = TCPStore(
                    self.where.host, self.where.port, is_master=False, wait_for_workers=False,
                    timeout=timedelta(seconds=min(_STORE_TRY_S, left)),
                )  # fmt: skip
                break
            except dist.DistNetworkError:
                if time.monotonic() >= deadline:
                    raise
        store.set_timeout(timedelta(seconds=self.where.timeout_s))
        with self._lock:
            self._device_ports.add((socket.gethostbyname(self.where.host), self.where.port))
        self.raise_if_aborted()  # by an abort that did not know of this socket yet
        return store

    def _listen(self) -> ProcessGroupGloo.Device:
        if self._device is not None:
            return self._device
        with _listen_lock:
            before = {port for port, _ in listening()}
            device = ProcessGroupGloo.create_device(hostname=self.where.address)
            opened = [port for port, address in listening() if port not in before and address == self.where.address]
        if len(opened) != 1:
            raise PeerFailed(f"this node's address {self.where.address} gave {len(opened)} listening sockets, not one")
        self._own_port, self._device = opened[0], device
        return device

    def _exchange_ports(self, store: TCPStore, mesh: Mesh, global_rank: int) -> None:
        self._publish_port(PrefixStore(self.where.prefix, store), global_rank, range(mesh.size))

    def _publish_port(self, store: PrefixStore, index: int, everyone: Sequence[int]) -> None:
        store.set(f"port/{index}", f"{self.where.address}:{self._own_port}")
        for answer in store.multi_get([f"port/{peer}" for peer in everyone]):
            host, _, port = answer.decode().rpartition(":")
            with self._lock:
                self._device_ports.add((host, int(port)))
        self.raise_if_aborted()

    def _group(
        self, store: TCPStore, device: ProcessGroupGloo.Device, name: str, ranks: Sequence[int], global_rank: int
    ) -> dist.ProcessGroup:
        """Connect and register one group, so that FSDP2 and DeviceMesh find it by name."""
        prefixed = PrefixStore(f"{self.where.prefix}/{name}", store)
        backend = self._gloo(prefixed, device, list(ranks).index(global_rank), len(ranks))
        return self._registered(name, prefixed, backend, "gloo", "cpu", ranks, global_rank)

    def _registered(
        self, name: str, store: PrefixStore, backend: Any, kind: str, device_type: str, ranks: Sequence[int],
        global_rank: int,
    ) -> dist.ProcessGroup:
        full_name, rank = f"{self.where.prefix}/{name}", list(ranks).index(global_rank)
        group = dist.ProcessGroup(store, rank, len(ranks))
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

    def _nccl_groups(
        self, named: Sequence[tuple[str, Sequence[int]]], global_rank: int
    ) -> list[dist.ProcessGroup]:
        """All NCCL groups at once, each over a connection to the store of its own: a client that waits blocks."""
        stores = [PrefixStore(f"{self.where.prefix}/{name}", self._open_store()) for name, _ in named]
        builds = [
            partial(self._timed_backend, name.rstrip("0123456789"), store, list(ranks).index(global_rank), len(ranks))
            for store, (name, ranks) in zip(stores, named, strict=True)
        ]
        backends = nccl.in_parallel(builds, self.raise_if_aborted)
        return [
            self._registered(name, store, backend, "nccl", "cuda", ranks, global_rank)
            for store, backend, (name, ranks) in zip(stores, backends, named, strict=True)
        ]

    def _timed_backend(self, kind: str, store: PrefixStore, rank: int, size: int) -> Any:
        begun = time.monotonic()
        backend = self._nccl_backend(store, rank, size)
        self.timings[f"{kind}_s"] = time.monotonic() - begun
        return backend

    def _nccl_backend(self, store: PrefixStore, rank: int, size: int) -> Any:
        backend = nccl.make_backend(
            store, rank, size, self.device, self.where.collective_s, self._keep, lambda: self.aborted
        )
        self.raise_if_aborted()
        return backend

    def _keep(self, backend: Any) -> None:
        with self._lock:
            self._nccl.append(backend)

    def _gloo(
        self, store: PrefixStore, device: ProcessGroupGloo.Device, rank: int, size: int
    ) -> ProcessGroupGloo:
        self.raise_if_aborted()
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timedelta(seconds=self.where.timeout_s)
        with self._lock:
            self._num_pairs += size
            self._connecting = True
        try:
            backend = ProcessGroupGloo(store, rank, size, options)
        finally:
            self._connecting = False
        self.raise_if_aborted()
        backend._set_default_timeout(timedelta(seconds=self.where.collective_s))
        return backend

    def exchange_error(self) -> str:
        """What NCCL has noticed of a broken link of these groups, and ends nothing for; empty if nothing."""
        with self._lock:
            backends = [] if self.aborted else [each for each in self._nccl if not self._aborter.has_begun(each)]
        return next((error for error in map(nccl.link_error, backends) if error), "")

    def raise_if_aborted(self) -> None:
        """Raises GroupAborted once the control thread has given this generation up."""
        if self.aborted:
            raise GroupAborted(f"generation {self.where.prefix} was aborted")


def forget_groups() -> None:
    """Take the old generation's groups out of torch's tables; frees their threads and sockets.

    Drop the module first: FSDP2's are reference cycles, which hold shards and groups until they are collected.
    """
    # Whether these groups are NCCL's, not whether there is a GPU: a run on CPUs may have one beside it.
    if dist.is_initialized() and any(kind == "nccl" for kind, _ in c10d._world.pg_map.values()):
        _forget_tables()
    elif dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _forget_tables() -> None:
    """What `destroy_process_group` does, but for waiting until NCCL's groups have shut down: they are aborted."""
    world = c10d._world
    c10d._update_default_pg(None)
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag,
                  world.tags_to_pg, world.pg_coalesce_state):  # fmt: skip
        table.clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0


class translated:
    """Turns torch's transport errors into GroupAborted or PeerFailed; leaves all others alone."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, GroupAborted):
            return
        if self._connector.aborted and is_transport_error(error):
            raise GroupAborted(f"generation {self._connector.where.prefix} was aborted") from error
        if is_transport_error(error):
            raise PeerFailed(f"{type(error).__name__}: {error}") from error
