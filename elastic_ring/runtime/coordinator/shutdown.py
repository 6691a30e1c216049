"""The end of a run: the last checkpoint, the last records, and clearing, while agents still get answers to their
heartbeats. No decisions here.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import ray

from elastic_ring.control.decisions.terms import LOOK_S as TERMS_LOOK_S
from elastic_ring.control.decisions.terms import Unanswered
from elastic_ring.control.state import Finishing, Running, State, end_step, members
from elastic_ring.errors import RunFailed, StaleMessage, StorageFailed, TermLost
from elastic_ring.monitor.callbacks import has_failed
from elastic_ring.monitor.metrics import CheckpointEvent, storage_error
from elastic_ring.runtime.agent.messages import WorkerReading
from elastic_ring.runtime.agent.stamp_dir import remove, stamp_folder
from elastic_ring.runtime.coordinator.inbox import Abandoned, CheckpointCounts, End, FaultAsked, Inbox, NodeBeat
from elastic_ring.runtime.coordinator.recorder import RunRecorder
from elastic_ring.runtime.coordinator.run_files import RunFiles, write_end
from elastic_ring.runtime.coordinator.startup import RESTART_PAUSE_S
from elastic_ring.runtime.driver.cluster import NAMESPACE, clear

if TYPE_CHECKING:
    from elastic_ring.runtime.coordinator.actor import Decider

log = logging.getLogger(__name__)

LOOK_S = 0.05
LONG_S = 2.0
CLOSE_S = 0.5
FOLDER_IS_AWAY = "the run's folder {} was moved, removed or unmounted with its records"
NAMES = {"save": "still write the last checkpoint", "validate": "compute the held-out sequences"}
"""Work of a worker at the end, by the phase of its stamps."""


class Shutdown:
    """Ends a coordinator's run: once, in whatever state it is."""

    def __init__(self, decider: Decider) -> None:
        self._decider, self._run_spec, self._feed = decider, decider.run_spec, decider.driver_feed
        self._run = decider.run_spec.run
        self.report: EndReport

    def finish(self, error: str, message: str, facts: Mapping[str, Any] | None = None, **more: int) -> None:
        """Write the last records, clear everything, and let the driver know. `more`: of `End`."""
        if self._feed.ended is not None:
            return
        fields = {"error": error, "message": message, "facts": facts or {}, "attempt": self._run_spec.attempt, **more}
        end, decider = cast("End", fields), self._decider
        if not decider.is_ready:  # it may be a restart, so there may be workers
            self._release(end, self.cleared())
            return
        weights_sha256 = decider.dispatch.weights_sha256
        beside = decider.queue, decider.node_monitor.echo, decider.recorder.checkpoint, self.report.look
        # The summary counts the last checkpoint.
        settled = aside(lambda: self._settle(end), *beside)
        end = settled or end
        concluded = settled and aside(lambda: self._conclude(end, weights_sha256), *beside)
        if settled is None:  # nobody waits for the last records, but they are written
            alone = partial(self._conclude_unawaited, end, weights_sha256)
            threading.Thread(target=alone, name="conclude", daemon=True).start()
        if concluded is None:
            stopped = "stopped while its last records were being written: submit it again to have them"
            concluded = {**end, "error": end["error"] or "RunFailed", "message": end["message"] or stopped}
        decider.storage.watch.close()
        self.report.doing("")
        decider.read_live()
        decider.services.metrics.export(decider.state, failed=has_failed(concluded["error"], concluded["message"]))
        begun = time.monotonic()
        left_behind = self.cleared()
        log.info("the end of the run: processes and placement groups removed, %.1f s", time.monotonic() - begun)
        log.info("ended: %s", {**concluded, "left_behind": left_behind})
        self._release(concluded, left_behind)

    def lose(self, lost: TermLost) -> None:
        """The run is another submission's: end the members, tell the driver, and write nothing more."""
        log.error("%s", lost.message)
        if self._decider.is_ready:
            self._decider.dispatch.kill_everyone()
            self._decider.storage.abandon()
            self._decider.services.metrics.export(self._decider.state, failed=True)
        fields = {"error": "TermLost", "message": lost.message, "facts": lost.facts}
        self._release(cast("End", {**fields, "attempt": self._run_spec.attempt}), self.cleared())

    def fail(self, error: BaseException) -> None:
        """The coordinator failed with an error of its own."""
        message = error.message if isinstance(error, StorageFailed) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            message = storage_error(self._run.folder, error)
        kind = "StorageFailed" if isinstance(error, StorageFailed) else "RunFailed"
        try:
            # Before it could open the run, RunFailed says that the folder is another submission's, or a finished run's.
            if not self._decider.is_ready and not isinstance(error, RunFailed):
                attempt = self._run_spec.attempt
                write_end(self._run, {"error": kind, "message": message, "facts": {}, "attempt": attempt})
            self.finish(kind, message)
        except TermLost as lost:
            self.lose(lost)
        except BaseException:
            # A driver would ask a process without a deciding thread for ever; a successor ends the run.
            log.exception("could not report the end")
            time.sleep(RESTART_PAUSE_S)
            os._exit(1)

    def _release(self, end: End, left_behind: list[str]) -> None:
        """Give the run's end to the driver, which may ask within the lease; then free name and process."""
        self._feed.ended = {**end, "left_behind": left_behind}
        me = partial(ray.get_actor, self._decider.own_name, namespace=NAMESPACE)
        threading.Timer(self._run.timeouts.lease_s, lambda: ray.kill(me(), no_restart=True)).start()

    def _refuse_if_replaced(self) -> None:
        """This process may have been frozen for long."""
        try:
            self._decider.storage.watch.look()
        except StorageFailed as error:
            log.warning("could not find out whether a newer coordinator exists: %s", error)

    def _settle(self, end: End) -> End:
        storage, uri = self._decider.storage, self._run.storage_uri
        self._refuse_if_replaced()
        away, waits = FOLDER_IS_AWAY.format(self._run.folder), Unanswered()
        while storage.watch.is_away and not end["error"]:
            if waits.tick(time.monotonic(), is_heard=False) > self._run.checkpoint_config.fail_after_s:
                break
            self.report.doing(f"{away}: waits until it is put back")
            time.sleep(TERMS_LOOK_S)
            self._refuse_if_replaced()
        if storage.watch.is_away and not end["error"]:
            message = f"{away}. Put it back and submit again: it goes on from its newest checkpoint"
            end = {**end, "error": "StorageFailed", "message": message, "facts": {}}
        self.report.doing(f"the last checkpoint's manifest, and clearing up, in {uri}")
        if not storage.checkpoints.close(self._run.timeouts.clear_s, prunes=not end["error"]):
            log.warning("the storage of the checkpoints does not answer at the end of the run")
        return end

    def _conclude(self, end: End, weights_sha256: str) -> End:
        decider = self._decider
        self.report.doing("summary and plot")
        decider.storage.watch.check()
        end = conclude(end, decider.recorder, decider.files, decider.state, weights_sha256)
        self.report.doing(f"the last records go to {self._run.storage_uri}")
        decider.storage.mirror.close(self._run.timeouts.clear_s)
        return end

    def _conclude_unawaited(self, end: End, weights_sha256: str) -> None:
        """Beside the rest of the end, whose question for a newer term may still be on its way: ask by itself."""
        try:
            self._refuse_if_replaced()
            self._conclude(end, weights_sha256)
        except (StaleMessage, TermLost) as error:
            log.warning("the last records are not written: %s", error)

    def cleared(self) -> list[str]:
        """Clear the run; the names of what is left. A failure to clear does not change how the run ended."""
        decider = self._decider
        try:
            if decider.is_ready:
                decider.node_monitor.close()
                decider.dispatch.kill_everyone()
                decider.services.corpus.close(CLOSE_S)
                decider.services.demand.close(self._run.timeouts.clear_s)
                decider.dispatch.close()  # nothing that was queued may start after the clearing
            return self.clear_actors()
        except Exception as error:
            log.exception("could not clear the run")
            return [f"perhaps all of it: clearing failed with {type(error).__name__}: {error}"]
        finally:
            # Last, because a starting worker would recreate it. On other hosts the next run's agents remove it.
            with suppress(OSError):
                remove(stamp_folder(self._run.name, self._run_spec.attempt))

    def clear_actors(self) -> list[str]:
        """Remove every actor and placement group of the run but this; the names of those that stay."""
        return clear(self._run.name, keep=self._decider.own_name, timeout_s=self._run.timeouts.clear_s)


