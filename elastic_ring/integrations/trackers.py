"""Callbacks for experiment trackers: TensorBoard, Weights & Biases, MLflow. Each library is imported when it is used.

A tracker writes all values of an event at once, and at its start asks its store which events are there. So an event
that a killed driver leaves to be repeated gets no second point. When events come is not decided here. Two more
callbacks control a run: early stopping, and the checkpoint of the best validation.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import struct
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_ring.files import cut
from elastic_ring.monitor.callbacks import FAILED, FINISHED, STOPPED, Callback, RunInfo
from elastic_ring.monitor.metrics import StepMetrics

log = logging.getLogger(__name__)

Values = dict[str, float]
Points = Mapping[str, Sequence[tuple[int, float]]]
"""(step, value) of each name."""

STEP, VALIDATION, RECOVERY, CHECKPOINT = MARKS = "train/loss", "val/loss", "recovery/total_s", "checkpoint/bytes"
"""The value that every event of a kind has."""
BRANCH = "branch/number"
"""How often the run has gone back, at the step to which it has."""
PURGE = "purge"
PARTS_OF_RECOVERY = ("total_s", "detect_s", "close_s", "heal_s", "rerun_s", "steps_undone")
LONGEST_PARAMETER = 500


class Tracker(Callback):
    """Base of the trackers: computes the values of each event, and leaves out events that the store has."""

    tries_again = True
    library = ""
    """The module that it writes with, which is imported when a run starts."""

    def check_metrics(self, metrics: Collection[str]) -> None:
        if self.library and importlib.util.find_spec(self.library) is None:
            raise ValueError(_missing(self.library))

    def on_start(self, run: RunInfo) -> None:
        self._stored: dict[str, dict[int, list[float]]] = {name: {} for name in MARKS}
        for name, points in self.open(run).items():
            for step, value in points:
                self._stored[name].setdefault(step, []).append(value)

    def on_step(self, metrics: StepMetrics) -> None:
        self._log(STEP, metrics.step, values_of(metrics))

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(VALIDATION, step, {f"val/{name.removeprefix('val_')}": value for name, value in metrics.items()})

    def on_recovery(self, recovery: Mapping[str, Any]) -> None:
        values = {f"recovery/{part}": float(recovery[part]) for part in PARTS_OF_RECOVERY if part in recovery}
        self._log(RECOVERY, int(recovery["step"]), values)

    def on_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        values = {
            f"checkpoint/{name}": float(value)
            for name, value in checkpoint.items()
            if name != "step" and type(value) in (int, float)
        }
        self._log(CHECKPOINT, int(checkpoint["step"]), {CHECKPOINT: math.nan, **values})

    def on_back(self, step: int, validations: Mapping[int, Mapping[str, float]]) -> None:
        number = self.state.get("branch", 0) + 1
        self.write(step, {BRANCH: float(number)})
        self.state["branch"] = number
        self._undo(step)

    def _undo(self, step: int) -> None:
        """The points from `step` on count no more, and may come again."""
        self._stored = {
            name: {at: values for at, values in kept.items() if at < step} for name, kept in self._stored.items()
        }

    def open(self, run: RunInfo) -> Points:
        """Open the store for this run; returns the points of `MARKS` that it has."""
        raise NotImplementedError

    def write(self, step: int, values: Values) -> None:
        """Write all values of one event. They are with the store when this returns."""
        raise NotImplementedError

    def _log(self, mark: str, step: int, values: Values) -> None:
        stored, value = self._stored[mark].setdefault(step, []), values[mark]
        # Recoveries of one step differ in their durations, and steps where the run has gone back in their loss.
        if any(_is_same(value, other) for other in stored):
            log.info("%s has %s of step %d already", self.name, mark, step)
            return
        self.write(step, values)
        stored.append(value)


def values_of(metrics: StepMetrics) -> Values:
    """The plotted values of a step, without those that were not measured."""
    values = {
        STEP: metrics.loss,
        "train/grad_norm": metrics.grad_norm,
        "train/lr": metrics.lr,
        "train/skipped": float(metrics.skipped),
        "train/expert_load_max": metrics.expert_load_max,
        "speed/tokens_per_s": metrics.tokens_per_s,
        "speed/step_s": metrics.step_s,
        "speed/exposed_hop_wait_s": metrics.exposed_hop_wait_s,
        "speed/hop_latency_p99_s": metrics.hop_latency_p99_s,
        "mesh/members": float(metrics.num_members),
        "mesh/dp": float(metrics.mesh.dp),
        "mesh/cp": float(metrics.mesh.cp),
        "mesh/generation": float(metrics.generation),
    }
    return {name: value for name, value in values.items() if value is not None}


def _is_same(value: float, stored: float) -> bool:
    """Whether a store, which may keep 32 bits, has the value."""
    return math.isclose(value, stored, rel_tol=1e-6) or (math.isnan(value) and math.isnan(stored))


class TensorBoard(Tracker):
    """Writes event files to `folder`, by default `tensorboard` in the run's folder. Where the run goes back, the undone
    points are purged."""

    library = "tensorboardX"

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder

    def open(self, run: RunInfo) -> Points:
        folder = Path(self._folder) if self._folder is not None else run.folder / "tensorboard"
        points: dict[str, list[tuple[int, float]]] = {name: [] for name in MARKS}
        for path in sorted(folder.glob("*.tfevents.*")):
            for step, name, value in _points_of(path):
                if name == PURGE:
                    points = {name: [point for point in kept if point[0] < step] for name, kept in points.items()}
                elif name in points:
                    points[name].append((step, value))
        # Two drivers may open files within one second, and those of one name would overwrite each other.
        folder.mkdir(parents=self._folder is not None, exist_ok=True)  # never a run's folder that was moved away
        _library(self.library)
        # Not SummaryWriter: its flush leaves what a thread has not yet taken from a queue, which a kill then loses.
        files = importlib.import_module("tensorboardX.event_file_writer")
        self._writer = files.EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        return points

    def write(self, step: int, values: Values) -> None:
        proto = importlib.import_module("tensorboardX.proto.summary_pb2")
        points = [proto.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._put(step, summary=proto.Summary(value=points))  # one record: a kill cuts off all or none

    def on_back(self, step: int, validations: Mapping[int, Mapping[str, float]]) -> None:
        log_of = importlib.import_module("tensorboardX.proto.event_pb2").SessionLog
        self._put(step, session_log=log_of(status=log_of.START))  # as SummaryWriter's purge_step
        self._undo(step)

    def _put(self, step: int, **content: Any) -> None:
        event = importlib.import_module("tensorboardX.proto.event_pb2").Event
        self._writer.write_event(event(wall_time=time.time(), step=step, **content))
        self._writer.flush()

    def on_end(self) -> None:
        self._writer.close()


def _points_of(path: Path) -> Iterator[tuple[int, str, float]]:
    """(step, name, value) in an event file, whose records are length, checksum, event, checksum; a torn last one ends
    it. The name is PURGE where points from the step on count no more."""
    event_of = importlib.import_module("tensorboardX.proto.event_pb2").Event.FromString
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack_from("<Q", head)
            record = file.read(length + 4)
            if len(record) < length + 4:
                return
            event = event_of(record[:length])
            if event.HasField("session_log"):
                yield int(event.step), PURGE, math.nan
            for value in event.summary.value:
                yield int(event.step), str(value.tag), float(value.simple_value)


class WandB(Tracker):
    """One run of Weights & Biases under the id of the run's folder. `mode="offline"` writes files for `wandb sync`.

    Online a resumed run knows its points. Each driver writes its own offline files, which `wandb sync` joins; the event
    at which one was killed may be in two, as the same history step. W&B takes no point back: where the run goes back,
    undone points stay before the point BRANCH, and the newer ones follow it. Other keywords go to `wandb.init`.
    """

    library = "wandb"

    def __init__(self, project: str, *, mode: str | None = None, **init: Any) -> None:
        self._init = {"project": project, "mode": mode, **init}

    def open(self, run: RunInfo) -> Points:
        own = {"name": run.name, "id": run.id, "resume": "allow", "dir": str(run.folder), "config": dict(run.config)}
        self._run = _library(self.library).init(**(own | self._init))
        self._is_shared = self._run.settings.mode == "shared"  # which has no such number
        points: dict[str, list[tuple[int, float]]] = {}
        for mark in MARKS:
            kind = mark.partition("/")[0]
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/at_step")
            last = self._run.summary.get(f"{kind}/at_step")
            # The newest point is all that a summary has, and the only one that can come again.
            points[mark] = [] if last is None else [(int(last), float(self._run.summary.get(mark, math.nan)))]
        for kind, of in (("speed", "train"), ("mesh", "train"), ("branch", "branch")):
            self._run.define_metric(f"{kind}/*", step_metric=f"{of}/at_step")
        # W&B numbers the rows of a run, in rising order: offline it does not know where an earlier driver has ended.
        self.state["next_row"] = max(self._run.starting_step, self.state.get("next_row", 0))
        return points

    def write(self, step: int, values: Values) -> None:
        kind = next(iter(values)).partition("/")[0]
        # W&B drops a row below its own number, which the user's own rows raise.
        row = max(self.state["next_row"], 0 if self._is_shared else self._run.step)
        self._run.log({f"{kind}/at_step": step, **values}, step=row, commit=True)
        self.state["next_row"] = row + 1

    def on_end(self) -> None:
        self._run.finish(exit_code=int(self.end == FAILED))


class MLflow(Tracker):
    """One run of MLflow with the run's name and settings; it ends as the training does: FINISHED, FAILED, or KILLED if
    somebody stopped it.

    `tracking_uri` and `experiment` as in MLflow; by default what its environment says, and "elastic_ring". MLflow takes
    no point back: where the run goes back, undone points stay beside the newer ones, with times before that of BRANCH.
    """

    TAG, library = "elastic_ring.id", "mlflow"

    def __init__(self, tracking_uri: str | None = None, experiment: str = "elastic_ring") -> None:
        self._uri, self._experiment = tracking_uri, experiment

    def check_metrics(self, metrics: Collection[str]) -> None:
        super().check_metrics(metrics)
        try:
            _library(self.library).MlflowClient(tracking_uri=self._uri)
        except Exception as error:  # of any store
            raise ValueError(f"tracking_uri={self._uri!r}: MLflow refuses it: {cut(str(error), 200)}") from error

    def open(self, run: RunInfo) -> Points:
        library = _library(self.library)
        self._entities = importlib.import_module("mlflow.entities")
        self._client = library.MlflowClient(tracking_uri=self._uri)
        stored = self._client.get_experiment_by_name(self._experiment)
        experiment = stored.experiment_id if stored else self._client.create_experiment(self._experiment)
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{self.TAG}` = '{run.id}'")
        tracked = runs[0] if runs else self._client.create_run(experiment, run_name=run.name, tags={self.TAG: run.id})
        self._id = tracked.info.run_id
        if tracked.info.status != "RUNNING":  # an attempt before this one has failed or was stopped
            self._client.update_run(self._id, status="RUNNING")
        if not tracked.data.params:
            params = [
                self._entities.Param(name, str(value)[:LONGEST_PARAMETER])
                for name, value in flat(run.config).items()
                if value not in ("", None)
            ]
            for first in range(0, len(params), 100):  # what MLflow takes at once
                self._client.log_batch(self._id, params=params[first : first + 100])
        return {
            mark: [(point.step, point.value) for point in self._client.get_metric_history(self._id, mark)]
            for mark in MARKS
        }

    def write(self, step: int, values: Values) -> None:
        now_ms = int(time.time() * 1000)
        points = [self._entities.Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=points)

    def on_end(self) -> None:
        if self.end:
            self._client.set_terminated(self._id, {FINISHED: "FINISHED", FAILED: "FAILED", STOPPED: "KILLED"}[self.end])


def flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Settings by dotted names."""
    values: dict[str, object] = {}
    for name, value in config.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values


