"""What a worker tells of a build or a step that broke off: whose error it is, and in which step of the run."""

from __future__ import annotations

import queue
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.control.messages import Build, BuildFailed, Finalize, Heal, MemberFailed, from_json
from elastic_ring.errors import PeerFailed
from elastic_ring.mesh import Mesh
from elastic_ring.runtime.agent.stamp_dir import remove_stale
from elastic_ring.runtime.worker.actor import Worker
from elastic_ring.runtime.worker.coordinator_client import WorkerSpec
from elastic_ring.runtime.worker.member import Member

WAIT_S = 60.0
NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
BROKEN = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nmore of it")


def order(kind: str) -> Build:
    """For a newcomer, a survivor, or a run that has no state yet."""
    heals = (Heal(0, "v", ("w",)),) if kind == "newcomer" else ()
    return Build("c", "w", 1, 3, Mesh(1, 2), ("w", "v"), 80_000, None, heals, kind == "fresh")


class Part:
    """A member that has applied no step, as a newcomer's, and does what a test gives it."""

    def __init__(self, work: Any, aborted: bool = False) -> None:
        self._work, self.aborted = work, aborted
        self.applied, self.writing, self.device_failed, self.in_mesh = 0, False, False, True
        self.lease = SimpleNamespace(device=torch.device("cpu"), erred=self.fail_device)
        self.parts = self

    def build(self, cause: str) -> Any:
        return self._work("build")

    def train(self) -> str:
        self.applied = 80_001
        self._work("train")
        return "boundary"

    def finalize(self, *args: Any) -> Any:
        return self._work("finalize")

    def fail_device(self, error: BaseException) -> None:
        self.device_failed = True

    def moved(self) -> tuple[int, ...]:
        return (0,)


def told(
    folder: Path, error: BaseException, at: str, *, build: str = "newcomer", aborted: bool = False
) -> tuple[Any, Part]:
    """What a worker's training thread answers first when `error` is raised at `at`; and its member."""

    def work(place: str) -> Any:
        if place == at:
            raise error
        return SimpleNamespace(), {}

    actor = Worker(WorkerSpec("w", "n", "127.0.0.1", str(folder / "stamps"), None, ScalingConfig(), RunConfig()))  # type: ignore[arg-type]
    heard: queue.Queue[Any] = queue.Queue()
    notify = SimpleNamespace(remote=lambda data, extra: heard.put(from_json(data)))
    actor._client.coordinator = SimpleNamespace(notify=notify)
    part = Part(work, aborted)
    actor._warm = part  # type: ignore[assignment]
    actor._seen = actor._built = (1, 3)
    actor._training.start()
    command = order(build)
    run = {
        "build": lambda: actor._build_and_train(command),
        "train": lambda: actor._train(command),
        "finalize": lambda: actor._finalize(Finalize("c", "w", 1, 3)),
    }[at]
    actor._training.give(run)
    answer = heard.get(timeout=WAIT_S)
    assert actor._training.paused.wait(WAIT_S)
    assert heard.empty()
    return answer, part


OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB."
ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("error", "at", "where", "kind", "detail"),
    [
        pytest.param(NO_ROOM, "build", {}, "device", OUT_OF_MEMORY, id="a newcomer without room"),
        pytest.param(NO_ROOM, "build", {"build": "fresh"}, "memory", "", id="a fresh build takes the memory ladder"),
        pytest.param(NO_ROOM, "build", {"build": "survivor"}, "memory", "", id="so does one whose members have state"),
        pytest.param(ValueError("a shape"), "build", {}, "user", "", id="user code in a newcomer's build"),
        pytest.param(BROKEN, "train", {}, "device", ECC, id="a device in a step, in one line"),
        pytest.param(BROKEN, "finalize", {}, "device", ECC, id="a device in the last gathering"),
        pytest.param(OSError("no space"), "finalize", {}, "check", "", id="weights that cannot be written"),
        pytest.param(BROKEN, "train", {"aborted": True}, "peer", "", id="a device after an abort"),
        pytest.param(ValueError("no number"), "train", {"aborted": True}, "peer", "", id="user code after an abort"),
    ],
)
def test_a_failure_names_its_kind_the_runs_step_and_a_failed_device(
    tmp_path: Path, error: BaseException, at: str, where: dict[str, Any], kind: str, detail: str
) -> None:
    failure, part = told(tmp_path, error, at, **where)
    assert isinstance(failure, MemberFailed)
    assert (failure.kind, part.device_failed) == (kind, kind == "device")
    assert failure.step == {"build": 80_000, "train": 80_001, "finalize": 0}[at]
    assert failure.detail == detail or not detail


