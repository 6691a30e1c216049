"""One small process per node that watches the workers there and kills by PID. No training, no torch.

It holds a pidfd on each worker (death, with its signal), reads their progress stamps (hangs), beats to the
coordinator, and puts a coordinator of its own node that has fallen silent out of its misery, so that Ray
starts it anew. It decides nothing else.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_ring.config import Timeouts
from elastic_ring.monitor.detect import HangDetector, HangSettings, Observation, ProcReader
from elastic_ring.monitor.exits import ExitNotice, ExitWatch, describe_exit, tail
from elastic_ring.monitor.stamps import Phase, Stamp, StampReader, phase_name
from elastic_ring.runtime.chips import FOLDER, bad_ones
from elastic_ring.runtime.lifeline import Line, dial
from elastic_ring.runtime.stamp_folder import hold, remove_stale

log = logging.getLogger(__name__)

PERIOD_S = 0.1
EARLY_PERIOD_S = 0.01
COORDINATOR = "coordinator"
NUM_LOG_LINES = 12
KEPT_NOTICES = 1000


@dataclass
class Watched:
    """A worker of this node."""

    worker: str
    pid: int
    stamps: StampReader
    log_path: str
    hang: str = ""
    ending: bool = False
    last: Stamp | None = field(default=None)


class NodeAgent:
    """The actor class. Constructing it starts nothing."""

    def __init__(self, node: str, timeouts: Timeouts, early: bool = False) -> None:
        """`early`: tell of a death when it begins. With a GPU's memory in hand it takes tenths of a second to end."""
        self._node, self._timeouts, self._early = node, timeouts, early
        self._exits = ExitWatch()
        self._detector = HangDetector(hang_settings(timeouts))
        self._proc = ProcReader()
        self._watched: dict[str, Watched] = {}
        self._notices: list[dict[str, Any]] = []
        self._line: Line | None = None
        self._lock = threading.RLock()
        self._coordinator: dict[str, Any] = {}
        self._echoed_at = self._beat_at = self._looked_at = 0.0
        self._stopped_since: float | None = None
        self._started = False
        self._chips: set[str] = set()  # GPUs that the workers here see
        self._bad_told: list[str] | None = None
        self._held: dict[Path, int] = {}  # folders of stamps that are read here

    # ------------------------------------------------------------ what the coordinator calls through Ray

    def attach(self, coordinator: dict[str, Any]) -> None:
        """Dial a (new) coordinator: host, port, key, pid, node. Tells it again of every death seen so far."""
        with self._lock:
            self._start()
        line = dial(coordinator["host"], coordinator["port"], self._timeouts.hello_s)
        line.send({"kind": "hello", "node": self._node, "key": coordinator["key"], "pid": os.getpid()})
        with self._lock:
            if self._line is not None:
                self._line.close()
            self._line, self._coordinator = line, coordinator
            self._echoed_at = time.monotonic()
            self._exits.unwatch(COORDINATOR)
            if coordinator["node"] == self._node:
                self._exits.watch(coordinator["pid"], COORDINATOR)
            for notice in self._notices:
                line.send(notice)
            self._bad_told = None

    def ping(self) -> str:
        """Alive, as Ray sees it."""
        return self._node

    def _start(self) -> None:
        """Begin to watch, once."""
        if self._started:
            return
        self._started = True
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        with suppress(OSError):  # what cannot be read stays for the next run
            remove_stale()
        self._exits.open()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    # ------------------------------------------------------------ the loop

    def _watch(self) -> None:
        while True:
            try:
                self._turn()
            except Exception:
                # A watcher that dies unseen is worse than one that stumbles.
                log.exception("turn failed")
                time.sleep(PERIOD_S)

    def _turn(self) -> None:
        line = self._line
        ready = [self._exits.fileno()] + ([line.fileno()] if line is not None else [])
        period_s = EARLY_PERIOD_S if self._early else PERIOD_S
        readable, _, _ = select.select([fd for fd in ready if fd >= 0], [], [], period_s)
        with self._lock:
            for key in self._exits.ending() if self._early else ():
                self._tell_ending(key)
            for notice in self._exits.wait(0):
                if notice.key != COORDINATOR:
                    self._tell_death(notice)
            # A line that `attach` has replaced meanwhile is closed, and its number may be another's.
            if line is not None and line is self._line and line.fileno() in readable:
                self._listen(line)
            now = time.monotonic()
            if self._early and now - self._looked_at < PERIOD_S:
                return
            self._looked_at = now
            self._look_for_hangs()
            self._tell_bad_chips()
            self._beat()
            self._check_coordinator()

    def _listen(self, line: Line) -> None:
        messages = line.receive()
        if messages is None:
            log.warning("the coordinator hung up")
            line.close()
            self._line = None
            return
        for message in messages:
            match message["kind"]:
                case "echo":
                    self._echoed_at = time.monotonic()
                case "watch":
                    self._begin_to_watch(message)
                case "kill":
                    self._kill(message["worker"], message["reason"])
                case "forget":
                    self._forget(message["worker"])

    def _beat(self) -> None:
        now = time.monotonic()
        if self._line is None or now - self._beat_at < self._timeouts.beat_s:
            return
        self._beat_at = now
        self._line.send({"kind": "beat"})

    def _check_coordinator(self) -> None:
        """Kill a coordinator of this node that is stopped or silent. Slowness alone must not cost its life:
        training goes on without it, so the limit on silence is a long one."""
        if self._line is None or self._coordinator.get("node") != self._node:
            return
        now, pid = time.monotonic(), self._coordinator["pid"]
        reading = self._proc.read(pid)
        stopped = reading is not None and reading.state in ("T", "t")
        self._stopped_since = (self._stopped_since or now) if stopped else None
        stopped_s = now - self._stopped_since if self._stopped_since is not None else 0.0
        silent_s = now - self._echoed_at
        if stopped_s > self._timeouts.stopped_s or silent_s > self._timeouts.coordinator_silent_s:
            log.error("the coordinator (pid %d) is stopped for %.1f s, silent for %.1f s: killing it", pid, stopped_s,
                      silent_s)  # fmt: skip
            self._exits.kill(COORDINATOR)
            self._echoed_at, self._stopped_since = now, None

    def _tell_bad_chips(self) -> None:
        """Tell of GPUs that are not to be used, when that changes: so many fewer members can sit here."""
        bad = bad_ones(FOLDER, self._chips)
        if self._line is not None and bad != (self._bad_told or []):
            log.error("GPUs that are not used here: %s", ", ".join(bad) or "none any more")
            self._line.send({"kind": "chips", "bad": bad})
            self._bad_told = bad

    # ------------------------------------------------------------ workers

    def _begin_to_watch(self, message: dict[str, Any]) -> None:
        worker = message["worker"]
        self._chips.update(message.get("chips", ()))
        if worker in self._watched:
            return
        stamps = StampReader(message["stamp_path"])
        self._watched[worker] = Watched(worker, message["pid"], stamps, message["log_path"])
        self._exits.watch(message["pid"], worker)
        self._hold(stamps.path.parent)

    def _hold(self, folder: Path) -> None:
        """Between two workers of a run nobody else may hold its folder.

        A living worker holds it: whoever is removing it removes a dead one's, and need not be waited for.
        """
        try:
            if folder not in self._held:
                self._held[folder] = hold(folder, 0.0, make=False)
        except OSError as error:  # watching matters more
            log.warning("%s is not held: %s", folder, error)

    def _kill(self, worker: str, reason: str) -> None:
        log.warning("killing %s: %s", worker, reason)
        if worker in self._watched:
            self._exits.kill(worker)
        elif self._line is not None:  # the coordinator waits for the news of its death
            known = [notice for notice in self._notices if notice["worker"] == worker]
            gone = {"kind": "death", "worker": worker, "pid": 0, "reason": "died", "how": "it was gone already",
                    "step": -1, "phase": "unknown", "log_lines": [], "monotonic_s": time.monotonic()}  # fmt: skip
            self._line.send(known[-1] if known else gone)

    def _forget(self, worker: str) -> None:
        watched = self._watched.get(worker)
        if watched is not None and watched.ending:
            return  # what it died of is still to be told
        self._watched.pop(worker, None)
        if watched is not None:
            self._exits.unwatch(worker)
            self._drop_stamps(watched)
        self._notices = [notice for notice in self._notices if notice["worker"] != worker]

    def _drop_stamps(self, watched: Watched) -> None:
        """The stamps of a worker that is gone; the run's folder of them stays for those that start."""
        watched.stamps.close()
        watched.stamps.path.unlink(missing_ok=True)

    def _look_for_hangs(self) -> None:
        observations = []
        for watched in self._watched.values():
            stamp = watched.stamps.read()
            watched.last = stamp or watched.last
            reading = self._proc.read(watched.pid, stamp.tid if stamp else None)
            observations.append(Observation(watched.worker, watched.pid, stamp, reading))
        for hang in self._detector.tick(time.monotonic(), observations):
            self._watched[hang.worker].hang = hang.describe()
            self._kill(hang.worker, hang.describe())

    def _tell_ending(self, key: str) -> None:
        """The end has begun; what it was is told when it is known."""
        if key in self._watched:
            watched = self._watched[key]
            watched.ending = True
            self._tell(watched, "hung" if watched.hang else "died", "its process is ending", time.monotonic())

    def _tell_death(self, notice: ExitNotice) -> None:
        watched = self._watched.pop(notice.key, None)
        if watched is None:
            return
        reason = "hung" if watched.hang else "exited" if notice.exit_code is not None else "died"
        self._tell(watched, reason, describe_exit(notice), notice.monotonic_s)
        self._drop_stamps(watched)

    def _tell(self, watched: Watched, reason: str, how: str, monotonic_s: float) -> None:
        stamp = watched.stamps.read() or watched.last
        message = {
            "kind": "death", "worker": watched.worker, "pid": watched.pid, "reason": reason,
            "how": f"{watched.hang}; {how}" if watched.hang else how,
            "step": stamp.step if stamp else -1,
            "phase": phase_name(stamp.phase) if stamp else "unknown",
            "log_lines": tail(watched.log_path, NUM_LOG_LINES) if watched.log_path else [],
            "monotonic_s": monotonic_s,
        }  # fmt: skip
        log.warning("%s (pid %d) %s in %s of step %d", watched.worker, watched.pid, message["how"], message["phase"],
                    message["step"])  # fmt: skip
        others = [told for told in self._notices if told["worker"] != watched.worker]
        self._notices = [*others[-KEPT_NOTICES:], message]
        if self._line is not None:
            self._line.send(message)


def hang_settings(timeouts: Timeouts) -> HangSettings:
    """A worker's heart beats in every phase, from a thread of its own; only writing the weights may hold the GIL."""
    return HangSettings(
        period_s=PERIOD_S,
        floor_s=timeouts.heart_floor_s,
        cap_s=timeouts.heart_cap_s,
        warmup_floor_s=timeouts.heart_floor_s,
        stopped_limit_s=timeouts.stopped_s,
        phase_floors_s={Phase.STARTING: timeouts.heart_cap_s, Phase.FINALIZE: timeouts.heart_cap_s},
    )
