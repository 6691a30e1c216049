"""One exchange of copies: a snapshot on its way to its holders, and what this rank receives of others meanwhile.

It runs in its own thread beside the next steps, over its own group in host memory. The end of its generation ends it;
only what is complete and verified counts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elastic_ring.control.messages import Build, SnapshotId
from elastic_ring.errors import DigestMismatch
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups.transport import is_transport_error
from elastic_ring.state import sealed
from elastic_ring.state.snapshot import Buffers, Snapshot, named

log = logging.getLogger(__name__)

RUNNING, DONE, FAILED = "running", "done", "failed"


@dataclass(frozen=True)
class Placement:
    """Who holds whose copy in a generation, as seen from one rank: it sends to `receivers`, holds the copies of
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

    def cp_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(rank % self.mesh.cp for rank in ranks)

    def workers(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.members[rank] for rank in ranks)


@dataclass(eq=False)
class Held:
    """A verified copy of one worker's snapshot, or the parity of several workers'. `data` is sealed."""

    id: SnapshotId
    workers: tuple[str, ...]
    cp_ranks: tuple[int, ...]
    data: Tensor

    @property
    def is_parity(self) -> bool:
        return len(self.workers) > 1

    def __str__(self) -> str:
        what = "parity" if self.is_parity else "copy"
        ranks = ", ".join(map(str, self.cp_ranks))
        return f"the {what} of cp_rank {ranks} of {named(self.id)}, made by {', '.join(self.workers)}"


@dataclass(eq=False)
class Exchange:
    """`keep_own` is called once the snapshot is sealed, `hold` with each copy or parity that is complete; both check
    `is_over`, which the end of the generation sets."""

    snapshot: Snapshot
    placement: Placement
    group: Any
    buffers: Buffers
    keep_own: Callable[[Exchange], None]
    hold: Callable[[Exchange, Held], None]
    state: str = RUNNING
    is_over: bool = False
    thread: threading.Thread | None = None

    @property
    def is_alive(self) -> bool:
        """Whether its thread may still read the snapshot."""
        return self.thread is not None and self.thread.is_alive()

    def start(self, done: Callable[[], None]) -> None:
        """Begin, in a thread; `done` is called there once all of it is complete on this rank."""
        self.thread = threading.Thread(target=self._run, args=(done,), name="copies", daemon=True)
        self.thread.start()

    def _run(self, done: Callable[[], None]) -> None:
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
            done()

    def _transfer(self) -> bool:
        """Send and receive everything; False if something arrived damaged. What is awaited is taken from its sender
        in any case, so that the next exchange finds nothing of this one."""
        mine, receivers = self.snapshot, self.placement.receivers
        self._finish_own()
        if mine.is_empty:  # the others' copies of this step count for nothing; the exchange is complete all the same
            sent = [work for rank in receivers for work in sealed.refuse(self.group, rank)]
        else:
            self.keep_own(self)
            sent = [work for rank in receivers for work in sealed.send(self.group, mine.data, rank)]
        results = [self._hold_copy(owner) for owner in self.placement.owners]
        results += [self._hold_parity(ranks) for ranks in self.placement.parities]
        for work in sent:
            work.wait()
        return all(results) and not mine.is_empty

    def _finish_own(self) -> None:
        """A snapshot that could not be copied from its device counts as not taken; this informs the others."""
        mine = self.snapshot
        if mine.is_empty:
            return
        try:
            mine.finish()
        except (MemoryError, RuntimeError) as error:
            log.error("no snapshot of %s, and no copies of it: %s: %s", named(mine.id), type(error).__name__, error)
            mine.data = mine.data[:0]

    def _hold_copy(self, owner: int) -> bool:
        data = self._received(owner)
        if data is not None:
            self._hold((owner,), data)
        return data is not None

    def _hold_parity(self, ranks: tuple[int, ...]) -> bool:
        """Receive the snapshots of `ranks` one after another and keep their XOR only."""
        total: Tensor | None = None
        is_whole = True
        for rank in ranks:
            piece = self._received(rank)
            if piece is None or total is None:
                total, is_whole = piece if total is None else total, is_whole and piece is not None
                continue
            total, spent = sorted([total, piece], key=Tensor.numel, reverse=True)
            sealed.xor(total, spent)
            self.buffers.give_back(spent)
        if is_whole and total is not None:
            try:
                self._hold(ranks, sealed.parity_of([total], self.buffers.take))
            except (MemoryError, RuntimeError) as error:
                log.error("the parity of ranks %s of %s is not kept: %s", ranks, named(self.snapshot.id), error)
                is_whole = False
        if total is not None:
            self.buffers.give_back(total)
        return is_whole

    def _received(self, rank: int) -> Tensor | None:
        worker = self.placement.members[rank]
        try:
            what = f"the copy of rank {rank} ({worker}) of {named(self.snapshot.id)}"
            return sealed.receive(self.group, rank, self.buffers.take, what)
        except DigestMismatch as error:
            log.error("%s: it arrived damaged and is not kept", error)
        except MemoryError as error:
            log.error("%s: it is not kept", error)
        return None

    def _hold(self, ranks: tuple[int, ...], data: Tensor) -> None:
        at = self.placement
        self.hold(self, Held(self.snapshot.id, at.workers(ranks), at.cp_ranks(ranks), data))
