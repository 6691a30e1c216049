"""The coordinator: one detached Ray actor that decides, and survives its own death.

It is a shell around `control`: events from workers, agents, Ray and the clock go into one queue; one thread
takes them out, lets the pure core decide, writes event and commands to the journal, and only then sends the
commands. A new process reads the journal back, claims a higher term and asks round.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

from elastic_ring.control.coordination import Decision, advance, initial, next_deadline
from elastic_ring.control.messages import (
    Build,
    Command,
    CoordinatorStarted,
    Event,
    Finalized,
    NodeDraining,
    NodeJoined,
    NodeLost,
    Published,
    Report,
    Resumed,
    Tick,
    Trouble,
    WorkerLost,
    WorkerReady,
    from_json,
)
from elastic_ring.control.replay import journal_line, replay, term_note
from elastic_ring.control.state import Ended, Reconnecting, Running, State, waiting_for
from elastic_ring.errors import IllegalTransition, JournalDamaged, RunFailed, StaleMessage
from elastic_ring.monitor.journal import Journal, newest_term
from elastic_ring.monitor.metrics import JOURNAL_NAME
from elastic_ring.runtime.audience import Audience
from elastic_ring.runtime.bits import versions
from elastic_ring.runtime.charter import Charter, Clock, control_options
from elastic_ring.runtime.chronicle import Chronicle, write_end
from elastic_ring.runtime.cluster import NAMESPACE, Cluster, actor_name, clear, left_behind
from elastic_ring.runtime.dispatch import Dispatcher
from elastic_ring.runtime.ending import aside, conclude
from elastic_ring.runtime.injection import strike_coordinator
from elastic_ring.runtime.lookout import Lookout
from elastic_ring.runtime.opening import open_run
from elastic_ring.runtime.stamp_folder import remove, stamp_folder

log = logging.getLogger(__name__)

TICK_S = 0.5
RESTART_PAUSE_S = 1.0
FINAL = (JournalDamaged, IllegalTransition, RunFailed)  # starting once more would not help


class Coordinator:
    """The actor class. The constructor keeps its charter and starts the deciding thread, because Ray
    restarts an actor by constructing it again and nobody else would call it then."""

    def __init__(self, charter: Charter) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self.charter = charter
        self.clock = Clock()
        self.address = ray.util.get_node_ip_address()
        self._queue: queue.Queue[tuple[str, Any, dict[str, Any]]] = queue.Queue()
        self.audience = Audience()
        self._ended: dict[str, Any] | None = None
        self._causes = 0
        self._ticked_at = 0.0
        self._told_waiting = ""
        self._is_restart = ray.get_runtime_context().was_current_actor_reconstructed
        self._ready = threading.Event()
        threading.Thread(target=self._main, name="decide", daemon=True).start()

    # ------------------------------------------------------------ called by workers

    def notify(self, event: dict[str, Any], extra: dict[str, Any]) -> None:
        """An event of a worker."""
        self._queue.put(("event", event, extra))

    def publish(self, worker: str, records: list[dict[str, Any]]) -> None:
        """Committed steps from global rank 0."""
        self._queue.put(("publish", records, {"worker": worker}))

    def fault(self, index: int, worker: str) -> bool:
        """Whether this planned fault may strike now; true once, and again for a worker that had no answer."""
        answer: queue.Queue[bool] = queue.Queue()
        self._queue.put(("fault", index, {"answer": answer, "worker": worker}))
        return answer.get(timeout=self.charter.run.timeouts.hello_s)

    # ------------------------------------------------------------ called by drivers

    def identity(self) -> dict[str, Any]:
        """Who this is, for a driver that found the name taken."""
        charter = self.charter
        return {"digest": charter.digest, "attempt": charter.attempt, "pid": os.getpid(),
                "folder": charter.run.run_dir, "ended": self._ended}  # fmt: skip

    def renew(self) -> None:
        """The driver lives; its lease begins anew."""
        self.audience.renew()

    def follow(self, after_step: int, after_line: int) -> dict[str, Any]:
        """What is new for a driver, and a renewal of its lease."""
        self.audience.renew()
        if not self._ready.is_set():
            return {"steps": [], "lines": [], "ended": self._ended, "phase": "starting"}
        news = self.audience.news(after_step)
        return {**news, "lines": self.chronicle.take_lines(after_line), "ended": self._ended}

    def abandon(self, reason: str) -> None:
        """End the run now: clear everything at once."""
        self._queue.put(("abandon", reason, {}))

    # ------------------------------------------------------------ the deciding thread

    def _main(self) -> None:
        try:
            self._open()
            self._ready.set()
            self._decide(CoordinatorStarted(self._cause(), self._term))
            while self._ended is None:
                self._take()
        except StaleMessage as error:
            log.warning("%s", error)
            os._exit(1)  # its successor decides now; nothing may be cleared behind its back
        except BaseException as error:
            log.exception("the coordinator fails")
            if self._is_restart and not self._ready.is_set() and not isinstance(error, FINAL):
                # Training goes on without a coordinator: a storage that is away for a while must not end it.
                time.sleep(RESTART_PAUSE_S)
                os._exit(1)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        end = {"error": "RunFailed", "message": f"{type(error).__name__}: {error}", "facts": {}}
        try:
            # Before it could open the run, RunFailed says that the folder is another submission's, or a finished run's.
            if not self._ready.is_set() and not isinstance(error, RunFailed):
                write_end(self.charter.run, {**end, "attempt": self.charter.attempt})
            self._finish(end)
        except BaseException:
            # A driver would ask a process without a deciding thread for ever; a successor ends the run.
            log.exception("the end could not be told")
            time.sleep(RESTART_PAUSE_S)
            os._exit(1)

    def _open(self) -> None:
        charter = self.charter
        options = control_options(charter)
        opened = open_run(
            charter, is_restart=self._is_restart, clear=self._clear,
            others=lambda: left_behind(charter.run.name, keep=self._own_name),
        )  # fmt: skip
        self.journal = Journal(charter.run.folder / JOURNAL_NAME, durable=True).open()
        self._term = opened.term
        self._note(term_note(opened.term, opened.num_written))
        self.chronicle = Chronicle(charter.run, self._note, self.clock)
        begin = opened.begin
        if begin is None:
            begin = {"note": "begin", "attempt": charter.attempt, "now": self.clock(), "run": charter.run.name,
                     "versions": versions(charter.scaling.device)}  # fmt: skip
            self._note(begin)
        self.chronicle.open(begin["now"])
        for line in opened.lines:
            self.chronicle.recall(line)
        events = [line for line in opened.lines if "event" in line]
        self.state: State = replay(options, events) if opened.lines else initial(options)
        self.me = ray.get_actor(self._own_name, namespace=NAMESPACE)
        self.cluster = Cluster(charter.run, charter.scaling, charter.task)
        self.lookout = Lookout(charter, self.address, self._put, secrets.token_hex(16))
        self.lookout.open()
        self.dispatch = Dispatcher(
            charter, self.address, self.cluster, self.lookout, self.me, self._put, self.chronicle
        )
        self.dispatch.open()
        self.dispatch.recall(self.state)

    def _clear(self) -> list[str]:
        """Remove every actor and placement group of the run but this; the names of those that stay."""
        return clear(self.charter.run.name, keep=self._own_name, timeout_s=self.charter.run.timeouts.clear_s)

    @property
    def _own_name(self) -> str:
        return actor_name(self.charter.run.name, "coordinator")

    def _take(self) -> None:
        """One turn. The clock has its turn however full the queue is, and the queue however many deadlines are due."""
        now = self.clock()
        due = min(self._ticked_at + TICK_S, next_deadline(self.state) or math.inf)
        if now >= due:
            self._ticked_at = now
            self._on_time()
            if self._ended is not None:  # by that very turn: what waits in the queue is of a run that is over
                return
        try:
            kind, body, extra = self._queue.get(timeout=max(0.0, due - now) + 1e-3)
        except queue.Empty:
            return
        self._handle(kind, body, extra)

    def _on_time(self) -> None:
        self._decide(Tick(self._cause()))
        told = waiting_for(self.state, self.clock())
        if told and told != self._told_waiting:
            self.chronicle.recoveries.say(told)
        self._told_waiting = told
        if self.audience.silent_s > self.charter.run.timeouts.lease_s:
            self._handle("abandon", f"no driver for {self.charter.run.timeouts.lease_s:.0f} s", {})

    def _handle(self, kind: str, body: Any, extra: dict[str, Any]) -> None:
        match kind:
            case "event":
                self._on_event(body if not isinstance(body, dict) else from_json(body), extra)
            case "publish":
                self._publish(body)
            case "fault":
                self._on_fault(body, extra["worker"], extra["answer"])
            case "beat":
                self.lookout.echo(body)
            case "abandon":
                self._finish({"error": "RunFailed", "message": body, "facts": {}})
            case "death":
                self._on_death(body)

    def _on_event(self, event: Any, extra: dict[str, Any]) -> None:
        if isinstance(event, Trouble):
            self.chronicle.recoveries.trouble(event.worker, event.kind, event.step, event.detail)
        if isinstance(event, Resumed):
            self.chronicle.recoveries.resumed(event.worker, extra)
        if isinstance(event, WorkerReady):
            self.chronicle.recoveries.worker_started(event.worker, event.pid, extra.get("environment", {}))
            self.lookout.watch_worker(event.worker, event.node, extra)
        if isinstance(event, Report):
            self._publish(extra.get("records", []))
        if isinstance(event, WorkerLost):
            self.dispatch.lost(event.worker)
        if isinstance(event, NodeLost):
            for worker in [w.worker for w in self.state.workers.values() if w.node == event.node]:
                self.dispatch.lost(worker)
        if isinstance(event, Finalized):
            self.dispatch.weights_sha256 = event.weights_sha256
        self._decide(event)

    def _on_death(self, death: Mapping[str, Any]) -> None:
        worker = death["worker"]
        self.chronicle.recoveries.died(death)
        detail = f"{death['how']} in {death['phase']} of step {death['step']}"
        self._on_event(
            WorkerLost(self._cause(), worker, death["reason"], "\n".join([detail, *death["log_lines"]])), {}
        )

    def _on_fault(self, index: int, worker: str, answer: queue.Queue[bool]) -> None:
        new = index not in self.chronicle.recoveries.fired
        if new:
            self.chronicle.recoveries.fault_fired(index, worker, self.clock())
        answer.put(new or self.chronicle.recoveries.fired_by.get(index) == worker)
        if new:  # this process's own faults strike once, or it would die of one at each start
            strike_coordinator(self.charter.run.faults[index].kind)

    def _publish(self, records: list[dict[str, Any]]) -> None:
        known = self.chronicle.metrics.last_step
        self.audience.publish(self.chronicle.publish(records))
        if self.chronicle.metrics.last_step > known:
            newest = self.chronicle.last_vote
            if newest is not None and not isinstance(self.state.phase, Running):
                self._decide(Published(self._cause(), newest))
            self._refresh()

    def _decide(self, event: Event) -> None:
        """Let the core decide, write it down, act."""
        if self._ended is not None:
            return
        newest = self.chronicle.last_vote
        if newest is not None and newest != self.state.newest_vote and starts_closing(event):
            self._one(Published(self._cause(), newest))
        self._one(event)

    def _one(self, event: Event) -> None:
        now, before = self.clock(), self.state
        decision: Decision = advance(before, event, now)
        self.state = decision.state
        if not isinstance(event, Tick) or decision.commands or decision.state is not before:
            # What leads to no command need not be on disk yet: the next line that does takes it along.
            self.journal.append(journal_line(event, decision, now), sync=bool(decision.commands))
        if not isinstance(event, Tick) or decision.commands:
            log.info("%s %s -> %s", event.cause, type(event).__name__, decision.reason)
        if decision.commands:
            self._refuse_if_replaced()
        for order in [command for command in decision.commands if isinstance(command, Build)][:1]:
            self.chronicle.begun(order.step, (order.term, order.generation))
        self._act(decision.commands)
        if isinstance(before.phase, Reconnecting) and isinstance(self.state.phase, Running):
            self.chronicle.coordinator_back(now)
        self.chronicle.look(self.state)
        self._refresh()
        if isinstance(self.state.phase, Ended) and self._ended is None:
            end = self.state.phase.end
            self._finish({"error": end.error, "message": end.message, "facts": dict(end.facts)})

    def _refuse_if_replaced(self) -> None:
        """Raises StaleMessage when another coordinator has claimed a higher term."""
        newest = newest_term(self.charter.run.folder, self._term)
        if newest > self._term:
            raise StaleMessage(f"another coordinator speaks term {newest}: this one ends")

    def _act(self, commands: tuple[Command, ...]) -> None:
        self.dispatch.send(commands, self.chronicle.metrics.last_step)

    # ------------------------------------------------------------ the end

    def _finish(self, end: dict[str, Any]) -> None:
        """Write the last records, clear everything, and let the driver know."""
        if self._ended is not None:
            return
        end = {**end, "attempt": self.charter.attempt}
        if not self._ready.is_set():  # it may be a restart, so there may be workers
            self._ended = {**end, "left_behind": self._cleared()}
            return
        self._refuse_if_replaced()
        weights_sha256 = self.dispatch.weights_sha256
        end = aside(lambda: conclude(end, self.chronicle, self.state, weights_sha256), self._queue, self.lookout.echo)
        end["left_behind"] = self._cleared()
        self._ended = end
        log.info("ended: %s", end)
        threading.Timer(self.charter.run.timeouts.lease_s, self._vanish).start()

    def _cleared(self) -> list[str]:
        """What stays of the run. Trouble with clearing is told beside the end; it does not change it."""
        try:
            if self._ready.is_set():
                self.lookout.close()
                self.dispatch.kill_everyone()
                self.dispatch.close()  # nothing that was queued may start after the clearing
            return self._clear()
        except Exception as error:
            log.exception("the run could not be cleared")
            return [f"perhaps all of it: clearing failed with {type(error).__name__}: {error}"]
        finally:
            # Only now: a worker that still starts would make it anew. On other hosts the next run's agents remove it.
            with suppress(OSError):
                remove(stamp_folder(self.charter.run.name, self.charter.attempt))

    def _vanish(self) -> None:
        ray.kill(self.me, no_restart=True)

    # ------------------------------------------------------------ small parts

    def _put(self, kind: str, body: Any, extra: dict[str, Any] | None = None) -> None:
        self._queue.put((kind, body, extra or {}))

    def _note(self, note: Mapping[str, Any]) -> None:
        self.journal.append(dict(note))

    def _cause(self) -> str:
        self._causes += 1
        return f"c{os.getpid()}.{self._causes}"

    def _refresh(self) -> None:
        self.chronicle.write_status(self.state)
        self.audience.outline(self.state)


def starts_closing(event: Event) -> bool:
    """Whether this event may lead to a quorum, which the newest published result must then be part of."""
    return not isinstance(event, Tick | Published | NodeJoined | NodeDraining | WorkerReady | Resumed)
