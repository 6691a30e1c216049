"""Callbacks for experiment trackers: TensorBoard, Weights & Biases, MLflow. Each library is imported when it is used.

A tracker writes all values of an event at once, and at its start asks its store which events are there. So an event
that a killed driver leaves to be repeated gets no second point. When events come is not decided here.
"""

from __future__ import annotations

import importlib
import logging
import math
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_ring.monitor.callbacks import FAILED, FINISHED, STOPPED, Callback, RunInfo
from elastic_ring.monitor.metrics import StepMetrics

log = logging.getLogger(__name__)

Values = dict[str, float]
Points = Mapping[str, Sequence[tuple[int, float]]]
"""(step, value) of each name."""

STEP, VALIDATION, RECOVERY, CHECKPOINT = MARKS = "train/loss", "val/loss", "recovery/total_s", "checkpoint/bytes"
"""The value that every event of a kind has."""
PARTS_OF_RECOVERY = ("total_s", "detect_s", "close_s", "heal_s", "rerun_s", "steps_undone")
LONGEST_PARAMETER = 500


class Tracker(Callback):
    """What the trackers share: the values of each event, and leaving out events that the store has."""

    tries_again = True

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

    def open(self, run: RunInfo) -> Points:
        """Open the store for this run; returns the points of `MARKS` that it has."""
        raise NotImplementedError

    def write(self, step: int, values: Values) -> None:
        """Write all values of one event. They are with the store when this returns."""
        raise NotImplementedError

    def _log(self, mark: str, step: int, values: Values) -> None:
        known = self._stored[mark].setdefault(step, [])
        # A step, its validation and its checkpoint come once; recoveries of one step differ in their durations.
        if known and (mark != RECOVERY or any(math.isclose(values[mark], value, rel_tol=1e-6) for value in known)):
            log.info("%s has %s of step %d already", self.name, mark, step)
            return
        self.write(step, values)
        known.append(values[mark])


def values_of(metrics: StepMetrics) -> Values:
    """What trackers plot of a step; what was not measured is left out."""
    found = {
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
    return {name: value for name, value in found.items() if value is not None}


class TensorBoard(Tracker):
    """Writes event files to `folder`, by default `tensorboard` in the run's folder."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder

    def open(self, run: RunInfo) -> Points:
        folder = Path(self._folder) if self._folder is not None else run.folder / "tensorboard"
        found: dict[str, list[tuple[int, float]]] = {name: [] for name in MARKS}
        for path in sorted(folder.glob("*.tfevents.*")):
            for step, name, value in _points_of(path):
                if name in found:
                    found[name].append((step, value))
        # Two drivers may open files within one second, and those of one name would overwrite each other.
        folder.mkdir(parents=True, exist_ok=True)
        _library("tensorboardX")
        # Not SummaryWriter: its flush leaves what a thread has not yet taken from a queue, which a kill then loses.
        files = importlib.import_module("tensorboardX.event_file_writer")
        self._writer = files.EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        return found

    def write(self, step: int, values: Values) -> None:
        proto = importlib.import_module("tensorboardX.proto.summary_pb2")
        event = importlib.import_module("tensorboardX.proto.event_pb2").Event
        points = [proto.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        # One record: a kill cuts off all or none.
        self._writer.write_event(event(wall_time=time.time(), step=step, summary=proto.Summary(value=points)))
        self._writer.flush()

    def on_end(self) -> None:
        self._writer.close()


def _points_of(path: Path) -> Iterator[tuple[int, str, float]]:
    """(step, name, value) in an event file, whose records are length, checksum, event, checksum; a torn last one ends
    it."""
    event_of = importlib.import_module("tensorboardX.proto.event_pb2").Event.FromString
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack_from("<Q", head)
            record = file.read(length + 4)
            if len(record) < length + 4:
                return
            event = event_of(record[:length])
            for value in event.summary.value:
                yield int(event.step), str(value.tag), float(value.simple_value)


class WandB(Tracker):
    """One run of Weights & Biases under the id of the run's folder. `mode="offline"` writes files for `wandb sync`.

    Online a resumed run knows its points. Offline files are not read again, so that there the event at which a driver
    was killed may have two points. Other keywords go to `wandb.init`.
    """

    def __init__(self, project: str, *, mode: str | None = None, **init: Any) -> None:
        self._init = {"project": project, "mode": mode, **init}

    def open(self, run: RunInfo) -> Points:
        self._run = _library("wandb").init(
            **{
                "name": run.name,
                "id": run.id,
                "resume": "allow",
                "dir": str(run.folder),
                "config": dict(run.config),
                **self._init,
            }
        )
        found: dict[str, list[tuple[int, float]]] = {}
        for mark in MARKS:
            kind = mark.partition("/")[0]
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/at_step")
            last = self._run.summary.get(f"{kind}/at_step")
            # The newest point is all that a summary has, and the only one that can come again.
            found[mark] = [] if last is None else [(int(last), float(self._run.summary.get(mark, math.nan)))]
        for kind in ("speed", "mesh"):
            self._run.define_metric(f"{kind}/*", step_metric="train/at_step")
        return found

    def write(self, step: int, values: Values) -> None:
        kind = next(iter(values)).partition("/")[0]
        self._run.log({f"{kind}/at_step": step, **values})

    def on_end(self) -> None:
        self._run.finish(exit_code=int(self.end == FAILED))


class MLflow(Tracker):
    """One run of MLflow with the run's name and settings; it ends as the training does: FINISHED, FAILED, or KILLED if
    somebody stopped it.

    `tracking_uri` and `experiment` as in MLflow; by default what its environment says, and "elastic_ring".
    """

    TAG = "elastic_ring.id"

    def __init__(self, tracking_uri: str | None = None, experiment: str = "elastic_ring") -> None:
        self._uri, self._experiment = tracking_uri, experiment

    def open(self, run: RunInfo) -> Points:
        library = _library("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = library.MlflowClient(tracking_uri=self._uri)
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
        found = self._client.search_runs([experiment], filter_string=f"tags.`{self.TAG}` = '{run.id}'")
        tracked = found[0] if found else self._client.create_run(experiment, run_name=run.name, tags={self.TAG: run.id})
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


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted names."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _library(name: str) -> Any:
    """Raises ValueError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is not installed: pip install 'elastic-ring[tracking]'") from error
