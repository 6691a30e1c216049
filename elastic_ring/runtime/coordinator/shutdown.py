"""The end of a run: writes the last records while agents still get answers to their heartbeats.

The coordinator itself clears actors and processes; no decisions here.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from elastic_ring.control.state import State
from elastic_ring.runtime.coordinator.recorder import RunRecorder

log = logging.getLogger(__name__)

LOOK_S = 0.05

End = dict[str, Any]
"""How a run ended: `error` (a class name of `elastic_ring.errors`, or empty), `message`, `facts`, the `attempt`
that ended, and `summary`."""


def conclude(end: End, recorder: RunRecorder, state: State, weights_sha256: str) -> End:
    """Write summary, plot and status. If that fails, the run ends with RunFailed."""
    try:
        return _last_records(end, recorder, state, weights_sha256)
    except Exception as error:
        log.exception("the last records could not be written")
        message = f"{end['message']}; then {type(error).__name__}: {error}"
        end = {**end, "error": "RunFailed", "message": message, "facts": {}}
        recorder.write_bare_end(end)
        return end


def _last_records(end: End, recorder: RunRecorder, state: State, weights_sha256: str) -> End:
    if not end["error"] and recorder.metrics.last_step + 1 == state.options.total_steps:
        unfired = recorder.recoveries.unfired(recorder.first_step)
        if unfired:
            text = "; ".join(str(fault) for fault in unfired)
            message = f"planned faults that never fired: {text}"
            end = {**end, "error": "FaultNeverFired", "message": message, "facts": {}}
        else:
            # The core's own fact survives a coordinator that dies after the weights were written.
            known = end["facts"].get("weights_sha256") or weights_sha256
            end["summary"] = recorder.write_summary(known, state.promise == "bit-exact")
    recorder.write_status(state, force=True, end=end)
    return end


EventQueue = queue.Queue[tuple[str, Any, dict[str, Any]]]


def aside(
    work: Callable[[], End], events: EventQueue, echo: Callable[[str], None],
    checkpoint: Callable[[Mapping[str, Any]], None],
) -> End:  # fmt: skip
    """Do long work beside the deciding thread, whose silence would otherwise look like a hang to the agents."""
    with ThreadPoolExecutor(1, thread_name_prefix="conclude") as executor:
        done = executor.submit(work)
        while not done.done():
            with suppress(queue.Empty):
                kind, body, extra = events.get(timeout=LOOK_S)
                if kind == "beat":
                    echo(body)
                elif kind == "checkpoint":
                    checkpoint(body)
                elif kind == "fault":
                    extra["answer"].put(False)
        return done.result()
