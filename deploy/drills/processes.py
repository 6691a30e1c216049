"""The processes of a drill: a training as a user starts it, and the end of everything that carries the drill's mark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from elastic_ring.config import environment

MARK = "ELASTIC_RING_DRILL"  # in the environment of every process that a drill may kill
LOOK_S = 0.02


def start_training(
    arguments: Sequence[str], log: Path, token: str, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """`elastic-ring train` with these arguments, `variables` beside this process's; what it says goes into `log`."""
    with log.open("ab") as told:
        return subprocess.Popen(
            [sys.executable, "-m", "elastic_ring", "train", *arguments],
            env={**environment(), MARK: token, **variables},
            stdout=told,
            stderr=told,
        )


def marked(token: str) -> list[psutil.Process]:
    """The live processes whose environment has the token, this one left out."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and _has(process, token)]


def kill_everything(token: str) -> int:
    """SIGKILL every process whose environment has the token, again until none is left; how many there were."""
    killed: set[int] = set()
    while found := marked(token):
        for process in found:
            killed.add(process.pid)
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        time.sleep(LOOK_S)
    return len(killed)


def _has(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(MARK) == token and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
