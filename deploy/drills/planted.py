"""What the alert drills plant: real signals, cut connections, files in the way, memory that is taken.

Each function gets the scene of a run that trains, and returns when the fault is planted; what has to go on longer goes
on in a thread until the scene is over.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from deploy.drills.local_cluster import LocalCluster
from deploy.drills.processes import LOOK_S, MARK, marked
from elastic_ring.config import RunConfig, environment
from elastic_ring.data.sampling.order import Order
from elastic_ring.monitor.host_memory import HostMemory
from elastic_ring.monitor.metrics import METRICS_NAME, read_status
from elastic_ring.runtime.agent.health import Nvml

GONE_ON_S = 120.0
STOPPED_S, RUNNING_S = 0.1, 0.025
"""Much less than a step, so that every step takes five times as long."""
PIDFD_GETFD = 438  # the number of the system call on every architecture that has it
USUAL_S = 80.0
POISON_BATCH, POISON_CONTEXT = 2, 256
FIRST_CALM_STEPS = 120
SENTENCE = "A ring that trains is a quiet ring, and nothing is to be seen of it. "
WORDS = ("ring", "rank", "step", "vote", "shard", "spare", "mesh", "heal")
LARGE_BYTES, SLOW_S = 192 << 20, 0.5
HEAT_CELSIUS = 3
BALLAST = 0.06
"""Of the node's memory."""


@dataclass
class Scene:
    """A run on a cluster of the drill's own, seen from outside."""

    run: RunConfig
    cluster: LocalCluster
    training: subprocess.Popen[bytes]
    token: str
    over: threading.Event = field(default_factory=threading.Event)

    def status(self) -> dict[str, Any]:
        return dict(read_status(self.run.folder) or {})

    def num_steps(self) -> int:
        path = self.run.folder / METRICS_NAME
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def members(self) -> list[int]:
        """PIDs of the members by rank."""
        found = sorted(self.status().get("members", ()), key=lambda member: int(member["global_rank"]))
        return [int(member["pid"]) for member in found]

    def actors(self, kind: str) -> list[psutil.Process]:
        """The live processes of the drill that hold an actor of this class."""
        found = []
        for process in marked(self.token):
            with suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(f"ray::{kind}"):
                    found.append(process)
        return found

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait until it holds. Ends the drill when the training ends, or GONE_ON_S are over."""
        deadline = time.monotonic() + GONE_ON_S
        while not holds():
            if self.training.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"drill: {what} has not happened; look at {self.run.folder}")
            time.sleep(LOOK_S)

    def more_steps(self, number: int) -> None:
        goal = self.num_steps() + number
        self.until(f"step {goal}", lambda: self.num_steps() >= goal)

    def in_thread(self, repeated: Callable[[], None], pause_s: float = LOOK_S) -> None:
        """Call it again and again until the scene is over."""

        def go() -> None:
            while not self.over.wait(pause_s):
                with suppress(psutil.Error, ProcessLookupError):
                    repeated()

        threading.Thread(target=go, name="drill", daemon=True).start()


# ---------------------------------------------------------------- processes and nodes


def nothing_more(scene: Scene) -> None:
    """The run's own settings have planted it."""


def stop_driver(scene: Scene) -> None:
    scene.training.send_signal(signal.SIGSTOP)


def kill_head(scene: Scene) -> None:
    """The coordinator's node, and with it everything that could export its metrics."""
    scene.cluster.kill_node(0)


def kill_second_node(scene: Scene) -> None:
    scene.cluster.kill_node(1)


def kill_coordinators(scene: Scene) -> None:
    """Three times, each once the last one decides again."""
    for _ in range(3):
        (coordinator,) = scene.actors("Coordinator")
        term = int(scene.status()["term"])
        coordinator.kill()
        scene.until("a new coordinator", lambda term=term: int(scene.status().get("term", 0)) > term)  # type: ignore[misc]
        scene.until("that it trains", lambda: scene.status()["phase"] == "running")


