"""Callbacks: what a driver tells while it follows a run. They read the run's records, so no step is told too early.

Each callback has a place in `callbacks.json` of the run's folder: what it has been told. A driver that attaches later
goes on from there. No training and no decision belongs here, and no Ray.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME, StepMetrics, write_json

log = logging.getLogger(__name__)

CALLBACKS_NAME, LOCK_NAME = "callbacks.json", "callbacks.lock"
STEP, VALIDATION, RECOVERY, CHECKPOINT = KINDS = ("step", "validation", "recovery", "checkpoint")


@dataclass(frozen=True)
class RunInfo:
    """The run that a callback is told of: its name, its folder, and its settings as in config.json."""

    name: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)


class Callback:
    """Override what you want to hear. All methods run in the driver's process, one at a time, never in a worker.

    Every committed step, validation, recovery and checkpoint is told once, in its order within its kind, whatever fails
    in the cluster and however often drivers attach. One case is left: a driver that is killed inside a method leaves
    the next driver to tell that one event again. A method that raises ends what this driver tells the callback; the
    training goes on, and submitting the run again tells the rest.
    """

    @property
    def name(self) -> str:
        """What the callback is called in `callbacks.json`; two callbacks of one class need two names."""
        return type(self).__qualname__

    def on_start(self, run: RunInfo) -> None:
        """The driver has found the run: open what you write to. Called by every driver."""

    def on_step(self, metrics: StepMetrics) -> None:
        """A step is committed. It will not be undone, and the next one has begun."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The held-out sequences after `step`: `val_loss`, and `val_NAME` of each metric of the trainer's `metrics`."""

    def on_recovery(self, recovery: Mapping[str, Any]) -> None:
        """A recovery is over; the keys are those of `recoveries` in summary.json."""

    def on_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """A checkpoint counts: its manifest is written. `step` is among the keys."""

    def on_end(self) -> None:
        """The driver leaves: close what `on_start` opened. Called once for every `on_start` that returned."""


@dataclass(frozen=True)
class Event:
    """One event of a kind; `index` rises within the kind: a step's number, or a count."""

    kind: str
    index: int
    told: Any

    def tell(self, callback: Callback) -> None:
        match self.kind:
            case "step":
                callback.on_step(StepMetrics.from_json(self.told))
            case "validation":
                callback.on_validation(self.index, self.told)
            case "recovery":
                callback.on_recovery(self.told)
            case "checkpoint":
                callback.on_checkpoint(self.told)


class RunEvents:
    """Reads a run's records as they grow: metrics.jsonl and the notes in journal.jsonl."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._journal = _Lines(folder / METRICS_NAME), _Lines(folder / JOURNAL_NAME)
        self._last_step = -1
        self._counts = {RECOVERY: 0, CHECKPOINT: 0}
        self._early: dict[int, Event] = {}  # validations whose step is not written yet

    def news(self) -> list[Event]:
        """What is new since the last call. A step comes before its validation; a step number comes once."""
        found = []
        for line in self._metrics.new():
            step = int(line["step"])
            if "note" in line:  # a step that ran again with the same loss, and where that began
                continue
            if "loss_hex" in line:
                if step > self._last_step:
                    found.append(Event(STEP, step, line))
                    self._last_step = step
            else:
                self._early[step] = Event(VALIDATION, step, _numbers(line))
            found += [self._early.pop(at) for at in sorted(self._early) if at <= self._last_step]
        for line in self._journal.new():
            kind = line.get("note")
            if kind in self._counts:
                found.append(Event(kind, self._counts[kind], line[kind]))
                self._counts[kind] += 1
        return found


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Of a validation's line the metrics; JSON has null for what is not finite."""
    return {name: math.nan if value is None else float(value) for name, value in line.items() if name != "step"}


class _Lines:
    """The complete lines of a JSON lines file that others append to."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n") or b"\0" in line:  # its writer has not finished it, or was cut off
                    return
                self._offset += len(line)
                yield json.loads(line)


class Telling:
    """Tells callbacks of one run. Among drivers that follow it at the same time one tells; another takes over once that
    one is gone. Use it in a `with`; nothing is read or called before the first `tell`."""

    def __init__(self, callbacks: Sequence[Callback], run: RunInfo) -> None:
        self._run, self._active = run, list(callbacks)
        self._events = RunEvents(run.folder)
        self._told: dict[str, dict[str, int]] = {}
        self._lock: int | None = None
        self._said_other = False

    def __enter__(self) -> Telling:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._lock is None:
            return
        if kind is None or issubclass(kind, Exception):  # an interrupted driver leaves at once
            self.tell()
        for callback in list(self._active):
            self._call(callback, "on_end", callback.on_end)
        os.close(self._lock)
        self._lock = None

    def tell(self) -> None:
        """Tell each callback what it has not been told yet. Call it once the run's records are those of its attempt."""
        if not self._active or not self._has_lock():
            return
        for event in self._events.news():
            for callback in list(self._active):
                place = self._told.setdefault(callback.name, {})
                if event.index <= place.get(event.kind, -1):
                    continue
                if self._call(callback, f"on_{event.kind}", partial(event.tell, callback)):
                    place[event.kind] = event.index
                    write_json(self._run.folder / CALLBACKS_NAME, self._told)

    def _has_lock(self) -> bool:
        """Whether this driver is the one that tells; calls `on_start` when it becomes so."""
        if self._lock is not None:
            return True
        descriptor = os.open(self._run.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if not self._said_other:
                log.info("another driver tells the callbacks of run %s; this one takes over if it ends", self._run.name)
            self._said_other = True
            return False
        self._lock = descriptor
        self._told = _read(self._run.folder / CALLBACKS_NAME)
        for callback in list(self._active):
            self._call(callback, "on_start", partial(callback.on_start, self._run))
        return True

    def _call(self, callback: Callback, method: str, call: Callable[[], None]) -> bool:
        """Whether it returned. A callback that raises is told nothing more: the run is worth more than its log."""
        try:
            call()
        except Exception:
            log.exception(
                "callback %s: %s raised; training goes on, and this driver tells it nothing more. Submit the run again "
                "to have it told the rest", callback.name, method,
            )  # fmt: skip
            self._active.remove(callback)
            return False
        return True


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raises ValueError for what is no callback, and for two of one name."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ValueError(
                f"callbacks: {callback!r} is no elastic_ring.Callback: derive from it, and give an instance"
            )
    names = [callback.name for callback in callbacks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"callbacks: two are called {twice[0]!r}: give each a `name` of its own")


def _read(path: Path) -> dict[str, dict[str, int]]:
    try:
        found: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}), so nobody knows what the callbacks have been told: remove it to have "
            "them told everything again"
        ) from error
    return found
