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
from elastic_ring.runtime import node_agent, stamp_folder
from elastic_ring.runtime.node_agent import NodeAgent
from elastic_ring.runtime.stamp_folder import GONE, LOCK_NAME, hold, remove_stale

LIVING = """
import sys, time
from pathlib import Path
from elastic_ring.monitor.stamps import StampWriter
from elastic_ring.runtime.stamp_folder import hold
folder = Path(sys.argv[1])
fd = hold(folder)
stamps = StampWriter(folder / "w.stamp").open()
print("held", flush=True)
time.sleep(600)
"""
IN_ANOTHER_NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


@contextmanager
def living(folder: Path, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A process that uses `folder` as a worker does."""
    command = [*prefix, sys.executable, "-c", LIVING, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "held"
            yield process
        finally:
            process.kill()


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
        agent = hold(folder)
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
    for name in ("elastic_ring-kernels", "elastic_ring-gpus", "another-11111111"):
        os.close(hold(tmp_path / name))
    (tmp_path / "elastic_ring-of-an-earlier-version").mkdir()
    (tmp_path / "elastic_ring-no-folder").touch()
    target = tmp_path / "target"
    os.close(hold(target))
    (tmp_path / "elastic_ring-link-11111111").symlink_to(target)
    before = names(tmp_path)
    assert remove_stale(tmp_path) == []
    assert names(tmp_path) == before
    assert names(target) == [LOCK_NAME]


def test_another_users_folder_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(hold(tmp_path / "elastic_ring-run-11111111"))
    monkeypatch.setattr(stamp_folder.os, "getuid", lambda: 12345)
    assert remove_stale(tmp_path) == []


def test_whoever_comes_while_a_folder_is_being_removed_gets_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer has the old lock file open already when the folder goes; it must not believe that lock."""
    folder, held, opened = tmp_path / "elastic_ring-run-11111111", list[int](), threading.Event()
    os.close(hold(folder))
    (folder / "w.stamp").touch()
    lock = stamp_folder.fcntl.flock

    def flock(fd: int, kind: int) -> None:
        if kind == stamp_folder.fcntl.LOCK_SH:
            opened.set()
        lock(fd, kind)

    newcomer = threading.Thread(target=lambda: held.append(hold(folder)))
    is_at = stamp_folder._is_at

    def meanwhile(fd: int, where: Path) -> bool:
        if threading.current_thread() is not newcomer:
            newcomer.start()  # the remover has the lock now
            assert opened.wait(60.0)
        return is_at(fd, where)

    monkeypatch.setattr(stamp_folder.fcntl, "flock", flock)
    monkeypatch.setattr(stamp_folder, "_is_at", meanwhile)
    assert remove_stale(tmp_path) == [folder.name]
    newcomer.join(60.0)
    monkeypatch.undo()
    assert names(folder) == [LOCK_NAME], "a new folder, without what was in the old one"
    assert remove_stale(tmp_path) == []
    os.close(held[0])
    assert remove_stale(tmp_path) == [folder.name]


REMOVE_FOR_EVER = """
import sys
from pathlib import Path
from elastic_ring.runtime.stamp_folder import remove_stale
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
            fd = hold(folder)
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


def test_an_agent_cleans_up_at_its_start_and_holds_the_folder_of_the_workers_that_it_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.close(hold(tmp_path / "elastic_ring-dead-11111111"))
    monkeypatch.setattr(node_agent, "remove_stale", lambda: remove_stale(tmp_path))
    monkeypatch.setattr(NodeAgent, "_watch", lambda self: None)
    agent: Any = NodeAgent("node", Timeouts())
    agent._start()
    assert names(tmp_path) == []
    own = tmp_path / "elastic_ring-own-22222222"
    card = {"worker": "w", "pid": os.getpid(), "stamp_path": str(own / "w.stamp"), "log_path": ""}
    agent._begin_to_watch(card)
    agent._forget("w")
    assert remove_stale(tmp_path) == []
    for fd in agent._held.values():
        os.close(fd)
    assert remove_stale(tmp_path) == [own.name]
