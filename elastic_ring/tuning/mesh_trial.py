"""A trial on the mesh that the user asks for: a run of its own on the elastic core, as a `Trainable` of Ray Tune.

The trial follows its run as a driver does and reports at each validation. A trial that is killed attaches to the run
again, or has it resume from its checkpoint. Tune stops trials that lost, pauses others and stops all after Ctrl-C, and
a trial cannot tell which: its run ends where it stands and stays, and the same trial has it resume. Tune waits only
10 s for that, so a run's own end is awaited in its last step. Results are those of `trial`.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ray import tune as ray_tune

from elastic_ring.config import RunConfig
from elastic_ring.errors import CoordinatorLost, ElasticRingError, JournalDamaged, StorageFailed
from elastic_ring.monitor.callbacks import Callback
from elastic_ring.monitor.goodput import seen_of
from elastic_ring.monitor.metrics import SUMMARY_NAME, read_metrics
from elastic_ring.runtime.driver import attach
from elastic_ring.runtime.driver.session import end_run
from elastic_ring.state.checkpoints.manifest import FOLDER
from elastic_ring.state.checkpoints.weight_files import remove_others
from elastic_ring.state.storage.folder import Storage
from elastic_ring.tuning.cost import Costs
from elastic_ring.tuning.trial import NUM_REPORTS, Asked, result_of

if TYPE_CHECKING:
    from elastic_ring.trainer import ElasticRingTrainer

log = logging.getLogger(__name__)

RUN, STOPPED = "run", "stopped by Ray Tune"
ASK_AGAIN_S = 1.0
AGAIN = (CoordinatorLost, JournalDamaged, StorageFailed)
CPUS = 0.01
"""Of the trial itself, which only waits; its workers ask for what the trainer says."""


@dataclass(frozen=True)
class AskedRuns:
    """What all trials of a search share: of the trainer all but the pattern, and where the runs lie."""

    trainer: ElasticRingTrainer
    asked: Asked
    storage_path: str


class Verdict(Callback):
    """Training waits at a validation until Tune has asked for the next report, or has ended the trial."""

    controls = True

    def __init__(self, wait_s: float) -> None:
        self.news, self.goes_on, self.is_over = SimpleQueue[bool](), threading.Semaphore(0), threading.Event()
        self._wait_s, self.diverged = wait_s, ""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        loss = metrics.get("val_loss")
        if loss is None or not math.isfinite(loss):
            self.diverged = f"diverged: the loss of the validation after step {step} is not finite"
        self.news.put(False)
        if not self.is_over.is_set():
            self.goes_on.acquire(timeout=self._wait_s)
        if self.diverged:
            self.control.stop(self.diverged)


class MeshTrial(ray_tune.Trainable):
    """One pattern on one mesh; a `step` follows the run to its next validation."""

    def setup(self, config: dict[str, Any], shared: AskedRuns | None = None) -> None:
        assert shared is not None
        self._shared, scaling = shared, shared.trainer.scaling_config
        self._costs = Costs(shared.asked.task, scaling.cp, scaling.device)
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        trainer, self._error = copy.copy(self._shared.trainer), ""
        self._lost: BaseException | None = None
        if os.path.isdir(self._shared.asked.folder):
            os.chdir(self._shared.asked.folder)
        self._text, task = self._shared.asked.of(config, self._costs.num_layers)
        every = -(-task.step.steps // NUM_REPORTS)
        self._num_reports = -(-task.step.steps // every)
        step = replace(task.step, val_every_steps=every, val_every_tokens=0)
        trainer.task = self._task = replace(task, step=step, asks_callbacks=True)
        trainer.run_config = run_of(trainer.run_config, self._shared.storage_path, self.trial_id)
        self._verdict = Verdict(trainer.run_config.timeouts.callback_s / 2)
        trainer.callbacks, trainer.config_files = (self._verdict,), {}
        self._run = trainer.run_config
        self._about: Mapping[str, Any] = {"density": 1.0, "bytes": 0}
        self._following = threading.Thread(target=self._follow, args=(trainer,), name=self._run.name, daemon=True)
        self._waits = False
        self._following.start()

    def _follow(self, trainer: ElasticRingTrainer) -> None:
        try:
            self._about = self._costs.of(self._text)
            if len(self._losses) < self._num_reports:
                trainer.fit()
        except (ValueError, ElasticRingError) as error:
            self._error = f"{type(error).__name__}: {error}"
            self._lost = error if isinstance(error, AGAIN) else None
        except BaseException as error:
            self._lost = error
        finally:
            self._verdict.news.put(True)

    @property
    def _lines(self) -> list[dict[str, Any]]:
        return read_metrics(self._run.driver_folder)

    @property
    def _losses(self) -> list[float]:
        return [line["val_loss"] for line in self._lines if line.get("val_loss") is not None]

    def step(self) -> dict[str, Any]:
        if self._waits:
            self._verdict.goes_on.release()
        ended = self._verdict.news.get()
        self._waits = not ended
        if self._lost is not None:  # of no fault of the pattern's: Tune starts the trial again, as `max_failures` says
            raise self._lost
        lines, losses = self._lines, self._losses
        wrong = self._verdict.diverged or self._error
        if ended and not wrong and len(losses) < self._num_reports:  # it diverged before this process began
            wrong = f"its run ended after {len(losses)} of {self._num_reports} validations"
        if ended or wrong or len(losses) >= self._num_reports:  # nothing is left to decide
            self._join()
            self._leave(lost=bool(wrong))
            ended = True
        losses = [] if wrong else losses
        seen = seen_of([line["step_s"] for line in lines], {})
        return result_of(self._text, self._task, self._about, losses, seen.get("step_s"), len(lines), wrong) | {
            "done": ended
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, RUN).write_text(self._run.name, encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        """The run goes on from its own."""

    def _join(self) -> None:
        """Each wait of a run has a limit of its own."""
        self._verdict.goes_on.release()
        self._following.join()

    def _leave(self, *, lost: bool) -> None:
        """Of a whole run the records stay, of one that lost nothing."""
        if lost:
            Storage(self._shared.storage_path).remove_folder(self._run.name)
            return
        storage = Storage(self._run.storage_uri)
        storage.remove_folder(FOLDER)
        remove_others(storage, [])

    def cleanup(self) -> None:
        """End the run where it stands."""
        self._verdict.is_over.set()
        self._verdict.goes_on.release()
        while self._following.is_alive():
            attach.abandon(self._run, STOPPED)
            self._following.join(ASK_AGAIN_S)


def run_of(run: RunConfig, storage_path: str, trial_id: str) -> RunConfig:
    """The run of a trial, with the other settings of `run`."""
    name = f"trial-{trial_id}"
    return replace(run, name=name, storage_path=storage_path, run_dir=None, progress=False, resume="auto")


def remove_stopped(run: RunConfig, storage_path: str, trial_ids: Iterable[str]) -> None:
    """Remove the runs of trials that Tune has stopped for good. One whose trial was killed before it had ended is
    waited for, as `end_run` does."""
    storage = Storage(storage_path)
    for own in (run_of(run, storage_path, one) for one in trial_ids):
        if not storage.exists(f"{own.name}/{SUMMARY_NAME}"):
            if told := end_run(own, STOPPED):
                log.info("%s: %s", own.name, told)
            storage.remove_folder(own.name)
