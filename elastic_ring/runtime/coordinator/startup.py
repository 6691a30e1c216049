"""The start of a coordinator: claims a term, reads the journal, and clears what an earlier attempt left.

No decisions on events here; `shutdown` writes the end of a run.
"""

from __future__ import annotations

import logging
import math
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from elastic_ring.config import RunConfig
from elastic_ring.control.coordination import standing
from elastic_ring.control.decisions.terms import Action, TermClaim, Unanswered, begin, refuse_if_replaced
from elastic_ring.errors import (
    CoordinatorLost,
    ElasticRingError,
    JournalDamaged,
    RecordDamaged,
    RunFailed,
    StorageFailed,
)
from elastic_ring.monitor import json_files
from elastic_ring.monitor.journal import Flaw, Journal, salvage_file
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import (
    JOURNAL_NAME,
    METRICS_NAME,
    OF_RUN,
    STATUS_NAME,
    SUMMARY_NAME,
    MetricsLine,
    cut_at_its_end,
    read_status,
)
from elastic_ring.monitor.metrics_log import StepTable, rebuild_metrics
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.coordinator.run_spec import (
    RECORDS,
    RunSpec,
    TimedLine,
    is_finished,
    set_aside,
    summary_of,
)
from elastic_ring.runtime.terms import Terms, since
from elastic_ring.runtime.worker.env_fingerprint import versions
from elastic_ring.state.checkpoints.manifest import located
from elastic_ring.state.storage.folder import Storage

log = logging.getLogger(__name__)

Names = Callable[[], Sequence[str]]


class JournalLine(TimedLine, total=False):
    """A line of the journal, as far as a start uses it."""

    note: str
    attempt: str
    host: str
    identity: str
    term: int
    saves_as: Any


MOST_FAILED_STARTS = 3
RESTART_PAUSE_S = 1.0
OF_CONTENT = (CoordinatorLost, RecordDamaged, LookupError, TypeError, ValueError, AttributeError)
"""Errors of a journal's content. A storage that is away raises other errors, and is waited for."""


class FailedStarts:
    """The starts of a coordinator that failed in a row. Each is another process, so the head of the cluster keeps how
    many failed for the content of the journal, and the seconds that all took."""

    def __init__(self, coordinator: str, attempt: str, limit_s: float) -> None:
        self._key, self._limit_s = f"{coordinator}:{attempt}:failed starts".encode(), limit_s
        self._begun_s = time.monotonic()

    def allow(self, error: BaseException) -> bool:
        """Whether one more may follow this one, which failed with `error`."""
        try:
            number, failing_s = map(float, (_internal_kv_get(self._key) or b"0 0").split())
            number += isinstance(error, OF_CONTENT)
            failing_s += time.monotonic() - self._begun_s + RESTART_PAUSE_S
            _internal_kv_put(self._key, b"%d %.3f" % (number, failing_s))
        except Exception:
            log.exception("could not count a failed start")
            return True
        return number < MOST_FAILED_STARTS and failing_s <= self._limit_s

    def forget(self) -> None:
        """This start has not failed."""
        try:
            _internal_kv_put(self._key, b"0 0")
        except Exception:
            log.exception("could not forget failed starts")


@dataclass(frozen=True)
class Startup:
    """The claim of a term, the number of lines of the journal (`num_written`), and those of this attempt that stand, in
    order; empty for the first coordinator of an attempt."""

    claim: TermClaim
    num_written: int = 0
    lines: tuple[JournalLine, ...] = ()
    remarks: tuple[str, ...] = ()
    """A line for each damaged record that was set aside."""
    lag: str = ""
    """The journal in the store lacks lines of a coordinator whose node was lost."""

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
    remaining: Names,
    clear: Names,
    built: Callable[[], int] = int,
) -> Startup:
    """Claim a term, and go on with the journal of this attempt or make room for a first one.

    `is_restart`: in a process that Ray started again. `remaining()` names the run's other actors; `built()` is the
    newest generation that its workers have built, 0 for none; `clear()` removes the actors, and names those that stay.
    Raises: as `begin` of the terms and `refuse_to_begin`; RunFailed when an actor stays; JournalDamaged; StorageFailed.
    """
    folder, run = run_spec.run.folder, run_spec.run
    refuse = partial(refuse_to_begin, run_spec, is_restart=is_restart, remaining=remaining, built=built)
    reading = Reading(run_spec, refuse)
    has_claimed = is_restart and terms.has_claimed(run_spec.attempt)
    steps = begin(run.name, run.storage_uri, run_spec.attempt, has_claimed=has_claimed)
    claim = _carry_out(steps, terms, run_spec.attempt, reading)
    if reading.is_own:
        return Startup(claim, reading.num_written, tuple(reading.lines), lag=reading.cut)
    # Actors of a dead coordinator would use the resources that this run needs.
    left = clear()
    if left:
        terms.withdraw(claim)
        raise RunFailed(f"an earlier attempt's actors do not go: {', '.join(left)}", run=run_spec.run.name)
    path = folder / JOURNAL_NAME
    remarks = _set_damaged_aside(run_spec, [f"line {flaw.line} of {path} {flaw.problem}" for flaw in reading.damaged])
    if any((folder / name).exists() for name in RECORDS):
        goes_on, was_finished = bool(run_spec.resume.checkpoints), (folder / SUMMARY_NAME).exists()
        set_aside(folder, keep_metrics=goes_on)
        run_storage.forget_end(run_spec.run, goes_on=goes_on, was_finished=was_finished)
    return Startup(claim, remarks=(*remarks, *_restore_metrics(run_spec)))


