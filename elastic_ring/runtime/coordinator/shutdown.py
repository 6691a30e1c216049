"""The end of a run: writes the last records while agents still get answers to their heartbeats.

The coordinator itself clears actors and processes; no decisions here.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from elastic_ring.control.state import Finishing, Running, State, end_step, members
from elastic_ring.monitor.metrics import CheckpointEvent
from elastic_ring.runtime.coordinator.inbox import Abandoned, CheckpointCounts, FaultAsked, Inbox, NodeBeat
from elastic_ring.runtime.coordinator.recorder import RunRecorder

log = logging.getLogger(__name__)

LOOK_S = 0.05
LONG_S = 2.0
NAMES = {"save": "still write the last checkpoint", "validate": "compute the held-out sequences"}
"""What a worker still does, by the phase of its stamps."""

End = dict[str, Any]
"""How a run ended: `error` (a class name of `elastic_ring.errors`, or empty), `message`, `facts`, the `attempt`
that ended, and `summary`."""


def conclude(end: End, recorder: RunRecorder, state: State, weights_sha256: str) -> End:
    """Write summary, plot and status. If that fails, the run ends with RunFailed."""
    try:
        return _last_records(end, recorder, state, weights_sha256)
    except Exception as error:
        log.exception("could not write the last records")
        message = f"{end['message']}; then {type(error).__name__}: {error}"
        end = {**end, "error": "RunFailed", "message": message, "facts": {}}
        recorder.status.write_bare_end(end)
        return end


def _last_records(end: End, recorder: RunRecorder, state: State, weights_sha256: str) -> End:
    if not end["error"] and recorder.metrics.last_step + 1 == end_step(state):
        unfired = recorder.recoveries.unfired(recorder.begin.first_step)
        if unfired:
            text = "; ".join(str(fault) for fault in unfired)
            message = f"planned faults that never fired: {text}"
            end = {**end, "error": "FaultNeverFired", "message": message, "facts": {}}
        else:
            # The core's own fact survives a coordinator that dies after the weights were written.
            known = end["facts"].get("weights_sha256") or weights_sha256
            end["summary"] = recorder.write_summary(
                known, state.promise == "bit-exact", state.callbacks.stop, state.options.total_steps
            )
    recorder.write_status(state, force=True, end=end)
    return end


def aside(
    work: Callable[[], End],
    events: Inbox,
    echo: Callable[[str], None],
    checkpoint: Callable[[CheckpointEvent], None],
    look: Callable[[], None] = lambda: None,
) -> End | None:
    """Do long work beside the deciding thread, whose silence would otherwise look like a hang to the agents. `look` is
    called again and again. What the work has posted is done when this returns. None when the user stops the run
    meanwhile: then nothing waits for the rest."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="conclude")
    try:
        done = executor.submit(work)
        while not done.done() or not events.empty():
            look()
            with suppress(queue.Empty):
                match events.get(timeout=LOOK_S):
                    case NodeBeat(node):
                        echo(node)
                    case CheckpointCounts(counted):
                        checkpoint(counted)
                    case FaultAsked(answer=answer):
                        answer.put(False)
                    case Abandoned() if not done.done():
                        return None
        return done.result()
    finally:
        executor.shutdown(wait=False)


class EndReport:
    """Reports what the end of a run is busy with, once it takes longer than LONG_S. `say` sends it to the drivers."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._doing, self._since, self._told = "", 0.0, ""

    def doing(self, what: str) -> None:
        """From now on the end is busy with `what`; empty: with nothing."""
        if what == self._doing:
            return
        now = self._clock()
        if self._doing:
            log.info("the end of the run: %s, %.1f s", self._doing, now - self._since)
        self._doing, self._since = what, now

    def look(self) -> None:
        if self._doing and self._doing != self._told and self._clock() - self._since >= LONG_S:
            self._told = self._doing
            self._say(f"ending: {self._doing}")


def unfinished(state: State, num_committed: int, where: str, progress: Callable[[str], Mapping[str, Any]]) -> str:
    """What a run still does whose steps are all committed; empty for others. `progress`: what a worker does right now;
    `where`: the run's storage."""
    if num_committed < end_step(state):
        return ""
    if isinstance(state.phase, Finishing):
        return f"ring 0 writes the weights to {where}"
    if not isinstance(state.phase, Running):
        return ""
    doing = Counter(NAMES[phase] for worker in members(state) if (phase := progress(worker).get("phase")) in NAMES)
    return ", ".join(f"{number} rank(s) {what}" for what, number in doing.items())
