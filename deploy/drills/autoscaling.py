"""The drill `autoscaling`: one run on a real autoscaling Ray cluster of this machine, from an empty to an empty one.

Nodes have two CPUs each, a ring has two ranks, the run may have one or two rings. In turn: the run is submitted to a
cluster without a node, starts, grows to max_dp; a node is drained with notice; a node is killed; the cluster may only
have one node; two again; the run is told to keep one ring, and leaves a node; it ends, and every node goes. Nobody but
the run asks the autoscaler for anything. The samples must be those that the order gives, whatever the cluster.

Steps are slowed (the user's loss waits) until the last change is seen, so that the run lasts as long as the story.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.drills.autoscaling_cluster import AutoscalingCluster
from deploy.drills.local_cluster import free_ports, using
from deploy.drills.watcher import Watcher, train_while
from elastic_ring.attention.layouts.layout import make_layout
from elastic_ring.config import ScalingConfig
from elastic_ring.data.loader import consumed_digest, samples_text, slice_sample
from elastic_ring.data.source import open_source
from elastic_ring.files import plain_json
from elastic_ring.model.loss import language_model_loss
from elastic_ring.monitor.metrics import SUMMARY_NAME
from elastic_ring.runtime.driver.attach import scale
from elastic_ring.runtime.driver.cluster import give_notice, left_behind
from elastic_ring.runtime.driver.ray_session import cluster
from elastic_ring.runtime.driver.task_checks import training_order
from elastic_ring.trainer import ElasticRingTrainer

if TYPE_CHECKING:
    from torch import Tensor

    from elastic_ring import Batch

CP, MAX_DP, CPUS_PER_NODE = 2, 2, 2
STEPS, STEP_S, IDLE_S = 240, 0.8, 4.0
NOTICE_S = 30.0
LIMIT_S = 180.0
GONE_S = 60.0


class SlowUntil:
    """`loss`, computed `wait_s` later for as long as `path` does not exist."""

    def __init__(self, loss: Any, path: str, wait_s: float) -> None:
        self._loss, self._path, self._wait_s = loss, path, wait_s

    def __call__(self, model: Any, batch: Batch) -> tuple[Tensor, int]:
        if not os.path.exists(self._path):
            time.sleep(self._wait_s)
        loss: tuple[Tensor, int] = self._loss(model, batch)
        return loss


@dataclass
class Timeline:
    """What happened when, in seconds since the submission. `samples`: (time, nodes, members, workers asked for)."""

    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    begun_at: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        return round(time.monotonic() - self.begun_at, 2)

    def note(self, what: str) -> None:
        self.events.append((self.now(), what))
        print(f"{self.now():7.1f} s  {what}", flush=True)


class Story:
    """The changes of the cluster, one after the other, seen from outside the run."""

    def __init__(self, run: str, cluster: AutoscalingCluster, timeline: Timeline, gate: Path) -> None:
        self._run, self._cluster, self._timeline, self._gate = run, cluster, timeline, gate

    def tell(self, run: Watcher) -> None:
        try:
            self._change(run)
        finally:
            self._gate.touch()

    def _change(self, run: Watcher) -> None:
        timeline, cluster = self._timeline, self._cluster
        self._until_mesh(run, 1, "first mesh")
        self._until_mesh(run, MAX_DP, "grown to max_dp")
        leaving = nodes_of(run)[-1]
        timeline.note("notice for a node")
        give_notice(leaving, NOTICE_S)
        self._until_mesh(run, 1, "handed over")
        run.until("the drained node is gone", lambda: leaving not in cluster.nodes() or None, LIMIT_S)
        timeline.note("drained node gone")
        self._until_mesh(run, MAX_DP, "grown again")
        timeline.note(f"a node is killed, {cluster.kill_node(nodes_of(run)[0])} processes")
        self._until_mesh(run, 1, "goes on with one ring")
        self._until_mesh(run, MAX_DP, "grown again")
        timeline.note("the cluster may have one node only")
        cluster.set_max_nodes(1)
        self._until_mesh(run, 1, "shrunk to min_dp")
        run.until("one node", lambda: len(cluster.nodes()) == 1 or None, LIMIT_S)
        run.more_steps(5)
        timeline.note("the cluster may have two nodes again")
        cluster.set_max_nodes(2)
        self._until_mesh(run, MAX_DP, "grown again")
        run.more_steps(5)
        timeline.note("the run is told to keep one ring")
        scale(self._run, 1, None)
        self._until_mesh(run, 1, "shrunk by itself")
        run.until("the other node is gone", lambda: cluster.nodes() == nodes_of(run) or None, LIMIT_S)
        timeline.note("the node that the run has left is gone, the last steps")

    def _until_mesh(self, run: Watcher, dp: int, what: str) -> None:
        def found() -> bool | None:
            status = run.status()
            return True if status.get("phase") == "running" and status["mesh"] == {"dp": dp, "cp": CP} else None

        run.until(f"{what} (dp={dp})", found, LIMIT_S)
        self._timeline.note(f"{what}: dp={dp}, step {len(run.steps())}")

    def sample(self, folder: Path, over: threading.Event) -> None:
        """Look at cluster and run, until `over`."""
        own = Watcher(folder, over, 0)
        while not over.wait(0.25):
            asked = [line["num_workers"] for line in own.journal() if line.get("note") == "demand"]
            members = len(own.status().get("members", ()))
            self._timeline.samples.append(
                (self._timeline.now(), len(self._cluster.nodes()), members, asked[-1] if asked else 0)
            )


def nodes_of(run: Watcher) -> list[str]:
    """The members' nodes by rank, each once."""
    return list(dict.fromkeys(member["node"] for member in run.status()["members"]))


