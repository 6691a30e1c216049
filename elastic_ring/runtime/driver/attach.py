"""Finds, asks and removes a run's coordinator, and reads whether others write to its folder.

Nothing is started or decided here: `decision` says what follows.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from elastic_ring.config import RunConfig
from elastic_ring.control.coordination import standing
from elastic_ring.errors import CoordinatorLost, RunFailed
from elastic_ring.monitor.journal import salvage_file
from elastic_ring.monitor.json_files import readable_json
from elastic_ring.monitor.metrics import JOURNAL_NAME, SUMMARY_NAME, changed_status, read_status
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.coordinator.inbox import End
from elastic_ring.runtime.driver import access
from elastic_ring.runtime.driver.cluster import NAMESPACE, actor_name, why_not_begun
from elastic_ring.runtime.driver.submission_rules import Coordinator

ASK_AGAIN_S = 0.2
SCALE_S = 30.0


def find(run: str) -> Any | None:
    """The actor handle of this run's coordinator in any state; None when there is none, or this process has left Ray: a
    call would start another one."""
    if not ray.is_initialized():
        return None
    try:
        return ray.get_actor(actor_name(run, "coordinator"), namespace=NAMESPACE)
    except ValueError:
        return None


def ask(
    coordinator: Any, run: RunConfig, patience_s: float | None = None, *, starts: bool = False
) -> Coordinator | None:
    """The coordinator's answer; None when it is gone for good.

    Asks again for `patience_s`, by default `lease_s`: Ray restarts a coordinator that was killed. Raises
    CoordinatorLost after that, and RunFailed for one that `starts` and whose process cannot begin.
    """
    patience_s = run.timeouts.lease_s if patience_s is None else patience_s
    deadline = time.monotonic() + patience_s
    while True:
        try:
            answer: Coordinator = ray.get(coordinator.identity.remote(), timeout=run.timeouts.hello_s)
            return answer
        except ActorDiedError as error:
            if starts and (reason := why_not_begun(error)):
                raise RunFailed(f"the coordinator of run {run.name} cannot begin: {reason}", run=run.name) from None
            return None
        except (GetTimeoutError, ActorUnavailableError) as error:
            if time.monotonic() > deadline:
                raise CoordinatorLost(
                    f"the coordinator of run {run.name} does not answer within {patience_s:.0f} s",
                    lease_s=run.timeouts.lease_s,
                ) from error
            time.sleep(ASK_AGAIN_S)


def attempt_of(coordinator: Any, run: RunConfig, *, starts: bool = False) -> str:
    """The id of the submission that created this coordinator; empty when the coordinator is gone.

    With `starts` it may take as long as a worker's process (`start_s`): Ray starts actors slowly on a busy machine.
    """
    timeouts = run.timeouts
    patience_s = max(timeouts.lease_s, timeouts.start_s) if starts else timeouts.lease_s
    answer = ask(coordinator, run, patience_s, starts=starts)
    return "" if answer is None else answer.attempt


def has_records_of(run: RunConfig, attempt: str) -> bool:
    """Whether the run's folder has the records of this attempt, so that it is the same folder by another path."""
    return not run.is_remote and attempt in begun_by(run)


def begun_by(run: RunConfig) -> list[str]:
    """The attempts that have begun in the journal of the run's folder, the newest last."""
    lines = standing(salvage_file(run.driver_folder / JOURNAL_NAME)[0])
    return [str(line.get("attempt")) for line in lines if line.get("note") == "begin"]


def other_writer(run: RunConfig) -> str | None:
    """The name of the run that a coordinator of another Ray cluster writes into the run's folder; None if none does.

    Looks whether its status changes. Its age says nothing: clocks of two hosts differ.
    """

    def look() -> Path:
        run_storage.fetch(run, run.driver_folder)
        return run.driver_folder

    before = read_status(run.driver_folder)
    if before is None or before.get("ended") or (now := changed_status(before, look)) is None:
        return None
    return str(now.get("run"))


def end_on_record(run: RunConfig, attempt: str) -> End | None:
    """How the submission `attempt` ended, as its coordinator recorded it in the run folder; None if it did not."""
    run_storage.fetch(run, run.driver_folder)
    summary = readable_json(run.driver_folder / SUMMARY_NAME)
    if summary:
        return {"error": "", "message": "", "facts": {}, "summary": summary}
    status = read_status(run.driver_folder)
    end: End | None = (status or {}).get("end")
    return end if end and end.get("attempt") == attempt else None


def abandon(run: RunConfig, reason: str) -> None:
    """Have the coordinator of this run, where there is one, end it now; its driver gets `reason`. Waits for nothing."""
    if (coordinator := find(run.name)) is not None:
        coordinator.abandon.remote(reason)


def remove(coordinator: Any, run: RunConfig) -> bool:
    """Kill the coordinator and wait until its name is free (`ray.kill` returns earlier); whether it is by `clear_s`."""
    ray.kill(coordinator, no_restart=True)
    deadline = time.monotonic() + run.timeouts.clear_s
    while find(run.name) == coordinator:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def scale(run: str, max_dp: int | None, spares: int | None) -> None:
    """Change a run's most rings and its spares; None leaves a number as it is.

    Raises: RunFailed without such a run; ValueError for impossible numbers, and where no cluster lets this process in.
    """
    if not ray.is_initialized():
        access.connect(namespace=NAMESPACE, logging_level="ERROR")
    coordinator = find(run)
    if coordinator is None:
        raise RunFailed(f"no run {run!r} trains on this cluster", run=run)
    try:
        ray.get(coordinator.scale.remote(max_dp, spares), timeout=SCALE_S)
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
