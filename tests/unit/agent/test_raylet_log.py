"""What the raylet's log says of a worker that Ray's memory monitor took, and that this Ray's raylet writes it so."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import ray

from elastic_ring.runtime.agent.memory_guard import NAME, TAIL_BYTES, ray_killed

CHOSEN = (
    "[2026-11-24 23:40:12,345 I 811 811] (raylet) node_manager.cc:3011: Currently used memory: 22548578304 bytes, "
    "threshold: 21474836480 bytes, kill buffer: 0 bytes. Needed to free 1073741824 bytes. Selected 2 workers to kill: "
    "(actor name=Coordinator, pid=812, actual memory used=0.41GB, worker ID=ab), "
    "(actor name=Worker, pid=4711, actual memory used=5.20GB, worker ID=cd).\n"
)
OTHERS = "[2026-11-24 23:40:13,000 I 811 811] (raylet) idle: (pid=4712, actual memory used=0.10GB, worker ID=ef)\n"


def log_beside(folder: Path, text: str) -> str:
    (folder / NAME).write_text(text)
    return str(folder / "worker-1.err")


def test_a_worker_that_the_monitor_chose_is_told_with_what_it_held_and_no_other(tmp_path: Path) -> None:
    worker_log = log_beside(tmp_path, "x" * (TAIL_BYTES + 5) + "\n" + CHOSEN + OTHERS)
    assert ray_killed(worker_log, 4711) == "Ray's memory monitor killed it (raylet.out: pid=4711, 5.20 GB)"
    assert ray_killed(worker_log, 812) == "Ray's memory monitor killed it (raylet.out: pid=812, 0.41 GB)"
    for pid in (4712, 471, 811):
        assert ray_killed(worker_log, pid) == ""


def test_without_a_log_nothing_is_known(tmp_path: Path) -> None:
    assert ray_killed("", 1) == ray_killed(str(tmp_path / "worker.err"), 1) == ""
    assert ray_killed(log_beside(tmp_path, CHOSEN + "x" * TAIL_BYTES), 4711) == "", "too long ago"


@pytest.mark.parametrize("text", [b"pid=%d, actual memory used=%sGB", b"workers to kill: %s"])
def test_the_raylet_of_this_ray_writes_so(text: bytes) -> None:
    binary = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"
    with binary.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(text) >= 0
