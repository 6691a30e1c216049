"""What the recovery benches share: a small model under elastic_ring, watching a run from outside, and signals.

A bench trains with `fit()` on the main thread while another thread watches the run's folder and sends signals to its
processes by PID, as a failing machine would: nothing in the run knows that it is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.results import ROOT, show
from benchmarks.peers import common
from elastic_ring import Batch, ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.config import Timeouts
from elastic_ring.data.packing import Sample
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME, STATUS_NAME, SUMMARY_NAME
from elastic_ring.train.task import LossFunction

DP, CP = 2, 2
SEQUENCES = common.NUM_WORKERS * common.SEQUENCES_PER_WORKER
SHOWN_EVERY_S = 15.0
POLL_S = 0.05

T = TypeVar("T")


# ------------------------------------------------------------ the small model, as the peers train it


@dataclass(frozen=True)
class PeersBytes:
    """The random bytes that the peers train on, each of their sequences once."""

    context_tokens: int = common.CONTEXT_TOKENS
    vocab_size: int = common.VOCAB
    num_sequences: int = SEQUENCES * 4096
    fingerprint: str = "random bytes"

    def open(self) -> PeersBytes:
        return self

    def read(self, sample_id: int) -> Sample:
        index, row = divmod(sample_id, common.SEQUENCES_PER_WORKER)
        tokens, targets = common.batch(*divmod(index, common.NUM_WORKERS))
        return Sample(np.append(tokens[row].numpy(), int(targets[row, -1])), (0,))


def small_model() -> nn.Module:
    return common.ByteModel()


def whole_model(model: nn.Module) -> tuple[nn.Module, ...]:
    """FSDP2 gathers so small a model in one piece, as the peers' DDP reduces it."""
    return ()


def small_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The peers' loss, with the blocks' attention over the whole ring."""
    for block in model.blocks:
        block.attention = batch.attention
    logits, targets = model(batch.tokens, batch.positions).flatten(0, 1), batch.targets.flatten()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), int((targets != -100).sum())


def small_trainer(
    folder: Path,
    name: str,
    *,
    steps: int,
    spares: int = 1,
    loss: LossFunction = small_loss,
    check_model: bool = True,
    timeouts: Timeouts | None = None,
    scaling: ScalingConfig | None = None,
) -> ElasticRingTrainer:
    """The peers' model, optimizer and sequences a step, on rings of 2 x 2 where `scaling` says nothing else."""
    rate = common.LEARNING_RATE
    return ElasticRingTrainer(
        small_model, PeersBytes(), loss=loss,
        step_config=StepConfig(
            steps=steps, global_batch=SEQUENCES, context_tokens=common.CONTEXT_TOKENS, check_model=check_model
        ),
        optim_config=OptimConfig(peak_lr=rate, min_lr=rate, total_steps=steps, weight_decay=0.01, betas=(0.9, 0.999)),
        scaling_config=scaling
        or ScalingConfig(dp=DP, cp=CP, spares=spares, resources_per_worker={"CPU": 0.25}),
        run_config=RunConfig(name, run_dir=str(folder / name), timeouts=timeouts or Timeouts(), progress=False),
        units=whole_model,
    )  # fmt: skip


# ------------------------------------------------------------ a run, seen from outside


@dataclass
class Tail:
    """The lines of a growing JSON-lines file, each read once."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        """All whole lines so far."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self.lines.append(json.loads(line))
        return self.lines


class BenchFailed(Exception):
    """What a bench waited for did not happen."""


