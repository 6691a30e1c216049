"""Callbacks that the driver calls while it follows a run. They read the run's records, so no event comes too early.

Each callback has a place in `callbacks.json` of the run's folder: the events that it has received. A driver that
attaches later goes on from there. This file collects what callbacks want; the core decides. No training and no Ray.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, cast

from elastic_ring.errors import RecordDamaged
from elastic_ring.files import plain_json
from elastic_ring.monitor.journal import Lines, Place, StoredLine, opened
from elastic_ring.monitor.json_files import as_written, read_json, set_aside
from elastic_ring.monitor.metrics import (
    AGAIN,
    JOURNAL_NAME,
    METRICS_NAME,
    SUMMARY_NAME,
    WENT_BACK,
    CheckpointEvent,
    StepMetrics,
    read_status,
    write_json,
)
from elastic_ring.state.storage.local_files import has_locks

log = logging.getLogger(__name__)

CALLBACKS_NAME, LOCK_NAME = "callbacks.json", "callbacks.lock"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Before a callback that raised and tries again is called again; the pause doubles."""
FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
STOPPED_BY_USER = "stopped by the user"
"""The message of a run's end."""
STEP, VALIDATION, RECOVERY, CHECKPOINT, BACK = "step", "validation", "recovery", "checkpoint", "back"
LINE, FILE = "line", "file"
"""Beside the delivered events: where the line of the newest of metrics.jsonl begins, and the checksum of that file's
first line."""


@dataclass(frozen=True)
class RunInfo:
    """The run that a callback gets: its name, its folder, and its settings as in config.json.

    `id` is the same for all drivers of one attempt and for attempts that go on from its checkpoints; one that begins
    anew in the folder has another.
    """

    name: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


class Requests(TypedDict, total=False):
    """Requests to the run: why to stop it, whether to save a checkpoint, whether to keep it, and the step of the newest
    request."""

    stop: str
    saves: bool
    keeps: bool
    at: int


class Granted(TypedDict):
    """What the run does for its callbacks at one validation."""

    stop: str
    saves: bool
    keeps: bool


class Record(TypedDict):
    """callbacks.json: by callback, the newest delivered event of each kind with LINE and FILE, its state and its
    requests; and the newest granted requests with their step, or None."""

    id: str
    run: str
    delivered: dict[str, dict[str, int]]
    states: dict[str, dict[str, Any]]
    requests: dict[str, Requests]
    granted: tuple[int, Granted] | None


class Control:
    """One callback's requests to the run. They take effect at the validation under delivery, else at the next one:
    training waits there for all callbacks with `controls`, `timeouts.callback_s` at most."""

    def __init__(self, requests: Requests, *, controls: bool) -> None:
        self._requests, self._controls = requests, controls
        self.at = -1  # the step of the event under delivery

    def stop(self, reason: str) -> None:
        """End the run as if it had no more steps: it saves, writes its weights and is finished."""
        self._changeable()["stop"] = str(reason) or "no reason given"

    def checkpoint(self, *, keep: bool = False) -> None:
        """Take a checkpoint. `keep`: retention leaves it until another is kept."""
        self._changeable()["saves"] = True
        if keep:
            self._requests["keeps"] = True

    def drop_stale_save(self, validated_step: int) -> None:
        """Drop a request for a kept checkpoint of `validated_step` or before: a later one holds another state."""
        if self._requests.get("keeps") and self._requests["at"] <= validated_step:
            self._requests.pop("saves", None)
            self._requests.pop("keeps", None)

    def go_back(self, step: int) -> None:
        """Drop requests made at `step` or later, which is undone."""
        if self._requests.get("at", -1) >= step:
            cast(dict[str, object], self._requests).clear()

    def _changeable(self) -> Requests:
        if not self._controls:
            raise ValueError(
                "controls=False: set controls = True in the callback's class, so that training waits for it"
            )
        self._requests["at"] = self.at
        return self._requests


