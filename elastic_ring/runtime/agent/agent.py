"""One small process per node that watches the workers there and kills by PID. No training, no torch.

It holds a pidfd on each worker (death, with its signal), reads their progress stamps (hangs), sends heartbeats to the
coordinator, and kills a hung coordinator of its own node so that Ray restarts it. No other decision may enter.
"""

from __future__ import annotations

import logging
import os
import select
import shlex
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elastic_ring.config import Timeouts, environment
from elastic_ring.monitor.exits import ExitNotice, ExitWatch, describe_exit, signal_name, tail
from elastic_ring.monitor.goodput import CLOCK_PARTS
from elastic_ring.monitor.hang_detection import HangDetector, HangSettings, Observation, ProcReader
from elastic_ring.monitor.host_memory import HostMemory
from elastic_ring.monitor.stamps import Phase, Stamp, StampReader, phase_name
from elastic_ring.runtime.agent import launch
from elastic_ring.runtime.agent.health import HealthThread, lookup_s
from elastic_ring.runtime.agent.memory_guard import MemoryGuard, guard_limit, ray_killed, ray_threshold, warning
from elastic_ring.runtime.agent.messages import (
    BadGpus,
    Beat,
    BePatient,
    CoordinatorEndpoint,
    Death,
    Echo,
    Forget,
    FromAgent,
    Hello,
    Kill,
    Leaves,
    NodeReading,
    Resolved,
    Said,
    Watch,
    WorkerReading,
    message_of,
)
from elastic_ring.runtime.agent.notices import Notices
from elastic_ring.runtime.agent.rpc import JsonConnection, dial, raise_open_files
from elastic_ring.runtime.agent.stamp_dir import hold, keep_variables, remove_stale
from elastic_ring.runtime.gpu.leases import FOLDER, bad_ones
from elastic_ring.runtime.ray_head import reconnect_s

log = logging.getLogger(__name__)

PERIOD_S = 0.1
EARLY_PERIOD_S = 0.01
COORDINATOR = "coordinator"
OUT_OF_MEMORY = "out of memory"
NUM_LOG_LINES = 12
KEPT_NOTICES = 1000
PROGRESS_S = 1.0
"""Seconds between beats with a reading of the workers."""


@dataclass
class Watched:
    """A worker of this node."""

    worker: str
    pid: int
    stamps: StampReader
    log_path: str
    hang: str = ""
    still_since: float = 0.0  # of a hang
    memory: str = ""
    killed: bool = False
    ending: bool = False
    last: Stamp | None = field(default=None)


@dataclass(frozen=True)
class AgentSpec:
    """`early`: report a death when the exit begins; freeing a GPU's memory takes the kernel tenths of a second.
    `notices`: the provider to ask for a preemption notice, as in `agent.notices`; empty for none.
    `memory_limit`: the share of the node's memory at which the worker that grew is killed; 0 for never."""

    node: str
    timeouts: Timeouts
    early: bool = False
    notices: str = ""
    memory_limit: float = 0.0


@dataclass
class Link:
    """The connection to one coordinator and its state: made when it attaches, dropped whole. `is_here`: the
    coordinator runs on this node, as the process `pid`."""

    connection: JsonConnection
    pid: int
    is_here: bool
    echoed_at: float
    beat_at: float = 0.0
    read_at: float = 0.0
    stopped_since: float | None = None
    bad_gpus: tuple[str, ...] = ()  # as reported


@dataclass
class News:
    """Sent to each coordinator that attaches: the deaths so far, until their workers are forgotten, and when the
    machine goes; and log sentences, each sent once."""

    deaths: list[Death] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    leaves_at: float = 0.0