def expected_samples(trainer: ElasticRingTrainer) -> str:
    """`samples_sha256` of the run, from the order of samples and the data alone: one rank, no cluster."""
    task, total = trainer.task, hashlib.sha256()
    order, source = training_order(task), open_source(task.data)
    layout = make_layout("contiguous", task.step.context_tokens, 1)
    for step in range(task.step.steps):
        slices = [
            slice_sample(source.read(sample), layout, 0, sample_id=sample, index_in_batch=index)
            for index, sample in enumerate(order.sample_ids(step))
        ]
        total.update(f"{step}:{samples_text(consumed_digest(step, slices))}\n".encode())
    return total.hexdigest()


def scaling() -> ScalingConfig:
    """One ring at first, MAX_DP at most; each worker takes a CPU."""
    return ScalingConfig(
        dp=1, cp=CP, spares=0, min_dp=1, max_dp=MAX_DP, wait_for_resources_s=LIMIT_S, resources_per_worker={"CPU": 1.0}
    )


def changing_run(
    folder: Path, trainer: ElasticRingTrainer, gate: Path, timeline: Timeline
) -> tuple[dict[str, Any], list[str]]:
    """(summary, each bound that does not hold, in words) of the run on an autoscaling cluster, whose files are in
    `folder`. The run's steps must be slow until there is a file `gate`."""
    name, (port,) = trainer.run_config.name, free_ports(1)
    nodes = AutoscalingCluster(folder, port, cpus_per_node=CPUS_PER_NODE, max_nodes=MAX_DP, idle_s=IDLE_S)
    with nodes, using(nodes.variables), cluster(0):
        return _changing(trainer, nodes, Story(name, nodes, timeline, gate), timeline)


def _changing(
    trainer: ElasticRingTrainer, nodes: AutoscalingCluster, story: Story, timeline: Timeline
) -> tuple[dict[str, Any], list[str]]:
    """The run, while the story is told, and the end of the nodes after it."""
    assert nodes.nodes() == []
    timeline.begun_at = time.monotonic()
    timeline.note("submitted to an empty cluster")
    over = threading.Event()
    sampler = threading.Thread(target=story.sample, args=(trainer.run_config.folder, over), daemon=True)
    sampler.start()
    train_while(trainer, story.tell, to_the_end=True)
    timeline.note("run ended")
    deadline = time.monotonic() + GONE_S
    while nodes.nodes() and time.monotonic() < deadline:
        time.sleep(0.25)
    over.set()
    sampler.join()
    timeline.samples.append((timeline.now(), len(nodes.nodes()), 0, 0))
    timeline.note(f"{len(nodes.nodes())} node(s) left")
    summary = dict(plain_json((trainer.run_config.folder / SUMMARY_NAME).read_text()))
    return summary, missed(timeline, summary, expected_samples(trainer), left_behind(trainer.run_config.name))


def missed(timeline: Timeline, summary: dict[str, Any], expected: str, left: list[str]) -> list[str]:
    """Each bound that does not hold, in words."""
    told = []
    if timeline.samples[-1][1]:
        told.append(f"{timeline.samples[-1][1]} node(s) were still there {GONE_S:.0f} s after the end")
    if summary["samples_sha256"] != expected:
        told.append("the samples are not those of the order")
    drained = [recovery for recovery in summary["recoveries"] if "drained" in recovery["cause"]]
    if not drained or any(recovery["steps_rerun"] or recovery["steps_undone"] for recovery in drained):
        told.append(f"a notice cost a step, or was not seen: {drained}")
    undone = [recovery for recovery in summary["recoveries"] if recovery["steps_undone"]]
    if undone:
        told.append(f"committed steps were undone: {undone}")
    if left:
        told.append(f"left behind: {left}")
    return told


def autoscaling(storage_path: str) -> int:
    """The drill, with the laptop preset's model: exit status 0 when everything held, 1 when not."""
    from elastic_ring.cli import train

    name, timeline = f"autoscaling-{secrets.token_hex(2)}", Timeline()
    asked = train.parse(
        [
            "--preset",
            "laptop",
            "--steps",
            str(STEPS),
            "--context",
            "256",
            "--global-batch",
            "2",
            "--grow-cost-s",
            "0",
            "--run-name",
            name,
            "--storage-path",
            storage_path,
        ]
    )
    with tempfile.TemporaryDirectory(prefix="as-", ignore_cleanup_errors=True) as folder:
        gate = Path(folder, "gate")
        trainer = train.build(replace(asked, scaling=scaling()))
        trainer.task = replace(trainer.task, loss=SlowUntil(language_model_loss, str(gate), STEP_S))
        _, told = changing_run(Path(folder), trainer, gate, timeline)
    print("\n".join(told) or f"everything held; the run: elastic-ring status {trainer.run_config.folder}")
    return 1 if told else 0
