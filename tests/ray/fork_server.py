"""Ray's worker processes, forked from one that has imported what a worker imports.

A worker of a test costs two to three seconds of CPU before it says a word: two interpreters, Ray and torch. Here Ray's
own `default_worker.py` runs in a fork of a process that holds torch and this package already, with the arguments,
environment, folder and files that Ray gave it. Everything after the imports is as it is anywhere. Only clusters whose
nodes die are without it: their workers must be children of their raylet.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.ray import walk_of_a_death as walk
from tests.ray.forked_worker import SOCKET

# Not Ray itself: it reads the environment when it is imported.
PRELOADED = (
    "elastic_ring.runtime.worker.actor",
    "torch._dynamo",
    "numpy.random",
    "fsspec.implementations.local",
    "google.protobuf.json_format",
    "jsonschema",
    "requests",
    "yaml",
)
ROOT = Path(__file__).parents[2]
CLIENT = Path(__file__).with_name("forked_worker.py")


def serve(address: str) -> None:
    """Fork a worker for each connection until the pipe at standard input is closed."""
    for name in PRELOADED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    children: set[int] = set()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, wake, 0], [], [])
        if wake in ready:
            os.read(wake, 4096)
        for pid in list(children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                children.discard(pid)
        if 0 in ready:
            break
        if listener in ready:
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                for other in (listener.detach(), wake, waker):
                    os.close(other)
                become_worker(connection)
            connection.close()
            children.add(pid)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def become_worker(connection: socket.socket) -> None:
    """Run the script that the client names, as `exec` would have."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(connection, 4, 3)
    request = json.loads(_read(connection, int.from_bytes(size, "big")))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    of_setup = ("--serialized-runtime-env-context=", "--language=")  # what Ray's own `setup_worker.py` takes
    words = [word for word in request["argv"] if not word.startswith(of_setup)]
    for context in (word.partition("=")[2] for word in request["argv"] if word.startswith(of_setup[0])):
        os.environ.update(json.loads(context).get("env_vars") or {})
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    if walk.FOLDER in request["env"]:
        walk.Walk(Path(request["env"][walk.FOLDER])).begin()
    code = 0
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(address: str) -> None:
    """What `python` does with the words after this script's: a script, or `-m` and a module."""
    os.environ[SOCKET] = address
    fork_workers()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def fork_workers(patch: pytest.MonkeyPatch | None = None) -> None:
    """The nodes of a Ray that this process starts have their workers forked."""
    from ray._private.node import Node  # not at the top: the server's process imports this file

    start = Node.start_raylet

    def start_raylet(node: Node, *words: Any, **options: Any) -> None:
        node._ray_params.setup_worker_path = str(CLIENT)
        start(node, *words, **options)

    (patch or pytest.MonkeyPatch()).setattr(Node, "start_raylet", start_raylet)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the client is gone"
        data += part
    return data


class ForkServer:
    """The server's process, while this is open."""

    def __init__(self, folder: Path) -> None:
        self._address = str(folder / "fork-server")

    def __enter__(self) -> ForkServer:
        command = [sys.executable, "-c", f"from tests.ray.fork_server import serve; serve({self._address!r})"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # it ends when its standard input does

    @contextmanager
    def forking(self) -> Iterator[None]:
        """The nodes of a Ray that is started meanwhile have their workers forked."""
        with pytest.MonkeyPatch.context() as patch:
            fork_workers(patch)
            patch.setenv(SOCKET, self._address)
            yield

    def python(self, *words: str) -> list[str]:
        """A command: `python` with these words, a Ray of whose own has its workers forked."""
        return [sys.executable, "-c", f"from tests.ray.fork_server import run; run({self._address!r})", *words]
