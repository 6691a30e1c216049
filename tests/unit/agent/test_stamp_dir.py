"""Stamps of runs that are gone are removed, and no living run's: real processes, locks and races."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_ring.config import Timeouts
from elastic_ring.runtime.agent import agent as agent_module
from elastic_ring.runtime.agent import stamp_dir
from elastic_ring.runtime.agent.agent import AgentSpec, NodeAgent
from elastic_ring.runtime.agent.messages import Watch
from elastic_ring.runtime.agent.stamp_dir import GONE, LOCK_NAME, hold, remove_stale
from tests.lock_process import lock_process

LIVING = """
import sys, time
from pathlib import Path
from elastic_ring.monitor.stamps import StampWriter
from elastic_ring.runtime.agent.stamp_dir import hold
folder = Path(sys.argv[1])
fd = hold(folder, 30.0)
stamps = StampWriter(folder / "w.stamp").open()
print("locked", flush=True)
time.sleep(600)
"""
WAIT_S = 60.0
IN_ANOTHER_NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


@contextmanager
def living(folder: Path, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A process that uses `folder` as a worker does."""
    command = [*prefix, sys.executable, "-c", LIVING, str(folder)]
    with lock_process(command) as process:
        yield process


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_what_a_killed_run_left_is_removed_and_told_and_what_a_living_one_uses_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    dead, alive = tmp_path / "elastic_ring-dead-11111111", tmp_path / "elastic_ring-alive-22222222"
    with living(dead) as killed, living(alive):
        assert remove_stale(tmp_path) == []
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert remove_stale(tmp_path) == [dead.name]
        assert names(tmp_path) == [alive.name]
        assert names(alive) == [LOCK_NAME, "w.stamp"]
    assert [line for line in caplog.messages if dead.name in line] == caplog.messages
    assert len(caplog.messages) == 1


def test_a_folder_is_in_use_until_the_last_of_its_processes_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "elastic_ring-run-11111111"
    with living(folder) as worker:
        agent = hold(folder, WAIT_S)
        worker.kill()
        worker.wait()
        assert remove_stale(tmp_path) == []
        os.close(agent)
        assert remove_stale(tmp_path) == [folder.name]


