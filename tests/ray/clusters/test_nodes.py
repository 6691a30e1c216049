"""Several raylets on one machine: whole nodes die, new ones join, and replicas never share a node."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from elastic_ring import CheckpointConfig
from elastic_ring.cli import main
from elastic_ring.monitor.journal import read
from elastic_ring.monitor.metrics import read_metrics
from elastic_ring.runtime.coordinator.node_monitor import POLL_S
from elastic_ring.runtime.driver.cluster import workers_on
from tests.ray.conftest import (
    are_apart,
    bits,
    check_records,
    cluster_of,
    events,
    fault_free,
    finished,
    num_steps,
    placements,
    status,
    tiny_trainer,
    wait_for,
)
from tests.ray.fork_server import ForkServer


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three nodes of two workers each."""
    with cluster_of(*3 * [{"num_cpus": 2}]) as cluster:
        yield cluster


def processes_of(node: Any) -> list[psutil.Process]:
    """A raylet and everything it started."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [raylet, *raylet.children(recursive=True)]


def events_of(folder: Path, node: str) -> list[str]:
    return [event["type"] for event in events(folder) if event.get("node") == node and event["type"].startswith("Node")]


def members_nodes(folder: Path) -> set[str]:
    return {member["node"] for member in status(folder)["members"]}


def occupied(cluster: Cluster, folder: Path) -> Any:
    """A node that has members of the run."""
    return next(node for node in cluster.list_all_nodes() if node.node_id in members_nodes(folder))


@pytest.mark.slow
def test_a_node_that_dies_with_a_whole_ring_changes_no_bit(cluster, tmp_path, undisturbed):
    calm = fault_free(undisturbed, tmp_path)
    faults = "kill-node@step=4,phase=backward,rank=1"
    planned = finished(tiny_trainer(tmp_path, "node", spares=2, faults=faults)).summary
    assert bits(planned) == bits(calm)
    (recovery,) = planned["recoveries"]
    assert recovery["action"] == "spares took their places"
    assert recovery["cause"].count("rank") == 2


@pytest.mark.slow
@pytest.mark.soak
def test_a_ring_over_two_nodes_sends_keys_between_them_once_and_loses_one_of_them(cluster, tmp_path, undisturbed):
    """Two ranks of each node: the second gets from its neighbour what the first has fetched. The bits are those of a
    ring on one node, where that ran before."""
    calm = fault_free(undisturbed, tmp_path, 1, 4)
    trainer = tiny_trainer(
        tmp_path,
        "over-nodes",
        dp=1,
        cp=4,
        spares=2,
        faults="kill-node@step=6,phase=backward,rank=2",
        run={"copies": "1", "copy_every_steps": 2},
    )
    summary = finished(trainer).summary
    assert bits(summary) == bits(calm)
    (recovery,) = summary["recoveries"]
    assert recovery["source"] == "copy"
    # Of what rank 0 sends, a third goes to the other node without documents; two thirds would, sent to each reader.
    shares = [line["far_hop_bytes"] / line["hop_bytes"] for line in read_metrics(trainer.run_config.folder)]
    assert all(0.0 < share < 0.5 for share in shares), shares


@pytest.mark.slow
def test_a_node_that_falls_silent_is_lost_once_and_nothing_is_started_there(cluster, tmp_path):
    folder, gate = tmp_path / "silent", tmp_path / "gate"
    trainer = tiny_trainer(tmp_path, "silent", spares=2, steps=40, gate=gate)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        wait_for(lambda: num_steps(folder) > 2)
        victim = occupied(cluster, folder)
        processes = processes_of(victim)
        for process in processes:
            process.suspend()  # as after a power cut: no connection of theirs is ever closed
        try:
            wait_for(lambda: "NodeLost" in events_of(folder, victim.node_id))
            known = num_steps(folder)
            wait_for(lambda: num_steps(folder) > known + 3)
            assert victim.node_id not in members_nodes(folder)
            assert all(process.status() == psutil.STATUS_STOPPED for process in processes[:1])
        finally:
            for process in processes:
                process.kill()
        wait_for(lambda: not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == victim.node_id))
        time.sleep(4 * POLL_S)  # Ray has given its verdict, and the node monitor has looked: there must be no news
        gate.touch()
        result = run.result()
    assert events_of(folder, victim.node_id) == ["NodeJoined", "NodeLost"]
    (recovery,) = result.summary["recoveries"]
    assert recovery["cause"].count("rank") == 2
    assert recovery["exact"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_a_node_that_dies_at_a_random_moment_is_replaced_by_one_that_joins(cluster, tmp_path, seed, undisturbed):
    calm = fault_free(undisturbed, tmp_path, steps=30)
    folder, gate = tmp_path / "random-node", tmp_path / "gate"
    trainer = tiny_trainer(tmp_path, "random-node", spares=2, steps=30, gate=gate)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        wait_for(lambda: num_steps(folder) > 2)
        time.sleep(random.Random(seed).random())
        for process in processes_of(occupied(cluster, folder)):
            process.kill()
        joined = cluster.add_node(num_cpus=2)
        warm = ("WorkerReady", joined.node_id)
        wait_for(lambda: any((event["type"], event.get("node")) == warm for event in events(folder)))
        assert num_steps(folder) < 30, "the run must still be under way"
        gate.touch()
        result = run.result()
    check_records(trainer, result)
    summary = result.summary
    assert summary["samples_sha256"] == calm["samples_sha256"]
    assert summary["recoveries"]
    assert any("node lost" in recovery["cause"] or "died" in recovery["cause"] for recovery in summary["recoveries"])
    assert all(recovery["steps_undone"] == 0 for recovery in summary["recoveries"])
    if summary["exact"]:
        assert summary["weights_sha256"] == calm["weights_sha256"]
    else:  # the mesh lost or gained a ring on the way
        assert {(g["mesh"]["dp"], g["mesh"]["cp"]) for g in summary["generations"]} > {(2, 2)}


@pytest.mark.slow
def test_a_drained_node_is_left_before_the_command_returns_and_no_step_is_lost(cluster, tmp_path, capsys):
    folder, gate = tmp_path / "leaving", tmp_path / "gate"
    trainer = tiny_trainer(tmp_path, "leaving", spares=2, steps=20, gate=gate)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        wait_for(lambda: num_steps(folder) > 2)
        node = sorted(members_nodes(folder))[0]
        command = [sys.executable, "-m", "elastic_ring", "drain", "--deadline-s", "100", "--node-id"]
        environment = {**os.environ, "RAY_ADDRESS": cluster.address}
        own = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
        refused = subprocess.run([*command, cluster.head_node.node_id], **own)
        assert refused.returncode == 2, refused.stdout
        assert "is the cluster's head: Ray would end it" in refused.stderr
        done = subprocess.run([*command, node], **own)
        assert (done.returncode, done.stdout) == (0, f"no run has a worker on {node}\n"), done.stderr
        assert workers_on(node) == []
        gate.touch()
        result = run.result()
    (recovery,) = result.summary["recoveries"]
    assert (recovery["action"], recovery["steps_rerun"], recovery["steps_undone"]) == ("drained", 0, 0)
    with pytest.raises(SystemExit):
        main(["drain", "--deadline-s", "0"])
    assert "must be above 0 seconds" in capsys.readouterr().err


def forked(fork_server: ForkServer, *nodes: dict[str, Any]) -> Iterator[Cluster]:
    """These nodes, whose workers are forked."""
    with fork_server.forking(), cluster_of(*nodes) as cluster:
        yield cluster


@pytest.fixture
def roomy(fork_server: ForkServer) -> Iterator[Cluster]:
    """Two nodes, each of which has room for a whole run."""
    yield from forked(fork_server, {"num_cpus": 8}, {"num_cpus": 8})


def test_with_two_free_nodes_no_two_holders_of_a_shard_begin_on_one(roomy, tmp_path):
    result = finished(tiny_trainer(tmp_path, "apart", spares=1, steps=2))
    lines = [line for line in read(result.path / "journal.jsonl") if "event" in line]
    (build,) = [
        line["commands"][0] for line in lines if line["commands"][:1] and line["commands"][0]["type"] == "Build"
    ]
    assert build["nodes"][:2] != build["nodes"][2:], build["nodes"]
    assert len(set(build["nodes"])) == 2
    joined = [line for line in lines if line["event"]["type"] == "NodeJoined" and line["event"]["num_slots"]]
    begun = next(line for line in lines if any(command["type"] == "StartWorker" for command in line["commands"]))
    assert begun == joined[1], "as soon as both have joined, whenever the head does"


@pytest.mark.slow
@pytest.mark.soak
def test_a_mesh_on_one_node_moves_apart_when_another_comes_and_outlives_the_node_of_rank_0(tmp_path, undisturbed):
    steps = 40
    folder, gate = tmp_path / "apart-later", tmp_path / "gate"
    trainer = tiny_trainer(tmp_path, "apart-later", spares=1, min_dp=2, steps=steps, gate=gate, gate_s=3.0)
    with cluster_of({"num_cpus": 8}) as cluster, ThreadPoolExecutor(1) as pool:
        calm = fault_free(undisturbed, tmp_path, steps=steps)
        run = pool.submit(trainer.fit)
        wait_for(lambda: (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) > 2)
        home = occupied(cluster, folder)
        joined = cluster.add_node(num_cpus=8)
        wait_for(lambda: status(folder)["recoveries"] != [])
        assert members_nodes(folder) == {home.node_id, joined.node_id}
        assert status(folder)["members"][0]["node"] == home.node_id
        assert num_steps(folder) < steps, "the run must still be under way"
        for process in processes_of(home):
            process.kill()
        wait_for(lambda: members_nodes(folder) == {joined.node_id})
        gate.touch()
        result = run.result()
    check_records(trainer, result)
    assert bits(result.summary) == bits(calm)
    moved, lost = result.summary["recoveries"]
    assert (moved["action"], moved["steps_rerun"], moved["steps_undone"]) == ("drained", 0, 0)
    assert (lost["source"], lost["steps_undone"]) == ("replica", 0)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_holders_begin_apart_and_the_node_of_rank_0_may_die(tmp_path, undisturbed, num_nodes):
    with cluster_of(*num_nodes * [{"num_cpus": 6}]):
        calm = fault_free(undisturbed, tmp_path)
        faults = "kill-node@step=4,phase=backward,rank=0"
        result = finished(tiny_trainer(tmp_path, "begun-apart", spares=1, min_dp=2, faults=faults))
    assert bits(result.summary) == bits(calm)
    first, *_, last = placements(result.path)
    assert are_apart(first)
    assert first[0] not in last
    assert are_apart(last) == (num_nodes > 2)
    (lost, *_) = result.summary["recoveries"]
    assert (lost["source"], lost["steps_undone"]) == ("replica", 0)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_a_run_that_grows_onto_other_nodes_outlives_the_node_of_rank_0(tmp_path, num_nodes):
    """The bits are those of a run that has one ring up to the same step, and two from its checkpoint on."""
    steps, gate, folder = 30, tmp_path / "gate", tmp_path / "grown"
    trainer = tiny_trainer(tmp_path, "grown", dp=1, max_dp=2, spares=2, steps=steps, gate=gate, gate_s=0.5)
    with cluster_of({"num_cpus": 2}) as cluster, ThreadPoolExecutor(1) as pool:
        run = pool.submit(trainer.fit)
        wait_for(lambda: num_steps(folder) > 1)
        home = occupied(cluster, folder)
        for _ in range(num_nodes - 1):
            cluster.add_node(num_cpus=12 // num_nodes)
        wait_for(lambda: len(status(folder)["members"]) == 4 and len(status(folder)["spares"]) == 2)
        grown = placements(folder)[-1]
        assert (grown[0], are_apart(grown)) == (home.node_id, True)
        assert num_steps(folder) < steps - 5, "the run must still be under way"
        for process in processes_of(home):
            process.kill()
        wait_for(lambda: len(status(folder)["members"]) == 4 and home.node_id not in members_nodes(folder))
        gate.touch()
        result = run.result()
        check_records(trainer, result)
        lines = read_metrics(folder)
        begun = next(line["step"] for line in lines if line["mesh"]["dp"] == 2)
        assert {line["mesh"]["dp"] for line in lines[begun:]} == {2}
        kept = {"checkpoint_config": CheckpointConfig(every_steps=begun)}
        calm = {"spares": 0, "total_steps": steps}
        first = finished(tiny_trainer(tmp_path, "one-ring", dp=1, steps=begun, run=kept, **calm))
        kept["resume"] = first.summary["checkpoints"][-1]["path"]
        second = finished(tiny_trainer(tmp_path, "two-rings", steps=steps, run=kept, **calm))
    assert second.summary["resumed_from"][-1]["step"] == begun
    assert bits(result.summary) == bits(second.summary)
    assert [recovery["steps_undone"] for recovery in result.summary["recoveries"]] == [0]


@pytest.fixture
def labelled(fork_server: ForkServer) -> Iterator[Cluster]:
    """Two spot machines of one zone, and a machine of another zone that is not spot."""
    machines = (("a", "spot"), ("a", "spot"), ("b", "on-demand"))
    labels = [{"ray.io/availability-zone": zone, "ray.io/market-type": market} for zone, market in machines]
    yield from forked(fork_server, *({"num_cpus": 1, "labels": of_node} for of_node in labels))


@pytest.mark.slow
def test_rays_labels_say_what_fails_together_and_where_one_holder_of_each_shard_sits(labelled, tmp_path):
    result = finished(tiny_trainer(tmp_path, "labelled", dp=2, cp=1, spares=1, steps=3))
    joined = [event for event in events(result.path) if event["type"] == "NodeJoined"]
    told = {event["node"]: (event["domains"], event["is_reserved"]) for event in joined if event["num_slots"]}
    spot, reserved = ["ray.io/availability-zone=a"], ["ray.io/availability-zone=b"]
    assert sorted(told.values()) == [(spot, False), (spot, False), (reserved, True)]
    on_node = {event["worker"]: event["node"] for event in events(result.path) if event["type"] == "WorkerReady"}
    lines = read(result.path / "journal.jsonl")
    builds = [command for line in lines for command in line.get("commands", ()) if command["type"] == "Build"]
    sits_on = [told[on_node[worker]][0] for worker in builds[0]["members"]]
    assert sorted(sits_on) == [spot, reserved], "not both in one zone, and one on the machine that is not spot"
