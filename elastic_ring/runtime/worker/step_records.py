"""A worker's records of its committed steps. Global rank 0 publishes its own; the others keep theirs in case it dies.

The training thread adds and publishes; the control thread reads, and resets what counts as published.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from elastic_ring.runtime.notices import Compiled, Notice, NotRepeatable, StepRecord
from elastic_ring.runtime.worker.env_fingerprint import NondeterminismLog
from elastic_ring.train.startup.compilations import CompileWatch

KEPT_RECORDS = 16384

Publish = Callable[[Sequence[Notice]], None]


def gpu_memory() -> dict[str, int]:
    """Bytes of this process's GPU that torch holds, by kind; {} without a GPU. Takes 0.1 ms on an H200."""
    if not torch.cuda.is_initialized():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "fragmented": stats["inactive_split_bytes.all.current"],
        "peak": stats["allocated_bytes.all.peak"],
    }


class StepRecords:
    """The newest KEPT_RECORDS records; `publish` hands some to the coordinator."""

    def __init__(self, publish: Publish) -> None:
        self.publish = publish
        self._records: list[StepRecord] = []
        self._published = -1
        self._lock = threading.Lock()  # `_published`: read and moved on by the training thread, set by the other

    def add(self, record: StepRecord) -> None:
        self._records.append(record)
        del self._records[:-KEPT_RECORDS]

    def send(self, through: int) -> None:
        """Publish the records that have not been, up to step `through`."""
        with self._lock:
            ready = [record for record in self._records if self._published < record.metrics.step <= through]
            if ready:
                self.publish(ready)
                self._published = ready[-1].metrics.step

    def go_back(self, step: int) -> None:
        """Go back to a checkpoint: `step` runs next; records of it and of later steps do not count."""
        with self._lock:
            self._records = [record for record in self._records if record.metrics.step < step]
            self._published = step - 1

    def after(self, step: int) -> list[StepRecord]:
        """Records of committed steps newer than `step`."""
        return [record for record in self._records if record.metrics.step > step]

    def unsent(self) -> list[StepRecord]:
        """Records that `send` has not published yet."""
        return self.after(self._published)

    def mark_published(self, published: int) -> None:
        """The coordinator has the steps up to `published`, from any worker."""
        with self._lock:
            self._published = max(self._published, published)

    def rewind(self, published: int) -> None:
        """A new coordinator has the steps up to `published` only."""
        with self._lock:
            self._published = published


class StepNotices:
    """Publishes nondeterministic operators and compilations of a step, which should have neither."""

    def __init__(self, worker: str, publish: Publish) -> None:
        self._worker, self._publish = worker, publish
        self.nondeterminism, self.compilations = NondeterminismLog(), CompileWatch()

    def after_step(self, step: int, deterministic: bool) -> None:
        """`deterministic`: the run asks for such operators, or its device has no others."""
        reasons = self.nondeterminism.take()
        if step == 0 and not deterministic:
            reasons.append("deterministic=False")
        if reasons:
            self._publish([NotRepeatable(step, "; ".join(reasons))])
        later, before = self.compilations.of_step(step)
        if later or before is not None:
            self._publish([Compiled(step, self._worker, later, before or 0)])