def stop_starting(scene: Scene) -> None:
    """Every worker as soon as it is there."""

    def stop() -> None:
        for worker in scene.actors("Worker"):
            worker.suspend()

    scene.in_thread(stop)


def kill_starting(scene: Scene) -> None:
    """Every worker that is not a member, until none is started any more for a while."""

    def kill() -> None:
        members = scene.members()
        for worker in scene.actors("Worker"):
            if members and worker.pid not in members:
                worker.kill()

    scene.in_thread(kill)


def slow_last_rank(scene: Scene) -> None:
    """Stop and continue the member of the last rank all the time: it computes in a fifth of the time."""

    def stop_and_continue() -> None:
        for pid in scene.members()[-1:]:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)

    scene.in_thread(stop_and_continue, RUNNING_S)


def slow_after_a_while(scene: Scene) -> None:
    """As `slow_last_rank`, once the run has had its pace for longer than the drill then needs."""
    begun = time.monotonic()
    scene.until("its usual pace", lambda: time.monotonic() - begun > USUAL_S)
    slow_last_rank(scene)


# ---------------------------------------------------------------- connections


def cut_connections(scene: Scene) -> None:
    """Three times: shut the connections between two members down, as a network does that drops them; nobody dies."""
    for _ in range(3):
        scene.until("that it trains", lambda: scene.status()["phase"] == "running")
        scene.more_steps(3)
        first, second = scene.members()[:2]
        generation = scene.status()["generation"]
        if not shut_between(first, second):
            raise SystemExit(f"drill: no connection between the members {first} and {second} was cut")
        scene.until("a rebuilt ring", lambda g=generation: scene.status()["generation"] > g)  # type: ignore[misc]


def shut_between(first: int, second: int) -> int:
    """Shut down every TCP connection of one process with another, from outside; how many. Needs ptrace's permission."""
    theirs = {tuple(one.laddr) for one in psutil.Process(second).net_connections("tcp") if one.raddr}
    own = [one for one in psutil.Process(first).net_connections("tcp") if one.raddr and tuple(one.raddr) in theirs]
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(first)
    try:
        for one in own:
            duplicate = libc.syscall(PIDFD_GETFD, pidfd, one.fd, 0)
            if duplicate < 0:
                why = os.strerror(ctypes.get_errno())
                raise SystemExit(f"drill: the connections of process {first} are out of reach: {why}")
            with socket.socket(fileno=duplicate) as reached:
                reached.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(pidfd)
    return len(own)


# ---------------------------------------------------------------- data, storage and memory


def poisoned_words(folder: Path) -> tuple[str, ...]:
    """Words in random order, of which a model learns all but the order: the loss is even, and far below noise's."""
    choose = random.Random(1)
    return poisoned(folder, lambda: " ".join(choose.choice(WORDS) for _ in range(POISON_CONTEXT)))


def poisoned_sentence(folder: Path) -> tuple[str, ...]:
    """A sentence again and again: the gradient of what is known by heart is small, and stays so."""
    return poisoned(folder, lambda: SENTENCE * POISON_CONTEXT)


