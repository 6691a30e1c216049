"""Machines that are taken away with notice, by every road by which it comes, and the deadlines that follow from it."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray

from deploy.drills.autoscaling import expected_samples
from deploy.drills.local_cluster import LocalCluster
from elastic_ring.config import CheckpointConfig
from elastic_ring.runtime.agent import notices
from tests.ray.conftest import check_records, join, num_steps, ran, status, tiny_trainer, wait_for

NOTICE_S = 15
ROADS = ("ray drain-node", "metadata", "SIGTERM")
METADATA = "ELASTIC_RING_TEST_METADATA"


class Metadata(ThreadingHTTPServer):
    """EC2's metadata service, for several machines: the first part of the path is Ray's id of the node."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.base = f"http://127.0.0.1:{self.server_address[1]}"
        self.leaves: dict[str, float] = {}


class Answer(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        self._say("token")

    def do_GET(self) -> None:
        at = self.server.leaves.get(self.path.split("/")[1])
        time_of = datetime.fromtimestamp(at or 0.0, UTC).isoformat()
        self._say(json.dumps({"action": "terminate", "time": time_of}) if at is not None else None)

    def _say(self, text: str | None) -> None:
        self.send_response(200 if text is not None else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *told: Any) -> None:
        pass


def ask() -> float | None:
    """What a node's agent asks, by the name of this function: the provider's own, of this test's server."""
    return notices.aws(f"{os.environ[METADATA]}/{ray.get_runtime_context().get_node_id()}")


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def machines(metadata: Metadata) -> Iterator[LocalCluster]:
    """A head without CPUs, and two nodes of one worker each."""
    ray.shutdown()  # the other modules' Ray
    with (
        tempfile.TemporaryDirectory(prefix="er-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as p,
    ):
        p.setenv("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", str(NOTICE_S))
        p.setenv(METADATA, metadata.base)
        for name, value in (("period_ms", 500), ("timeout_ms", 1000), ("failure_threshold", 3)):
            p.setenv(f"RAY_health_check_{name}", str(value))  # else a killed node is dead after 13 s
        with LocalCluster(Path(folder, "ray"), (0, 1, 1), secrets.token_hex(8)) as cluster:
            join(cluster.address)
            yield cluster
            ray.shutdown()


class Cloud:
    """Takes machines away, and says so before, by one of the ROADS."""

    def __init__(self, road: str, machines: LocalCluster, metadata: Metadata) -> None:
        self._road, self._machines, self._metadata = road, machines, metadata

    def give_notice(self, node: str) -> float:
        """The deadline, in Unix seconds."""
        if self._road == "metadata":
            self._metadata.leaves[node] = time.time() + NOTICE_S
        elif self._road == "SIGTERM":
            self._machines.nodes[self._index(node)].terminate()
        else:
            drain = f"-m ray.scripts.scripts drain-node --address {self._machines.address} --node-id {node}"
            why = "--reason DRAIN_NODE_REASON_PREEMPTION --reason-message spot"
            deadline = f"--deadline-remaining-seconds {NOTICE_S}"
            ran(sys.executable, *f"{drain} {why} {deadline}".split(), timeout_s=60.0)
        return time.time() + NOTICE_S

    def take(self, node: str) -> None:
        self._machines.kill_node(self._index(node))
        wait_for(lambda: not any(one["Alive"] for one in ray.nodes() if one["NodeID"] == node))

    def _index(self, node: str) -> int:
        (port,) = [one["MetricsExportPort"] for one in ray.nodes() if one["NodeID"] == node]
        return [int(address.split(":")[1]) for address in self._machines.metrics].index(port)


def nodes_of(folder: Path) -> list[str]:
    """The members' nodes by rank; none while the run does not train."""
    told = status(folder) if (folder / "status.json").exists() else {"phase": "none"}
    return [member["node"] for member in told["members"]] if told["phase"] == "running" else []


@pytest.mark.slow
@pytest.mark.parametrize(
    "road", [*(pytest.param(one, marks=pytest.mark.soak) for one in (ROADS[0], *ROADS[2:])), ROADS[1]]
)
def test_members_hand_over_before_the_deadline_and_the_last_one_leaves_a_checkpoint(road, machines, metadata, tmp_path):
    """First one of two machines goes, then the other; a new one takes the run up where the last has left it."""
    folder, gate, cloud = tmp_path / "spot", tmp_path / "gate", Cloud(road, machines, metadata)
    trainer = tiny_trainer(
        tmp_path,
        "spot",
        dp=2,
        cp=1,
        spares=0,
        steps=150,
        global_batch=2,
        gate=gate,
        run={"checkpoint_config": CheckpointConfig(every_steps=1_000_000), "notices": f"{__name__}:ask"},
    )
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        try:
            wait_for(lambda: run.done() or (len(nodes_of(folder)) == 2 and num_steps(folder) > 2))
            first, last = nodes_of(folder)
            deadline = cloud.give_notice(last)
            wait_for(lambda: nodes_of(folder) == [first])
            assert time.time() < deadline, "handed over in time"
            cloud.take(last)
            known = num_steps(folder)
            assert not list(folder.glob("checkpoints/*/*/COMMIT.json"))
            deadline = cloud.give_notice(first)
            wait_for(lambda: bool(list(folder.glob("checkpoints/*/*/COMMIT.json"))))
            assert time.time() < deadline, "saved in time"
            cloud.take(first)
            machines.add_node(1)
            wait_for(lambda: len(nodes_of(folder)) == 1 and nodes_of(folder)[0] not in (first, last))
            gate.touch()
        except BaseException:
            ray.shutdown()  # a run without machines would wait for ever
            raise
        result = run.result()
    check_records(trainer, result)
    summary = result.summary
    handed_over, taken_up = summary["recoveries"]
    assert handed_over["cause"].endswith(" drained")
    assert (handed_over["action"], handed_over["steps_rerun"], handed_over["steps_undone"]) == ("mesh shrank", 0, 0)
    (checkpoint,) = summary["checkpoints"]
    assert checkpoint["step"] >= known
    assert taken_up["source"] == "checkpoint"
    assert summary["samples_sha256"] == expected_samples(trainer)
