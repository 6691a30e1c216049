"""What a worker's process tells a bench beside its steps: each round of copies, and where its threads are in a step
that takes too long. The product knows nothing of it: its log is read, at a level that operators do not see."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from elastic_ring.runtime.worker.copies import Copies

COPIES_LOG = "elastic_ring.runtime.worker.copies"


class _Rounds(logging.Handler):
    """Writes what the log of copies says as JSON lines."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(logging.DEBUG)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        line: dict[str, Any] = {"at_s": time.monotonic(), "pid": os.getpid(), "said": record.getMessage()}
        if record.levelno == logging.DEBUG and isinstance(record.args, tuple):
            _, size, num_holders, total_s, blocked_s = record.args
            line |= {"bytes": size, "num_holders": num_holders, "total_s": total_s, "blocked_s": blocked_s}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class StepWatch:
    """Writes the stacks of all threads once in a step that takes too long. A thread does it, which needs the GIL:
    `faulthandler.dump_traceback_later` reads the frames of threads that run, and killed a worker so."""

    def __init__(self, file: TextIO, slow_s: float) -> None:
        self._file, self._slow_s = file, slow_s
        self._timer: threading.Timer | None = None

    def step(self) -> None:
        """A step begins."""
        self.pause()
        self._timer = threading.Timer(self._slow_s, self._write)
        self._timer.daemon = True
        self._timer.start()

    def pause(self) -> None:
        """The worker waits for its turn."""
        if self._timer is not None:
            self._timer.cancel()

    def _write(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            self._file.write(f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}\n")
        self._file.flush()


def copies_in_turns(num_steps: int) -> None:
    """In a worker's process. All ranks count the same steps, so all agree."""
    due = Copies._is_due

    def is_due(self: Copies, applied: int) -> bool:
        return due(self, applied) and applied // num_steps % 2 == 0

    Copies._is_due = is_due  # type: ignore[method-assign]


@dataclass(frozen=True)
class WorkerNotes:
    """Where processes write, and after how many seconds without a step one writes the stacks of its threads."""

    folder: Path
    slow_s: float
    copies_in_turns: int = 0
    """Copies are due in the first so many steps, not in as many that follow, and so on. 0: in all."""

    def begin(self) -> StepWatch:
        """In the worker's process: from now on it writes."""
        if self.copies_in_turns:
            copies_in_turns(self.copies_in_turns)
        self.folder.mkdir(parents=True, exist_ok=True)
        log = logging.getLogger(COPIES_LOG)
        log.setLevel(logging.DEBUG)
        log.addHandler(_Rounds((self.folder / f"copies-{os.getpid()}.jsonl").open("a")))
        return StepWatch((self.folder / f"stacks-{os.getpid()}.txt").open("a"), self.slow_s)

    def copies(self) -> list[dict[str, Any]]:
        """All rounds, of all processes, in the order of time."""
        lines = [line for path in self.folder.glob("copies-*.jsonl") for line in path.read_text().splitlines()]
        return sorted((json.loads(line) for line in lines), key=lambda line: float(line["at_s"]))

    def stacks(self) -> dict[str, str]:
        """The stacks of steps that took too long, by process."""
        texts = {path.stem: path.read_text() for path in sorted(self.folder.glob("stacks-*.txt"))}
        return {name: text for name, text in texts.items() if text}
