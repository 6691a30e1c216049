"""The start of a coordinator: claims a term, reads the journal, and clears what an earlier attempt left.

No decisions on events here; `shutdown` writes the end of a run.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from elastic_ring.control.decisions.terms import Action, TermClaim, begin
from elastic_ring.control.replay import standing
from elastic_ring.errors import CoordinatorLost, ElasticRingError, JournalDamaged, RecordDamaged, RunFailed
from elastic_ring.monitor import json_files
from elastic_ring.monitor.journal import Flaw, Journal, salvage, salvage_file
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import (
    JOURNAL_NAME,
    METRICS_NAME,
    STATUS_NAME,
    SUMMARY_NAME,
    missing_steps,
    rebuild_metrics,
)
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.coordinator.run_spec import (
    RunSpec,
    has_records,
    is_finished,
    set_aside,
    summary_of,
)
from elastic_ring.runtime.terms import Terms
from elastic_ring.state.checkpoints.manifest import located
from elastic_ring.state.storage.folder import Storage

log = logging.getLogger(__name__)

JournalLine = Mapping[str, Any]
Names = Callable[[], Sequence[str]]

MOST_FAILED_STARTS = 3
OF_CONTENT = (CoordinatorLost, RecordDamaged, LookupError, TypeError, ValueError, AttributeError)
"""What reading a journal raises. A storage that is away raises others, and is waited for."""


def num_failed_starts(coordinator: str, attempt: str, error: BaseException | None) -> int:
    """How many starts in a row have failed for what the journal holds, with this `error`; None: this one has not. Each
    is another process, so the head of the cluster keeps the number."""
    key, number = f"{coordinator}:{attempt}:failed starts".encode(), 0
    try:
        if isinstance(error, OF_CONTENT):
            number = 1 + int(_internal_kv_get(key) or 0)
        _internal_kv_put(key, b"%d" % number)
    except Exception:
        log.exception("could not count a failed start")
    return number


@dataclass(frozen=True)
class Startup:
    """What a coordinator starts from: its claim of a `term`, how many lines it has read (`num_written`), and those of
    this attempt that stand, in order; none for the first coordinator of an attempt."""

    claim: TermClaim
    num_written: int = 0
    lines: tuple[JournalLine, ...] = ()
    told: tuple[str, ...] = ()
    """A line for each damaged record that was set aside."""

    @property
    def term(self) -> int:
        return self.claim.term

    @property
    def begin(self) -> JournalLine | None:
        """The note with which this attempt began, written by its first coordinator."""
        return next((line for line in self.lines if line.get("note") == "begin"), None)


def open_run(
    run_spec: RunSpec,
    terms: Terms,
    *,
    is_restart: bool,
    others: Names,
    clear: Names,
    built: Callable[[], int] = int,
) -> Startup:
    """Claim a term, and go on with the journal of this attempt or make room for a first one.

    `is_restart`: in a process that Ray started again. `others()` names what exists of the run beside this coordinator;
    `built()` is the newest generation that its workers have built, 0 for none; `clear()` removes them, and names what
    stays. Raises: as `begin` of the terms and `refuse_to_begin`; RunFailed when something stays; JournalDamaged;
    StorageFailed.
    """
    folder, run = run_spec.run.folder, run_spec.run
    reading = _Reading(run_spec, partial(refuse_to_begin, run_spec, is_restart=is_restart, others=others, built=built))
    has_claimed = is_restart and terms.has_claimed(run_spec.attempt)
    steps = begin(run.name, run.storage_uri, run_spec.attempt, has_claimed=has_claimed)
    claim = _carried_out(steps, terms, run_spec.attempt, reading.read)
    folder.mkdir(parents=True, exist_ok=True)  # not before: a folder that was moved away must not seem to be there
    if reading.is_own:
        return Startup(claim, reading.num_written, tuple(reading.lines))
    # Actors of a dead coordinator would use the resources that this run needs.
    left = clear()
    if left:
        terms.withdraw(claim)
        raise RunFailed(f"an earlier attempt's actors do not go: {', '.join(left)}", run=run_spec.run.name)
    path = folder / JOURNAL_NAME
    told = _set_damaged_aside(run_spec, [f"line {flaw.line} of {path} {flaw.problem}" for flaw in reading.damaged])
    if has_records(folder):
        goes_on, was_finished = bool(run_spec.resume.checkpoints), (folder / SUMMARY_NAME).exists()
        set_aside(folder, keep_metrics=goes_on)
        run_storage.forget_end(run_spec.run)
        run_storage.reset_places(run_spec.run, goes_on=goes_on, was_finished=was_finished)
    return Startup(claim, told=(*told, *_metrics(run_spec)))


def _carried_out(
    steps: Generator[Action, Any, TermClaim], terms: Terms, attempt: str, read_records: Callable[[], None]
) -> TermClaim:
    """What `steps` ask for, against the storage."""
    own: TermClaim | None = None
    try:
        action = next(steps)
        while True:
            answer: TermClaim | None = None
            try:
                match action:
                    case "look":
                        answer = terms.newest()
                    case "claim":
                        answer = own = terms.claim(attempt)
                    case "withdraw":
                        assert own is not None
                        terms.withdraw(own)
                    case "read":
                        read_records()
            except ElasticRingError as error:
                action = steps.throw(error)
            else:
                action = steps.send(answer)
    except StopIteration as done:
        claim: TermClaim = done.value
        return claim


class _Reading:
    """The run's records as they were last read."""

    def __init__(self, run_spec: RunSpec, refuse: Callable[[Sequence[JournalLine]], None]) -> None:
        self._run_spec, self._refuse = run_spec, refuse
        self.num_written = 0
        self.damaged: list[Flaw] = []
        self.lines: list[JournalLine] = []
        self.is_own = False

    def read(self) -> None:
        """Raises as `refuse_to_begin`, where the journal is not this attempt's; JournalDamaged where it is."""
        run_spec = self._run_spec
        path = run_spec.run.folder / JOURNAL_NAME
        run_storage.fetch(run_spec.run, run_spec.run.folder, keep_longer=True)
        with suppress(FileNotFoundError):
            path.stat()  # any other error: its storage is away
        written, self.damaged = salvage_file(path)
        self.num_written, self.lines = len(written), standing(written)
        begins = [line for line in self.lines if line.get("note") == "begin"]
        self.is_own = bool(begins) and begins[-1]["attempt"] == run_spec.attempt
        if not self.is_own:
            self._refuse(begins)
        elif self.damaged:
            raise JournalDamaged(
                f"line {self.damaged[0].line} of {path} {self.damaged[0].problem}, so a new coordinator cannot tell "
                "what was decided: submit the run again, and it goes on from its newest checkpoint",
                path=str(path),
                line=self.damaged[0].line,
            )


