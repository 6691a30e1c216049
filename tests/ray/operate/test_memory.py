"""A lack of memory on real processes: survived with the same bits, and told by its name."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from elastic_ring import ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.data.source import StdlibText
from elastic_ring.model.config import ModelConfig
from elastic_ring.model.init import Initialiser
from elastic_ring.model.loss import language_model_loss
from elastic_ring.model.transformer import Transformer
from tests.ray.conftest import TINY, bits, finished, join

# Each of two ranks keeps about 12 MiB a layer where it recomputes nothing.
WIDE = ModelConfig(257, 12, 64, 4, 2, 16, 2048, checkpoint_activations=False)
CONTEXT, STEPS = 1024, 5
EARLY_STEPS = 24
ROOM_BYTES = 80 << 20
M_MMAP_THRESHOLD = -3


@dataclass
class LimitedLoss:
    """The usual loss. In the third step one process, the first that makes the file `claim`, may have no more than
    ROOM_BYTES beyond what it has then. The limit ends with that step: what Ray itself needs at another moment must
    not meet it."""

    claim: str = ""
    num_calls: int = 0
    is_limited: bool = False
    until: int = 6

    def __call__(self, model: Any, batch: Any) -> tuple[Any, int]:
        self.num_calls += 1
        if self.num_calls == 1:  # what is freed goes back at once, so that the limit counts what is used
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
        if self.claim and self.num_calls == 3:
            self._limit()
        if self.is_limited and self.num_calls == self.until:  # two more attempts freed caches and recomputed layers
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return language_model_loss(model, batch)

    def _limit(self) -> None:
        try:
            Path(self.claim).touch(exist_ok=False)
        except FileExistsError:
            return
        status = Path("/proc/self/status").read_text()
        (data_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
        limit = (data_kib << 10) + self.room(data_kib << 10)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        self.is_limited = True

    def room(self, data_bytes: int) -> int:
        return ROOM_BYTES


def trained(folder: Path, name: str, loss: LimitedLoss, steps: int = STEPS, **settings: Any) -> dict[str, Any]:
    trainer = ElasticRingTrainer(
        partial(Transformer, WIDE),
        StdlibText(CONTEXT),
        loss=loss,
        initial=Initialiser(0, WIDE.num_layers),
        step_config=StepConfig(steps=steps, global_batch=1, context_tokens=CONTEXT, check_model=False),
        optim_config=OptimConfig(peak_lr=1e-2, min_lr=1e-3, warmup_steps=1, total_steps=steps),
        scaling_config=ScalingConfig(dp=1, cp=2, spares=0),
        run_config=RunConfig(name=name, run_dir=str(folder / name), progress=False, copies="0", **settings),
    )
    return finished(trainer).summary


@pytest.mark.slow
def test_a_step_that_runs_out_of_memory_runs_again_with_less_and_changes_no_bit(local_ray, tmp_path):
    calm = trained(tmp_path, "roomy", LimitedLoss())
    claim = tmp_path / "claim"
    summary = trained(tmp_path, "tight", LimitedLoss(str(claim)))
    assert claim.exists()
    assert bits(summary) == bits(calm)
    assert (calm["memory"], calm["recoveries"]) == ([], [])
    assert [change["reliefs"] for change in summary["memory"]] == [["caches"], ["caches", "recompute"]]
    assert {change["step"] for change in summary["memory"]} == {2}
    assert all("you tried to allocate" in change["why"] for change in summary["memory"])
    recoveries = summary["recoveries"]
    assert all("ran out of memory in step 2" in recovery["cause"] for recovery in recoveries)
    assert all(recovery["survivor_pids_kept"] and recovery["steps_undone"] == 0 for recovery in recoveries)
    assert summary["lost_workers"] == {}
    assert summary["exact"]


@dataclass
class NearlyFullLoss(LimitedLoss):
    """The usual loss. In the third step one process, the first that makes the file `claim`, may have no more than a
    sixth beyond what it has behind its forward pass, from then on."""

    def __call__(self, model: Any, batch: Any) -> tuple[Any, int]:
        limits, self.claim = self.claim, ""
        found = super().__call__(model, batch)
        self.claim = limits
        if limits and self.num_calls == 3:
            self._limit()
        return found

    def room(self, data_bytes: int) -> int:
        return data_bytes // 6


@pytest.mark.soak
def test_before_memory_runs_out_all_members_climb_the_ladder_at_a_boundary_and_no_bit_changes(local_ray, tmp_path):
    settings = {"memory_pressure": "act", "memory_pressure_share": 0.8}
    calm = trained(tmp_path, "roomy", LimitedLoss(), EARLY_STEPS)
    claim = tmp_path / "claim"
    summary = trained(tmp_path, "nearly-full", NearlyFullLoss(str(claim), until=0), EARLY_STEPS, **settings)
    assert claim.exists()
    assert bits(summary) == bits(calm)
    reliefs = [change["reliefs"] for change in summary["memory"]]
    assert reliefs
    assert reliefs == [["caches"], ["caches", "recompute"]][: len(reliefs)]
    assert all("memory pressure: " in change["why"] and change["shortages"] == 0 for change in summary["memory"])
    assert (summary["recoveries"], summary["lost_workers"]) == ([], {})
    assert summary["exact"]


# ------------------------------------------------------------ the memory of a node

LIMIT_BYTES = 3 << 30
CHUNK_BYTES = 48 << 20
ACTORS = ("Coordinator", "NodeAgent")


@dataclass
class GrowingLoss:
    """The usual loss. In the fourth step the first process that makes the file `claim` grows until it is killed,
    by some 500 MB a second."""

    claim: str = ""
    num_calls: int = 0

    def __call__(self, model: Any, batch: Any) -> tuple[Any, int]:
        self.num_calls += 1
        if self.claim and self.num_calls == 4 * 3:  # three sequences a step and ring
            self._grow()
        return language_model_loss(model, batch)

    def _grow(self) -> None:
        try:
            Path(self.claim).touch(exist_ok=False)
        except FileExistsError:
            return
        kept = []
        for _ in range(2 * LIMIT_BYTES // CHUNK_BYTES):
            kept.append(bytearray(b"x") * CHUNK_BYTES)
            time.sleep(0.1)
        raise AssertionError("nobody stopped it")


@pytest.fixture
def small_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster of one node whose processes share a memory cgroup of LIMIT_BYTES. Ray's own monitor is off: it looks at
    the whole machine."""
    folder = memory_cgroup()
    if folder is None:
        pytest.skip("no memory cgroup can be made here: that needs root and a writable /sys/fs/cgroup")
    ray.shutdown()  # the other modules' Ray
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    for process in raylet_and_children(cluster):
        (folder / "cgroup.procs").write_text(str(process.pid))
    join(cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    for _ in range(100):  # until its last process is gone
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
    folder.rmdir()


def memory_cgroup() -> Path | None:
    """A new cgroup of LIMIT_BYTES; None where that is not allowed."""
    roots = [(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")]
    for root, limit in roots:
        folder = root / f"elastic-ring-test-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
            try:
                assert (folder / limit).exists()
                (folder / limit).write_text(str(LIMIT_BYTES))
                return folder
            except (OSError, AssertionError):
                folder.rmdir()
    return None


def raylet_and_children(cluster: Cluster) -> list[psutil.Process]:
    raylet = psutil.Process(cluster.head_node.all_processes["raylet"][0].process.pid)
    return [raylet, *raylet.children(recursive=True)]


class Pids:
    """Collects the PIDs of the coordinator and of the agent while a run goes on."""

    def __init__(self, cluster: Cluster) -> None:
        self.seen: dict[str, set[int]] = defaultdict(set)
        self._cluster, self._over = cluster, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Pids:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            for process in raylet_and_children(self._cluster):
                with suppress(psutil.NoSuchProcess, IndexError):
                    title = process.cmdline()[0]
                    for name in (name for name in ACTORS if title.startswith(f"ray::{name}")):
                        self.seen[name].add(process.pid)


def on_two_rings(folder: Path, name: str, loss: GrowingLoss, memory_limit: float, spares: int = 1) -> dict[str, Any]:
    trainer = ElasticRingTrainer(
        partial(Transformer, TINY),
        StdlibText(96),
        loss=loss,
        initial=Initialiser(0, TINY.num_layers),
        step_config=StepConfig(steps=8, global_batch=6, context_tokens=96),
        optim_config=OptimConfig(peak_lr=1e-2, min_lr=1e-3, warmup_steps=2, total_steps=8),
        scaling_config=ScalingConfig(dp=2, cp=1, spares=spares),
        run_config=RunConfig(name=name, run_dir=str(folder / name), progress=False, memory_limit=memory_limit),
    )
    return finished(trainer).summary


@pytest.mark.soak
def test_a_member_that_fills_its_node_dies_alone_and_its_death_is_told_by_its_cause(small_node, tmp_path):
    calm = on_two_rings(tmp_path, "calm", GrowingLoss(), 0.9, spares=0)
    assert calm["recoveries"] == []
    for name, memory_limit, by in (
        ("guarded", 0.9, "it grew by"),
        ("unguarded", 0.0, "killed by the kernel's OOM killer"),
    ):
        claim = tmp_path / f"claim-{name}"
        with Pids(small_node) as pids:
            summary = on_two_rings(tmp_path, name, GrowingLoss(str(claim)), memory_limit)
        assert claim.exists()
        assert bits(summary) == bits(calm)
        assert summary["lost_workers"] == {"out of memory": 1}
        (recovery,) = summary["recoveries"]
        assert " of step 3 (" in recovery["cause"]
        assert " out of memory in " in recovery["cause"]
        assert by in recovery["cause"]
        assert recovery["survivor_pids_kept"]
        assert {name: len(pids.seen[name]) for name in ACTORS} == dict.fromkeys(ACTORS, 1)
        assert [change["reliefs"] for change in summary["memory"]] == [["caches"]]
        assert summary["exact"]
