"""A trial on the mesh that the user asks for: a run of its own on the elastic core, as a `Trainable` of Ray Tune.

The trial follows its run as a driver does and reports at each validation. A trial that is killed attaches to the run
again, or has it resume from its checkpoint. Tune stops trials that lost, pauses others and stops all after Ctrl-C, and
a trial cannot distinguish these: its run ends where it stands, its records stay, and the same trial resumes it. Tune
waits only 10 s for that, so a run's own end is awaited in its last step.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
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
from elastic_ring.tuning.report import NUM_REPORTS, TrialResult, trial_result
from elastic_ring.tuning.space import PatternCost, PatternCosts, SearchTask, Value

if TYPE_CHECKING:
    from elastic_ring.trainer import ElasticRingTrainer

log = logging.getLogger(__name__)

RUN, STOPPED = "run", "stopped by Ray Tune"
RETRY_S = 1.0
RETRIED = (CoordinatorLost, JournalDamaged, StorageFailed)
"""Errors that are not the pattern's: Tune starts the trial again, up to its `max_failures`."""
CPUS = 0.01
"""CPUs of the trial itself, which only waits; its workers take the trainer's resources."""


class ReportGate(Callback):
    """Holds training at a validation until Tune asks for the next report or ends the trial."""

    controls = True

    def __init__(self, wait_s: float) -> None:
        self.reports, self.permits, self.is_over = SimpleQueue[bool](), threading.Semaphore(0), threading.Event()
        self._wait_s, self.diverged = wait_s, ""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        loss = metrics.get("val_loss")
        if loss is None or not math.isfinite(loss):
            self.diverged = f"diverged: the loss of the validation after step {step} is not finite"
        self.reports.put(False)
        if not self.is_over.is_set():
            self.permits.acquire(timeout=self._wait_s)
        if self.diverged:
            self.control.stop(self.diverged)


class MeshTrial(ray_tune.Trainable):
    """One pattern on one mesh; a `step` follows the run to its next validation. Runs lie in the storage `runs`."""

    def setup(
        self,
        config: Mapping[str, Value],
        trainer: ElasticRingTrainer | None = None,
        search: SearchTask | None = None,
        runs: str = "",
    ) -> None:
        assert trainer is not None
        assert search is not None
        self._trainer, self._search, self._runs = trainer, search, runs
        self._costs = PatternCosts(search.task, search.scaling.cp, search.scaling.device)
        self._begin(config)

    def reset_config(self, new_config: Mapping[str, Value]) -> bool:
        self.cleanup()
        self._begin(new_config)
        return True

    def _begin(self, config: Mapping[str, Value]) -> None:
        trainer, self._error = copy.copy(self._trainer), ""
        self._lost: BaseException | None = None
        if os.path.isdir(self._search.folder):
            os.chdir(self._search.folder)
        self._text, task = self._search.trial(config, self._costs.num_layers)
        every = -(-task.step.steps // NUM_REPORTS)
        self._num_reports = -(-task.step.steps // every)
        step = replace(task.step, val_every_steps=every, val_every_tokens=0)
        trainer.task = self._task = replace(task, step=step, asks_callbacks=True)
        trainer.run_config = self._run = run_of(trainer.run_config, self._runs, self.trial_id)
        self._gate = ReportGate(self._run.timeouts.callback_s / 2)
        trainer.callbacks, trainer.config_files = (self._gate,), {}
        self._cost, self._waits = PatternCost(1.0, 0), False
        self._following = threading.Thread(target=self._follow, args=(trainer,), name=self._run.name, daemon=True)
        self._following.start()

    def _follow(self, trainer: ElasticRingTrainer) -> None:
        try:
            self._cost = self._costs.cost(self._text)
            if len(self._records()[1]) < self._num_reports:
                trainer.fit()
        except (ValueError, ElasticRingError) as error:
            self._error = f"{type(error).__name__}: {error}"
            self._lost = error if isinstance(error, RETRIED) else None
        except BaseException as error:
            self._lost = error
        finally:
            self._gate.reports.put(True)

    def _records(self) -> tuple[list[float], list[float]]:
        """The times of the run's steps and the losses of its validations so far."""
        lines = read_metrics(self._run.driver_folder)
        losses = [loss for line in lines if (loss := line.get("val_loss")) is not None]
        return [line["step_s"] for line in lines], losses

    def step(self) -> TrialResult:
        if self._waits:
            self._gate.permits.release()
        ended = self._gate.reports.get()
        self._waits = not ended
        if self._lost is not None:
            raise self._lost
        times, losses = self._records()
        wrong = self._gate.diverged or self._error
        if ended and not wrong and len(losses) < self._num_reports:  # it diverged before this process began
            wrong = f"its run ended after {len(losses)} of {self._num_reports} validations"
        if ended or wrong or len(losses) >= self._num_reports:  # nothing is left to decide
            self._gate.permits.release()
            self._following.join()  # each wait of a run has a limit of its own
            if wrong:
                Storage(self._runs).remove_folder(self._run.name)
            else:  # the records of a whole run stay
                storage = Storage(self._run.storage_uri)
                storage.remove_folder(FOLDER)
                remove_others(storage, [])
            ended = True
        losses, step_s = [] if wrong else losses, seen_of(times, {}).get("step_s")
        result = trial_result(self._text, self._task, self._cost, losses, step_s, len(times), wrong)
        return result | {"done": ended}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, RUN).write_text(self._run.name, encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing to load: the run resumes from its own checkpoint."""

    def cleanup(self) -> None:
        """End the run where it stands."""
        self._gate.is_over.set()
        self._gate.permits.release()
        while self._following.is_alive():
            attach.abandon(self._run, STOPPED)
            self._following.join(RETRY_S)


def run_of(run: RunConfig, runs: str, trial_id: str) -> RunConfig:
    """The run of a trial in the storage `runs`, with the other settings of `run`."""
    name = f"trial-{trial_id}"
    return replace(run, name=name, storage_path=runs, run_dir=None, progress=False, resume="auto")


def remove_stopped(run: RunConfig, runs: str, trial_ids: Iterable[str]) -> None:
    """Remove the runs of trials that Tune has stopped for good. Waits, as `end_run` does, for a run whose trial was
    killed before the run had ended."""
    storage = Storage(runs)
    for own in (run_of(run, runs, trial_id) for trial_id in trial_ids):
        if not storage.exists(f"{own.name}/{SUMMARY_NAME}"):
            if outcome := end_run(own, STOPPED):
                log.info("%s: %s", own.name, outcome)
            storage.remove_folder(own.name)