def _set_damaged_aside(run_spec: RunSpec, of_journal: Sequence[str]) -> list[str]:
    """Rename what of an earlier attempt is damaged: nothing of it is needed. What is whole is moved by `set_aside`."""
    folder, told = run_spec.run.folder, []
    if of_journal:
        told.append(json_files.set_aside(folder / JOURNAL_NAME, of_journal[0]))
    identity = run_spec.identity.digest
    for name, look in ((STATUS_NAME, read_json), (SUMMARY_NAME, lambda _: summary_of(folder, identity))):
        try:
            look(folder / name)
        except RecordDamaged as error:
            told.append(json_files.set_aside(folder / name, error.message))
    return told


def _metrics(run_spec: RunSpec) -> list[str]:
    """A run that resumes at a checkpoint keeps its metrics of earlier steps; a damaged file is written anew from its
    undamaged lines. A run that begins at another run's checkpoint takes over its metrics. Returns lines to report."""
    resume, path, told = run_spec.resume, run_spec.run.folder / METRICS_NAME, []
    if not resume.checkpoints:
        return []
    identity = run_spec.identity.digest
    if path.exists():
        wrong, lines = rebuild_metrics(salvage_file(path), identity, resume.step)
        if wrong:
            told.append(json_files.set_aside(path, f"{path}: {wrong}"))
    else:
        uri, _ = located(run_spec.run.storage_uri, resume.checkpoints[-1].folder)
        source = Storage(uri, timeout_s=run_spec.run.timeouts.storage_s).open(write=False)
        _, lines = rebuild_metrics(salvage(run_storage.growing(source, METRICS_NAME)), identity, resume.step)
    if not path.exists():
        with Journal(path, durable=True) as journal:
            for line in lines:
                journal.append(line, sync=False)
            journal.sync()
    missing = missing_steps(lines, resume.step)
    if missing and (told or missing[-1] == resume.step - 1):  # else it was reported before
        told.append(f"{path} has no lines of {len(missing)} step(s), {missing[0]} to {missing[-1]}")
    return told


def refuse_to_begin(
    run_spec: RunSpec, begins: Sequence[JournalLine], *, is_restart: bool, others: Names, built: Callable[[], int]
) -> None:
    """Whether a first coordinator of `run_spec` may begin where the journal has these beginnings.

    Raises RunFailed when the run has finished. In a process that Ray started again: RunFailed when the folder is
    another submission's now, CoordinatorLost when workers of this run live whose journal is not to be seen from here,
    JournalDamaged when there is none although they have trained: nobody can tell what was decided.
    """
    run = run_spec.run
    if is_restart and begins and begins[-1]["now"] > run_spec.submitted_unix_s:
        raise RunFailed(f"another submission has taken {run.folder}: this one ends", run=run.name)
    if is_restart and not begins and (generation := built()):
        raise JournalDamaged(
            f"no journal of run {run.name} is in {run.folder} on host {socket.gethostname()}, although its workers "
            f"have built generation {generation}: the folder was moved, emptied or is not mounted. The run ends; put "
            "the folder back and submit again: it goes on from its newest checkpoint",
            path=str(run.folder / JOURNAL_NAME),
        )
    if is_restart and others():
        raise CoordinatorLost(f"the run has workers, but its journal is not in {run.folder} on this node")
    if is_finished(run, run.folder, run_spec.task.step.steps, run_spec.identity.digest):
        raise RunFailed(f"run {run.name} has finished: {run.folder} holds its summary")
