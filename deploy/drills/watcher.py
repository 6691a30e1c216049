"""A run seen from outside, by what it writes into its folder, for drills and benches; the run does not know of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from elastic_ring.errors import ElasticRingError
from elastic_ring.files import plain_json
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME, STATUS_NAME
from elastic_ring.trainer import ElasticRingTrainer

SHOWN_EVERY_S = 15.0
POLL_S = 0.05

T = TypeVar("T")


@dataclass
class Tail:
    """The lines of a growing JSON-lines file, each read once."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        """All whole lines so far."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self.lines.append(plain_json(line))
        return self.lines


class WatchFailed(ElasticRingError):
    """What somebody waited for did not happen."""


class Watcher:
    """What one run writes into its folder, and its processes. For one thread."""

    def __init__(self, folder: Path, over: threading.Event, num_places: int) -> None:
        self.folder = folder
        self._num_places = num_places
        self._over = over
        self._metrics, self._journal = Tail(folder / METRICS_NAME), Tail(folder / JOURNAL_NAME)
        self._shown_at = time.monotonic()

    def status(self) -> dict[str, Any]:
        path = self.folder / STATUS_NAME
        return plain_json(path.read_text()) if path.exists() else {}

    def steps(self) -> list[dict[str, Any]]:
        """Those that are committed, without the notes between their lines."""
        return [line for line in self._metrics.read() if "loss_hex" in line]

    def journal(self) -> list[dict[str, Any]]:
        return self._journal.read()

    def until(self, what: str, found: Callable[[], T | None], timeout_s: float = 180.0, poll_s: float = POLL_S) -> T:
        """The first answer of `found` that is not None. Raises WatchFailed when the run or the time is over."""
        deadline = time.monotonic() + timeout_s
        while (answer := found()) is None:
            if self._over.is_set():
                raise WatchFailed(f"the run ended while this waited for {what}")
            if time.monotonic() > deadline:
                raise WatchFailed(f"{what}: not within {timeout_s:.0f} s; status: {self.status()}")
            if time.monotonic() - self._shown_at > SHOWN_EVERY_S:
                self._shown_at = time.monotonic()
                print(f"  step {len(self.steps())}, waiting for {what}", flush=True)
            time.sleep(poll_s)
        return answer

    def whole(self, num_spares: int) -> dict[str, Any]:
        """Wait until the mesh is full and `num_spares` spares are ready; returns the status at that moment."""
        since_s = time.time()

        def found() -> dict[str, Any] | None:
            status = self.status()
            fresh = status.get("updated_unix_s", 0.0) > since_s and status["phase"] == "running"
            whole = fresh and len(status["members"]) == self._num_places and len(status["spares"]) >= num_spares
            alive = whole and all(psutil.pid_exists(p["pid"]) for p in status["members"] + status["spares"])
            return status if alive else None

        return self.until(f"a whole mesh and {num_spares} spare(s)", found)

    def more_steps(self, number: int) -> None:
        """Wait until `number` more steps are committed."""
        goal = len(self.steps()) + number
        self.until(f"step {goal}", lambda: True if len(self.steps()) >= goal else None)

    def ahead_s(self) -> float:
        """How far the journal's times are ahead of this host's monotonic clock."""
        return float([line["offset_s"] for line in self.journal() if "offset_s" in line][-1])

    def recoveries(self) -> list[dict[str, Any]]:
        return [line["recovery"] for line in self.journal() if line.get("note") == "recovery"]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Journal lines of these kinds of events."""
        return [line for line in self.journal() if line.get("event", {}).get("type") in kinds]


def train_while(trainer: ElasticRingTrainer, action: Callable[[Watcher], T], *, to_the_end: bool = False) -> T:
    """`fit()` here, `action` on a thread; then the run is stopped as `ray job stop` does, or trains `to_the_end`.

    Raises what the action or the training raised.
    """
    over, answers, problems = threading.Event(), list[T](), list[BaseException]()

    def act() -> None:
        try:
            answers.append(action(Watcher(trainer.run_config.folder, over, trainer.scaling_config.mesh.size)))
        except BaseException as problem:
            problems.append(problem)
        if (problems or not to_the_end) and not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    def on_term(number: int, frame: object) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    before = signal.signal(signal.SIGTERM, on_term)
    thread = threading.Thread(target=act, name="watch")
    thread.start()
    try:
        trainer.fit()
    except KeyboardInterrupt:
        if not answers and not problems:
            raise
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)
    if problems:
        raise problems[0]
    return answers[0]
