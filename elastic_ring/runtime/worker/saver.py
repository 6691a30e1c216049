"""Saves this rank's part of a checkpoint: a copy in host memory first, then the file, both beside the next steps.

One thread copies from a GPU, digests and writes, one part at a time. The training thread copies state that is in host
memory, and waits for the copy before the state changes. Whether a checkpoint is due and whether it counts is decided
elsewhere: ranks agree in the vote, the coordinator commits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic_ring.config import CheckpointConfig, RunConfig
from elastic_ring.control.decisions.detectors import FIRST_INTERVAL_S
from elastic_ring.control.messages import Checkpoint
from elastic_ring.errors import CheckpointDamaged, StorageFailed
from elastic_ring.mesh import Mesh
from elastic_ring.monitor.metrics import JOURNAL_NAME
from elastic_ring.runtime.notices import CheckpointLeftOut, CheckpointPart
from elastic_ring.state.checkpoints.checkpoint import (
    Reader,
    ShardPart,
    buffers_for,
    describe,
    take,
    write_part,
)
from elastic_ring.state.checkpoints.manifest import attempt_folder, located, read_manifest
from elastic_ring.state.checkpoints.retention import interval_s
from elastic_ring.state.pinned import Pinning
from elastic_ring.state.shard import Shard
from elastic_ring.state.storage.backend import ignore
from elastic_ring.state.storage.folder import Storage
from elastic_ring.train.vote import NOTHING, Flag

log = logging.getLogger(__name__)

LEAST_INTERVAL_S, MOST_INTERVAL_S = 30.0, 3600.0
"""Bounds of an interval that the run chooses."""
SendPart = Callable[[CheckpointPart | CheckpointLeftOut], None]
LAST_S = 3.0
"""The last step is saved too if the checkpoint before took no longer: the end of a run waits for it."""


@dataclass(frozen=True)
class CheckpointTerms:
    """Sent by the coordinator with a build: the place of its checkpoints, and figures for their interval."""

    attempt: str
    lineage: int
    mean_time_between_failures_s: float
    wants_first: bool
    config: CheckpointConfig | None = None
    """In place of the run's, once it has changed."""


def open_checkpoint(run: RunConfig, checkpoint: Checkpoint, tell: Callable[[str], None] = ignore) -> Reader:
    """A reader of a checkpoint of this run, or of another by its path. It waits for the storage for `restore_s`. Raises
    CheckpointDamaged, StorageFailed."""
    uri, folder = located(run.storage_uri, checkpoint.folder)
    storage = Storage(uri, timeout_s=run.timeouts.restore_s, tell=tell).open(write=False)
    try:
        return Reader(storage, read_manifest(storage, folder))
    except StorageFailed as error:
        if storage.exists(f"{folder}/COMMIT.json"):
            raise
        raise CheckpointDamaged(f"{checkpoint.folder} has no manifest", path=checkpoint.folder) from error


