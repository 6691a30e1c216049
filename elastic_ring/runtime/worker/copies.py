"""This rank's snapshots, and the copies and parities of its peers' that it holds: taken, sent, verified, kept.

The training thread takes a snapshot at the begin of each generation and after each step that makes `applied` a multiple
of `copy_every_steps`; one thread an exchange seals it, sends it to its holders over a group of its own, and receives
what this rank holds for others. A due snapshot is skipped by all ranks if one of them is not done with the last: the
vote asks (`Flag.COPYING`). So a vote without such an answer proves that the last exchange is complete everywhere, and
what came before it is dropped then. Who holds whose copy and what a recovery uses is decided elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from elastic_ring.config import RunConfig
from elastic_ring.control.messages import Build, HeldCopy, SnapshotId
from elastic_ring.errors import DigestMismatch
from elastic_ring.runtime.worker.copy_exchange import DONE, FAILED, RUNNING, Exchange, Held, Placement
from elastic_ring.state import sealed, snapshot
from elastic_ring.state.pinned import Pinning
from elastic_ring.state.shard import Shard
from elastic_ring.state.snapshot import Buffers, Snapshot, named
from elastic_ring.train.vote import NOTHING, Flag, Outcome

log = logging.getLogger(__name__)

HELD_AT_A_TIME = 2
"""Own snapshots: the last whose copies are complete, and the next."""


class Copies:
    """The snapshots and copies of one worker. The training thread calls all but `held`."""

    def __init__(
        self, run: RunConfig, worker: str, told: Callable[[dict[str, Any]], None] = lambda figures: None
    ) -> None:
        """A finished exchange calls `told` with its figures, in its own thread."""
        self._every, self._worker, self._told = run.copy_every_steps, worker, told
        self._lock = threading.Lock()
        self._own: dict[SnapshotId, Snapshot] = {}
        self._held: list[Held] = []
        self._exchanges: list[Exchange] = []
        self._placement: Placement | None = None
        self._group: Any = None
        self._pinned, self._buffers = Buffers(), Buffers()
        self._stream: Any = None
        self.pinning = Pinning("copies")
        self._is_prepared = True
        self.num_skipped = 0

    # ------------------------------------------------------------ a generation

    @property
    def is_on(self) -> bool:
        """Whether this generation's members hold copies for each other."""
        return self._placement is not None

    def leave(self) -> None:
        """The generation ends: its exchanges come to nothing, and the shard may be changed or freed."""
        self._placement, self._group = None, None
        with self._lock:
            for exchange in self._exchanges:
                exchange.is_over = True
        for exchange in self._exchanges:
            exchange.snapshot.wait()
        self._exchanges = [exchange for exchange in self._exchanges if exchange.is_alive]

    def keep(self, *kept: SnapshotId | None) -> None:
        """Drop all but what is held of `kept`."""
        self._drop(self._ids() - set(kept))

    def clear(self) -> None:
        """Drop everything, as for a spare."""
        self.leave()
        self.pinning.wait()
        self.keep(None)
        self._buffers.clear()
        self._pinned.clear()

    def begin(self, command: Build, rank: int, group: Any, device: torch.device) -> None:
        """The members of `command` are connected by `group`, for host memory."""
        self._placement, self._group = Placement.of(command, rank), group
        if device.type == "cuda" and (self._stream is None or self._stream.device != device):
            self._stream, self._pinned = torch.cuda.Stream(device), Buffers(is_pinned=True)
        self._is_prepared = device.type != "cuda"

    def prepare(self, shard: Shard) -> None:
        """Pin host memory for the snapshots that are held at a time, in a thread. No copies are due until it is
        there."""
        if not self.is_on:
            return
        self._is_prepared = True
        if self._stream is None:
            return
        self.pinning.wait()
        num_bytes = snapshot.size_of(shard)
        self.pinning.start(self._stream.device, partial(self._pin, num_bytes))

    def _pin(self, num_bytes: int) -> None:
        with self._lock:
            known = {id(one): one for one in (*self._own.values(), *(each.snapshot for each in self._exchanges))}
            num_held = sum(one.is_taken and one.data.numel() >= num_bytes for one in known.values())
        self._pinned.reserve(num_bytes, max(0, HELD_AT_A_TIME - num_held))

    # ------------------------------------------------------------ taking snapshots

    def flags(self, applied: int) -> Flag:
        """What this rank says in the vote of the step that makes `applied`."""
        if not self._is_due(applied) or not self._exchanges:
            return NOTHING
        if self.pinning.is_running or not self._is_prepared:
            return Flag.COPYING
        return {RUNNING: Flag.COPYING, FAILED: Flag.COPY_FAILED, DONE: NOTHING}[self._exchanges[-1].state]

    def first(self, shard: Shard) -> None:
        """A generation begins: its holders get copies of the state it begins with."""
        if self.is_on:
            self._take(shard)

    def after_step(self, shard: Shard, outcome: Outcome) -> None:
        """Take a snapshot if one is due after the step of `outcome`, and no rank is busy with the last."""
        applied = shard.counters.applied
        if not self._is_due(applied):
            return
        if outcome.copying:
            self.num_skipped += 1
            log.warning(
                "no copies of step %d: the last ones, or memory for them, are not ready (%d skipped so far)",
                applied,
                self.num_skipped,
            )
            return
        last = self._exchanges[-1].snapshot.id
        self._drop({last} if outcome.copies_failed else self._ids() - {last})
        self._take(shard)

    def before_apply(self) -> None:
        """The shard is about to change: not before the copy that is under way ends."""
        for exchange in self._exchanges[-1:]:
            exchange.snapshot.waited_s += exchange.snapshot.wait()

    def _is_due(self, applied: int) -> bool:
        return self.is_on and applied % self._every == 0

    def _take(self, shard: Shard) -> None:
        assert self._placement is not None
        begun = time.monotonic()
        self.pinning.wait()
        try:
            taken = snapshot.take(shard, self._placement.membership_id, self._pinned, self._stream)
        except (MemoryError, RuntimeError) as error:  # one of the device shows again in the next step
            at = SnapshotId(shard.counters.applied, self._placement.membership_id)
            log.error("no snapshot of %s, and no copies of it: %s: %s", named(at), type(error).__name__, error)
            taken = Snapshot.empty(at, shard.cp_rank)
        exchange = Exchange(taken, self._placement, self._group, self._buffers, self._keep_own, self._hold)
        blocked_s = time.monotonic() - begun
        self._exchanges = [*(one for one in self._exchanges if one.is_alive), exchange]
        exchange.start(lambda: self._done(exchange, time.monotonic() - begun, blocked_s))

    # ------------------------------------------------------------ in the thread of an exchange

    def _keep_own(self, exchange: Exchange) -> None:
        with self._lock:
            if not exchange.is_over:
                self._own[exchange.snapshot.id] = exchange.snapshot

    def _hold(self, exchange: Exchange, held: Held) -> None:
        with self._lock:
            if not exchange.is_over:
                self._held.append(held)

    def _done(self, exchange: Exchange, total_s: float, blocked_s: float) -> None:
        taken, num_holders = exchange.snapshot, len(exchange.placement.receivers)
        blocked_s += taken.waited_s
        log.debug(
            "copies of %s: %d bytes to %d rank(s) in %.3f s, for %.3f s of which training waited",
            named(taken.id),
            taken.data.numel(),
            num_holders,
            total_s,
            blocked_s,
        )
        self._told(
            {
                "step": taken.id.step,
                "bytes": taken.data.numel(),
                "num_holders": num_holders,
                "blocked_s": blocked_s,
                "total_s": total_s,
                "skipped": self.num_skipped,
            }
        )

    # ------------------------------------------------------------ using them

    def held(self) -> tuple[HeldCopy, ...]:
        """What this worker could bring into a recovery: complete, and verified when it arrived."""
        with self._lock:
            own, others = list(self._own.values()), list(self._held)
        found = [HeldCopy(one.id, (one.cp_rank,), own=True) for one in own]
        found += [HeldCopy(one.id, one.cp_ranks, parity_of=one.workers if one.is_parity else ()) for one in others]
        return tuple(found)

    def load(self, wanted: SnapshotId, cp_rank: int, shard: Shard) -> None:
        """Make `shard` what this worker holds of `cp_rank`. Raises DigestMismatch, and drops what is damaged."""
        one, what = self._find(wanted, cp_rank)
        begun = time.monotonic()
        with self._dropped_if_damaged(one):
            snapshot.load(one.data, wanted, cp_rank, shard, what)
        log.warning("back to step %d from %s, verified in %.3f s", wanted.step, what, time.monotonic() - begun)

    def piece(self, wanted: SnapshotId, cp_rank: int, parity_with: tuple[str, ...] = ()) -> Tensor:
        """What this worker sends to a newcomer of `cp_rank`: its own snapshot of that rank, its copy, or its parity of
        that rank's snapshot and those of the workers `parity_with`. Raises DigestMismatch as `load`."""
        return self._verified(*self._find(wanted, cp_rank, parity_with))

    def own_piece(self, wanted: SnapshotId) -> Tensor:
        """This worker's own snapshot, of whatever rank, for a parity. Raises DigestMismatch as `load`."""
        own = self._own.get(wanted)
        if own is None:
            raise DigestMismatch(f"{self._worker} has no snapshot of {named(wanted)}")
        return self._verified(own, self._named(own))

    def buffer(self, num_bytes: int) -> Tensor:
        """Host memory for a newcomer's shard."""
        return self._buffers.take(num_bytes)

    def healed(self, wanted: SnapshotId, cp_rank: int, data: Tensor, shard: Shard) -> None:
        """Make `shard` what a newcomer received, which is its own snapshot from now on. Raises DigestMismatch."""
        snapshot.load(data, wanted, cp_rank, shard, f"what a newcomer of cp_rank {cp_rank} received")
        with self._lock:
            self._own[wanted] = Snapshot(wanted, cp_rank, data)

    def _find(self, wanted: SnapshotId, cp_rank: int, parity_with: tuple[str, ...] = ()) -> tuple[Snapshot | Held, str]:
        own = self._own.get(wanted)
        if own is not None and own.cp_rank == cp_rank and not parity_with:
            return own, self._named(own)
        for held in self._held:
            fits = held.id == wanted and cp_rank in held.cp_ranks and held.is_parity == bool(parity_with)
            if fits and set(parity_with) <= set(held.workers):
                return held, f"{held}, in {self._worker},"
        raise DigestMismatch(f"{self._worker} holds nothing of cp_rank {cp_rank} of {named(wanted)}")

    def _verified(self, one: Snapshot | Held, what: str) -> Tensor:
        with self._dropped_if_damaged(one):
            sealed.verify(one.data, what)
        return one.data

    @contextmanager
    def _dropped_if_damaged(self, one: Snapshot | Held) -> Iterator[None]:
        try:
            yield
        except DigestMismatch as error:
            log.error("%s: it is dropped", error)
            with self._lock:
                self._own = {known: own for known, own in self._own.items() if own is not one}
                self._held = [held for held in self._held if held is not one]
            raise

    def _named(self, own: Snapshot) -> str:
        return f"the snapshot of cp_rank {own.cp_rank} of {named(own.id)}, in {self._worker},"

    # ------------------------------------------------------------ keeping them

    def _ids(self) -> set[SnapshotId]:
        with self._lock:
            return {*self._own, *(held.id for held in self._held)}

    def _drop(self, ids: set[SnapshotId]) -> None:
        """Forget these; their memory is used again unless a thread may still read it."""
        with self._lock:
            own = [one for known, one in self._own.items() if known in ids]
            others = [held for held in self._held if held.id in ids]
            self._own = {known: one for known, one in self._own.items() if known not in ids}
            self._held = [held for held in self._held if held.id not in ids]
        busy = [one.snapshot for one in self._exchanges if one.is_alive and one.state != DONE]
        for one in own:
            if not any(one is known for known in busy):
                (self._pinned if one.is_taken else self._buffers).give_back(one.data)
        for held in others:
            self._buffers.give_back(held.data)
