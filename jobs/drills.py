"""What the measuring jobs share: a small model under elastic_ring, a run looked at from outside, the hand that strikes.

A drill trains with `fit()` on the main thread while another thread watches the run's folder and sends signals
to its processes by PID, as a failing machine would: nothing in the run knows that it is a drill.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic_ring import Batch, ElasticRingTrainer, OptimConfig, RunConfig, ScalingConfig, StepConfig
from elastic_ring.config import Timeouts
from elastic_ring.data.packing import Sample
from elastic_ring.monitor.metrics import JOURNAL_NAME, METRICS_NAME, STATUS_NAME, SUMMARY_NAME
from elastic_ring.train.task import LossFunction
from jobs.peers import common

ROOT = Path(__file__).resolve().parents[1]
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
    """FSDP2 gathers a model as small as this in one piece, as the peers' DDP reduces it."""
    return ()


def small_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The peers' loss, with the blocks' attention over the whole ring."""
    for block in model.blocks:
        block.attention = batch.attention
    logits, targets = model(batch.tokens, batch.positions).flatten(0, 1), batch.targets.flatten()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), int((targets != -100).sum())


def small_trainer(
    folder: Path, name: str, *, steps: int, spares: int = 1, loss: LossFunction = small_loss,
    check_model: bool = True, timeouts: Timeouts | None = None,
) -> ElasticRingTrainer:
    """The peers' model, optimizer and sequences a step, on rings of 2 x 2."""
    rate = common.LEARNING_RATE
    return ElasticRingTrainer(
        small_model, PeersBytes(), loss=loss,
        step=StepConfig(
            steps=steps, global_batch=SEQUENCES, context_tokens=common.CONTEXT_TOKENS, check_model=check_model
        ),
        optim=OptimConfig(peak_lr=rate, min_lr=rate, total_steps=steps, weight_decay=0.01, betas=(0.9, 0.999)),
        scaling=ScalingConfig(dp=DP, cp=CP, spares=spares, resources_per_worker={"CPU": 0.25}),
        run=RunConfig(name, str(folder / name), timeouts=timeouts or Timeouts(), progress=False), units=whole_model,
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


class DrillFailed(Exception):
    """What a drill waited for did not happen."""


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
        """The first answer of `found` that is not None. Raises DrillFailed when the run or the time is over."""
        deadline = time.monotonic() + timeout_s
        while (answer := found()) is None:
            if self._over.is_set():
                raise DrillFailed(f"the run ended while this waited for {what}")
            if time.monotonic() > deadline:
                raise DrillFailed(f"{what}: not within {timeout_s:.0f} s; status: {self.status()}")
            if time.monotonic() - self._shown_at > SHOWN_EVERY_S:
                self._shown_at = time.monotonic()
                show(f"  step {len(self.steps())}, waiting for {what}")
            time.sleep(poll_s)
        return answer

    def whole(self, num_spares: int) -> dict[str, Any]:
        """Wait until every place of the mesh is taken and `num_spares` warm ones wait; the status as it is then."""
        since_s = time.time()

        def found() -> dict[str, Any] | None:
            status = self.status()
            fresh = status.get("updated_unix_s", 0.0) > since_s and status["phase"] == "running"
            seated = fresh and len(status["members"]) == self._num_places and len(status["spares"]) >= num_spares
            alive = seated and all(psutil.pid_exists(p["pid"]) for p in status["members"] + status["spares"])
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


def strike(pid: int, number: signal.Signals) -> float:
    """Send the signal to a process of Ray's; the monotonic time just before. Raises DrillFailed for any other."""
    title = " ".join(psutil.Process(pid).cmdline())
    if not title.startswith("ray::"):
        raise DrillFailed(f"pid {pid} is {title!r}, no process of the run: it is not struck")
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

    from elastic_ring.runtime.cluster import NAMESPACE

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
            answers.append(action(Watcher(trainer.run.folder, over, trainer.scaling.mesh.size)))
        except BaseException as problem:
            problems.append(problem)
        if (problems or not to_the_end) and not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    def on_term(number: int, frame: object) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    before = signal.signal(signal.SIGTERM, on_term)
    thread = threading.Thread(target=act, name="drill")
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
    return dict(json.loads((trainer.run.folder / SUMMARY_NAME).read_text()))


# ------------------------------------------------------------ showing and keeping


def show(text: str) -> None:
    print(text, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) if i == 0 else text.rjust(width) for i, (text, width) in
                  enumerate(zip(row, widths, strict=True))).rstrip()
        for row in cells
    )  # fmt: skip


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import ray

    return {
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "cores": os.cpu_count(),
        "load_1_min": round(os.getloadavg()[0], 2), "python": platform.python_version(), "torch": torch.__version__,
        "ray": ray.__version__, "machine": platform.machine(), "arguments": sys.argv[1:],
    }  # fmt: skip


def save(name: str, text: str, figures: dict[str, Any]) -> None:
    """benchmarks/NAME-DATE.txt as printed, and the same as .json beside it."""
    folder = ROOT / "benchmarks"
    folder.mkdir(exist_ok=True)
    about = machine()
    stem = f"{name}-{about['utc'][:10]}"
    head = ", ".join(f"{key} {value}" for key, value in about.items() if key != "arguments")
    (folder / f"{stem}.txt").write_text(f"jobs/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}\n{head}\n\n{text}\n")
    (folder / f"{stem}.json").write_text(json.dumps({"machine": about, **figures}, indent=1) + "\n")
    show(f"saved as benchmarks/{stem}.txt and .json")


def keep_logs(folder: Path, target: Path) -> None:
    """Copy what the runs in `folder` and this process's Ray wrote of themselves: journals, metrics, logs."""
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
    """A folder for the runs of a drill, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="elastic_ring_drill_") as folder:
        yield Path(folder)