def _library(name: str) -> Any:
    """Raises ValueError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(_missing(name)) from error


def _missing(library: str) -> str:
    return f"{library} is not installed: pip install '.[tracking]'"


# ------------------------------------------------------------ callbacks that control a run


class _BestMetric(Callback):
    """Follows the least value of a validation's metric, in `state`, so that another driver goes on."""

    controls, min_delta = True, 0.0

    def __init__(self, metric: str = "val_loss") -> None:
        self.metric = metric

    @property
    def name(self) -> str:
        return f"{type(self).__qualname__}({self.metric})"

    def check_metrics(self, metrics: Collection[str]) -> None:
        if self.metric not in metrics:
            raise ValueError(f"metric={self.metric!r}: the validation has {', '.join(metrics)}")

    def on_back(self, step: int, validations: Mapping[int, Mapping[str, float]]) -> None:
        self.state.clear()
        for at, metrics in validations.items():
            if self.metric in metrics:
                self.take(at, metrics)

    def take(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the metric is less than ever before by more than `min_delta`; then it is the best."""
        value, best = metrics[self.metric], self.state.get("best", math.inf)
        is_best = value < best - self.min_delta
        waited = 0 if is_best else self.state.get("waited", 0) + 1
        self.state.update({"waited": waited} | ({"best": value, "step": step} if is_best else {}))
        return is_best


class EarlyStopping(_BestMetric):
    """Stops the run when `metric` has not become less by more than `min_delta` in `patience` validations (Prechelt
    1998, "Early Stopping - But When?"). Raises ValueError for a patience below 1."""

    def __init__(self, metric: str = "val_loss", patience: int = 3, min_delta: float = 0.0) -> None:
        super().__init__(metric)
        if patience < 1:
            raise ValueError(f"patience={patience}: give at least 1 validation")
        self.patience, self.min_delta = patience, min_delta

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self.take(step, metrics) and self.state["waited"] >= self.patience:
            best = (
                f"{self.state['best']:.4f} after step {self.state['step']}" if "best" in self.state else "never finite"
            )
            self.control.stop(f"{self.metric} has not improved in {self.patience} validations; its best was {best}")


class KeepBest(_BestMetric):
    """Has a checkpoint taken where `metric` is the least so far, which retention keeps until there is a better one."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.take(step, metrics):
            self.control.checkpoint(keep=True)

    def on_back(self, step: int, validations: Mapping[int, Mapping[str, float]]) -> None:
        if self.state.get("step", -1) >= step:  # retention left no earlier best: the next validation is the best again
            self.state.clear()