def poisoned(folder: Path, calm: Callable[[], str], num_steps: int = 20_000) -> tuple[str, ...]:
    """The settings for a corpus of `calm` texts in which the sequences of some stretches of steps are noise.

    The sample order says which these are. How fast a machine trains is not known: good stretches and bad ones are ever
    longer, so that some are as long as a rule wants them.
    """
    noise, order = random.Random(0), Order(0, POISON_BATCH, POISON_BATCH * num_steps)
    pieces = [calm()[:POISON_CONTEXT].encode() for _ in range(POISON_BATCH * num_steps)]
    step, length = FIRST_CALM_STEPS, FIRST_CALM_STEPS / 2
    while step < num_steps:
        for bad in range(step, min(num_steps, step + int(length))):
            for sample in order.sample_ids(bad):
                # Characters of two bytes: noise to the model, and yet text to the reader of files.
                pieces[sample] = "".join(chr(noise.randrange(0x80, 0x800)) for _ in range(POISON_CONTEXT // 2)).encode()
        step, length = step + int(4 * length), 1.5 * length
    path = folder / "poisoned.txt"
    path.write_bytes(b"".join(pieces))
    return ("--data", str(path), "--seed", "0", "--global-batch", str(POISON_BATCH), "--context", str(POISON_CONTEXT))


class SlowFile(BaseHTTPRequestHandler):
    """One file of LARGE_BYTES over HTTP, by parts, each SLOW_S late."""

    def do_HEAD(self) -> None:
        self._answer(200, LARGE_BYTES)

    def do_GET(self) -> None:
        time.sleep(SLOW_S)
        asked = self.headers.get("Range", f"bytes=0-{LARGE_BYTES - 1}").removeprefix("bytes=").partition("-")
        first, last = int(asked[0]), min(int(asked[2] or LARGE_BYTES), LARGE_BYTES - 1)
        self._answer(206, last + 1 - first, f"bytes {first}-{last}/{LARGE_BYTES}")
        with suppress(OSError):  # a reader that has enough goes
            begin, num_bytes = first % len(SENTENCE), last + 1 - first
            text = SENTENCE * ((begin + num_bytes) // len(SENTENCE) + 1)
            self.wfile.write(text.encode()[begin : begin + num_bytes])

    def _answer(self, status: int, num_bytes: int, part: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(num_bytes))
        self.send_header("Accept-Ranges", "bytes")
        if part:
            self.send_header("Content-Range", part)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the drill's own lines are what is read."""


def slow_corpus(folder: Path) -> tuple[str, ...]:
    """Text of a store that is slow, and more of it than a worker keeps."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowFile)
    threading.Thread(target=server.serve_forever, name="store", daemon=True).start()
    return ("--data", f"http://127.0.0.1:{server.server_port}/text.txt")


def block_checkpoints(scene: Scene) -> None:
    """A file where the checkpoints' folder was."""
    folder = scene.run.folder / "checkpoints"
    scene.until("a checkpoint", lambda: any(folder.glob("*/*/COMMIT.json")))
    folder.rename(scene.run.folder / "checkpoints-aside")
    folder.write_text("in the way of a drill")


def fill_memory(scene: Scene) -> None:
    """A process that takes BALLAST of the node's memory."""
    size = int(BALLAST * HostMemory().read().total_bytes)
    code = f"b = bytearray(b'x') * {size}; import time; time.sleep({GONE_ON_S * 5})"
    subprocess.Popen([sys.executable, "-c", code], env={**environment(), MARK: scene.token})


def heat_gpu(scene: Scene) -> None:
    """A process that multiplies matrices on the first GPU for as long as the drill lasts."""
    code = "import torch; a = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16)\nwhile True: a = a @ a"
    subprocess.Popen([sys.executable, "-c", code], env={**environment(), MARK: scene.token})


def heat_limit() -> tuple[tuple[str, str], ...]:
    """The rule's limit, so low that a GPU at work passes it: nobody overheats a GPU for a drill."""
    nvml = Nvml()
    hottest = max((gpu["temperature_celsius"] for gpu in nvml.read().values()), default=None) if nvml.open() else None
    if hottest is None:
        raise ValueError("ElasticRingDeviceHot: NVML tells no GPU's temperature here; install nvidia-ml-py")
    return (("> 87", f"> {hottest + HEAT_CELSIUS:.0f}"),)


def memory_limit() -> tuple[tuple[str, str], ...]:
    """The rule's limit, halfway to what the ballast makes: nobody fills a machine for a drill."""
    return (("> 0.91", f"> {HostMemory().read().share + BALLAST / 2:.3f}"),)