class Callback:
    """Override the methods of the events that you need. All run in the driver's process, one at a time, never in a
    worker.

    A callback receives every committed step, validation, recovery and checkpoint once, in order within its kind,
    whatever fails in the cluster and however often drivers attach; where the run goes back and a step has another
    result than before, `on_back`, then that step and the later ones again. The one exception: if a driver is killed
    inside a method, the next driver repeats that event. A method that raises is logged, with its traceback the first
    time, and the next event follows; training goes on. `on_start` is called again after a pause that grows. Submitting
    the run again delivers the events that a driver missed.
    """

    tries_again: bool = False
    """Whether a method that raised is called again with the same event, after the same pause, before later events: for
    callbacks that write to a store that may be away."""
    controls: bool = False
    """Whether `control` may be used: then training waits for this callback after each validation."""
    control: Control
    """Set before `on_start`."""
    state: dict[str, Any]
    """What the next driver finds here, as JSON: the best loss so far, for example. Set before `on_start`, saved with
    each event."""
    end: str = ""
    """Before `on_end`: "finished", "failed", "stopped" (by the user), or empty if the run goes on."""

    @property
    def name(self) -> str:
        """What the callback is called in `callbacks.json`; two callbacks of one class need two names."""
        return type(self).__qualname__

    def check_metrics(self, metrics: Collection[str]) -> None:
        """Before the start, with the names of the validations' metrics. Raises ValueError for settings that cannot
        work."""

    def on_start(self, run: RunInfo) -> None:
        """The driver has found the run: open what you write to. Called by every driver."""

    def on_step(self, metrics: StepMetrics) -> None:
        """A step is committed, and the next one has begun. Steps that a run repeats with the same result come once."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """After `step`: `val_loss`, `val_perplexity`, and `val_NAME` of each metric of the trainer's `metrics`; with
        several sets the means of all, and `val_SET_loss` and so on of each."""

    def on_back(self, step: int, validations: Mapping[int, Mapping[str, float]]) -> None:
        """The run has gone back, and `step` has another result than this callback was given: it comes again, as all
        later ones. Take back what `state` and stores have from `step` on. `validations`: those before it, by step."""

    def on_recovery(self, recovery: Mapping[str, Any]) -> None:
        """A recovery is over: the fields of `metrics.Recovery` by name."""

    def on_checkpoint(self, checkpoint: CheckpointEvent) -> None:
        """A checkpoint counts: its manifest is written."""

    def on_end(self) -> None:
        """The driver leaves: close what `on_start` opened. Called once for every `on_start` that returned."""


@dataclass(frozen=True)
class Event:
    """One event of a kind. `index`: a step's number, which rises within the kind until the run goes back, or a count.
    `content` is what the callback's method gets. `line`: as LINE, of an event of metrics.jsonl."""

    kind: str
    index: int
    content: Any
    line: int = -1

    def is_new(self, place: Mapping[str, int]) -> bool:
        """Whether it is not among the delivered ones."""
        before = place.get(LINE, -1) if self.line >= 0 else self.line
        return self.line > before or (self.line == before and self.index > place.get(self.kind, -1))

    def enter(self, place: dict[str, int]) -> None:
        """It is delivered."""
        place[self.kind] = self.index
        if self.line >= 0:
            place[LINE] = self.line
        if self.kind == BACK:
            place.update({kind: min(place.get(kind, -1), self.content[0] - 1) for kind in (STEP, VALIDATION)})

    def deliver(self, callback: Callback) -> None:
        match self.kind:
            case "step":
                callback.on_step(self.content)
            case "validation":
                callback.on_validation(self.index, self.content)
            case "back":
                callback.on_back(*self.content)
            case "recovery":
                callback.on_recovery(self.content)
            case "checkpoint":
                callback.on_checkpoint(self.content)


