"""Attaching to a run: is its name free, is its folder free, and which coordinator should a driver follow?

A run of this name may be active in this Ray cluster, may have failed and still hold its lease, or may be written to
from another cluster. Nothing is started here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from elastic_ring.config import OptimConfig, RunConfig
from elastic_ring.errors import CoordinatorLost, RunFailed
from elastic_ring.monitor.journal import salvage_file
from elastic_ring.monitor.json_files import readable_json
from elastic_ring.monitor.metrics import CONFIG_NAME, JOURNAL_NAME, SUMMARY_NAME, read_status
from elastic_ring.runtime import run_storage
from elastic_ring.runtime.code_digest import changed_parts
from elastic_ring.runtime.driver import access
from elastic_ring.runtime.driver.cluster import NAMESPACE, actor_name
from elastic_ring.runtime.identity import NUM_TOLD, Identity, changed_files
from elastic_ring.state.checkpoints.weight_files import are_there
from elastic_ring.state.storage.folder import Storage
from elastic_ring.validation import from_plain
from elastic_ring.wording import few

log = logging.getLogger(__name__)

LOOK_S = 4.0  # several times the period of a live coordinator's status updates
STALE_S = 60.0  # no live coordinator has a status this old, even where clocks differ
ASK_AGAIN_S = 0.2
UNRECORDED = "nothing that is recorded: the mesh, planned faults, validation sets or the cost model"


def running_coordinator(
    run: RunConfig, digest: str, own: Identity, sources: Mapping[str, str], *, controls: bool = False
) -> Any | None:
    """The coordinator of this run in this Ray cluster; None when there is none to follow.

    `sources`: digests of this submission's code. `controls`: whether it has callbacks that control the run. Removes a
    coordinator whose run has failed and that only waits for its lease to expire.

    Raises: ValueError when the name is taken by a run with other settings or another folder; CoordinatorLost when the
    coordinator does not answer.
    """
    found = find(run)
    known = _identity(found, run, run.timeouts.lease_s) if found is not None else None
    if found is None or known is None:
        return None
    if known["ended"] is not None and known["ended"]["error"]:
        log.info("an earlier attempt of run %s has ended (%s): starting anew", run.name, known["ended"]["error"])
        if not remove(found, run):
            raise CoordinatorLost(f"the ended coordinator of run {run.name} keeps its name")
        return None
    if known["digest"] != digest:
        refuse_other_settings(run, own.differences(known.get("what", {})) or [UNRECORDED], "it is running now")
    if known["ended"] is None:
        refuse_running_code(run, known.get("sources"), sources)
    if known["folder"] != run.storage_uri and not _holds(run, known["attempt"]):
        raise ValueError(
            f"run name {run.name!r} is running now with run_dir={known['folder']!r}, not {run.storage_uri!r}: "
            "choose another name, or give the same run_dir to attach to it"
        )
    if known["ended"] is None and bool(known.get("asks_callbacks")) != controls:
        refuse_other_control(run, controls=controls)
    log.info("attached to run %s", run.name)
    own.tell_moved(run.name, known.get("places", {}))
    return found


def refuse_running_code(run: RunConfig, there: object, here: Mapping[str, str]) -> None:
    """Raises ValueError where the running run has other code. An older coordinator does not say which it has."""
    if isinstance(there, dict) and (changed := changed_parts(there, here)):
        raise ValueError(
            f"run name {run.name!r}: the run is running now with other code of {', '.join(changed)}: choose another "
            "name, submit the code with which it began, or stop it first"
        )


def refuse_other_control(run: RunConfig, *, controls: bool) -> None:
    """Raises ValueError for callbacks that a running run does not wait for, and for none where it waits for some."""
    it_is = "does not wait for callbacks" if controls else "waits after each validation for callbacks"
    this = "has some that control it" if controls else "has none that control it"
    raise ValueError(
        f"callbacks: run {run.name!r}, which is running now, {it_is} and this submission {this}: submit it as it "
        "began, or stop it first"
    )


def attempt_of(coordinator: Any, run: RunConfig, *, starts: bool = False) -> str:
    """The id of the submission that created this coordinator; empty when the coordinator is gone.

    With `starts` it may take as long as a worker's process (`start_s`): Ray starts actors slowly on a busy machine.
    """
    timeouts = run.timeouts
    identity = _identity(coordinator, run, max(timeouts.lease_s, timeouts.start_s) if starts else timeouts.lease_s)
    return "" if identity is None else str(identity["attempt"])


def head_is_kept(coordinator: Any, run: RunConfig) -> bool:
    """Whether the head of the cluster keeps its state when it dies, as the coordinator there has found."""
    identity = _identity(coordinator, run, run.timeouts.lease_s)
    return identity is not None and bool(identity.get("head_is_kept"))


def end_on_record(run: RunConfig, attempt: str) -> dict[str, Any] | None:
    """How the submission `attempt` ended, as its coordinator recorded it in the run folder; None if it did not."""
    run_storage.fetch(run, run.driver_folder)
    summary = readable_json(run.driver_folder / SUMMARY_NAME)
    if summary:
        return {"error": "", "message": "", "facts": {}, "summary": summary}
    status = read_status(run.driver_folder)
    end: dict[str, Any] = (status or {}).get("end") or {}
    return end if end.get("attempt") == attempt else None


def refuse_without_weights(run: RunConfig) -> None:
    """A summary of all steps counts only beside the weights that it names: a file alone may be anybody's, or a copy.

    Raises ValueError, StorageFailed.
    """
    storage = Storage(run.storage_uri, timeout_s=run.timeouts.storage_s)
    if not are_there(storage):
        raise ValueError(
            f"run_dir={run.storage_uri!r}: its {SUMMARY_NAME} says that all steps are done, and the weights are not "
            f"there: bring them back, or remove {SUMMARY_NAME} to go on from the newest checkpoint"
        )


def refuse_other_settings(run: RunConfig, told: Sequence[str], where: str, or_else: str = "") -> None:
    """Raises ValueError when there are differences: then a run of this name has other settings. `or_else`: one more way
    out."""
    if told:
        raise ValueError(
            f"run name {run.name!r} is taken by a run with other settings ({where}, in {few(told, NUM_TOLD, '; ')}): "
            "choose another name and run_dir, or submit the same settings to attach to it"
            f"{or_else}"
        )


def refuse_other_code(run: RunConfig, recorded: Mapping[str, Any], here: Mapping[str, str], *, is_whole: bool) -> None:
    """Raises ValueError where the run began with other code, unless the submission says so: then that is told. A
    beginning may have any code."""
    there = recorded.get("sources")
    if not isinstance(there, dict) or run.resume == "never":  # a run that began before such digests were taken
        return
    if not (changed := changed_parts(there, here)):
        return
    if not run.code_changed:
        then = "what it has trained is the result of that" if is_whole else "its steps so far are the result of that"
        raise ValueError(
            f"run name {run.name!r} began with other code of {', '.join(changed)}, and {then} ({run.storage_uri}): "
            "choose another name; or go on with the new code, code_changed=True (--run.code-changed), with more steps "
            "if all are done; or remove that folder to begin anew"
        )
    what = "its result is still that of the code before" if is_whole else "it goes on with the new code"
    log.warning("run %s: the code of %s has changed; %s", run.name, ", ".join(changed), what)


def differences(recorded: Mapping[str, Any], own: Identity, wanted: Mapping[str, Any]) -> list[str]:
    """The settings in which a config on record differs from this submission's, as text."""
    there = recorded.get("identity") or {}
    told = own.differences(there) + other_plans(recorded, wanted.get("plans", []))
    changed = changed_files(recorded.get("files", ()), wanted.get("files", ()))
    return [changed, *told] if changed and there.get("data") != own.what["data"] else told


