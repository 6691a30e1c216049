"""A Ray cluster of a drill's own on this machine: a head and further nodes, each with as many CPUs as it is given."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from deploy.drills.processes import LOOK_S, MARK, kill_everything
from elastic_ring.config import environment
from elastic_ring.runtime.driver import access

HOST = "127.0.0.1"
START_S = 120.0


def new_access() -> dict[str, str]:
    """Variables of a Ray for one purpose, and of its clients: a token that the user has set counts."""
    return {access.MODE: "token", access.TOKEN: environment().get(access.TOKEN) or secrets.token_hex(32)}


@contextmanager
def using(variables: Mapping[str, str]) -> Iterator[None]:
    """Connect to Ray with these variables within."""
    before = {name: environment().get(name) for name in variables}
    access.use(variables)
    try:
        yield
    finally:
        access.use(before)


class LocalCluster:
    """`folder` must have a short path, as Ray puts sockets there. Use as a context; what it started is killed."""

    def __init__(self, folder: Path, cpus: Sequence[int], token: str) -> None:
        """`cpus` of each node, the head first."""
        self._folder, self._cpus, self._token = folder, cpus, token
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._access = new_access()
        self.address = ""
        self.metrics: list[str] = []
        """HOST:PORT of each node, where Prometheus reads."""

    @property
    def variables(self) -> dict[str, str]:
        """Of a process that connects to it."""
        return {**self._access, "RAY_ADDRESS": self.address}

    def __enter__(self) -> LocalCluster:
        try:
            for cpus in self._cpus:
                self.add_node(cpus)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        kill_everything(self._token)
        for node in self.nodes:
            node.wait()

    def add_node(
        self,
        cpus: int,
        more: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> int:
        """One more node; the first is the head. `more`: further arguments of `ray start`; `variables`: of the node's
        processes; `before`: a command that ends by executing its last arguments. Returns its index."""
        port, metrics = free_ports(2)
        joins = [f"--address={self.address}"]
        if not self.nodes:
            self.address = f"{HOST}:{port}"
            joins = ["--head", f"--port={port}", f"--temp-dir={self._folder}", "--include-dashboard=false"]
        self.metrics.append(f"{HOST}:{metrics}")
        self._start([*joins, f"--num-cpus={cpus}", f"--metrics-export-port={metrics}", *more], variables or {}, before)
        return len(self.nodes) - 1

    def is_whole(self, index: int) -> bool:
        """Whether the node's Ray runs and is not stopped."""
        if self.nodes[index].poll() is not None:
            return False
        children = psutil.Process(self.nodes[index].pid).children()
        return any("raylet" in child.name() for child in children) and all(
            child.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) for child in children
        )

    def _start(self, arguments: Sequence[str], more: Mapping[str, str], before: Sequence[str]) -> None:
        index = len(self.nodes)
        log = self._folder.parent / f"node-{index}.log"
        variables = {
            **environment(),
            **self._access,
            MARK: self._token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_usage_threshold": "0.98",
            **more,
        }
        variables.pop("RAY_ADDRESS", None)
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={HOST}"]
        with log.open("wb") as told:
            self.nodes.append(subprocess.Popen([*before, *ray, *arguments], env=variables, stdout=told, stderr=told))
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in (said := log.read_text(errors="replace")):
            if self.nodes[-1].poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"drill: node {index} of the drill's Ray did not start:\n{said[-2000:]}")
            time.sleep(LOOK_S)

    def kill_node(self, index: int) -> None:
        """SIGKILL a node's Ray and all that it has started, as when a machine fails."""
        with suppress(psutil.NoSuchProcess):
            node = psutil.Process(self.nodes[index].pid)
            for process in [node, *node.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now."""
    probes = [socket.socket() for _ in range(number)]
    try:
        for probe in probes:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
