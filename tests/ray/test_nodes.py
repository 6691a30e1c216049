"""Several raylets on one machine: whole nodes die, new ones join, and replicas never share a node."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from elastic_ring.monitor.metrics import read_metrics
from elastic_ring.runtime.cluster import NAMESPACE, left_behind
from tests.ray.conftest import check_records, tiny_trainer


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, so that the coordinator outlives the nodes, and three nodes of two workers each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def kill_node(node: Any) -> None:
    """SIGKILL a raylet and everything it started."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for process in (raylet, *raylet.children(recursive=True)):
        process.kill()


def kill_after_step(folder: Path, step: int, node: Any, killed: list[int]) -> threading.Thread:
    """Kill a node at a random moment once `step` has committed."""

    def go() -> None:
        while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder)) <= step:
            time.sleep(0.01)
        time.sleep(random.Random(step).random() * 0.3)
        killed.append(len(read_metrics(folder)))
        kill_node(node)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    return thread


def test_a_node_that_dies_with_a_whole_ring_changes_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    calm = tiny_trainer(tmp_path, "calm-nodes", spares=0).fit().summary
    trainer = tiny_trainer(tmp_path, "node", spares=2, faults="kill-node@step=4,phase=backward,rank=1")
    result = trainer.fit()
    check_records(trainer, result)
    planned = result.summary
    assert planned["weights_sha256"] == calm["weights_sha256"]
    assert planned["losses"] == calm["losses"]
    assert planned["samples_sha256"] == calm["samples_sha256"]
    (recovery,) = planned["recoveries"]
    assert recovery["action"] == "spares took their places"
    assert recovery["cause"].count("rank") == 2
    assert left_behind("node") == []


def test_a_node_that_dies_at_a_random_moment_is_replaced_by_one_that_joins(cluster: Cluster, tmp_path: Path) -> None:
    calm = tiny_trainer(tmp_path, "calm-random", spares=0, steps=20, slow_s=0.3).fit().summary
    killed: list[int] = []
    victim = cluster.list_all_nodes()[1]
    thread = kill_after_step(tmp_path / "random-node", 3, victim, killed)
    trainer = tiny_trainer(tmp_path, "random-node", spares=2, steps=20, slow_s=0.3)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        thread.join()
        cluster.add_node(num_cpus=2)
        result = run.result()
    check_records(trainer, result)
    summary = result.summary
    assert len(killed) == 1
    assert killed[0] < 20
    assert summary["samples_sha256"] == calm["samples_sha256"]
    if all(recovery["exact"] for recovery in summary["recoveries"]):
        assert summary["weights_sha256"] == calm["weights_sha256"]
    assert all(recovery["steps_undone"] == 0 for recovery in summary["recoveries"])