def open_when_stored(run: RunConfig, attempt: Callable[[], Startup], *, is_restart: bool) -> Startup:
    """The result of `attempt`, which opens the run. While its storage is away a coordinator that was started again
    tries again, since training goes on; for `fail_after_s` at most. Raises: as `attempt`; RunFailed after that time."""
    silence = Unanswered(longest_turn_s=math.inf)
    while True:
        silence.tick(time.monotonic(), is_heard=False)
        try:
            return attempt()
        except StorageFailed as error:
            if not is_restart:
                raise
            if silence.silent_s > run.checkpoint_config.fail_after_s:
                limit = f"checkpoint.fail_after_s={run.checkpoint_config.fail_after_s:g}"
                raise RunFailed(f"no term could be claimed for {silence.silent_s:.0f} s ({limit}): {error}") from error
            log.warning("could not claim a term yet; tries again: %s", error)
            time.sleep(RESTART_PAUSE_S)


def refuse_unknown_workers(run: RunConfig, startup: Startup, num_known: int, num_started: int) -> None:
    """Raises JournalDamaged where a run has started more workers than its journal knows; a copy in a store lags."""
    if num_started > num_known and not run.is_remote:
        raise JournalDamaged(
            f"{run.folder / JOURNAL_NAME} ends after line {startup.num_written} and lacks workers that this run has "
            "started: lines at its end are missing. Submit the run again: it goes on from its newest checkpoint",
            path=str(run.folder / JOURNAL_NAME),
            line=startup.num_written,
        )


def begin_note(run_spec: RunSpec, now: float) -> JournalLine:
    """The journal's note that this submission begins."""
    note = {
        "note": "begin",
        "attempt": run_spec.attempt,
        "now": now,
        "host": socket.gethostname(),
        "run": run_spec.run.name,
        "identity": run_spec.identity.digest,
        "versions": versions(run_spec.scaling.device),
        **run_spec.resume.journalled(),
    }
    return cast("JournalLine", note)


def _carry_out(steps: Generator[Action, Any, TermClaim], terms: Terms, attempt: str, reading: Reading) -> TermClaim:
    """Carry out the actions of `steps` against the storage; returns the claim."""
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
                        if not reading.lines:  # else the folder is there, or was moved away meanwhile
                            reading.folder.mkdir(0o700, parents=True, exist_ok=True)
                        # The journal knows terms whose claims were removed.
                        newest = max((line.get("term", 0) for line in reading.lines), default=0)
                        answer = own = terms.claim(attempt, above=newest)
                    case "withdraw":
                        assert own is not None
                        terms.withdraw(own)
                    case "read":
                        reading.read()
            except ElasticRingError as error:
                action = steps.throw(error)
            else:
                action = steps.send(answer)
    except StopIteration as done:
        claim: TermClaim = done.value
        return claim


class Reading:
    """The run's journal as it was last read."""

    def __init__(self, run_spec: RunSpec, refuse: Callable[[Sequence[JournalLine]], None]) -> None:
        self._run_spec, self._refuse, self.folder = run_spec, refuse, run_spec.run.folder
        self.num_written = 0
        self.damaged: list[Flaw] = []
        self.lines: list[JournalLine] = []
        self.is_own = False
        self.cut = ""

    def read(self) -> None:
        """Raises as `refuse_to_begin`, where the journal is not this attempt's; JournalDamaged where it is."""
        run_spec = self._run_spec
        path = self.folder / JOURNAL_NAME
        run_storage.fetch(run_spec.run, self.folder, keep_longer=True)
        with suppress(FileNotFoundError):
            path.stat()  # any other error: its storage is away
        written, self.damaged = salvage_file(path)
        self.num_written, self.lines = len(written), cast("list[JournalLine]", standing(written))
        begins = [line for line in self.lines if line.get("note") == "begin"]
        self.is_own = bool(begins) and begins[-1]["attempt"] == run_spec.attempt
        if not self.is_own:
            self._refuse(begins)
            return
        self.cut = cut_at_its_end(path, self.num_written, read_status(run_spec.run.folder))
        if self.damaged or (self.cut and not run_spec.run.is_remote):  # copies in a store lag
            line = self.damaged[0].line if self.damaged else self.num_written
            problem = f"line {line} of {path} {self.damaged[0].problem}" if self.damaged else self.cut
            raise JournalDamaged(
                f"{problem}, so a new coordinator cannot tell what was decided: submit the run again, and it goes on "
                "from its newest checkpoint",
                path=str(path),
                line=line,
            )