class RunEvents:
    """Reads a run's records as they grow: metrics.jsonl and the facts of journal.jsonl. `place`: of a callback, as in
    callbacks.json."""

    def __init__(self, folder: Path, place: dict[str, int]) -> None:
        self._folder, self._read = folder, {METRICS_NAME: Place(), JOURNAL_NAME: Place()}
        self._place, self._is_begun = place, False
        self.standing = -1
        """The newest step that counts."""
        self._last_step = self._last_known = -1  # of all steps that came as events, and of validations in another file
        self._counts = {RECOVERY: 0, CHECKPOINT: 0}
        self._early: dict[int, Mapping[str, float]] = {}  # validations whose step is not written yet
        self._validations: dict[int, Mapping[str, float]] = {}  # that came as events

    def news(self) -> list[Event]:
        """The events since the last call. A step comes before its validation; a step number comes once, and again where
        the run has gone back and has another result for it, after a BACK."""
        facts = [*self._new_lines(JOURNAL_NAME)]  # first: a recovery's step is then among the lines
        events = [event for line in self._new_lines(METRICS_NAME) for event in self._take(line)]
        for kind, fact in ((line.record.get("note"), line.record) for line in facts):
            if kind in self._counts and kind in fact:
                events.append(Event(kind, self._counts[kind], fact[kind]))
                self._counts[kind] += 1
        return events

    def _new_lines(self, name: str) -> Iterator[StoredLine]:
        """The complete lines that others have appended to the file."""
        with suppress(FileNotFoundError), opened(self._folder / name) as file:
            for line in Lines(file, name, [], self._read[name]):  # damage is reported where the file is opened again
                self._read[name] = line.after
                yield line

    def _begin(self, first_crc: int) -> None:
        """Of a file that is not the one of the place only the numbers of steps are known."""
        self._is_begun = True
        if self._place.get(FILE) != first_crc:
            self._place.update({FILE: first_crc, LINE: -1})
            self.standing = self._last_step = self._place.get(STEP, -1)
            self._last_known = self._place.get(VALIDATION, -1)

    def _take(self, line: StoredLine) -> Iterator[Event]:
        if not self._is_begun:
            self._begin(line.after.link.crc)
        record, at = line.record, line.start_bytes
        step, note = record.get("step"), record.get("note")
        if type(step) is not int:  # no line of a run
            return
        if note == WENT_BACK:
            self.standing = min(self.standing, step - 1)
            self._early = {early: values for early, values in self._early.items() if early < step}
        elif note == AGAIN:
            self.standing = max(self.standing, step)
        elif note is None and "loss_hex" not in record:
            self._early[step] = {  # JSON has null for values that are not finite
                name: math.nan if value is None else float(value)
                for name, value in record.items()
                if name != "step" and (value is None or isinstance(value, (int, float)))
            }
        elif note is None and step > self.standing:
            if step <= self._last_step:
                yield self._go_back(step, at)
            self.standing = self._last_step = step
            try:
                with as_written(f"the line of step {step}"):
                    yield Event(STEP, step, StepMetrics.from_json(record), at)
            except RecordDamaged as error:
                log.error("%s; callbacks do not receive it", error.message)
        for early in sorted(early for early in self._early if early <= self.standing):
            values = self._early.pop(early)
            if early not in self._validations:
                self._validations[early] = values
                if early > self._last_known:
                    yield Event(VALIDATION, early, values, at)

    def _go_back(self, step: int, at: int) -> Event:
        self._last_known = min(self._last_known, step - 1)
        self._validations = {before: values for before, values in self._validations.items() if before < step}
        return Event(BACK, at, (step, dict(self._validations)), at)


