"""Context managers of a driver: the run's lease, and signals that stop it.

A driver nests them around following a run. No training and no decision belongs here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RaySystemError

from elastic_ring.config import RunConfig
from elastic_ring.monitor.callbacks import STOPPED_BY_USER
from elastic_ring.runtime.driver import attach
from elastic_ring.runtime.driver.access import is_listening
from elastic_ring.runtime.driver.stops import AT_ONCE, HEAD_IS_GONE, SAVED, STOPPED, UNSAVED, StopSignal, heeding

log = logging.getLogger(__name__)

ASK_S = 2.0
LOOK_S = 0.25
NOBODY_CLEARS = f"{HEAD_IS_GONE}, and nothing can clear the run"
GOES_ON = (
    "the coordinator goes on clearing the run by itself, and what runs in a Ray that this command started ends with it"
)


@contextmanager
def lease(coordinator: Any, period_s: float) -> Iterator[None]:
    """Renew the lease every `period_s` from a separate thread, so that a blocked terminal does not end the run."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(period_s) and ray.is_initialized():
            try:
                coordinator.renew.remote()
            except RaySystemError:  # left meanwhile
                return

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def interruptible(run: RunConfig, attempt: str) -> Iterator[list[Any]]:
    """Ctrl-C and the stop signals (SIGTERM of `ray job stop`) clear the run before they end this process.

    Clears only a run that this process follows (the caller appends the coordinator to the yielded list) or has just
    started as `attempt`; a run of the same name from another submission is left alone.
    """
    followed: list[Any] = []
    with heeding():
        try:
            yield followed
        except KeyboardInterrupt as interrupt:
            saves = isinstance(interrupt, StopSignal)
            try:
                message = _stopped(run, attempt, followed, saves=saves)
            except KeyboardInterrupt:  # once more: this process waits for nothing any longer
                for coordinator in followed if saves and ray.is_initialized() else ():
                    coordinator.abandon.remote(STOPPED_BY_USER)
                message = f"{AT_ONCE}; {GOES_ON}"
            raise KeyboardInterrupt(message) from None


def head_is_gone() -> bool:
    """Whether nothing listens any more where the head of this process's cluster was."""
    return ray.is_initialized() and not is_listening(ray.get_runtime_context().gcs_address)


def _stopped(run: RunConfig, attempt: str, followed: list[Any], *, saves: bool) -> str:
    """As `_cleared`, while the head of the cluster is there. A signal to the whole process group ends a Ray that this
    process started, too, a moment later perhaps, and each call to it would wait for a minute."""
    clearing: Future[str] = Future()
    head_gone = threading.Event()

    def clear() -> None:
        try:
            clearing.set_result(_cleared(run, attempt, followed, head_gone, saves=saves))
        except RaySystemError:  # Ray was left meanwhile
            clearing.set_result(NOBODY_CLEARS)
        except BaseException as error:
            clearing.set_exception(error)

    if head_is_gone():
        return NOBODY_CLEARS
    thread = threading.Thread(target=clear, name="clear", daemon=True)
    thread.start()
    while not wait([clearing], timeout=LOOK_S).done:
        if head_is_gone():
            head_gone.set()
            thread.join(ASK_S)
            return NOBODY_CLEARS
    return clearing.result()


def _cleared(run: RunConfig, attempt: str, followed: list[Any], head_gone: threading.Event, *, saves: bool) -> str:
    """Have the run cleared, if it is this process's to clear. Returns the outcome, in words. `head_gone` ends the wait.
    `saves`: the run takes a checkpoint first, if there is time."""
    coordinator = attach.find(run.name)
    if coordinator is None:
        return "stopped; the run has no coordinator, so nothing is left to clear"
    if not ray.is_initialized():  # left meanwhile: a call would start another one
        return NOBODY_CLEARS
    if not (owner := attempt if followed else attach.attempt_of(coordinator, run)):
        return "stopped; the run's coordinator has not begun, so nothing is left to clear"
    if owner != attempt:
        return f"stopped; the run {run.name} is another submission's, and goes on"
    (coordinator.stop if saves else coordinator.abandon).remote(STOPPED_BY_USER)
    save_s = run.timeouts.stop_save_s if saves else 0.0
    log.info(
        "stopping: %sthe run is cleared, for up to %.0f s; once more ends this command at once",
        f"after a checkpoint, if that takes at most {save_s:g} s (timeouts.stop_save_s), " if saves else "",
        run.timeouts.clear_s,
    )
    return _await_clear(coordinator, run, head_gone, save_s)


def end_run(run: RunConfig, reason: str) -> str:
    """End a run that has lost its driver, and wait as after Ctrl-C: for `clear_s`. What came of it, in words; empty
    where it has no coordinator."""
    coordinator = attach.find(run.name)
    if coordinator is None:
        return ""
    coordinator.abandon.remote(reason)
    return _await_clear(coordinator, run, threading.Event())


def _await_clear(coordinator: Any, run: RunConfig, head_gone: threading.Event, save_s: float = 0.0) -> str:
    """Wait until the coordinator has cleared the run, which it may save for `save_s` first, and say what is left.

    The coordinator goes on clearing if this process is killed.
    """
    clear_s = run.timeouts.clear_s
    deadline, ended = time.monotonic() + save_s + clear_s + ASK_S, None
    while ended is None and ray.is_initialized() and not head_gone.is_set() and time.monotonic() < deadline:
        try:
            ended = ray.get(coordinator.follow.remote(1 << 60), timeout=ASK_S)["ended"]
        except ray.exceptions.ActorDiedError:
            return "stopped, but the coordinator died while it cleared the run: see `ray list actors` for what is left"
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError) as error:
            # Of Ray's text only the kind: it speaks of memory and crashes, which a run that is stopped has nothing of.
            log.warning(
                "the coordinator does not answer while it clears the run, asked again: %s", type(error).__name__
            )
        time.sleep(0.05)
    if ended is None:
        return f"stopped, but the coordinator has not cleared the run within {clear_s:.0f} s; it goes on by itself"
    if not attach.remove(coordinator, run):
        ended["left_behind"] = [*ended["left_behind"], "its coordinator, which was killed"]
    leftovers = f"left behind: {', '.join(ended['left_behind'])}" if ended["left_behind"] else "nothing is left running"
    stopped = f"{UNSAVED} (timeouts.stop_save_s={save_s:g})" if save_s else STOPPED
    if "saved_step" in ended:
        stopped = f"{SAVED} {ended['saved_step']}"
    return f"{stopped}; {leftovers}"