def _set_damaged_aside(run_spec: RunSpec, of_journal: Sequence[str]) -> list[str]:
    """Rename the damaged records of an earlier attempt, none of which is needed; `set_aside` moves the others."""
    folder, remarks = run_spec.run.folder, []
    if of_journal:
        remarks.append(json_files.set_aside(folder / JOURNAL_NAME, of_journal[0]))
    identity = run_spec.identity.digest
    for name, look in ((STATUS_NAME, read_json), (SUMMARY_NAME, lambda _: summary_of(folder, identity))):
        try:
            look(folder / name)
        except RecordDamaged as error:
            remarks.append(json_files.set_aside(folder / name, error.message))
    return remarks


def _restore_metrics(run_spec: RunSpec) -> list[str]:
    """Keep the metrics of the steps before the checkpoint at which the run resumes; a damaged file is written anew from
    its undamaged lines. At another run's checkpoint its metrics are copied. Returns lines to report."""
    resume, path, remarks = run_spec.resume, run_spec.run.folder / METRICS_NAME, []
    if not resume.checkpoints:
        return []
    identity = run_spec.identity.digest
    with tempfile.NamedTemporaryFile() as copy:
        has_own = path.exists()
        if not has_own:
            uri, _ = located(run_spec.run.storage_uri, resume.checkpoints[-1].folder)
            source = Storage(uri, timeout_s=run_spec.run.timeouts.storage_s).open(write=False)
            copy.write(run_storage.growing(source, METRICS_NAME))
            copy.flush()
        flaws = list[Flaw]()
        with StepTable.load(path if has_own else Path(copy.name), flaws, uses_index=False) as table:
            wrong, lines, missing = rebuild_metrics(table, flaws, identity, resume.step)
            if has_own and wrong:
                remarks.append(json_files.set_aside(path, f"{path}: {wrong}"))
            is_kept = path.exists()
            if is_kept:  # an earlier attempt's builds may have had higher terms
                lines = iter([MetricsLine(step=0, note=OF_RUN, identity=identity)])
            if not is_kept or any(table.went_back):
                with Journal(path, durable=True).open(table.after) as journal:
                    for line in lines:
                        journal.append({**line}, sync=False)
                    journal.sync()
    if missing and (remarks or missing[-1] == resume.step - 1):  # else it was reported before
        remarks.append(f"{path} has no lines of {len(missing)} step(s), {missing[0]} to {missing[-1]}")
    return remarks


def refuse_to_begin(
    run_spec: RunSpec, begins: Sequence[JournalLine], *, is_restart: bool, remaining: Names, built: Callable[[], int]
) -> None:
    """Check that a first coordinator of `run_spec` may begin where the journal has these beginnings.

    Raises RunFailed when the run has finished. In a process that Ray started again: TermLost when the folder is
    another submission's now, CoordinatorLost when workers of this run live but its journal is not visible from here,
    JournalDamaged when the journal is missing although they have trained, as the decisions in it are lost.
    """
    run = run_spec.run
    if is_restart and begins and (later := begins[-1])["attempt"] != run_spec.follows:
        newest = TermClaim(
            max(1, later.get("term", 1)), later["attempt"], later.get("host", ""), "", since(later["now"])
        )
        refuse_if_replaced(run.name, run.storage_uri, TermClaim(0, run_spec.attempt), newest)
    if is_restart and not begins and (generation := built()):
        raise JournalDamaged(
            f"no journal of run {run.name} is in {run.folder} on host {socket.gethostname()}, although its workers "
            f"have built generation {generation}: the folder was moved or is not mounted, or the journal was cut. The "
            "run ends; put it back and submit again: it goes on from its newest checkpoint",
            path=str(run.folder / JOURNAL_NAME),
        )
    if is_restart and remaining():
        raise CoordinatorLost(f"the run has workers, but its journal is not in {run.folder} on this node")
    if is_finished(run, run.folder, run_spec.task.step.steps, run_spec.identity.digest):
        raise RunFailed(f"run {run.name} has finished: {run.folder} holds its summary")
