"""Real processes for tests of process groups: forked from a server that has imported torch, so they start fast.

Each process has a training thread (its main thread, which runs what `start` sends) and a control thread
(which runs what `now` sends, whatever the training thread waits for), as a worker has.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import queue
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from elastic_ring.mesh import Mesh
from elastic_ring.runtime.groups.groups import Connector, Rendezvous, forget_groups
from elastic_ring.runtime.groups.transport import RendezvousStore

HOST = "127.0.0.1"
# Far above what any answer takes: a test that reaches it is stuck, which is its failure.
ANSWER_S = 60.0
# Far above ANSWER_S: what returns did not run into its own timeout.
OPERATION_S = 600.0

PRELOAD = ["pytest", "torch.distributed.fsdp", "tests.unit.groups.processes", "elastic_ring.train.transaction"]

Job = Callable[..., Any]
"""job(me, *args): a function of a test module; `me.rank` is its process's, anything else it may keep there."""


class Membership:
    """Some processes and one rendezvous store, which lives in this process as it lives in no member."""

    def __init__(self, size: int) -> None:
        self.server = RendezvousStore(HOST)
        self.store = self.server.keys
        self._prefixes = itertools.count()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._ends: list[Connection] = []
        self._inboxes: list[dict[str, tuple[bool, Any]]] = [{} for _ in range(size)]
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self.processes.append(process)

    def start(self, rank: int, job: Job, *args: Any) -> None:
        """Hand a job to the training thread of a process; `result` waits for it."""
        self._ends[rank].send(("work", job, args))

    def result(self, rank: int) -> Any:
        """What the job gave; raises what it raised."""
        return self._answer(rank, "work")

    def now(self, rank: int, job: Job, *args: Any) -> Any:
        """Run a job in the control thread of a process, at once."""
        self._ends[rank].send(("now", job, args))
        return self._answer(rank, "now")

    def call(self, rank: int, job: Job, *args: Any) -> Any:
        self.start(rank, job, *args)
        return self.result(rank)

    def all(self, job: Job, *args: Any, ranks: range | tuple[int, ...] | None = None) -> list[Any]:
        """Run a job in the training threads of all processes, or of some; results in the order of ranks."""
        chosen = range(len(self._ends)) if ranks is None else ranks
        for rank in chosen:
            self.start(rank, job, *args)
        return [self.result(rank) for rank in chosen]

    def kill(self, rank: int) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.processes[rank].kill()
        self.processes[rank].join()

    def meeting(self) -> Rendezvous:
        """A place to meet that no earlier generation has used."""
        prefix, server = f"1/{next(self._prefixes)}", self.server
        return Rendezvous(HOST, server.port, prefix, HOST, OPERATION_S, OPERATION_S, server.secret)

    def close(self) -> None:
        for process, end in zip(self.processes, self._ends, strict=True):
            process.kill()
            process.join()
            process.close()
            end.close()

    def _answer(self, rank: int, lane: str) -> Any:
        inbox = self._inboxes[rank]
        while lane not in inbox:
            assert self._ends[rank].poll(ANSWER_S), f"rank {rank} is stuck"
            answered, good, value = self._ends[rank].recv()
            inbox[answered] = (good, value)
        good, value = inbox.pop(lane)
        if good:
            return value
        raise value


@contextmanager
def membership(size: int) -> Iterator[Membership]:
    made = Membership(size)
    try:
        yield made
    finally:
        made.close()


def reaches(at: tuple[str, int], source: str = HOST) -> bool:
    with suppress(TimeoutError), socket.create_connection(at, timeout=0.5, source_address=(source, 0)):
        return True
    return False


# ------------------------------------------------------------ jobs that several test modules use


def connect(me: Any, where: Rendezvous, mesh: Mesh) -> None:
    """Join a generation as the rank of this process; leaves the one before."""
    leave(me)
    me.connector = Connector(where)
    me.groups = me.connector.connect(mesh, me.rank)


def leave(me: Any) -> None:
    """Give up the generation, as a paused worker does."""
    forget_groups()
    me.groups = None
    if getattr(me, "connector", None) is not None:
        me.connector.close()
    me.connector = None


def abort(me: Any) -> None:
    me.connector.abort()


# ------------------------------------------------------------ in the processes


def _serve(rank: int, end: Connection) -> None:
    torch.set_num_threads(1)
    me = SimpleNamespace(rank=rank)
    orders: queue.Queue[tuple[Job, Any]] = queue.Queue()
    sending = threading.Lock()

    def listen() -> None:
        while True:
            try:
                lane, job, args = end.recv()
            except EOFError:
                os._exit(0)
            if lane == "now":
                _run("now", job, args)
            else:
                orders.put((job, args))

    def _run(lane: str, job: Job, args: Any) -> None:
        try:
            answer = (lane, True, job(me, *args))
        except Exception as error:
            answer = (lane, False, _portable(error))
        with sending:
            end.send(answer)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        job, args = orders.get()
        _run("work", job, args)
        del job, args


def _portable(error: Exception) -> Exception:
    """The error itself where it survives pickling, with the trace of its own process in a note."""
    error.add_note(traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    return error