class NodeAgent:
    """Watches one node for the coordinator: reports its workers' deaths and hangs, and kills them on order.
    Constructing it starts nothing."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec, self._news = spec, News()
        self._guard, self._memory = MemoryGuard(0.0), HostMemory()
        self._health = HealthThread(self._tell)
        self._exits = ExitWatch()
        self._detector = HangDetector(hang_settings(spec.timeouts))
        self._proc = ProcReader()
        self._watched: dict[str, Watched] = {}
        self._link: Link | None = None
        self._lock = threading.RLock()
        self._looked_at = 0.0
        self._started = False
        self._gpus: set[str] = set()  # names of the GPUs that the workers here see
        self._locks: dict[Path, int] = {}  # stamp folders in use here, with the descriptors of their locks

    # ------------------------------------------------------------ what the coordinator calls through Ray

    def attach(self, coordinator: CoordinatorEndpoint) -> None:
        """Connect to a (new) coordinator. Reports every death so far again."""
        with self._lock:
            self._start()
        node = self._spec.node
        connection = dial(coordinator.host, coordinator.port, self._spec.timeouts.hello_s)
        connection.send(Hello(node, coordinator.key, os.getpid(), reconnect_s(environment())))

        def check_resolver() -> None:
            address = connection.sock.getsockname()[0]
            took_s = lookup_s(address)
            with self._lock:
                connection.send(Resolved(address, took_s))

        threading.Thread(target=check_resolver, name="resolver", daemon=True).start()
        with self._lock:
            if self._link is not None:
                self._link.connection.close()
            self._link = Link(connection, coordinator.pid, coordinator.node == node, time.monotonic())
            self._exits.unwatch(COORDINATOR)
            if self._link.is_here:
                self._exits.watch(self._link.pid, COORDINATOR)
            for death in self._news.deaths:
                connection.send(death)
            self._send_notice()
            self._send_sentences()
            if text := warning(node, self._spec.memory_limit, ray_threshold(os.getppid())):
                connection.send(Said(text))

    def keep_variables(self, folder: str, values: dict[str, str], python: str = "") -> str:
        """Write variables for the run's workers on this node into its stamp folder; returns the command that starts
        Python with them. `python`: the job's own `py_executable`."""
        with self._lock:
            stamps = Path(folder)
            if stamps not in self._locks:
                self._locks[stamps] = hold(stamps, self._spec.timeouts.clear_s)
            path = keep_variables(stamps, values)
        words = shlex.join([sys.executable, "-I", "-S", launch.__file__, str(path)])
        return f"{words} {python or shlex.quote(sys.executable)}"

    def ping(self) -> str:
        """Answer Ray's liveness check with the node's id."""
        return self._spec.node

    def _start(self) -> None:
        """Start the watching thread, once."""
        if self._started:
            return

        def leave(in_s: float) -> None:
            with self._lock:
                self._news.leaves_at = time.monotonic() + in_s
                self._send_notice()

        notices = Notices(self._spec.notices, leave, self._tell) if self._spec.notices else None
        self._started = True
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        raise_open_files()
        with suppress(OSError):  # an unreadable folder stays for the next run
            remove_stale()
        self._exits.open()
        self._guard = MemoryGuard(guard_limit(self._spec.memory_limit, ray_threshold(os.getppid())))
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        self._health.open()
        if notices is not None:
            notices.open()

    def _tell(self, text: str) -> None:
        """Add a sentence to the run's log, behind the node's name."""
        log.warning("%s", text)
        with self._lock:
            self._news.sentences.append(text)
            self._send_sentences()

    def _send_sentences(self) -> None:
        """Send all waiting sentences, including those from before there was a connection."""
        while self._news.sentences and self._link is not None:
            self._send(Said(f"node {self._spec.node}: {self._news.sentences.pop(0)}"))

    def _send_notice(self) -> None:
        if self._news.leaves_at:
            self._send(Leaves(max(0.0, self._news.leaves_at - time.monotonic())))

    def _send(self, message: FromAgent) -> None:
        """To the coordinator, if it is connected."""
        if self._link is not None:
            self._link.connection.send(message)

    # ------------------------------------------------------------ the loop

    def _watch(self) -> None:
        while True:
            try:
                self._look()
            except Exception:
                # Without this thread no death and no hang of this node is noticed.
                log.exception("could not look at the workers; tries again")
                time.sleep(PERIOD_S)

    def _look(self) -> None:
        link, early = self._link, self._spec.early
        ready = [self._exits.fileno()] + ([link.connection.fileno()] if link is not None else [])
        poll = select.poll()  # `select` takes no descriptor above 1,023
        for fd in ready:
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        readable = [fd for fd, _ in poll.poll((EARLY_PERIOD_S if early else PERIOD_S) * 1e3)]
        with self._lock:
            for key in self._exits.ending() if early else ():
                if (ending := self._watched.get(key)) is not None:  # the cause is reported when it is known
                    ending.ending = True
                    self._report(ending, "its process is ending", time.monotonic())
            for notice in self._exits.wait(0):
                if notice.key != COORDINATOR:
                    self._report_death(notice)
            # A connection that `attach` has replaced is closed, and its descriptor may be reused.
            if link is not None and link is self._link and link.connection.fileno() in readable:
                self._receive(link)
            now = time.monotonic()
            if early and now - self._looked_at < PERIOD_S:
                return
            self._looked_at = now
            observations = []
            for watched in self._watched.values():
                stamp = watched.stamps.read()
                watched.last = stamp or watched.last
                reading = self._proc.read(watched.pid, stamp.tid if stamp else None)
                observations.append(Observation(watched.worker, watched.pid, stamp, reading))
            for hang in self._detector.tick(now, observations):
                self._watched[hang.worker].hang = hang.describe()
                self._watched[hang.worker].still_since = now - hang.still_s
                self._kill(hang.worker, hang.describe())
            self._look_at_memory(now)
            self._report_bad_gpus()
            if self._link is not None and now - self._link.beat_at >= self._spec.timeouts.beat_s:
                self._beat(self._link, now)
            self._check_coordinator()

    def _receive(self, link: Link) -> None:
        messages = link.connection.receive()
        if messages is None:
            log.warning("the coordinator closed the connection")
            link.connection.close()
            self._link = None
            return
        for message in map(message_of, messages):
            match message:
                case Echo():
                    link.echoed_at = time.monotonic()
                case Watch():
                    self._watch_worker(message)
                case Kill():
                    self._kill(message.worker, message.reason)
                case Forget():
                    self._forget(message.worker)
                case BePatient():
                    self._detector.least_s = message.limits_s

    def _beat(self, link: Link, now: float) -> None:
        link.beat_at, reading, health = now, None, None
        if now - link.read_at >= PROGRESS_S:
            workers = {worker: progress(watched.last) for worker, watched in self._watched.items()}
            for worker, watched in self._watched.items():
                if (memory := self._memory.process(watched.pid)) is not None:
                    workers[worker].update(vars(memory))  # type: ignore[typeddict-item]
            pressure = self._memory.pressure()
            share, waits = self._memory.read().share, vars(pressure) if pressure is not None else {}
            link.read_at, health = now, self._health.take()
            reading = NodeReading(workers, share, self._guard.limit, waits)
        link.connection.send(Beat(reading, health))

    def _check_coordinator(self) -> None:
        """Kill a coordinator of this node that is stopped or silent. The limit on silence is long: training goes on
        without the coordinator, and a slow one must live."""
        link, timeouts = self._link, self._spec.timeouts
        if link is None or not link.is_here:
            return
        now, reading = time.monotonic(), self._proc.read(link.pid)
        stopped = reading is not None and reading.state in ("T", "t")
        link.stopped_since = (link.stopped_since or now) if stopped else None
        stopped_s = now - link.stopped_since if link.stopped_since is not None else 0.0
        silent_s = now - link.echoed_at
        if stopped_s > timeouts.stopped_s or silent_s > timeouts.coordinator_silent_s:
            state = f"stopped for {stopped_s:.1f} s, silent for {silent_s:.1f} s"
            log.error(f"the coordinator (pid {link.pid}) is {state}: killing it")
            self._exits.kill(COORDINATOR)
            link.echoed_at, link.stopped_since = now, None

    def _report_bad_gpus(self) -> None:
        """Report the GPUs that must not be used, when they change: fewer members fit on this node."""
        bad = tuple(bad_ones(FOLDER, self._gpus))
        if self._link is not None and bad != self._link.bad_gpus:
            log.error("GPUs that are not used here: %s", ", ".join(bad) or "none any more")
            self._send(BadGpus(bad))
            self._link.bad_gpus = bad

    # ------------------------------------------------------------ workers

    def _watch_worker(self, request: Watch) -> None:
        self._gpus.update(request.gpus)
        if request.worker in self._watched:
            return
        stamps = StampReader(request.stamp_path)
        self._watched[request.worker] = Watched(request.worker, request.pid, stamps, request.log_path)
        self._exits.watch(request.pid, request.worker)
        # Locked, so that no process removes the run's folder between two of its workers. A living worker holds the lock
        # too: a process that removes the folder now removes a dead run's.
        folder = stamps.path.parent
        try:
            if folder not in self._locks:
                self._locks[folder] = hold(folder, 0.0, make=False)
        except OSError as error:  # watching goes on without the lock
            log.warning("%s is not locked: %s", folder, error)

    def _kill(self, worker: str, reason: str) -> None:
        log.warning("killing %s: %s", worker, reason)
        if worker in self._watched:
            self._watched[worker].killed = True
            self._exits.kill(worker)
        else:  # the coordinator waits for a death notice
            deaths = [death for death in self._news.deaths if death.worker == worker]
            self._send(deaths[-1] if deaths else Death(worker, 0, "died", "it was gone already", time.monotonic()))

    def _forget(self, worker: str) -> None:
        watched = self._watched.get(worker)
        if watched is not None and watched.ending:
            return  # the cause of its death is still to be reported
        self._watched.pop(worker, None)
        if watched is not None:
            self._exits.unwatch(worker)
            self._drop_stamps(watched)
        self._news.deaths = [death for death in self._news.deaths if death.worker != worker]

    def _drop_stamps(self, watched: Watched) -> None:
        """Remove the stamps of a dead worker; the run's folder stays for new workers."""
        watched.stamps.close()
        watched.stamps.path.unlink(missing_ok=True)

    def _look_at_memory(self, now: float) -> None:
        """Kill the worker that grew, before Ray or the kernel chooses another process."""
        verdict = self._guard.look(now, {worker: watched.pid for worker, watched in self._watched.items()})
        if verdict is None:
            return
        if not verdict.worker:
            log.warning("memory: %s", verdict.text)
            return
        self._watched[verdict.worker].memory = verdict.text
        self._kill(verdict.worker, f"{OUT_OF_MEMORY}: {verdict.text}")

    def _report_death(self, notice: ExitNotice) -> None:
        watched = self._watched.pop(notice.key, None)
        if watched is None:
            return
        if signal_name(notice.signal) == "SIGKILL" and not watched.killed:
            watched.memory = self._guard.kernel_killed(notice.key) or ray_killed(watched.log_path, watched.pid)
        died = "died" if notice.exit_code is None else "exited"
        self._report(watched, describe_exit(notice), notice.monotonic_s, signal_name(notice.signal), died)
        self._drop_stamps(watched)

    def _report(self, watched: Watched, how: str, monotonic_s: float, signal: str = "", died: str = "died") -> None:
        stamp = watched.stamps.read() or watched.last
        why = watched.hang or watched.memory
        death = Death(
            worker=watched.worker,
            pid=watched.pid,
            reason="hung" if watched.hang else OUT_OF_MEMORY if watched.memory else died,
            how=f"{why}; {how}" if why else how,
            monotonic_s=monotonic_s,
            step=stamp.step if stamp else -1,
            phase=phase_name(stamp.phase) if stamp else "unknown",
            log_lines=tuple(tail(watched.log_path, NUM_LOG_LINES)) if watched.log_path else (),
            signal=signal,
            still_s=monotonic_s - watched.still_since if watched.hang else 0.0,
        )
        log.warning("%s (pid %d) %s in %s of step %d", death.worker, death.pid, death.how, death.phase, death.step)
        earlier = [notice for notice in self._news.deaths if notice.worker != death.worker]
        self._news.deaths = [*earlier[-KEPT_NOTICES:], death]
        self._send(death)


