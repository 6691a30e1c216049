"""The head of the cluster is lost with all its processes and comes back from what Ray keeps in RocksDB or in Redis."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from elastic_ring.runtime.driver.cluster import NAMESPACE, left_behind
from tests.ray.conftest import ROOT, bits, fault_free, num_steps, pids, ran, status, wait_for
from tests.ray.head_driver import STEPS

HEAD, WORKER, PORT, REDIS_PORT = "127.0.0.2", "127.0.0.3", 7491, 7493
SHORT_LEASE_S = 4.0


@dataclass
class Driver:
    process: subprocess.Popen[bytes]
    log: Path

    def says(self, text: str) -> bool:
        assert self.process.poll() is None or text in self.log.read_text(), self.log.read_text()[-3000:]
        return text in self.log.read_text()

    def end(self) -> str:
        """What it has said, once it has ended."""
        self.process.wait(120)
        return self.log.read_text()


class TwoNodes:
    """A head without CPUs and a node of five workers, each with an address and folders of its own."""

    def __init__(self, folder: Path, reconnect_s: int, kept: str) -> None:
        """The worker node waits for `reconnect_s` for a head that does not answer. `kept`: rocksdb or redis."""
        self.folder, self.kept = folder, kept
        self.redis: subprocess.Popen[bytes] | None = None
        self.environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT),
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(reconnect_s),
        }
        self.drivers: list[Driver] = []

    def start_redis(self) -> None:
        """It outlives the head; `stop` ends it."""
        with (self.folder / "redis.log").open("w") as file:
            self.redis = subprocess.Popen(
                ["redis-server", "--port", str(REDIS_PORT), "--save", "", "--dir", str(self.folder)],
                stdout=file,
                stderr=file,
            )
        wait_for(lambda: "Ready to accept connections" in (self.folder / "redis.log").read_text())

    def start_head(self) -> None:
        kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.folder / "gcs")}
        if self.kept == "redis":
            kept = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{REDIS_PORT}", "RAY_external_storage_namespace": "head-lost"}
        # Ray would take the other node's processes for a head that still runs at the address in this file.
        (self.folder / "head" / "ray_current_cluster").unlink(missing_ok=True)
        self._ray(kept, HEAD, "head", f"--head --port={PORT} --num-cpus=0 --include-dashboard=false")

    def start_worker_node(self) -> None:
        self._ray({}, WORKER, "node", f"--address={HEAD}:{PORT} --num-cpus=5")

    def _ray(self, more: dict[str, str], address: str, folder: str, flags: str) -> None:
        own = f"--node-ip-address={address}", f"--temp-dir={self.folder / folder}"
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", *own, *flags.split()]
        ran(*start, env={**self.environment, **more}, timeout_s=120.0)

    def kill_head(self) -> None:
        """SIGKILL the head's control plane, its raylet and all that it started, the coordinator among them."""
        own = self._own()
        (gcs,) = [process for process in own if process.name() == "gcs_server"]
        (raylet,) = [
            process
            for process in own
            if process.name() == "raylet" and f"--node_ip_address={HEAD}" in process.cmdline()
        ]
        started = raylet.children(recursive=True)
        assert "ray::Coordinator" in {process.name() for process in started}
        for process in (gcs, raylet, *started):
            process.kill()

    def _own(self) -> list[psutil.Process]:
        """What `ray start` has started in this test's folder."""
        every = psutil.process_iter(["cmdline"])
        return [process for process in every if str(self.folder) in " ".join(process.info["cmdline"] or [])]

    def driver(self, name: str, gate: Path, lease_s: float, step_s: float) -> Driver:
        words = [f"{HEAD}:{PORT}", WORKER, str(self.folder), "run", str(gate), str(lease_s), str(step_s)]
        log = self.folder / f"{name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.ray.head_driver", *words],
                env=self.environment,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        self.drivers.append(Driver(process, log))
        return self.drivers[-1]

    def stop(self) -> None:
        for driver in self.drivers:
            driver.process.kill()
            driver.process.wait()
        if self.redis is not None:
            self.redis.kill()
            self.redis.wait()
        for process in self._own():
            with suppress(psutil.NoSuchProcess):  # its parent may have ended it
                for child in process.children(recursive=True):
                    child.kill()
                process.kill()


