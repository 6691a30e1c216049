"""Sends the core's commands: to workers through Ray, to processes through the agents.

Sending never blocks; failures become events. No decisions here.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.exceptions import ActorDiedError, RayTaskError

from elastic_ring.control.messages import (
    Answer,
    Build,
    CauseIds,
    Command,
    DrainNode,
    EndRun,
    Finalize,
    Hello,
    KillWorker,
    Release,
    Standby,
    StartWorker,
    Stop,
    WorkerLost,
    WorkerReady,
    to_json,
)
from elastic_ring.control.state import State
from elastic_ring.errors import ElasticRingError
from elastic_ring.runtime.agent.stamp_dir import stamp_folder
from elastic_ring.runtime.coordinator.inbox import Happened, Put, WorkerFound
from elastic_ring.runtime.driver.cluster import Cluster, leave_node, watch_ref, why_not_begun
from elastic_ring.runtime.groups.transport import RendezvousStore, StoreAddress, common_host
from elastic_ring.runtime.worker.actor import CONTROL
from elastic_ring.runtime.worker.coordinator_client import CommandDetails, WorkerDescription
from elastic_ring.runtime.worker.saver import CheckpointTerms

log = logging.getLogger(__name__)

AGENT_FIRST_S = 0.5


class RayCalls:
    """A thread for slow calls to Ray (start, remove), so that they do not block decisions."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._make, name="ray-calls", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def put(self, call: Callable[..., None], *arguments: Any) -> None:
        self._calls.put(partial(call, *arguments))

    def close(self, timeout_s: float) -> None:
        """Drop the queued calls. Returns once the present one has ended."""
        self._closed.set()
        self._calls.put(None)
        self._thread.join(timeout=timeout_s)

    def _make(self) -> None:
        while (call := self._calls.get()) is not None and not self._closed.is_set():
            try:
                call()
            except Exception:
                # Actors that were not removed are reported at the end as left behind.
                log.exception("a call to Ray failed")


@dataclass(frozen=True)
class Meeting:
    """The rendezvous of one generation's members, built and dropped whole. `id`: (term, generation). `hosts`: their
    addresses; empty to let any host connect."""

    id: tuple[int, int]
    store: RendezvousStore
    hosts: list[str]


