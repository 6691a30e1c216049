"""The walk of a dead worker: the files and threads that its death passes through, from the agent's notice to the ring
that is closed again. Followed by a profile of every call in the processes of a real run, of which one worker is killed.

python -m tests.ray.walk_of_a_death             prints the walk, in the order of its threads
python -m tests.ray.walk_of_a_death --calls     its functions too
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "elastic_ring") + "/"
FOLDER = "ELASTIC_RING_TEST_WALK"
"""The environment variable with the folder of the notes."""
TAKES_OVER = {
    "NodeAgent._report_death": "the agent's thread",
    "NodeMonitor._on_message": "the coordinator's thread of connections",
    "Coordinator.notify": "a call of a worker to the coordinator",
    "Decider._handle": "the deciding thread",
    "Worker.command": "a worker's control thread",
    "Worker._build_and_train": "a worker's training thread",
    "Worker._report_failure": "a worker's training thread",
}
"""Functions with which a thread takes the death over: what they call belongs to the walk."""
BEGINS, ENDS = "NodeAgent._report_death", "RecoveryLog.resumed"
LEAVES = {"Worker._train", "Decider._publish", "CoordinatorClient.publish", "AgentServer._serve"}
"""What these call does not: it is the next step's, and records of committed ones."""


MESSAGES = {"Death", "WorkerLost", "MemberFailed", "Stop", "Report", "Build", "Heal", "Resumed"}
"""What carries the death on: the notices, what the core makes of them, and the answers. On the wire by these names."""


class Call(NamedTuple):
    at: float
    process: int
    thread: str
    file: str
    function: str
    has_message: bool


class Walk:
    """Notes this process's calls inside CARRIES: one line each, at once, as a killed process ends without a word."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def begin(self) -> None:
        from elastic_ring.runtime.coordinator.actor import Coordinator
        from elastic_ring.runtime.worker.actor import Worker

        threading.setprofile(self._called)
        for actor, method in ((Coordinator, "notify"), (Worker, "command")):
            setattr(actor, method, self._profiled(getattr(actor, method)))

    def _profiled(self, method: Callable[..., None]) -> Callable[..., None]:
        """Ray calls actors in threads of its own, which `threading.setprofile` does not reach."""

        @wraps(method)
        def profiled(*arguments: Any) -> None:
            sys.setprofile(self._called)
            method(*arguments)

        return profiled

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or not self._is_carried(frame):
            return
        words = threading.current_thread().name, code.co_filename[len(PACKAGE) :], code.co_qualname
        call = (
            f"{time.monotonic():.6f}",
            *words,
            str(int(code.co_qualname == BEGINS or is_message([*frame.f_locals.values()]))),
        )
        os.write(self._file, ("\t".join(call) + "\n").encode())

    def _is_carried(self, frame: FrameType | None) -> bool:
        while frame is not None:
            called = frame.f_code.co_qualname
            if called in LEAVES:
                return False
            if called in TAKES_OVER:
                return True
            frame = frame.f_back
        return False


def is_message(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(map(is_message, value))
    if isinstance(value, dict):
        return value.get("type") in MESSAGES
    return type(value).__name__ in MESSAGES


def calls_of(folder: Path) -> list[Call]:
    """All calls of the walk, in order: until the last answer that the ring is closed."""
    noted = []
    for path in folder.iterdir():
        for line in path.read_text(encoding="utf-8").splitlines():
            at, thread, file, function, has_message = line.split("\t")
            noted.append(Call(float(at), int(path.name), thread, file, function, has_message == "1"))
    begun = min(call.at for call in noted if call.function == BEGINS)
    ended = max(call.at for call in noted if call.function == ENDS)
    return sorted(call for call in noted if begun <= call.at <= ended)


def threads_of(calls: Iterable[Call]) -> dict[str, list[Call]]:
    """Calls by the kind of thread, in the order in which the death comes to them."""
    kinds = dict[tuple[int, str], str]()
    calls_by_kind: dict[str, list[Call]] = {}
    for call in calls:
        if call.function in TAKES_OVER:
            kinds[call.process, call.thread] = TAKES_OVER[call.function]
        kind = kinds.get((call.process, call.thread))
        if kind is not None:  # else it was taken over before the notice: a peer's failure came first
            calls_by_kind.setdefault(kind, []).append(call)
    return calls_by_kind


def follow(folder: Path) -> list[Call]:
    """A run of two rings of two, one worker of which is killed in a step."""
    os.environ[FOLDER] = str(folder)
    import ray

    from elastic_ring.runtime.driver.cluster import NAMESPACE
    from tests.ray.conftest import tiny_trainer
    from tests.ray.fork_server import ForkServer

    with tempfile.TemporaryDirectory() as runs, ForkServer(Path(runs)) as server, server.forking():
        ray.init(address="local", num_cpus=8, namespace=NAMESPACE, include_dashboard=False, logging_level="ERROR")
        tiny_trainer(Path(runs), "walk", spares=1, faults="kill@step=4,phase=backward,rank=3").fit()
        ray.shutdown()
    return calls_of(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", action="store_true", help="print the functions of each file, too")
    parser.add_argument("--all", action="store_true", help="also what runs meanwhile without a message")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = follow(Path(folder))
    threads = threads_of(calls)
    for thread, mine in threads.items():
        mine = [call for call in mine if arguments.all or call.has_message]
        print(f"\n{thread}, in {len({call.process for call in mine})} process(es)")
        for file in sorted({call.file for call in mine}):
            functions = sorted({call.function for call in mine if call.file == file})
            print(f"  {file}" + (f": {', '.join(functions)}" if arguments.calls else ""))
    handed = {call.file for call in calls if call.has_message}
    print(f"\n{len(handed)} files of {len({call.file for call in calls})} get a message, {len(threads) - 1} hand-overs")


if __name__ == "__main__":
    main()
