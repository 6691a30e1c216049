"""A command in a terminal of its own, as a person has it: what it prints, its keys, and what it leaves."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import termios
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.signals import heed_interrupts

CTRL_C = b"\x03"
MARK = "ER_TEST_TERMINAL"


def _take_terminal() -> None:
    """For `preexec_fn`, in a new session: its terminal is standard input, and Ctrl-C counts."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    heed_interrupts()


class Terminal:
    """Runs `words`; all their processes have a mark in their environment."""

    def __init__(self, words: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._mark = uuid.uuid4().hex
        self._main, self._side = os.openpty()
        self._text, self._modes = bytearray(), termios.tcgetattr(self._side)
        self.process = subprocess.Popen(
            words,
            cwd=cwd,
            env={**environment, MARK: self._mark},
            stdin=self._side,
            stdout=self._side,
            stderr=self._side,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # no process has the terminal any more
            while part := os.read(self._main, 1 << 16):
                self._text += part

    @property
    def text(self) -> str:
        return self._text.decode(errors="replace").replace("\r\n", "\n")

    def press(self, key: bytes = CTRL_C) -> None:
        os.write(self._main, key)

    def leave(self, timeout_s: float = 30.0) -> None:
        """Press Return until the process ends: an interrupt on its way takes one with it."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self.press(b"\n")
            time.sleep(0.5)

    def wait_until(self, is_there: Callable[[], object], timeout_s: float = 90.0) -> None:
        """Wait for a stage. Fails where the process ends first."""
        deadline = time.monotonic() + timeout_s
        while not is_there():
            assert self.process.poll() is None, f"exit {self.process.returncode} too early: {self.text[-3000:]}"
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {self.text[-3000:]}"
            time.sleep(0.01)

    def children(self) -> set[str]:
        """Names of the processes below."""
        try:
            return {child.name() for child in psutil.Process(self.process.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            return set()

    def has_loaded(self, library: str) -> bool:
        with suppress(OSError):
            return library in Path(f"/proc/{self.process.pid}/maps").read_text()
        return False

    def left(self, within_s: float) -> list[str]:
        """The commands of marked processes that are still there after so long."""
        deadline = time.monotonic() + within_s
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [str(process.as_dict(["pid", "name", "cmdline"]))[:300] for process in left if process.is_running()]

    def _processes(self) -> list[psutil.Process]:
        """By mark, terminal session, or session of Ray: a process that changes its title overwrites its environment."""
        marks = (f"{MARK}={self._mark}".encode(), f"_{self.process.pid}/".encode())
        own = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, psutil.NoSuchProcess):
                text = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
                if os.getsid(int(folder.name)) == self.process.pid or any(mark in text for mark in marks):
                    process = psutil.Process(int(folder.name))
                    own += [process] * (process.status() != psutil.STATUS_ZOMBIE)
        return own

    def modes_are_kept(self) -> bool:
        return termios.tcgetattr(self._side) == self._modes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        for process in self._processes():
            process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._side)
        self._reader.join(5.0)
        os.close(self._main)
