"""Copies of peers' state in host memory: the store of one worker, and the exchange that fills it.

What is stored is complete, verified at arrival and again before use. An exchange sends this rank's snapshot to its
holders and receives what this rank holds for its peers, in a thread of its own beside the next steps. The end of its
generation ends it. Who holds whose copy, and which of them a recovery uses, is decided elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elastic_ring.control.messages import Build, HeldCopy, SnapshotId
from elastic_ring.errors import DigestMismatch
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups.transport import is_transport_error
from elastic_ring.state import sealed, snapshot
from elastic_ring.state.shard import Shard
from elastic_ring.state.snapshot import Buffers, Snapshot, named

log = logging.getLogger(__name__)

RUNNING, DONE, FAILED = "running", "done", "failed"


@dataclass(eq=False)
class StoredCopy:
    """A verified copy of one worker's snapshot, or the parity of several workers' snapshots. `data` is sealed."""

    id: SnapshotId
    workers: tuple[str, ...]
    cp_ranks: tuple[int, ...]
    data: Tensor

    @property
    def is_parity(self) -> bool:
        return len(self.workers) > 1

    def __str__(self) -> str:
        kind, ranks = "parity" if self.is_parity else "copy", ", ".join(map(str, self.cp_ranks))
        return f"the {kind} of cp_rank {ranks} of {named(self.id)}, made by {', '.join(self.workers)}"


class CopyStore:
    """The worker's own snapshots by their id, and the copies and parities of its peers' snapshots.

    Exchanges add to it in their own threads, under `lock`. Memory of dropped snapshots is used again.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self.lock = threading.Lock()
        self.own: dict[SnapshotId, Snapshot] = {}
        self.copies: list[StoredCopy] = []
        self.pinned, self.buffers = Buffers(), Buffers()

    def held(self) -> tuple[HeldCopy, ...]:
        """The snapshots and copies for this worker's report; called by any thread."""
        with self.lock:
            snapshots = [HeldCopy(own.id, (own.cp_rank,), own=True) for own in self.own.values()]
            copies = [
                HeldCopy(copy.id, copy.cp_ranks, parity_of=copy.workers if copy.is_parity else ())
                for copy in self.copies
            ]
        return (*snapshots, *copies)

    def ids(self) -> set[SnapshotId]:
        with self.lock:
            return {*self.own, *(copy.id for copy in self.copies)}

    def drop(self, ids: Collection[SnapshotId], busy: Collection[Snapshot]) -> None:
        """Forget the snapshots and copies of `ids`. The memory of `busy` ones, which a thread may still read, is not
        used again."""
        with self.lock:
            snapshots = [own for snapshot_id, own in self.own.items() if snapshot_id in ids]
            copies = [copy for copy in self.copies if copy.id in ids]
            self.own = {snapshot_id: own for snapshot_id, own in self.own.items() if snapshot_id not in ids}
            self.copies = [copy for copy in self.copies if copy.id not in ids]
        for dropped in snapshots:
            if not any(dropped is other for other in busy):
                (self.pinned if dropped.is_taken else self.buffers).give_back(dropped.data)
        for copy in copies:
            self.buffers.give_back(copy.data)

    def load(self, snapshot_id: SnapshotId, cp_rank: int, shard: Shard) -> None:
        """Fill `shard` with the stored state of `cp_rank`. Raises DigestMismatch, and drops damaged data."""
        source, name = self._find(snapshot_id, cp_rank)
        begun = time.monotonic()
        with self._dropped_if_damaged(source):
            snapshot.load(source.data, snapshot_id, cp_rank, shard, name)
        log.warning("back to step %d from %s, verified in %.3f s", snapshot_id.step, name, time.monotonic() - begun)

    def piece(self, snapshot_id: SnapshotId, cp_rank: int, parity_with: tuple[str, ...] = ()) -> Tensor:
        """The data to send to a newcomer of `cp_rank`: the own snapshot of that rank, its copy, or its parity with the
        snapshots of the workers `parity_with`. Raises DigestMismatch as `load`."""
        return self._verified(*self._find(snapshot_id, cp_rank, parity_with))

    def own_piece(self, snapshot_id: SnapshotId) -> Tensor:
        """This worker's own snapshot, of whatever rank, for a parity. Raises DigestMismatch as `load`."""
        own = self.own.get(snapshot_id)
        if own is None:
            raise DigestMismatch(f"{self._worker} has no snapshot of {named(snapshot_id)}")
        return self._verified(own, self._name(own))

    def fill(self, snapshot_id: SnapshotId, cp_rank: int, data: Tensor, shard: Shard) -> None:
        """Fill `shard` with received data, and keep it as the own snapshot of a newcomer. Raises DigestMismatch."""
        snapshot.load(data, snapshot_id, cp_rank, shard, f"what a newcomer of cp_rank {cp_rank} received")
        with self.lock:
            self.own[snapshot_id] = Snapshot(snapshot_id, cp_rank, data)

    def _find(
        self, snapshot_id: SnapshotId, cp_rank: int, parity_with: tuple[str, ...] = ()
    ) -> tuple[Snapshot | StoredCopy, str]:
        """The snapshot, copy or parity, and its name for messages."""
        own = self.own.get(snapshot_id)
        if own is not None and own.cp_rank == cp_rank and not parity_with:
            return own, self._name(own)
        for copy in self.copies:
            fits = copy.id == snapshot_id and cp_rank in copy.cp_ranks and copy.is_parity == bool(parity_with)
            if fits and set(parity_with) <= set(copy.workers):
                return copy, f"{copy}, in {self._worker},"
        raise DigestMismatch(f"{self._worker} holds nothing of cp_rank {cp_rank} of {named(snapshot_id)}")

    def _name(self, own: Snapshot) -> str:
        return f"the snapshot of cp_rank {own.cp_rank} of {named(own.id)}, in {self._worker},"

    def _verified(self, source: Snapshot | StoredCopy, name: str) -> Tensor:
        with self._dropped_if_damaged(source):
            sealed.verify(source.data, name)
        return source.data

    @contextmanager
    def _dropped_if_damaged(self, source: Snapshot | StoredCopy) -> Iterator[None]:
        try:
            yield
        except DigestMismatch as error:
            log.error("%s: it is dropped", error)
            with self.lock:
                self.own = {snapshot_id: own for snapshot_id, own in self.own.items() if own is not source}
                self.copies = [copy for copy in self.copies if copy is not source]
            raise