def other_plans(recorded: Mapping[str, Any], plans: Sequence[tuple[int, int]]) -> list[str]:
    """Where a run on record has planned its rates again, and steps that it may have run would have other rates."""
    optim = recorded.get("optim") or {}
    if not plans or (not optim.get("replanned", ()) and len(plans) == 1):
        return []
    there = from_plain(OptimConfig, optim, "optim.").plans
    later = plans[len(there)][0] if len(plans) > len(there) else None
    is_longer = plans[: len(there)] == there and (later is None or later >= int(recorded["step"]["steps"]))
    return [] if is_longer else [f"optim.replanned: {there} there, {list(plans)} here"]


def other_versions(recorded: Mapping[str, Any], here: Mapping[str, str]) -> str:
    """The packages whose recorded version differs from this process's, as text; empty if none does."""
    there = recorded.get("versions", {})
    if not isinstance(there, dict):  # a stranger's
        return ""
    odd = [name for name in there if name in here and there[name] != here[name]]
    return ", ".join(f"{name} {there[name]} there, {here[name]} here" for name in odd)


def tell_other_versions(run: RunConfig, here: Mapping[str, str]) -> None:
    """Warn if the run was recorded with other versions: a resumed or repeated run may then not be bit-identical."""
    told = other_versions(readable_json(run.driver_folder / CONFIG_NAME), here)
    if told:
        log.warning("run %s was recorded with other versions than this submission's: %s", run.name, told)


