"""How a process of somebody else's ended is known: its signal or its code, once, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_ring.monitor import exits
from elastic_ring.monitor.exits import ExitNotice, ExitWatch, describe_exit, tail

# A parent that is not us: starts a process that waits for a line, tells its pid, and reaps it on demand.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.readline()\\n" + sys.argv[1]],
                         stdin=subprocess.PIPE, text=True)
print(child.pid, flush=True)
for line in sys.stdin:
    if line == "go\\n":
        child.stdin.write("\\n"); child.stdin.flush()
    if line == "reap\\n":
        child.wait()
        print("reaped", flush=True)
"""


class Parent:
    def __init__(self, body: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.grandchild = int(self._hear())

    def _hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def reap(self) -> None:
        self.say("reap")
        assert self._hear() == "reaped"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def parent() -> Iterator[Callable[[str], Parent]]:
    parents: list[Parent] = []

    def start(body: str) -> Parent:
        parents.append(Parent(body))
        return parents[-1]

    yield start
    for one in parents:
        one.end()


@pytest.fixture
def watch() -> Iterator[ExitWatch]:
    with ExitWatch() as opened:
        yield opened


ENDS = [
    ("import os; os.kill(os.getpid(), 9)", None, signal.SIGKILL, "killed by SIGKILL"),
    ("import ctypes; ctypes.string_at(0)", None, signal.SIGSEGV, "killed by SIGSEGV"),
    ("sys.exit(3)", 3, None, "exit code 3"),
    ("pass", 0, None, "exit code 0"),
    ("import os, threading; threading.Thread(target=os._exit, args=(5,)).start()", 5, None, "exit code 5"),
]


@pytest.mark.parametrize("reaped", [False, True], ids=["zombie", "reaped"])
@pytest.mark.parametrize(("body", "code", "number", "words"), ENDS, ids=[end[3] for end in ENDS])
def test_the_end_of_a_grandchild_is_known_before_and_after_it_is_reaped(
    parent: Callable[[str], Parent],
    watch: ExitWatch,
    body: str,
    code: int | None,
    number: int | None,
    words: str,
    reaped: bool,
) -> None:
    other = parent(body)
    watch.watch(other.grandchild, "w-1")
    assert watch.wait(0) == []
    other.say("go")
    if reaped:
        other.reap()
    (notice,) = watch.wait(30)
    assert (notice.pid, notice.key) == (other.grandchild, "w-1")
    if reaped and notice.source == "unknown":
        pytest.skip("this kernel keeps no record of a reaped process (Linux before 6.15)")
    assert (notice.exit_code, notice.signal) == (code, number)
    assert describe_exit(notice) == words
    assert notice.source == ("pidfd" if reaped else "proc")
    assert watch.wait(0) == []


def test_only_those_that_ended_are_reported(parent: Callable[[str], Parent], watch: ExitWatch) -> None:
    others = [parent("pass") for _ in range(3)]
    for index, other in enumerate(others):
        watch.watch(other.grandchild, f"w-{index}")
    watch.unwatch("w-2")
    watch.unwatch("w-2")
    os.kill(others[2].grandchild, signal.SIGKILL)
    os.kill(others[1].grandchild, signal.SIGTERM)
    assert [(n.key, describe_exit(n)) for n in watch.wait(30)] == [("w-1", "killed by SIGTERM")]
    assert watch.kill("w-0")
    assert [(n.key, describe_exit(n)) for n in watch.wait(30)] == [("w-0", "killed by SIGKILL")]
    assert not watch.kill("w-0")
    assert watch.wait(0) == []


def test_a_stopped_process_is_killed_through_the_watch(parent: Callable[[str], Parent], watch: ExitWatch) -> None:
    other = parent("pass")
    watch.watch(other.grandchild, "w-0")
    os.kill(other.grandchild, signal.SIGSTOP)
    assert watch.kill("w-0")
    (notice,) = watch.wait(30)
    assert notice.signal == signal.SIGKILL


def test_a_process_that_is_gone_already_is_reported_at_once(watch: ExitWatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    watch.watch(child.pid, "w-9")
    (notice,) = watch.wait(None)
    assert (notice.key, notice.source, describe_exit(notice)) == ("w-9", "unknown", "ended, cause unknown")


def test_an_older_kernel_leaves_only_the_zombie_to_ask(
    parent: Callable[[str], Parent], watch: ExitWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request number that no kernel knows gives what an old kernel gives to the real one."""
    monkeypatch.setattr(exits, "_GET_INFO", exits._GET_INFO ^ 0x7F)
    seen: list[ExitNotice] = []
    for reaped in (False, True):
        other = parent("sys.exit(4)")
        watch.watch(other.grandchild, "w-1")
        other.say("go")
        if reaped:
            other.reap()
        seen += watch.wait(30)
    assert [(n.source, n.exit_code, n.signal) for n in seen] == [("proc", 4, None), ("unknown", None, None)]


def test_no_descriptor_is_left_open(parent: Callable[[str], Parent]) -> None:
    other = parent("pass")
    before = len(os.listdir("/proc/self/fd"))
    with ExitWatch() as watch:
        watch.watch(other.grandchild, "a")
        watch.watch(other.grandchild, "b")
        watch.unwatch("a")
    with ExitWatch() as watch:
        watch.watch(other.grandchild, "a")
        os.kill(other.grandchild, signal.SIGKILL)
        assert len(watch.wait(30)) == 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_signal_without_a_name_is_still_told() -> None:
    assert describe_exit(ExitNotice(1, "w", 0.0, None, 40, "proc")) == "killed by signal 40"


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "w-1.log"
    assert tail(log, 3) == []
    log.write_bytes(b"one\ntwo\nthr\xffee\nfour")
    assert tail(log, 2) == ["thr\ufffdee", "four"]
    assert tail(log, 9) == ["one", "two", "thr\ufffdee", "four"]
    assert tail(log, 0) == []
    log.write_text("".join(f"line {n}\n" for n in range(10_000)))
    assert tail(log, 2) == ["line 9998", "line 9999"]
    assert tail(log, 100, max_bytes=25) == ["line 9998", "line 9999"]


def test_a_death_is_seen_when_it_begins_and_told_of_again_when_its_cause_is_known(
    parent: Callable[[str], Parent],
) -> None:
    with ExitWatch() as watch:
        someone = parent("input()")
        watch.watch(someone.grandchild, "one")
        assert watch.ending() == []
        os.kill(someone.grandchild, signal.SIGKILL)
        notices = watch.wait(60)
        assert [notice.signal for notice in notices] == [signal.SIGKILL]
    with ExitWatch() as watch:
        someone = parent("input()")
        watch.watch(someone.grandchild, "two")
        os.kill(someone.grandchild, signal.SIGKILL)
        seen: list[str] = []
        while not seen:
            seen = watch.ending()
        assert seen == ["two"]
        assert watch.ending() == []
        assert [notice.key for notice in watch.wait(60)] == ["two"]
