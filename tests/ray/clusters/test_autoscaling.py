"""A run on a real autoscaling cluster, from an empty cluster to an empty one; the story is that of the drill."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

from benchmarks.recovery.autoscaling import changing_run
from deploy.drills.autoscaling import MAX_DP, Timeline
from deploy.drills.autoscaling_cluster import AutoscalingCluster
from deploy.drills.local_cluster import free_ports, using
from elastic_ring.runtime.driver.ray_session import cluster
from tests.ray.conftest import (
    are_apart,
    bits,
    check_records,
    fault_free,
    num_steps,
    placements,
    status,
    tiny_trainer,
    wait_for,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: Ray puts sockets in it, whose paths may have 107 bytes."""
    ray.shutdown()  # the other modules' Ray
    with tempfile.TemporaryDirectory(prefix="as-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)  # nodes come and go at the pace of the autoscaler
def test_a_run_grows_and_shrinks_with_its_cluster_by_itself_and_uses_the_same_samples(folder):
    timeline = Timeline()
    summary, missed = changing_run(folder, timeline)
    assert missed == []
    told = [what for _, what in timeline.events]
    assert told[0] == "submitted to an empty cluster"
    assert [what for what in told if what.startswith("shrunk to min_dp")]
    assert sum(what.startswith("grown again") for what in told) == 3
    sizes = [dp for dp, _ in itertools.groupby(one["mesh"]["dp"] for one in summary["generations"])]
    assert sizes == [1, MAX_DP, 1, MAX_DP, 1, MAX_DP, 1, MAX_DP, 1]
    assert timeline.samples[-1][1] == 0, "every node is gone"
    assert max(asked for _, _, _, asked in timeline.samples) == MAX_DP * 2


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_nodes", "cpus_per_node"), [(2, 4), (3, 2)])
def test_on_nodes_that_an_autoscaler_brings_holders_come_apart_and_the_node_of_rank_0_may_die(
    folder, undisturbed, num_nodes, cpus_per_node
):
    """The first node may have room for all, and does not keep them."""
    steps, gate, own = 60, folder / "gate", folder / "scaled"
    scaling = {"spares": 1, "min_dp": 2, "wait_for_resources_s": 180.0, "resources_per_worker": {"CPU": 1.0}}
    trainer = tiny_trainer(folder, "scaled", steps=steps, gate=gate, gate_s=0.5, **scaling)
    (port,) = free_ports(1)
    nodes = AutoscalingCluster(folder, port, cpus_per_node=cpus_per_node, max_nodes=num_nodes, idle_s=60.0)
    with nodes, using(nodes.variables), cluster(0), ThreadPoolExecutor(1) as pool:
        assert nodes.nodes() == []
        run = pool.submit(trainer.fit)
        try:
            wait_for(
                lambda: num_steps(own) > 1,
                lambda: are_apart(placements(own)[-1]) and status(own)["phase"] == "running",
                limit_s=300.0,
            )
            home = placements(own)[-1][0]
            nodes.kill_node(home)
            wait_for(lambda: status(own)["phase"] == "running" and home not in placements(own)[-1], limit_s=180.0)
            assert num_steps(own) < steps, "the run must still be under way"
        finally:
            gate.touch()
        result = run.result()
        check_records(trainer, result)
        calm = fault_free(undisturbed, folder, steps=steps)
    assert bits(result.summary) == bits(calm)
    assert all(recovery["steps_undone"] == 0 for recovery in result.summary["recoveries"])