@dataclass(frozen=True)
class Placement:
    """The holders of copies in a generation, as seen from one rank: it sends to `receivers`, holds the copies of
    `owners` and the XOR of each of `parities`."""

    membership_id: tuple[int, int]
    mesh: Mesh
    members: tuple[str, ...]
    receivers: tuple[int, ...]
    owners: tuple[int, ...]
    parities: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, command: Build, rank: int) -> Placement:
        holders = command.copy_holders or ((),) * command.mesh.size
        receivers = (*holders[rank], *(group.holder for group in command.parity_groups if rank in group.ranks))
        groups = [group.ranks for group in command.parity_groups if group.holder == rank]
        owners = [owner for owner, of_owner in enumerate(holders) if rank in of_owner]
        owners += [ranks[0] for ranks in groups if len(ranks) == 1]  # the XOR of one is a copy
        parities = tuple(ranks for ranks in groups if len(ranks) > 1)
        identity = (command.term, command.generation)
        return cls(identity, command.mesh, command.members, receivers, tuple(owners), parities)


@dataclass(eq=False)
class Exchange:
    """Adds this rank's sealed snapshot and each complete copy or parity to `store`, until the generation `is_over`."""

    snapshot: Snapshot
    placement: Placement
    group: Any
    store: CopyStore
    state: str = RUNNING
    is_over: bool = False
    thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its thread may still read the snapshot."""
        return self.thread is not None and self.thread.is_alive()

    def start(self, report: Callable[[], None]) -> None:
        """Begin, in a thread; `report` is called there once everything is complete on this rank."""
        self.thread = threading.Thread(target=self._run, args=(report,), name="copies", daemon=True)
        self.thread.start()

    def _run(self, report: Callable[[], None]) -> None:
        try:
            is_whole = self._transfer()
        except Exception as error:  # training goes on; the vote says that there are no copies
            if self.is_over or is_transport_error(error):
                log.info("the copies of %s were not completed: %s", named(self.snapshot.id), error)
            else:
                log.exception("the copies of %s were not completed", named(self.snapshot.id))
            self.state = FAILED
            return
        self.state = DONE if is_whole else FAILED
        if is_whole:
            report()

    def _transfer(self) -> bool:
        """Send and receive everything; False if something arrived damaged. Every awaited message is taken from its
        sender in any case, so that the next exchange finds nothing of this one."""
        own, receivers = self.snapshot, self.placement.receivers
        if not own.is_empty:
            try:
                own.finish()
            except (MemoryError, RuntimeError) as error:  # it could not be copied from its device: counts as not taken
                log.error("no snapshot of %s, and no copies of it: %s: %s", named(own.id), type(error).__name__, error)
                own.data = own.data[:0]
        if own.is_empty:  # the peers' copies of this step count for nothing; the exchange is complete all the same
            sent = [work for rank in receivers for work in sealed.refuse(self.group, rank)]
        else:
            self.keep_own()
            sent = [work for rank in receivers for work in sealed.send(self.group, own.data, rank)]
        results = []
        for owner in self.placement.owners:
            data = self._receive(owner)
            if data is not None:
                self._keep((owner,), data)
            results.append(data is not None)
        results += [self._receive_parity(ranks) for ranks in self.placement.parities]
        for work in sent:
            work.wait()
        return all(results) and not own.is_empty

    def _receive_parity(self, ranks: tuple[int, ...]) -> bool:
        """Receive the snapshots of `ranks` one after another and keep their XOR only."""
        total: Tensor | None = None
        is_whole = True
        for rank in ranks:
            piece = self._receive(rank)
            if piece is None or total is None:
                total, is_whole = piece if total is None else total, is_whole and piece is not None
                continue
            total, spent = sorted([total, piece], key=Tensor.numel, reverse=True)
            sealed.xor(total, spent)
            self.store.buffers.give_back(spent)
        if is_whole and total is not None:
            try:
                self._keep(ranks, sealed.parity_of([total], self.store.buffers.take))
            except (MemoryError, RuntimeError) as error:
                log.error("the parity of ranks %s of %s is not kept: %s", ranks, named(self.snapshot.id), error)
                is_whole = False
        if total is not None:
            self.store.buffers.give_back(total)
        return is_whole

    def _receive(self, rank: int) -> Tensor | None:
        """The snapshot of a peer; None if it arrived damaged or there is no memory for it."""
        name = f"the copy of rank {rank} ({self.placement.members[rank]}) of {named(self.snapshot.id)}"
        try:
            return sealed.receive(self.group, rank, self.store.buffers.take, name)
        except DigestMismatch as error:
            log.error("%s: it arrived damaged and is not kept", error)
        except MemoryError as error:
            log.error("%s: it is not kept", error)
        return None

    def keep_own(self) -> None:
        with self.store.lock:
            if not self.is_over:
                self.store.own[self.snapshot.id] = self.snapshot

    def _keep(self, ranks: Sequence[int], data: Tensor) -> None:
        workers = tuple(self.placement.members[rank] for rank in ranks)
        cp_ranks = tuple(rank % self.placement.mesh.cp for rank in ranks)
        with self.store.lock:
            if not self.is_over:
                self.store.copies.append(StoredCopy(self.snapshot.id, workers, cp_ranks, data))