class SaveSchedule:
    """When a checkpoint is due; asked by global rank 0 before each vote. Times in seconds on the monotonic clock."""

    def __init__(self, config: CheckpointConfig) -> None:
        self.config = config
        self._last_s = time.monotonic()
        self._cost_s = 0.0
        self.wrote_s = math.inf  # of the last checkpoint, until its part was written
        self.mean_time_between_failures_s = 86_400.0
        self._reported_s = 0.0
        self._is_asked = False
        self._missed_s = -math.inf
        self.wants_first = False
        """Whether no checkpoint of the run counts yet. A run without a set interval takes one at once, since a failure
        before it may cost everything; not before there is memory for it."""

    def ask(self, terms: CheckpointTerms | None = None) -> None:
        """Make the next checkpoint due at once: a node leaves with its state, or `terms` have changed. Called by the
        control thread."""
        if terms is not None and terms.config is not None:
            self.config = terms.config
        self._is_asked = True

    def is_due(self, applied: int, total_steps: int) -> bool:
        """Whether to save the state after `applied` steps."""
        config = self.config
        if not config.is_on:
            return False
        if self._is_asked:
            return True
        if config.every_steps:
            return applied % config.every_steps == 0
        if applied == total_steps:  # a longer run goes on from here; not where the end would have to wait for it
            return self.wrote_s <= LAST_S
        return self.is_first or time.monotonic() - self._last_s >= self.interval_s

    @property
    def is_first(self) -> bool:
        """Whether the next checkpoint is due at once, as none exists."""
        return self.wants_first and self.config.every_steps is None and self.config.every_s is None

    @property
    def interval_s(self) -> float:
        """Seconds from one checkpoint to the next."""
        if self.config.every_s is not None:
            return self.config.every_s
        if not self._cost_s:
            return FIRST_INTERVAL_S
        best_s = interval_s(self._cost_s, self.mean_time_between_failures_s)
        return min(MOST_INTERVAL_S, max(LEAST_INTERVAL_S, best_s))

    def is_new_miss(self) -> bool:
        """Whether to report a skipped checkpoint: each if the interval is in steps; else, because it stays due in every
        step, once in LEAST_INTERVAL_S."""
        now = time.monotonic()
        if not self.config.every_steps and now - self._missed_s < LEAST_INTERVAL_S:
            return False
        self._missed_s = now
        return True

    def saved(self, blocked_s: float) -> None:
        """A checkpoint was taken, for which training waited `blocked_s`."""
        self._last_s, self._cost_s = time.monotonic(), blocked_s
        self._is_asked = self.wants_first = False

    def waited(self, blocked_s: float) -> None:
        """Training also waited for the end of the last checkpoint's copy."""
        self._cost_s += blocked_s

    def news(self) -> str:
        """The interval that the run has chosen, and why; empty if it is set, or much the same as last time."""
        config, interval_s = self.config, self.interval_s
        is_set = config.every_steps is not None or config.every_s is not None
        if is_set or abs(interval_s - self._reported_s) <= 0.1 * self._reported_s:
            return ""
        self._reported_s = interval_s
        return (
            f"a checkpoint blocks for {self._cost_s:.3f} s and a failure is expected every "
            f"{self.mean_time_between_failures_s:.0f} s: the next checkpoint in {interval_s:.0f} s"
        )


@dataclass(frozen=True)
class Place:
    """Where this rank's part of a checkpoint goes; `attempt` and `lineage` as in `CheckpointTerms`."""

    term: int
    generation: int
    mesh: Mesh
    global_rank: int
    attempt: str
    lineage: int

    def folder(self, step: int) -> str:
        """The folder of all ranks' files, the same on each and never used twice."""
        return attempt_folder(step, self.lineage, f"{self.attempt[:8]}-{self.term:04d}-{self.generation:06d}")