def test_a_process_of_another_pid_namespace_keeps_its_folder(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run([*IN_ANOTHER_NAMESPACE, "true"], check=False).returncode:
        pytest.skip("this machine lets nobody make a PID namespace")
    folder = tmp_path / "elastic_ring-run-11111111"
    with living(folder, *IN_ANOTHER_NAMESPACE):
        assert remove_stale(tmp_path) == []
        assert names(folder) == [LOCK_NAME, "w.stamp"]


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    for name in (f"elastic_ring-{os.geteuid()}", "elastic_ring-gpus", "another-11111111"):
        os.close(hold(tmp_path / name, WAIT_S))
    (tmp_path / "elastic_ring-of-an-earlier-version").mkdir()
    (tmp_path / "elastic_ring-of-an-earlier-version" / "w.stamp").touch()
    for name in ("elastic_ring-no-folder", f"{GONE}no-folder"):
        (tmp_path / name).touch()
    target = tmp_path / "target"
    os.close(hold(target, WAIT_S))
    (tmp_path / "elastic_ring-link-11111111").symlink_to(target)
    before = names(tmp_path)
    assert remove_stale(tmp_path) == []
    assert names(tmp_path) == before
    assert names(target) == [LOCK_NAME]


def test_another_users_folder_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(hold(tmp_path / "elastic_ring-run-11111111", WAIT_S))
    for name in (f"{GONE}half", "elastic_ring-empty-11111111"):
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    monkeypatch.setattr(stamp_dir.os, "getuid", lambda: 12345)
    assert remove_stale(tmp_path) == []
    assert names(tmp_path) == before


def test_whoever_comes_while_a_folder_is_being_removed_gets_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer has the old lock file open already when the folder goes, and gets its lock afterwards: it must not
    believe it."""
    folder, held = tmp_path / "elastic_ring-run-11111111", list[int]()
    opened, gone = threading.Event(), threading.Event()
    os.close(hold(folder, WAIT_S))
    (folder / "w.stamp").touch()
    lock = stamp_dir.fcntl.flock

    def flock(fd: int, kind: int) -> None:
        if kind & stamp_dir.fcntl.LOCK_SH:
            opened.set()
            assert gone.wait(WAIT_S)
        lock(fd, kind)

    newcomer = threading.Thread(target=lambda: held.append(hold(folder, WAIT_S)))
    is_at = stamp_dir._is_at

    def meanwhile(fd: int, where: Path) -> bool:
        if threading.current_thread() is not newcomer:
            newcomer.start()  # the remover has the lock now
            assert opened.wait(WAIT_S)
        return is_at(fd, where)

    monkeypatch.setattr(stamp_dir.fcntl, "flock", flock)
    monkeypatch.setattr(stamp_dir, "_is_at", meanwhile)
    assert remove_stale(tmp_path) == [folder.name]
    gone.set()
    newcomer.join(WAIT_S)
    monkeypatch.undo()
    assert names(folder) == [LOCK_NAME], "a new folder, without what was in the old one"
    assert remove_stale(tmp_path) == []
    os.close(held[0])
    assert remove_stale(tmp_path) == [folder.name]


def test_a_remover_that_is_frozen_at_it_is_waited_for_only_so_long(tmp_path: Path) -> None:
    folder = tmp_path / "elastic_ring-run-11111111"
    frozen = hold(folder, WAIT_S)
    stamp_dir.fcntl.flock(frozen, stamp_dir.fcntl.LOCK_EX)
    with pytest.raises(TimeoutError, match=r"-run-11111111 is being removed, and is not gone after 0\.05 s"):
        hold(folder, 0.05)
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TimeoutError):
        hold(folder, 0.05)
    assert len(os.listdir("/proc/self/fd")) == num_files
    threading.Timer(0.05, os.close, args=(frozen,)).start()  # it goes on, or dies
    os.close(hold(folder, WAIT_S))


def test_whoever_is_not_to_make_a_folder_makes_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hold(tmp_path / "elastic_ring-run-11111111", WAIT_S, make=False)
    assert names(tmp_path) == []


def test_a_folder_whose_maker_died_before_it_held_it_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "elastic_ring-run-11111111"
    folder.mkdir()
    assert remove_stale(tmp_path) == [folder.name]
    assert names(tmp_path) == []


def test_one_that_is_removed_by_its_own_run_goes_whoever_holds_it_and_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = tmp_path / "elastic_ring-run-11111111", list[list[str]]()
    fd = hold(folder, WAIT_S)
    empty = shutil.rmtree

    def rmtree(path: Path, ignore_errors: bool) -> None:
        seen.append(names(tmp_path))
        empty(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(stamp_dir.shutil, "rmtree", rmtree)
    stamp_dir.remove(folder)
    os.close(fd)
    assert [name.startswith(GONE) for (name,) in seen] == [True], "out of the way before the first file went"
    assert names(tmp_path) == []


REMOVE_FOR_EVER = """
import sys
from pathlib import Path
from elastic_ring.runtime.agent.stamp_dir import remove_stale
print("up", flush=True)
while True:
    remove_stale(Path(sys.argv[1]))
"""


def test_under_removers_that_never_rest_no_held_folder_loses_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "elastic_ring-run-11111111"
    command = [sys.executable, "-c", REMOVE_FOR_EVER, str(tmp_path)]
    removers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for remover in removers:
            assert remover.stdout is not None
            assert remover.stdout.readline().strip() == "up"
        for number in range(300):
            fd = hold(folder, WAIT_S)
            path = folder / f"w-{number}.stamp"
            path.touch()
            for _ in range(20):
                assert path.exists()
                assert (folder / LOCK_NAME).exists()
            os.close(fd)
        assert all(remover.poll() is None for remover in removers)
    finally:
        for remover in removers:
            remover.kill()
            remover.communicate()


def test_what_a_remover_left_that_died_on_the_way_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{GONE}half").mkdir()
    assert remove_stale(tmp_path) == []
    assert names(tmp_path) == []


# ------------------------------------------------------------------------------------ the node's agent


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One whose shared memory is a folder of this test, and whose turns are the test's."""
    monkeypatch.setattr(agent_module, "remove_stale", lambda: remove_stale(tmp_path))
    monkeypatch.setattr(NodeAgent, "_watch", lambda self: None)
    made: Any = NodeAgent(AgentSpec("node", Timeouts()))
    yield made
    for fd in made._locks.values():
        os.close(fd)
    made._exits.close()


def worker_spec(process: subprocess.Popen[str], folder: Path) -> Watch:
    return Watch("w", process.pid, str(folder / "w.stamp"), "")


def deaths(agent: Any) -> list[str]:
    """How the agent says that its worker, killed now, died."""
    agent._exits.kill("w")
    while not agent._news.deaths:
        agent._look()
    return [death.how for death in agent._news.deaths]


def test_an_agent_cleans_up_at_its_start_and_holds_the_folder_of_the_workers_that_it_watches(
    tmp_path: Path, agent: Any
) -> None:
    os.close(hold(tmp_path / "elastic_ring-dead-11111111", WAIT_S))
    agent._start()
    assert names(tmp_path) == []
    own = tmp_path / "elastic_ring-own-22222222"
    with living(own) as worker:
        agent._watch_worker(worker_spec(worker, own))
        worker.kill()
    agent._forget("w")
    assert remove_stale(tmp_path) == []
    for fd in agent._locks.values():
        os.close(fd)
    agent._locks.clear()
    assert remove_stale(tmp_path) == [own.name]


def test_an_agent_that_cannot_hold_a_folder_watches_its_worker_all_the_same(
    tmp_path: Path, agent: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, watched = tmp_path / "elastic_ring-own-22222222", list[bool]()

    def refuse(folder: Path, timeout_s: float, *, make: bool) -> int:
        watched.append(agent._exits.kill("w", 0))  # signal 0 asks only
        raise OSError(28, "No space left on device")

    agent._start()
    monkeypatch.setattr(agent_module, "hold", refuse)
    with living(folder) as worker:
        agent._watch_worker(worker_spec(worker, folder))
        assert watched == [True], "watched before anything else: its number may be another's soon"
        assert deaths(agent) == ["killed by SIGKILL"]
    assert [line for line in caplog.messages if "is not locked: [Errno 28]" in line and str(folder) in line]


def test_an_agent_waits_for_no_remover_and_makes_no_folder(
    tmp_path: Path, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Under its lock, in the thread that beats: to wait there is to fall silent."""
    folder = tmp_path / "elastic_ring-own-22222222"
    agent._start()
    with living(tmp_path / "elsewhere") as worker:
        agent._watch_worker(worker_spec(worker, folder))
        assert not folder.exists()
        agent._forget("w")
        frozen = hold(folder, WAIT_S)
        stamp_dir.fcntl.flock(frozen, stamp_dir.fcntl.LOCK_EX)
        begun = threading.Thread(target=agent._watch_worker, args=(worker_spec(worker, folder),), daemon=True)
        begun.start()
        begun.join(WAIT_S)
        assert not begun.is_alive()
        os.close(frozen)
        assert deaths(agent) == ["killed by SIGKILL"]
    assert agent._locks == {}
    not_locked = [line for line in caplog.messages if "not locked" in line]
    assert [("No such file" in line, "is being removed" in line) for line in not_locked] == [
        (True, False),
        (False, True),
    ]


def test_an_agent_that_cannot_clean_up_watches_all_the_same(
    tmp_path: Path, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> list[str]:
        raise PermissionError(13, "Permission denied", "/dev/shm")

    monkeypatch.setattr(agent_module, "remove_stale", refuse)
    agent._start()
    with living(tmp_path / "elastic_ring-own-22222222") as worker:
        agent._watch_worker(worker_spec(worker, tmp_path / "elastic_ring-own-22222222"))
        assert deaths(agent) == ["killed by SIGKILL"]