@dataclass
class Outage:
    """For how long the head is away, and for how long a node and a driver wait for it."""

    away_s: float
    reconnect_s: int
    lease_s: float
    step_s: float
    kept: str = "rocksdb"


SHORT, LONG, IN_REDIS = (Outage(0.0, 40, 60.0, 1.0), Outage(75.0, 600, 300.0, 5.0), Outage(0.0, 40, 60.0, 1.0, "redis"))


@pytest.fixture
def nodes(outage: Outage) -> Iterator[TwoNodes]:
    ray.shutdown()  # the other modules' Ray
    # A short path: Ray puts sockets in it, whose paths may have 107 bytes.
    if outage.kept == "redis" and shutil.which("redis-server") is None:
        pytest.skip("no redis-server here: apt-get install --no-install-recommends redis-server")
    nodes = TwoNodes(Path(tempfile.mkdtemp(prefix="head-")), outage.reconnect_s, outage.kept)
    try:
        if outage.kept == "redis":
            nodes.start_redis()
        nodes.start_head()
        nodes.start_worker_node()
        yield nodes
    finally:
        ray.shutdown()
        nodes.stop()
        shutil.rmtree(nodes.folder, ignore_errors=True)


@pytest.fixture
def calm(local_ray: None, undisturbed: Path, tmp_path: Path) -> dict[str, Any]:
    return fault_free(undisturbed, tmp_path, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "outage",
    [SHORT, *(pytest.param(one, marks=pytest.mark.soak) for one in (LONG, IN_REDIS))],
    ids=["short", "75 s", "in Redis"],
)
def test_a_head_that_is_lost_and_comes_back_costs_no_step_and_drivers_attach_again(calm, nodes, outage):
    folder, gate = nodes.folder / "run", nodes.folder / "gate"
    first = nodes.driver("first", gate, outage.lease_s, outage.step_s)
    wait_for(lambda: num_steps(folder) > 1)
    warned = (
        "may be away for 40 s only, not for timeouts.lease_s=60: Ray then ends this driver",
        "Ray then ends all processes of node",
    )
    assert [first.says(text) for text in warned] == [outage.reconnect_s < outage.lease_s] * 2
    members = pids(folder)
    hasty = nodes.driver("hasty", gate, SHORT_LEASE_S, outage.step_s)
    wait_for(lambda: hasty.says("attached to run run"))
    nodes.kill_head()
    before, killed_s = num_steps(folder), time.monotonic()
    wait_for(lambda: first.says(f"the head of the Ray cluster at {HEAD}:{PORT} does not answer; the workers train on"))
    wait_for(lambda: hasty.says("no head of the Ray cluster and no coordinator answered run run for 4 s"))
    wait_for(lambda: hasty.says("Submit the same command again: it attaches to the run if that is still alive"))
    time.sleep(max(0.0, killed_s + outage.away_s - time.monotonic()))
    nodes.start_head()
    wait_for(lambda: first.says("the head and the coordinator answer again after"))
    wait_for(lambda: num_steps(folder) > before)  # what the file of the status says may be of before
    wait_for(lambda: status(folder)["phase"] == "running")
    assert pids(folder) == members
    # The coordinator writes the records, and it was away. A step takes three sequences of `step_s` each.
    assert num_steps(folder) - before >= outage.away_s / (4 * outage.step_s), "they have trained on meanwhile"
    assert "CoordinatorLost" in hasty.end()
    assert hasty.process.returncode == 1
    first.process.kill()
    again = nodes.driver("again", gate, outage.lease_s, outage.step_s)
    wait_for(lambda: again.says("attached to run run"))
    psutil.Process(members[1]).kill()
    wait_for(lambda: members[1] not in pids(folder) and status(folder)["phase"] == "running")
    assert num_steps(folder) < STEPS, "the run must still be under way"
    gate.touch()
    said = again.end()
    assert again.process.returncode == 0, said[-3000:]
    summary = json.loads((folder / "summary.json").read_text())
    assert bits(summary) == bits(calm)
    assert {recovery["steps_undone"] for recovery in summary["recoveries"]} == {0}
    assert any("the coordinator died" in recovery["cause"] for recovery in summary["recoveries"])
    ray.init(address=f"{HEAD}:{PORT}", _node_ip_address=WORKER, namespace=NAMESPACE, log_to_driver=False)
    assert left_behind("run") == []