def test_a_peer_that_fails_in_a_build_is_a_failed_build(tmp_path: Path) -> None:
    answer, _ = told(tmp_path, PeerFailed("gone"), "build")
    assert isinstance(answer, BuildFailed)


def test_a_worker_that_has_told_of_its_device_reports_itself_unhealthy(tmp_path: Path) -> None:
    """Also where the news itself came too late to be heard."""
    spec = SimpleNamespace(worker="w", scaling=ScalingConfig(), run=RunConfig(name="r"), task=None)
    member = Member(spec, None, None, lambda records: None)  # type: ignore[arg-type]
    nothing = SimpleNamespace(applied=0, unapplied=None, valid=False, shard=None, has_gradient=False, last=None)
    nothing.gradient_membership_id = nothing.valid_id = (0, 0)
    member.parts.warm = SimpleNamespace(transaction=SimpleNamespace(held=nothing))  # type: ignore[assignment]
    assert member.report("c", 1, 4, "aborted").healthy
    member.parts.lease.has_erred = True
    assert not member.report("c", 1, 4, "aborted").healthy


@pytest.mark.slow
def test_a_start_that_takes_too_long_leaves_its_stacks_in_the_log(tmp_path: Path) -> None:
    """In a process of its own: pytest's own watch over a test's time uses the same one timer."""
    run = subprocess.run([sys.executable, "-c", SLOW_START, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "Timeout (" in run.stderr
    assert "in wait_for_a_driver" in run.stderr
    assert run.stderr.count("Timeout (") == 1  # and the start that was in time left none


SLOW_START = """
import sys, time
from types import SimpleNamespace
import ray  # which a start imports too, in its own time
from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.runtime.worker import actor
from elastic_ring.runtime.worker.coordinator_client import StartWork, WorkerSpec

class Slow:
    warm = SimpleNamespace(data=SimpleNamespace(fingerprint=""), environment={}, gpus=[])
    def __init__(self, *_): self.parts, self.start_work = self, StartWork()
    def warm_up(self): wait_for_a_driver()

def wait_for_a_driver():
    time.sleep(seconds)

actor.Member = Slow
actor.Worker._beat = lambda self: None
for name, seconds in (("slow", 6.0), ("quick", 0.0)):
    run = RunConfig()
    spec = WorkerSpec(name, "n", "127.0.0.1", f"{sys.argv[1]}/{name}", None, ScalingConfig(), run)
    actor.STACKS_SHARE = 3.0 / run.timeouts.start_s
    actor.Worker(spec).start(None)
"""


@pytest.mark.slow
def test_a_worker_holds_the_folder_of_its_stamps_from_its_start_until_its_process_ends(tmp_path: Path) -> None:
    folder = tmp_path / "elastic_ring-run-11111111"
    command = [sys.executable, "-c", WARM, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "warm"
            assert remove_stale(tmp_path) == []
            assert (folder / "w").exists()
        finally:
            process.kill()
    assert remove_stale(tmp_path) == [folder.name]


WARM = """
import sys, time
from elastic_ring.config import RunConfig, ScalingConfig
from elastic_ring.runtime.worker import actor
from elastic_ring.runtime.worker.coordinator_client import WorkerSpec

class Ready:
    def __init__(self): self.parts = self
    def warm_up(self): pass

actor.Worker._beat = lambda self: None
started = actor.Worker(WorkerSpec("w", "n", "127.0.0.1", f"{sys.argv[1]}/w", None, ScalingConfig(), RunConfig()))
started._warm_up(Ready())
print("warm", flush=True)
time.sleep(600)
"""