def conclude(end: End, recorder: RunRecorder, files: RunFiles, state: State, weights_sha256: str) -> End:
    """Write summary, plot and status. If that fails, the run ends with RunFailed."""
    try:
        if not end["error"] and recorder.metrics.last_step + 1 == end_step(state):
            if unfired := recorder.recoveries.unfired(recorder.begin.first_step):
                message = f"planned faults that never fired: {'; '.join(map(str, unfired))}"
                end = {**end, "error": "FaultNeverFired", "message": message, "facts": {}}
            else:
                # The core's own fact survives a coordinator that dies after the weights were written.
                digest = end["facts"].get("weights_sha256") or weights_sha256
                is_exact, planned_steps = state.promise == "bit-exact", state.options.total_steps
                summary = files.write_summary(digest, is_exact, state.callbacks.stop, planned_steps)
                end = {**end, "summary": summary}
        files.write_status(state, end)
        return end
    except Exception as error:
        log.exception("could not write the last records")
        message = f"{end['message']}; then {type(error).__name__}: {error}"
        end = {**end, "error": "RunFailed", "message": message, "facts": {}}
        files.write_bare_end(end)
        return end


def aside(
    work: Callable[[], End],
    events: Inbox,
    echo: Callable[[str], None],
    checkpoint: Callable[[CheckpointEvent], None],
    look: Callable[[], None] = lambda: None,
) -> End | None:
    """Do long work beside the deciding thread, whose silence would otherwise look like a hang to the agents. `look` is
    called again and again. Messages that the work has posted are handled when this returns. None when the user stops
    the run meanwhile: then nothing waits for the rest."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="conclude")
    try:
        done = executor.submit(work)
        while not done.done() or not events.empty():
            look()
            with suppress(queue.Empty):
                match events.get(timeout=LOOK_S):
                    case NodeBeat(node):
                        echo(node)
                    case CheckpointCounts(event):
                        checkpoint(event)
                    case FaultAsked(answer=answer):
                        answer.put(False)
                    case Abandoned() if not done.done():
                        return None
        return done.result()
    finally:
        executor.shutdown(wait=False)


class EndReport:
    """Reports the work at the end of a run, once it takes longer than LONG_S. `say` sends it to the drivers."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._doing, self._since, self._reported = "", 0.0, ""

    def doing(self, work: str) -> None:
        """From now on the end is busy with `work`; empty for nothing."""
        if work == self._doing:
            return
        now = self._clock()
        if self._doing:
            log.info("the end of the run: %s, %.1f s", self._doing, now - self._since)
        self._doing, self._since = work, now

    def look(self) -> None:
        if self._doing and self._doing != self._reported and self._clock() - self._since >= LONG_S:
            self._reported = self._doing
            self._say(f"ending: {self._doing}")


def unfinished(state: State, num_committed: int, where: str, workers: Mapping[str, WorkerReading]) -> str:
    """The remaining work of a run whose steps are all committed; empty for other runs. `where`: the run's storage;
    `workers`: their readings."""
    if num_committed < end_step(state):
        return ""
    if isinstance(state.phase, Finishing):
        return f"ring 0 writes the weights to {where}"
    if not isinstance(state.phase, Running):
        return ""
    phases = (workers[worker].get("phase", "") for worker in members(state) if worker in workers)
    doing = Counter(NAMES[phase] for phase in phases if phase in NAMES)
    return ", ".join(f"{number} rank(s) {work}" for work, number in doing.items())