class Watcher:
    """What one run writes into its folder, and its processes. For one thread."""

    def __init__(self, folder: Path, over: threading.Event, num_places: int) -> None:
        self.folder = folder
        self._num_places = num_places
        self._over = over
        self._metrics, self._journal = Tail(folder / METRICS_NAME), Tail(folder / JOURNAL_NAME)
        self._shown_at = time.monotonic()

    def status(self) -> dict[str, Any]:
        path = self.folder / STATUS_NAME
        return json.loads(path.read_text()) if path.exists() else {}

    def steps(self) -> list[dict[str, Any]]:
        return self._metrics.read()

    def journal(self) -> list[dict[str, Any]]:
        return self._journal.read()

    def until(self, what: str, found: Callable[[], T | None], timeout_s: float = 180.0, poll_s: float = POLL_S) -> T:
        """The first answer of `found` that is not None. Raises BenchFailed when the run or the time is over."""
        deadline = time.monotonic() + timeout_s
        while (answer := found()) is None:
            if self._over.is_set():
                raise BenchFailed(f"the run ended while this waited for {what}")
            if time.monotonic() > deadline:
                raise BenchFailed(f"{what}: not within {timeout_s:.0f} s; status: {self.status()}")
            if time.monotonic() - self._shown_at > SHOWN_EVERY_S:
                self._shown_at = time.monotonic()
                show(f"  step {len(self.steps())}, waiting for {what}")
            time.sleep(poll_s)
        return answer

    def whole(self, num_spares: int) -> dict[str, Any]:
        """Wait until the mesh is full and `num_spares` spares are ready; returns the status at that moment."""
        since_s = time.time()

        def found() -> dict[str, Any] | None:
            status = self.status()
            fresh = status.get("updated_unix_s", 0.0) > since_s and status["phase"] == "running"
            whole = fresh and len(status["members"]) == self._num_places and len(status["spares"]) >= num_spares
            alive = whole and all(psutil.pid_exists(p["pid"]) for p in status["members"] + status["spares"])
            return status if alive else None

        return self.until(f"a whole mesh and {num_spares} spare(s)", found)

    def more_steps(self, number: int) -> None:
        """Wait until `number` more steps are committed."""
        goal = len(self.steps()) + number
        self.until(f"step {goal}", lambda: True if len(self.steps()) >= goal else None)

    def first_step_of(self, newer_than: int, timeout_s: float = 120.0) -> dict[str, Any]:
        """Wait for the first committed step of a generation above `newer_than`."""

        def found() -> dict[str, Any] | None:
            return next((line for line in self.steps() if line["generation"] > newer_than), None)

        return self.until(f"a step of a generation above {newer_than}", found, timeout_s)

    def recoveries(self) -> list[dict[str, Any]]:
        return [line["recovery"] for line in self.journal() if line.get("note") == "recovery"]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Journal lines of these kinds of events."""
        return [line for line in self.journal() if line.get("event", {}).get("type") in kinds]


def inject(pid: int, number: signal.Signals) -> float:
    """Send the signal to a process of Ray's; the monotonic time just before. Raises BenchFailed for any other."""
    title = " ".join(psutil.Process(pid).cmdline())
    if not title.startswith("ray::"):
        raise BenchFailed(f"pid {pid} is {title!r}, no process of the run: no signal is sent")
    at_s = time.monotonic()
    os.kill(pid, number)
    return at_s


def actor_pids(kind: str) -> list[int]:
    """Live processes of this driver's own Ray that hold an actor of class `kind`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            if title.startswith(f"ray::{kind}") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


# ------------------------------------------------------------ running it


@contextmanager
def local_ray(num_cpus: int = 8) -> Iterator[None]:
    """A Ray of this process's own, whose workers find this repository."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    import ray

    from elastic_ring.runtime.driver.cluster import NAMESPACE

    ray.init(
        address="local", num_cpus=num_cpus, namespace=NAMESPACE, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR",
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def train_while(trainer: ElasticRingTrainer, action: Callable[[Watcher], T], *, to_the_end: bool = False) -> T:
    """`fit()` here, `action` on a thread; then the run is stopped as `ray job stop` does, or trains `to_the_end`.

    Raises what the action or the training raised.
    """
    over, answers, problems = threading.Event(), list[T](), list[BaseException]()

    def act() -> None:
        try:
            answers.append(action(Watcher(trainer.run_config.folder, over, trainer.scaling_config.mesh.size)))
        except BaseException as problem:
            problems.append(problem)
        if (problems or not to_the_end) and not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    def on_term(number: int, frame: object) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    before = signal.signal(signal.SIGTERM, on_term)
    thread = threading.Thread(target=act, name="bench")
    thread.start()
    try:
        trainer.fit()
    except KeyboardInterrupt:
        if not answers and not problems:
            raise
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)
    if problems:
        raise problems[0]
    return answers[0]


def summary_of(trainer: ElasticRingTrainer) -> dict[str, Any]:
    """What a run that trained to its end left as its summary."""
    return dict(json.loads((trainer.run_config.folder / SUMMARY_NAME).read_text()))


def keep_logs(folder: Path, target: Path) -> None:
    """Copy the journals, metrics and logs of the runs in `folder` and of this process's Ray into `target`."""
    import ray

    node = ray._private.worker._global_node
    logs = Path(node.get_logs_dir_path()) if node is not None else None
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.rglob("*.json*")):
        shutil.copy(path, target / f"{path.parent.name}-{path.name}")
    for path in sorted(logs.glob("worker-*")) if logs is not None else []:
        if path.stat().st_size:
            shutil.copy(path, target / path.name)


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder for a bench's runs."""
    with tempfile.TemporaryDirectory(prefix="elastic_ring_bench_") as folder:
        yield Path(folder)
