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
    """What torch holds of this process's GPU, in bytes by kind; {} without one. Takes 0.1 ms on an H200."""
    if not torch.cuda.is_initialized():
        return {}
    found = torch.cuda.memory_stats()
    return {
        "allocated": found["allocated_bytes.all.current"],
        "reserved": found["reserved_bytes.all.current"],
        "fragmented": found["inactive_split_bytes.all.current"],
        "peak": found["allocated_bytes.all.peak"],
    }


class StepRecords:
    """The newest KEPT_RECORDS of them; `publish` hands some to the coordinator."""

    def __init__(self, publish: Publish) -> None:
        self.publish = publish
        self._records: list[StepRecord] = []
        self._published = -1
        self._lock = threading.Lock()  # `_published`: read and moved on by the training thread, set by the other

    def add(self, record: StepRecord) -> None:
        self._records.append(record)
        del self._records[:-KEPT_RECORDS]

    def send(self, through: int) -> None:
        """Publish what has not been, up to step `through`."""
        with self._lock:
            ready = [r for r in self._records if self._published < r.metrics.step <= through]
            if ready:
                self.publish(ready)
                self._published = ready[-1].metrics.step

    def go_back(self, step: int) -> None:
        """The run goes back to a checkpoint: `step` runs next, records of it and of later steps do not count."""
        with self._lock:
            self._records = [record for record in self._records if record.metrics.step < step]
            self._published = step - 1

    def after(self, step: int) -> list[StepRecord]:
        """Those of committed steps newer than `step`."""
        return [record for record in self._records if record.metrics.step > step]

    def unsent(self) -> list[StepRecord]:
        """Those that `send` has not published yet."""
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
    """Publishes what a step did that it should not have: operators without a deterministic form, and compilations."""

    def __init__(self, worker: str, publish: Publish) -> None:
        self._worker, self._publish = worker, publish
        self._nondeterminism, self._compiled = NondeterminismLog(), CompileWatch()

    def listen(self) -> None:
        """Hear torch's warnings, of the whole process."""
        self._nondeterminism.listen()

    def before_steps(self) -> None:
        self._compiled.before_steps()

    def after_step(self, step: int, deterministic: bool) -> None:
        """`deterministic`: the run asks for such operators, or its device has no others."""
        heard = self._nondeterminism.take()
        if step == 0 and not deterministic:
            heard.append("deterministic=False")
        if heard:
            self._publish([NotRepeatable(step, "; ".join(heard))])
        later, before = self._compiled.of_step(step)
        if later or before is not None:
            self._publish([Compiled(step, self._worker, later, before or 0)])
