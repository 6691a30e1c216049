"""When this rank's snapshots are taken and exchanged with its peers, so that a lost ring can go back to a recent step.

The training thread takes a snapshot at the beginning of each generation and after each step that makes `applied` a
multiple of `copy_every_steps`; an exchange sends it beside the next steps. All ranks skip a due snapshot if one of them
is not done with the last: the vote asks (`Flag.COPYING`). So a vote without that flag proves that the last exchange is
complete everywhere, and older snapshots are dropped then. Who holds whose copy is decided elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from elastic_ring.config import RunConfig
from elastic_ring.control.messages import Build, SnapshotId
from elastic_ring.runtime.notices import Copied
from elastic_ring.runtime.worker.copy_exchange import DONE, FAILED, RUNNING, CopyStore, Exchange, Placement
from elastic_ring.state import snapshot
from elastic_ring.state.pinned import Pinning
from elastic_ring.state.shard import Shard
from elastic_ring.state.snapshot import Buffers, Snapshot, named
from elastic_ring.train.vote import NOTHING, Flag, Outcome

log = logging.getLogger(__name__)

SNAPSHOTS_AT_A_TIME = 2
"""Own snapshots: the last with complete copies, and the next."""


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
        num_bytes, store = snapshot.size_of(shard), self.store

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
        except (MemoryError, RuntimeError) as error:  # an error of the device shows again in the next step
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