class Dispatcher:
    """Sends commands for one coordinator and hosts the rendezvous store.

    Each generation gets a new store, so that late workers of an old one cannot join; it is there only while the
    generation is built, because torch's store serves whoever finds its port. The store is not in a member, because
    members may die.
    """

    def __init__(self, run_spec: Any, address: str, cluster: Cluster, node_monitor: Any, me: Any, put: Put) -> None:
        self._address, self._cluster, self._node_monitor = address, cluster, node_monitor
        self._me, self._put = me, put
        self._clear_s = run_spec.run.timeouts.clear_s
        self._handles: dict[str, Any] = {}
        self._meeting: Meeting | None = None
        self._keeps_out = True
        self._cause = CauseIds("dispatch")
        self._fingerprint = run_spec.fingerprint
        self._killed: set[str] = set()
        self.weights_sha256 = ""
        self._ray_calls = RayCalls()
        self.stamp_dir = str(stamp_folder(run_spec.run.name, run_spec.attempt))

    def open(self) -> None:
        self._ray_calls.open()

    def close(self) -> None:
        """Make no more calls to Ray."""
        self._ray_calls.close(self._clear_s)

    def recall(self, state: State) -> None:
        """Find the workers that an earlier coordinator started."""
        for worker in state.workers.values():
            handle = self._cluster.find_worker(worker.worker)
            if handle is None:
                self._put(Happened(WorkerLost(self._cause(), worker.worker, "unreachable", "Ray knows it no more")))
                continue
            self._handles[worker.worker] = handle
            if worker.status == "starting":  # its answer went to the old coordinator
                watch_ref(handle.start.remote(self._me), partial(self._started, worker.worker))
            else:
                # Ray calls this in its own thread, which must wait for no lock of the node monitor.
                watch_ref(
                    handle.describe.remote(), lambda described, _: described and self._put(WorkerFound(described))
                )

    def send(self, commands: Iterable[Command], published: int, checkpoint: CheckpointTerms | None = None) -> None:
        """`published`: the last step that is recorded. `checkpoint`: what members need to know to save."""
        details = CommandDetails(published, checkpoint=checkpoint)
        for command in commands:
            match command:
                case StartWorker():
                    self._start(command)
                case DrainNode():
                    self._ray_calls.put(leave_node, command.node)
                case KillWorker():
                    self._kill(command)
                case Build():
                    self._tell(command, CommandDetails(published, self._rendezvous(command), checkpoint))
                case Release():
                    self._tell(command, details)
                    if not command.wrong:  # else it marks its GPU first, and ends by itself
                        self._ray_calls.put(self._cluster.remove_worker, command.worker)
                case Stop() | Answer() | Hello() | Standby() | Finalize():
                    self._tell(command, details)
                case EndRun():
                    log.info("%s: end of run: %s %s", command.cause, command.error or "success", command.message)

    def end_meeting(self) -> None:
        """Close the rendezvous store: no member connects any more."""
        self._meeting = None

    def lost(self, worker: str) -> None:
        """Free the place of a worker that is gone."""
        self._handles.pop(worker, None)
        self._node_monitor.forget(worker)
        self._ray_calls.put(self._cluster.remove_worker, worker)

    def kill_everyone(self) -> None:
        """The end: by PID first, because Ray takes seconds for a stopped process."""
        for worker in list(self._handles):
            self._node_monitor.kill(worker, "end of run")

    def watch(self, described: WorkerDescription) -> None:
        """Watch a worker that is ready, unless it has been lost meanwhile."""
        handle = self._handles.get(described["worker"])
        if handle is not None:
            self._node_monitor.watch_worker(described, handle)

    # ------------------------------------------------------------ parts

    def _start(self, command: StartWorker) -> None:
        node = self._node_monitor.info(command.node)
        if node is None:
            self._put(Happened(WorkerLost(command.cause, command.worker, "died", "its node is gone")))
            return
        self._ray_calls.put(self._start_on, command.worker, node)

    def _start_on(self, worker: str, node: Any) -> None:
        try:
            self._handles[worker] = self._cluster.start_worker(worker, node, self._me, self.stamp_dir, self._started)
        except Exception as error:
            log.exception("%s could not be started", worker)
            is_ours = isinstance(error, ElasticRingError)
            detail = f"{error}" if is_ours else f"Ray refuses to start it: {type(error).__name__}: {error}"
            self._put(Happened(WorkerLost(self._cause(), worker, "start-failed", detail)))

    def _started(self, worker: str, started: WorkerDescription | None, error: BaseException | None) -> None:
        if error is not None or started is None:
            why = why_not_begun(error)  # an error of the worker's own process would come again
            reason = "start-failed" if why or isinstance(error, RayTaskError) else "died"
            self._put(Happened(WorkerLost(self._cause(), worker, reason, why or f"{error}")))
            return
        if started["fingerprint"] != self._fingerprint:
            detail = (
                f"it reads another corpus ({started['fingerprint'][:16]}) than the driver ({self._fingerprint[:16]})"
            )
            self._put(Happened(WorkerLost(self._cause(), worker, "start-failed", detail)))
            return
        ready = WorkerReady(self._cause(), worker, started["node"], started["pid"])
        self._put(Happened(ready, started))

    def _kill(self, command: KillWorker) -> None:
        was_sent = self._node_monitor.kill(command.worker, command.reason)
        if (
            was_sent and command.worker in self._killed
        ):  # the agent has the order already, and the worker is still there
            self._ray_calls.put(self._cluster.remove_worker, command.worker)
        self._killed.add(command.worker)
        if not was_sent:
            self._ray_calls.put(self._cluster.remove_worker, command.worker)
            self._put(Happened(WorkerLost(command.cause, command.worker, "unreachable", command.reason)))

    def _tell(self, command: Any, details: CommandDetails) -> None:
        handle = self._handles.get(command.worker)
        if handle is None:
            return
        log.info("%s: %s to %s", command.cause, type(command).__name__, command.worker)

        def sent(_: Any, error: BaseException | None) -> None:
            if isinstance(error, ActorDiedError):
                # The agent's notice comes first, with the signal and the log tail; this is the fallback.
                lost = WorkerLost(self._cause(), command.worker, "died", "Ray: the actor is dead")
                threading.Timer(AGENT_FIRST_S, self._put, args=(Happened(lost),)).start()
            elif error is not None:
                log.warning("%s: %s to %s: %s", command.cause, type(command).__name__, command.worker, error)

        in_control = handle.command.options(concurrency_group=CONTROL)
        watch_ref(in_control.remote(to_json(command), details), sent)

    def _rendezvous(self, command: Build) -> StoreAddress:
        identity = (command.term, command.generation)
        if self._meeting is None or self._meeting.id != identity:
            # After a build that failed, maybe because a worker connects from an unknown address.
            self._keeps_out = self._keeps_out and self._meeting is None
            heals = [worker for heal in command.heals for worker in (heal.donor, *heal.newcomers)]
            addresses = [self._node_monitor.addresses_of(worker) for worker in {*command.members, *heals}]
            nodes = [address for address, _ in addresses]
            hosts = sorted({self._address, *(host for pair in addresses for host in pair)}) if self._keeps_out else []
            self._meeting = Meeting(identity, RendezvousStore(common_host(self._address, nodes), hosts), hosts)
        store = self._meeting.store
        return StoreAddress(store.host, store.port, store.secret, tuple(self._meeting.hosts))
