"""Carries out the core's commands: to workers through Ray, to processes through the agents.

Sending never waits. What goes wrong comes back as an event.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ray.exceptions import ActorDiedError, RayTaskError
from torch.distributed import TCPStore

from elastic_ring.control.messages import (
    Build,
    Command,
    EndRun,
    Finalize,
    Hello,
    KillWorker,
    Release,
    Stand,
    StartWorker,
    Stop,
    WorkerLost,
    WorkerReady,
    to_json,
)
from elastic_ring.control.state import State
from elastic_ring.runtime.cluster import Cluster, watch_ref
from elastic_ring.runtime.stamp_folder import stamp_folder

log = logging.getLogger(__name__)

AGENT_FIRST_S = 0.5


class Dispatcher:
    """Sends for one coordinator. It hosts the rendezvous store, a fresh one for each generation, so that an
    old generation's stragglers find nobody and a store never lives in a member."""

    def __init__(
        self, charter: Any, address: str, cluster: Cluster, lookout: Any, me: Any, put: Any, chronicle: Any
    ) -> None:
        self._address, self._cluster, self._lookout = address, cluster, lookout
        self._me, self._put, self._chronicle = me, put, chronicle
        self._clear_s = charter.run.timeouts.clear_s
        self._handles: dict[str, Any] = {}
        self._store: TCPStore | None = None
        self._store_of: tuple[int, int] = (0, 0)
        self._causes = 0
        self._fingerprint = charter.fingerprint
        self._killed: set[str] = set()
        self.weights_sha256 = ""
        self._chores: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._hand = threading.Thread(target=self._do_chores, name="chores", daemon=True)
        self.stamp_dir = str(stamp_folder(charter.run.name, charter.attempt))

    def open(self) -> None:
        """Ray's slow calls (starting, removing) have a thread of their own: deciding never waits for them."""
        self._hand.start()

    def close(self) -> None:
        """Do no more chores; those that wait are dropped. Returns once the one at hand is done."""
        self._closed.set()
        self._chores.put(None)
        self._hand.join(timeout=self._clear_s)

    def _do_chores(self) -> None:
        while (chore := self._chores.get()) is not None and not self._closed.is_set():
            try:
                chore()
            except Exception:
                # What was not removed shows at the end as left behind.
                log.exception("a call to Ray failed")

    def recall(self, state: State) -> None:
        """Find the workers that an earlier coordinator started."""
        for worker in state.workers.values():
            handle = self._cluster.find_worker(worker.worker)
            if handle is None:
                self._put("event", WorkerLost(self._cause(), worker.worker, "unreachable", "Ray knows it no more"))
                continue
            self._handles[worker.worker] = handle
            if worker.life == "starting":  # its answer went to a coordinator that is no more
                watch_ref(handle.start.remote(self._me), partial(self._started, worker.worker))
            else:
                watch_ref(handle.describe.remote(), partial(self._found, handle))

    def send(self, commands: Iterable[Command], published: int) -> None:
        for command in commands:
            match command:
                case StartWorker():
                    self._start(command)
                case KillWorker():
                    self._kill(command)
                case Build():
                    self._tell(command, {**self._rendezvous(command), "published": published})
                case Release():
                    self._tell(command, {"published": published})
                    self._chores.put(partial(self._cluster.remove_worker, command.worker))
                case Stop() | Hello() | Stand() | Finalize():
                    self._tell(command, {"published": published})
                case EndRun():
                    log.info("%s: end of run: %s %s", command.cause, command.error or "success", command.message)

    def lost(self, worker: str) -> None:
        """Free the place of a worker that is gone."""
        self._handles.pop(worker, None)
        self._lookout.forget(worker)
        self._chores.put(partial(self._cluster.remove_worker, worker))

    def kill_everyone(self) -> None:
        """The end: by PID first, because Ray takes seconds for a stopped process."""
        for worker in list(self._handles):
            self._lookout.kill(worker, "end of run")

    # ------------------------------------------------------------ parts

    def _start(self, command: StartWorker) -> None:
        node = self._lookout.nodes.get(command.node)
        if node is None:
            self._put("event", WorkerLost(command.cause, command.worker, "died", "its node is gone"))
            return
        self._chores.put(partial(self._start_on, command.worker, node))

    def _start_on(self, worker: str, node: Any) -> None:
        try:
            self._handles[worker] = self._cluster.start_worker(worker, node, self._me, self.stamp_dir, self._started)
        except Exception as error:
            log.exception("%s could not be started", worker)
            detail = f"Ray refuses to start it: {type(error).__name__}: {error}"
            self._put("event", WorkerLost(self._cause(), worker, "start-failed", detail))

    def _started(self, worker: str, card: dict[str, Any] | None, error: BaseException | None) -> None:
        if error is not None or card is None:
            reason = "start-failed" if is_own_error(error) else "died"
            self._put("event", WorkerLost(self._cause(), worker, reason, f"{error}"))
            return
        if card["fingerprint"] != self._fingerprint:
            detail = f"it reads another corpus ({card['fingerprint'][:16]}) than the driver ({self._fingerprint[:16]})"
            self._put("event", WorkerLost(self._cause(), worker, "start-failed", detail))
            return
        ready = WorkerReady(self._cause(), worker, card["node"], card["pid"])
        self._put("event", ready, {**card, "handle": self._handles.get(worker)})

    def _found(self, handle: Any, card: dict[str, Any] | None, error: BaseException | None) -> None:
        if card is not None:
            self._lookout.watch_worker(card["worker"], card["node"], {**card, "handle": handle})

    def _kill(self, command: KillWorker) -> None:
        told = self._lookout.kill(command.worker, command.reason)
        if told and command.worker in self._killed:  # the agent was told before, and the worker is still there
            self._chores.put(partial(self._cluster.remove_worker, command.worker))
        self._killed.add(command.worker)
        if not told:
            self._chores.put(partial(self._cluster.remove_worker, command.worker))
            self._put("event", WorkerLost(command.cause, command.worker, "unreachable", command.reason))

    def _tell(self, command: Any, extra: dict[str, Any]) -> None:
        handle = self._handles.get(command.worker)
        if handle is None:
            return
        log.info("%s: %s to %s", command.cause, type(command).__name__, command.worker)

        def sent(_: Any, error: BaseException | None) -> None:
            if isinstance(error, ActorDiedError):
                # The agent's notice has the signal and the last log lines; this one is for when it has none to give.
                lost = WorkerLost(self._cause(), command.worker, "died", "Ray: the actor is dead")
                threading.Timer(AGENT_FIRST_S, self._put, args=("event", lost)).start()
            elif error is not None:
                log.warning("%s: %s to %s: %s", command.cause, type(command).__name__, command.worker, error)

        watch_ref(handle.command.remote(to_json(command), extra), sent)

    def _rendezvous(self, command: Build) -> dict[str, Any]:
        identity = (command.term, command.generation)
        if self._store is None or self._store_of != identity:
            self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
            self._store_of = identity
        return {"store_host": self._address, "store_port": self._store.port}

    def _cause(self) -> str:
        self._causes += 1
        return f"d{os.getpid()}.{self._causes}"


def is_own_error(error: BaseException | None) -> bool:
    """Whether a start failed by an error that the worker's own process raised, and would raise again."""
    return isinstance(error, RayTaskError) or (isinstance(error, ActorDiedError) and "creation task" in str(error))