class Saver:
    """Holds at most one part that is being written; `send` reports it to the coordinator."""

    def __init__(
        self,
        run: RunConfig,
        send: SendPart,
        inject: Callable[[int, int], None] = lambda step, rank: None,
        tell: Callable[[str], None] = ignore,
    ) -> None:
        """`inject` fires the faults that are planned for the middle of a file. `tell` gets lines for a person."""
        self._tell, self._waits_for = tell, ""
        self._run, self._send, self._inject = run, send, inject
        self.schedule = SaveSchedule(run.checkpoint_config)
        self._storage: Storage | None = None
        self._last: ShardPart | None = None
        self._stream: Any = None  # on which copies from a GPU run beside the next step
        self.pinning = Pinning("checkpoints")
        self._thread: threading.Thread | None = None
        self.newest = (-1, 0, 0)  # (step, term, generation) of the part that was saved last
        self._written: CheckpointPart | None = None  # in this generation, and sent
        self._awaits_memory = False  # `prepare` has not begun to pin it

    def begin(self, terms: CheckpointTerms, *, pins: bool) -> None:
        """A generation begins. `pins`: `prepare` will pin memory for it."""
        self.schedule.mean_time_between_failures_s = terms.mean_time_between_failures_s
        self.schedule.wants_first = terms.wants_first
        self.schedule.config = terms.config or self._run.checkpoint_config
        self._awaits_memory, self._written = pins, None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, shard: Shard, shapes: Mapping[str, tuple[int, ...]], place: Place) -> None:
        """Pin host memory for this rank's part, in a thread: the first checkpoint need not wait for it."""
        self._awaits_memory = False
        device = next(iter(shard.params.values())).device
        if device.type != "cuda" or not self._run.checkpoint_config.is_on:
            return
        self.pinning.wait()
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        part = place.mesh.coordinate(place.global_rank).dp_rank
        described = describe(shard, shapes, place.mesh.dp)

        def pin() -> None:
            pinned = ShardPart(shard.cp_rank, part, {}, shard.meta())
            try:
                for name, buffer, _ in buffers_for(shard, described, part, self._last):
                    pinned.tensors[name] = buffer
            finally:
                self._last = pinned

        self.pinning.start(device, pin)

    def before_apply(self) -> None:
        """Wait for the end of the copy under way: the shard is about to change."""
        if self._last is not None:
            self.schedule.waited(self._last.wait())

    def leave(self) -> None:
        """End the generation: afterwards the shard may be changed or freed."""
        self.pinning.wait()
        if self._last is not None:
            self._last.wait()

    def clear(self) -> None:
        """Give the buffers up, as for a spare."""
        self.leave()
        self._last = None

    def flags(self, applied: int, total_steps: int, global_rank: int) -> Flag:
        """This rank's flags in the vote of the step that makes `applied`."""
        due = Flag.DUE if global_rank == 0 and self.schedule.is_due(applied, total_steps) else NOTHING
        if self.schedule.is_first and (self._awaits_memory or self.pinning.is_running):
            return Flag.BUSY  # training need not wait for memory that is pinned beside it
        return Flag.BUSY | due if self.is_busy else due

    def save(self, shard: Shard, shapes: Mapping[str, tuple[int, ...]], place: Place) -> None:
        """Begin to copy this rank's part and to write it.

        A copy that fails costs this checkpoint and nothing else; an error of the device shows again in the next step.
        """
        begun = time.monotonic()
        assert not self.is_busy, "the vote has asked"
        self.wait(0.0)
        step, coordinate = shard.counters.applied, place.mesh.coordinate(place.global_rank)
        membership_id, ranks = (place.term, place.generation), (coordinate.dp_rank, coordinate.cp_rank)
        part = CheckpointPart(step, membership_id, place.lineage, place.folder(step), place.mesh, *ranks)
        self.newest = (step, place.term, place.generation)
        try:
            self.pinning.wait()
            described = describe(shard, shapes, place.mesh.dp)
            snapshot = take(shard, described, coordinate.dp_rank, self._last, self._stream)
        except (RuntimeError, ValueError, MemoryError) as error:
            self._last = None
            self.schedule.saved(time.monotonic() - begun)
            self._failed(part, error)
            return
        self._last = snapshot
        part = replace(part, blocked_s=time.monotonic() - begun)
        self.schedule.saved(part.blocked_s)
        if place.global_rank == 0:
            part = replace(part, tensors=described, meta=snapshot.meta, interval=self.schedule.news())
        self._thread = threading.Thread(target=self._write, args=(snapshot, part, begun), name="saver", daemon=True)
        self._thread.start()

    def missed(self, place: Place, step: int) -> None:
        """Report, on global rank 0, that a due checkpoint is skipped because some rank still writes the last."""
        if place.global_rank == 0 and not self.schedule.is_first and self.schedule.is_new_miss():
            why = f"the last one is still being written{self._waits_for and ': it '}{self._waits_for}"
            log.warning("the checkpoint of step %d is left out: %s", step, why)
            self._send(CheckpointLeftOut(step, (place.term, place.generation), why))

    def repeat(self) -> None:
        """Send the last part again: a coordinator that died may not have committed its checkpoint."""
        if (part := self._written) is not None:
            self._send(replace(part, is_repeated=True))

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is being written, after at most `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_busy

    def _waits(self, text: str) -> None:
        self._waits_for = text
        self._tell(f"writing a checkpoint {text}")

    def _write(self, snapshot: ShardPart, part: CheckpointPart, begun: float) -> None:
        self._waits_for = ""
        try:
            snapshot.finish()
            if self._storage is None:
                uri, storage_s = self._run.storage_uri, self._run.timeouts.storage_s
                storage = Storage(uri, timeout_s=storage_s, anchor=JOURNAL_NAME, tell=self._waits)
                self._storage = storage.open(write=False)
            rank = part.dp_rank * part.mesh.cp + part.cp_rank
            file = write_part(self._storage, part.folder, snapshot, lambda: self._inject(part.step, rank))
        except Exception as error:  # training goes on without this checkpoint; the coordinator counts it
            self._failed(part, error)
            return
        self.schedule.wrote_s = time.monotonic() - begun
        self._written = replace(part, file=file, total_s=self.schedule.wrote_s)
        self._send(self._written)

    def _failed(self, part: CheckpointPart, error: Exception) -> None:
        log.error("this rank's part of the checkpoint of step %d is missing", part.step, exc_info=error)
        self._send(replace(part, error=f"{type(error).__name__}: {error}"))