@dataclass
class _Listener:
    """One callback, and the events that it has yet to receive. `save` records the place after each event, `go_back` a
    step to which the run has gone back."""

    callback: Callback
    run: RunInfo
    place: dict[str, int]
    save: Callable[[], None]
    go_back: Callable[[int], None]
    has_started: bool = False
    retry_at: float = 0.0
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        self._events, self._waiting = RunEvents(self.run.folder, self.place), deque[Event]()
        self._raised = Counter[tuple[str, type[Exception]]]()
        self.state_text = json.dumps(self.callback.state)

    def deliver(self, now: float) -> None:
        """Deliver all new events, unless it is too early to try again."""
        if now < self.retry_at:
            return
        if not self.has_started:
            try:
                self.callback.on_start(self.run)
            except Exception as error:
                self._try_later(now, "on_start", error)
                return
            self.has_started = True
        while (event := self._next()) is not None:
            control = self.callback.control
            control.at = event.index if event.kind in (STEP, VALIDATION) else self.place.get(STEP, -1)
            if event.kind == VALIDATION:
                control.drop_stale_save(self.place.get(VALIDATION, -1))
            if event.kind == BACK:
                control.go_back(event.content[0])
                self.go_back(event.content[0])
            try:
                event.deliver(self.callback)
                self.state_text = json.dumps(self.callback.state, allow_nan=False)
            except Exception as error:  # the run is worth more than its log
                if self.callback.tries_again:
                    self._try_later(now, f"on_{event.kind}", error)
                    return
                self._report(f"on_{event.kind}", error, "the next event follows", once=True)
                self.callback.state.clear()  # the method may have left half a change, or no JSON
                self.callback.state.update(plain_json(self.state_text))
            event.enter(self.place)
            self._waiting.popleft()
            self.save()
        self.pause_s = 0.0

    def _next(self) -> Event | None:
        if not self._waiting:
            self._waiting.extend(self._events.news())
        while self._waiting and not self._waiting[0].is_new(self.place):
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def has_events_until(self, validated_step: int) -> bool:
        """Whether it has received all events up to that validation, as the run has them now."""
        newest = min(self._events.standing, self.place.get(VALIDATION, -1))
        return not self._waiting and newest >= validated_step

    def _try_later(self, now: float, doing: str, error: Exception) -> None:
        self.pause_s = min(max(2 * self.pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self.retry_at = now + self.pause_s
        self._report(doing, error, f"it is called again in {self.pause_s:.0f} s")

    def _report(self, doing: str, error: Exception, then: str, *, once: bool = False) -> None:
        """Log the error: the first time with its traceback, later in one line or, with `once`, counted at the end."""
        self._raised[doing, type(error)] += 1
        if self._raised[doing, type(error)] == 1:
            log.error("callback %s: %s raised; %s", self.callback.name, doing, then, exc_info=error)
        elif not once:
            log.error("callback %s: %s raised %s: %s; %s", self.callback.name, doing, type(error).__name__, error, then)

    def close(self, end: str) -> None:
        for (doing, kind), times in self._raised.items():
            if times > 1 and not self.callback.tries_again:
                log.error("callback %s: %s raised %s %d times", self.callback.name, doing, kind.__name__, times)
        if not self.has_started:
            return
        self.callback.end = end
        try:
            self.callback.on_end()
        except Exception:
            log.exception("callback %s: on_end raised", self.callback.name)

    @property
    def is_behind(self) -> bool:
        return self.pause_s > 0


class CallbackDelivery:
    """Delivers events to the callbacks of one run. One of the drivers that follow it delivers; another takes over when
    that driver ends. A context manager; it reads and calls nothing before the first `deliver`."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        run: RunInfo,
        *,
        clock: Callable[[], float] = time.monotonic,
        bring: Callable[[], None] = lambda: None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """For a run in an object store: `bring` fetches the record before it is read, `keep` stores it after each
        delivery."""
        self._run, self._callbacks, self._clock = run, tuple(callbacks), clock
        self._bring, self._keep, self._is_kept = bring, keep, True
        self._record: Record = _empty_record("", run.name)
        self._listeners: list[_Listener] = []
        self._lock: int | None = None
        self._refused: int | None = None  # the number of the last error of the run's folder
        self._has_reported_other = False

    def __enter__(self) -> CallbackDelivery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._lock is None:
            return
        for listener in self._listeners:
            if kind is None or issubclass(kind, Exception):  # an interrupted driver leaves at once
                listener.deliver(math.inf)
                self._put()
                if listener.is_behind:
                    log.error("callback %s has not received every event: submit the run again", listener.callback.name)
            listener.close(STOPPED if kind is KeyboardInterrupt else end_of(self._run.folder))
        os.close(self._lock)
        self._lock = None

    def deliver(self) -> None:
        """Deliver to each callback the events that it lacks. Call it once the run's records belong to its attempt."""
        if self._callbacks and self._has_lock():
            for listener in self._listeners:
                listener.deliver(self._clock())
            self._put()

    def requests(self, step: int) -> Granted | None:
        """The requests of all callbacks, after all events up to the validation after `step` steps.

        None while a callback with `controls` lacks events, and where this driver has no such callback. An attempt that
        reaches a step again gets the requests that were granted there.
        """
        controlling = [listener for listener in self._listeners if listener.callback.controls]
        if not controlling or not all(listener.has_events_until(step - 1) for listener in controlling):
            return None
        if self._record["granted"] is not None:
            granted_step, granted = self._record["granted"]
            if step <= granted_step:
                return granted if step == granted_step else {"stop": "", "saves": False, "keeps": False}
        names = [listener.callback.name for listener in controlling]
        requests = {name: self._record["requests"][name] for name in names}
        return {
            "stop": "; ".join(f"{name}: {request['stop']}" for name, request in requests.items() if "stop" in request),
            "saves": any("saves" in request for request in requests.values()),
            "keeps": any("keeps" in request for request in requests.values()),
        }

    def grant(self, step: int, granted: Granted) -> None:
        """Record that the run does so after `step` steps."""
        if any(granted.values()):
            self._record["granted"] = (step, granted)
        for requests in self._record["requests"].values():
            cast(dict[str, object], requests).clear()  # each callback's `control` holds it
        self._save()

    def _put(self) -> None:
        if not self._is_kept:
            self._is_kept = True
            self._keep()

    def _has_lock(self) -> bool:
        """Whether this driver is the one that delivers."""
        if self._lock is not None:
            return True
        try:
            descriptor = os.open(
                self._run.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            self._report(error)
            return False
        try:
            if not has_locks(descriptor):
                log.warning(
                    "%s: its file system has no locks (flock): a second driver repeats events", self._run.folder
                )
        except BlockingIOError:
            os.close(descriptor)
            if not self._has_reported_other:
                log.info("another driver runs the callbacks of run %s; this one takes over if it ends", self._run.name)
            self._has_reported_other = True
            return False
        self._lock = descriptor
        self._open()
        return True

    def _open(self) -> None:
        self._bring()
        self._record = _read(self._run.folder / CALLBACKS_NAME, self._run.name)
        run = replace(self._run, id=self._record["id"])
        self._save()
        for callback in self._callbacks:
            requests = self._record["requests"].setdefault(callback.name, {})
            callback.control = Control(requests, controls=callback.controls)
            callback.state = self._record["states"].setdefault(callback.name, {})
            place = self._record["delivered"].setdefault(callback.name, {})
            self._listeners.append(_Listener(callback, run, place, self._save, self._go_back))

    def _go_back(self, step: int) -> None:
        """What was granted after `step` is of steps that are undone."""
        if self._record["granted"] is not None and self._record["granted"][0] > step:
            self._record["granted"] = None

    def _save(self) -> None:
        self._is_kept = False
        try:
            write_json(self._run.folder / CALLBACKS_NAME, self._record)
            self._refused = None
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        if self._refused != error.errno:
            text = "cannot record what callbacks received, which a driver after this one repeats"
            log.warning("%s: %s: %s", self._run.folder, text, error.strerror)
        self._refused = error.errno


def end_of(folder: Path) -> str:
    """How the run in a folder ended, as `Callback.end`."""
    status = read_status(folder) or {}
    if not status.get("ended"):
        return FINISHED if (folder / SUMMARY_NAME).exists() else ""
    end = status.get("end") or {}
    if not end.get("error"):
        return FINISHED
    return FAILED if has_failed(end["error"], end.get("message", "")) else STOPPED


def has_failed(error: str, message: str) -> bool:
    """Whether a run ended by an error, and not by a person."""
    return bool(error) and message != STOPPED_BY_USER


def kept_places(record: Mapping[str, Any], *, was_finished: bool = False) -> dict[str, Any]:
    """The record for the next attempt: steps and validations stay delivered, recoveries and checkpoints count anew.

    Grants hold for an attempt that goes on, but not for one that extends a finished run.
    """
    delivered = {
        name: {kind: at for kind, at in place.items() if kind not in (RECOVERY, CHECKPOINT)}
        for name, place in record["delivered"].items()
    }
    return {**record, "delivered": delivered, **({"granted": None} if was_finished else {})}


def check_callbacks(
    callbacks: Sequence[Callback], validates: bool = True, metrics: Collection[str] = ("val_loss",)
) -> None:
    """Raises ValueError for objects that are no callbacks, two of one name, control without validations, and settings
    that a callback refuses. `metrics`: what a validation finds."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ValueError(
                f"callbacks: {callback!r} is no elastic_ring.Callback: derive from it, and give an instance"
            )
        if callback.controls and not validates:
            raise ValueError(
                f"val_every_steps=0: the callback {callback.name} controls the run, which happens at validations: set "
                "val_every_steps, or controls=False"
            )
        callback.check_metrics(metrics)
    names = [callback.name for callback in callbacks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"callbacks: two are called {twice[0]!r}: give each a `name` of its own")


def _empty_record(identity: str, run: str) -> Record:
    return {"id": identity, "run": run, "delivered": {}, "states": {}, "requests": {}, "granted": None}


def _read(path: Path, run: str) -> Record:
    """The record of delivered events. A damaged one, or another run's, is set aside: callbacks receive everything
    again."""
    record = _empty_record(secrets.token_hex(8), run)
    try:
        content = read_json(path)
        if content is None:
            return record
        if content.get("run", run) != run:
            raise RecordDamaged(f"{path} is of run {content['run']!r}")
        with as_written(str(path)):
            places, requests = content["delivered"].items(), content.get("requests", {}).items()
            granted_step, granted = content.get("granted") or (0, None)
            return {
                "id": str(content["id"]),
                "run": run,
                "delivered": {name: {kind: int(at) for kind, at in place.items()} for name, place in places},
                "states": {str(name): dict(state) for name, state in content.get("states", {}).items()},
                "requests": {str(name): cast(Requests, dict(request)) for name, request in requests},
                "granted": granted and (int(granted_step), cast(Granted, dict(granted))),
            }
    except RecordDamaged as error:
        log.warning("%s, and the callbacks receive everything again", set_aside(path, error.message))
        return record