def progress(stamp: Stamp | None) -> WorkerReading:
    """A worker's step, its phase and the seconds in it, and the parts of its last whole step in seconds, by
    `CLOCK_PARTS`; `other` is the rest. {} if unknown."""
    if stamp is None:
        return {}
    in_phase_s = round(max(0.0, (time.monotonic_ns() - stamp.monotonic_ns) / 1e9), 3)
    figures: WorkerReading = {"at_step": stamp.step, "phase": phase_name(stamp.phase), "in_phase_s": in_phase_s}
    if (clock := stamp.clock) is not None:
        parts = {part: clock.phases_s[part] for part in CLOCK_PARTS if part in clock.phases_s}
        parts |= {"data": clock.data_wait_s, "other": sum(clock.phases_s.values()) - sum(parts.values())}
        figures["clock"] = {part: round(parts[part], 6) for part in CLOCK_PARTS}
    return figures


def hang_settings(timeouts: Timeouts) -> HangSettings:
    """Limits on a worker's silence. Its heartbeat thread touches the stamps in every phase; only writing the weights,
    native code that keeps the GIL, and compilers silence it."""
    return HangSettings(
        period_s=PERIOD_S,
        floor_s=timeouts.heart_floor_s,
        cap_s=timeouts.heart_cap_s,
        computing_floor_s=timeouts.heart_computing_s,
        computing_cap_s=timeouts.compile_s,
        warmup_floor_s=timeouts.heart_floor_s,
        stopped_limit_s=timeouts.stopped_s,
        phase_floors_s={
            Phase.STARTING: timeouts.heart_cap_s,
            Phase.FINALIZE: timeouts.heart_cap_s,
            Phase.COMPILE: timeouts.compile_s,
        },
    )
