"""Copies of peers' state in host memory: when snapshots are taken, the exchange that sends them, and their store.

The training thread takes a snapshot at the beginning of each generation and after each step that makes `applied` a
multiple of `copy_every_steps`. An exchange sends it to its holders, and receives what this rank holds for its peers, in
a thread of its own beside the next steps. All ranks skip a due snapshot if one of them is not done with the last: the
vote asks (`Flag.COPYING`). So a vote without that flag proves that the last exchange is complete everywhere, and older
snapshots are dropped then. What is stored is complete, verified at arrival and again before use. Who holds whose copy,
and which of them a recovery uses, is decided elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_ring.config import RunConfig
from elastic_ring.control.messages import Build, HeldCopy, SnapshotId
from elastic_ring.errors import DigestMismatch
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups.transport import is_transport_error
from elastic_ring.runtime.notices import Copied
from elastic_ring.state import sealed, snapshot
from elastic_ring.state.pinned import Pinning
from elastic_ring.state.shard import Shard
from elastic_ring.state.snapshot import Buffers, Snapshot, named
from elastic_ring.train.vote import NOTHING, Flag, Outcome

log = logging.getLogger(__name__)

RUNNING, DONE, FAILED = "running", "done", "failed"
SNAPSHOTS_AT_A_TIME = 2
"""Own snapshots: the last with complete copies, and the next."""


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


class Copies:
    """Takes one worker's snapshots and exchanges them; called by the training thread only."""

    def __init__(self, run: RunConfig, worker: str, publish: Callable[[Copied], None] = lambda notice: None) -> None:
        """A finished exchange calls `publish` in its own thread."""
        self._every, self._publish = run.copy_every_steps, publish
        self.store = CopyStore(worker)
        self._exchanges: list[Exchange] = []
        self._placement: Placement | None = None
        self._group: Any = None
        self._stream: Any = None
        self.pinning = Pinning("copies")
        self._is_prepared = True
        self.num_skipped = 0

    @property
    def is_on(self) -> bool:
        """Whether this generation's members hold copies for each other."""
        return self._placement is not None

    def leave(self) -> None:
        """End the generation: its exchanges come to nothing. Afterwards the shard may be changed or freed."""
        self._placement, self._group = None, None
        with self.store.lock:
            for exchange in self._exchanges:
                exchange.is_over = True
        for exchange in self._exchanges:
            exchange.snapshot.wait()
        self._exchanges = [exchange for exchange in self._exchanges if exchange.is_alive]

    def keep(self, *ids: SnapshotId | None) -> None:
        """Drop everything but the snapshots and copies of `ids`."""
        self._drop(self.store.ids() - set(ids))

    def clear(self) -> None:
        """Drop everything, as for a spare."""
        self.leave()
        self.pinning.wait()
        self.keep(None)
        self.store.buffers.clear()
        self.store.pinned.clear()

    def begin(self, command: Build, rank: int, group: Any, device: torch.device) -> None:
        """Begin a generation whose members are connected by `group`, for host memory."""
        self._placement, self._group = Placement.of(command, rank), group
        if device.type == "cuda" and (self._stream is None or self._stream.device != device):
            self._stream, self.store.pinned = torch.cuda.Stream(device), Buffers(is_pinned=True)
        self._is_prepared = device.type != "cuda"

    def prepare(self, shard: Shard) -> None:
        """Pin host memory for SNAPSHOTS_AT_A_TIME snapshots, in a thread. No copies are due until it is there."""
        if not self.is_on:
            return
        self._is_prepared = True
        if self._stream is None:
            return
        self.pinning.wait()
        store = self.store
        try:
            num_bytes = snapshot.size_of(shard)
        except ValueError as error:  # state that no copy holds, as `first` says
            log.warning("no pinned memory for copies: %s", error)
            return

        def pin() -> None:
            with store.lock:
                snapshots = {id(own): own for own in (*store.own.values(), *(run.snapshot for run in self._exchanges))}
                num_taken = sum(own.is_taken and own.data.numel() >= num_bytes for own in snapshots.values())
            store.pinned.reserve(num_bytes, max(0, SNAPSHOTS_AT_A_TIME - num_taken))

        self.pinning.start(self._stream.device, pin)

    def flags(self, applied: int) -> Flag:
        """This rank's flags in the vote of the step that makes `applied`."""
        if not self._is_due(applied) or not self._exchanges:
            return NOTHING
        if self.pinning.is_running or not self._is_prepared:
            return Flag.COPYING
        return {RUNNING: Flag.COPYING, FAILED: Flag.COPY_FAILED, DONE: NOTHING}[self._exchanges[-1].state]

    def first(self, shard: Shard) -> None:
        """Copy the state with which a generation begins."""
        if self.is_on:
            self._take(shard)

    def after_step(self, shard: Shard, outcome: Outcome) -> None:
        """Take a snapshot if one is due after the step of `outcome`, and no rank is busy with the last."""
        applied = shard.counters.applied
        if not self._is_due(applied):
            return
        if outcome.copying:
            self.num_skipped += 1
            reason = f"the last ones, or memory for them, are not ready ({self.num_skipped} skipped so far)"
            log.warning(f"no copies of step {applied}: {reason}")
            return
        last = self._exchanges[-1].snapshot.id
        self._drop({last} if outcome.copies_failed else self.store.ids() - {last})
        self._take(shard)

    def before_apply(self) -> None:
        """Wait for the end of the copy under way: the shard is about to change."""
        for exchange in self._exchanges[-1:]:
            exchange.snapshot.waited_s += exchange.snapshot.wait()

    def _is_due(self, applied: int) -> bool:
        return self.is_on and applied % self._every == 0

    def _drop(self, ids: set[SnapshotId]) -> None:
        busy = [exchange.snapshot for exchange in self._exchanges if exchange.is_alive and exchange.state != DONE]
        self.store.drop(ids, busy)

    def _take(self, shard: Shard) -> None:
        assert self._placement is not None
        begun = time.monotonic()
        self.pinning.wait()
        try:
            own = snapshot.take(shard, self._placement.membership_id, self.store.pinned, self._stream)
        except (MemoryError, RuntimeError, ValueError) as error:  # an error of the device shows again in the next step
            at = SnapshotId(shard.counters.applied, self._placement.membership_id)
            log.error("no snapshot of %s, and no copies of it: %s: %s", named(at), type(error).__name__, error)
            own = Snapshot.empty(at, shard.cp_rank)
        exchange = Exchange(own, self._placement, self._group, self.store)
        blocked_s, num_holders = time.monotonic() - begun, len(exchange.placement.receivers)
        self._exchanges = [*(running for running in self._exchanges if running.is_alive), exchange]

        def report() -> None:
            """In the thread of the exchange."""
            total_s, waited_s, num_bytes = time.monotonic() - begun, blocked_s + own.waited_s, own.data.numel()
            log.debug(
                "copies of %s: %d bytes to %d rank(s) in %.3f s, for %.3f s of which training waited",
                named(own.id),
                num_bytes,
                num_holders,
                total_s,
                waited_s,
            )
            self._publish(Copied(own.id.step, num_bytes, num_holders, waited_s, total_s, skipped=self.num_skipped))

        exchange.start(report)