def _holds(run: RunConfig, attempt: str) -> bool:
    """Whether the run's folder has the records of this attempt, so that it is the same folder by another path."""
    lines = [] if run.is_remote else salvage_file(run.driver_folder / JOURNAL_NAME)[0]
    return any(line.get("attempt") == attempt for line in lines)


def refuse_if_written_to(run: RunConfig) -> None:
    """Raises ValueError when a coordinator of another Ray cluster writes to the run's folder.

    A live coordinator updates its status file every second.
    """
    before = read_status(run.driver_folder)
    if before is None or before.get("ended") or time.time() - before.get("updated_unix_s", 0.0) > STALE_S:
        return
    deadline = time.monotonic() + LOOK_S
    while time.monotonic() < deadline:
        time.sleep(ASK_AGAIN_S)
        run_storage.fetch(run, run.driver_folder)
        now = read_status(run.driver_folder)
        if now is not None and now.get("updated_unix_s") != before["updated_unix_s"]:
            raise ValueError(
                f"run_dir={run.storage_uri!r} is being written to by run {now.get('run')!r} on another Ray cluster: "
                "choose another run_dir, or stop that run first"
            )


def find(run: RunConfig) -> Any | None:
    """The actor handle of this run's coordinator in any state; None when there is none."""
    try:
        return ray.get_actor(actor_name(run.name, "coordinator"), namespace=NAMESPACE)
    except ValueError:
        return None


def _identity(coordinator: Any, run: RunConfig, patience_s: float) -> dict[str, Any] | None:
    """What the coordinator says of itself; None when it is gone for good.

    Retries for `patience_s`: Ray restarts a coordinator that was killed. Raises CoordinatorLost after that.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            answer: dict[str, Any] = ray.get(coordinator.identity.remote(), timeout=run.timeouts.hello_s)
            return answer
        except ActorDiedError:
            return None
        except (GetTimeoutError, ActorUnavailableError) as error:
            if time.monotonic() > deadline:
                raise CoordinatorLost(
                    f"the coordinator of run {run.name} does not answer within {patience_s:.0f} s",
                    lease_s=run.timeouts.lease_s,
                ) from error
            time.sleep(ASK_AGAIN_S)


def abandon(run: RunConfig, reason: str) -> None:
    """Have the coordinator of this run, where there is one, end it now; its driver is told. Waits for nothing."""
    if (coordinator := find(run)) is not None:
        coordinator.abandon.remote(reason)


def remove(coordinator: Any, run: RunConfig) -> bool:
    """Kill the coordinator and wait until its name is free (`ray.kill` returns earlier); whether it is by `clear_s`."""
    ray.kill(coordinator, no_restart=True)
    deadline = time.monotonic() + run.timeouts.clear_s
    while find(run) == coordinator:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


ANSWER_S = 30.0


def scale(run: str, max_dp: int | None, spares: int | None) -> None:
    """None leaves a number as it is. Raises: RunFailed without such a run; ValueError for what cannot be;
    ConnectionError without a cluster that lets this process in."""
    if not ray.is_initialized():
        access.connect(namespace=NAMESPACE, logging_level="ERROR")
    try:
        coordinator = ray.get_actor(actor_name(run, "coordinator"), namespace=NAMESPACE)
    except ValueError as error:
        raise RunFailed(f"no run {run!r} trains on this cluster", run=run) from error
    try:
        ray.get(coordinator.scale.remote(max_dp, spares), timeout=ANSWER_S)
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
