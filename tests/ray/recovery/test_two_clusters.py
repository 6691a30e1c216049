"""Two clusters, one run, real processes: the first is frozen, the second goes on with its run, the first wakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_ring.state.storage.folder import Storage
from tests.ray.conftest import wait_for

LIMIT_S = 240.0


class Submission:
    """One driver with a Ray of its own, by the command line."""

    def __init__(self, folder: Path, log: Path) -> None:
        small = "--preset laptop --dp 1 --cp 1 --spares 0 --model.num-layers 1 --context 64 --global-batch 1"
        run = f"--steps 100000 --checkpoint-every-steps 50 --run-name shared --run-dir {folder}"
        command = [sys.executable, *f"-m elastic_ring train {small} {run}".split()]
        self.log, self._file = log, log.open("wb")
        environment = {**os.environ, "RAY_ADDRESS": "local"}
        self.driver = psutil.Popen(
            command, stdout=self._file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        self._tree: list[psutil.Process] = []

    def freeze(self) -> None:
        """All of it; a process that starts another one meanwhile is looked at again."""
        while new := [one for one in self.processes() if one not in self._tree]:
            for process in new:
                process.suspend()
                self._tree.append(process)

    def wake(self) -> None:
        for process in reversed(self._tree):
            if process.is_running():
                process.resume()

    def processes(self) -> list[psutil.Process]:
        return [self.driver, *self.driver.children(recursive=True)]

    @property
    def has_ended(self) -> bool:
        return self.driver.poll() is not None

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        for process in {*self._tree, *(self.processes() if self.driver.is_running() else ())}:
            if process.is_running():
                process.kill()
        self._file.close()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def committed(folder: Path) -> list[dict[str, Any]]:
    """The manifests that count, by step."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("checkpoints/*/*/COMMIT.json"))]


@pytest.mark.slow
@pytest.mark.parametrize("purged", [False, True])
def test_a_frozen_submission_whose_run_another_one_has_taken_stops_with_3_and_so_does_that_one_in_its_turn(
    tmp_path, purged
):
    """`purged`: the claims are removed, as by a purge of the storage: while the first is frozen, and once it has
    stopped."""
    folder = tmp_path / "run"
    made = [Submission(folder, tmp_path / "first.log")]
    try:
        wait_for(lambda: bool(committed(folder)) or made[0].has_ended, limit_s=LIMIT_S)
        assert not made[0].has_ended, made[0].said()
        made[0].freeze()
        last = committed(folder)[-1]["step"]
        if purged:
            shutil.rmtree(folder / "terms")
        made.append(Submission(folder, tmp_path / "second.log"))
        wait_for(lambda: committed(folder)[-1]["term"] == 2 or made[1].has_ended, limit_s=LIMIT_S)
        assert f"resumes at step {last}" in made[1].said()
        made[0].wake()
        for submission, term in ((made[0], 2), (made[1], 9)):
            if submission is made[1]:
                assert not submission.has_ended, "whoever has the newest term trains on"
                seen = committed(folder)[-1]["step"]
                wait_for(lambda seen=seen: committed(folder)[-1]["step"] > seen)  # type: ignore[misc]
            tree = submission.processes()
            if submission is made[1] and purged:
                shutil.rmtree(folder / "terms")
            elif submission is made[1]:
                (folder / "terms" / "000009").touch()
            assert submission.driver.wait(LIMIT_S) == 3, submission.said()
            host = socket.gethostname()
            reason = (
                f"{host} has claimed term 2, since 20" if term == 2 else "somebody .terms/000009 names no host. has"
            )
            if purged and term != 2:
                reason = rf"its claim terms/000002 \({host}, since 20.*\) was removed, "
            line = rf"elastic-ring train: run shared in {folder} is not .*: {reason}.* submit this command.*"
            assert re.fullmatch(line, submission.said().splitlines()[-1]), submission.said()
            wait_for(lambda tree=tree: not any(map(is_alive, tree[1:])))  # type: ignore[misc]
        names = [name for name, _ in Storage(str(folder)).names("terms")]
        left = [] if purged else ["terms/000001", "terms/000002", "terms/000009"]
        assert names == left, "the loser claimed nothing on its way out"
        assert {one["term"] for one in committed(folder) if one["step"] > last} == {2}
    finally:
        for submission in made:
            submission.kill()
