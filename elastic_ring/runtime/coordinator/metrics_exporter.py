"""Exports a run's metrics through Ray: a loop over `folds.metrics_table`.

The coordinator's deciding thread calls it, never a step. A gauge that is not set again disappears from Ray's endpoint
after 20 to 30 s, so all are set every few seconds, and an ended run has none soon. No decisions here.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial

from ray.util.metrics import Gauge, Histogram

from elastic_ring.config import RunConfig
from elastic_ring.control.state import State
from elastic_ring.runtime.coordinator.folds.metrics_table import TABLE, Metric, Reading
from elastic_ring.runtime.coordinator.recorder import RunRecorder
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

PERIOD_S = 4.0
BUCKETS_S = [0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 300.0]


class MetricsExporter:
    """The metrics of one run. Not thread-safe: the deciding thread alone uses it."""

    def __init__(
        self, run: RunConfig, recorder: RunRecorder, failing_s: Callable[[], float], step_flops: float | None = None
    ) -> None:
        """`failing_s` says for how long no checkpoint could be written."""
        self._run, self._recorder = run, recorder
        self._reading = partial(Reading, run, recorder, step_flops, time.time(), failing_s)
        self._exported_at = -math.inf
        self._num_observed = len(recorder.recoveries.records)  # an earlier coordinator observed these
        self._exported: list[tuple[Metric, Gauge | Histogram]] = []
        self._closed = False

    def export(self, state: State, driver_silent_s: float, now: float, *, failed: bool | None = None) -> None:
        """Set every gauge, at most once in PERIOD_S. A defect in here ends the metrics, not the training. `failed`: how
        the run ended; this export is the last."""
        if self._closed or (failed is None and time.monotonic() - self._exported_at < PERIOD_S):
            return
        self._exported_at, self._closed = time.monotonic(), failed is not None
        try:
            self._export(self._reading(state, driver_silent_s, now, self._num_observed, failed))
        except Exception:
            log.exception("metrics are not exported any more")
            self._closed = True

    def _export(self, reading: Reading) -> None:
        self._exported = self._exported or [(metric, _register(metric)) for metric in TABLE]
        for metric, exported in self._exported:
            export = exported.observe if isinstance(exported, Histogram) else exported.set
            for value, number in metric.samples(reading):
                if number is not None and math.isfinite(number):  # Ray drops these without a word
                    export(float(number), dict(zip(metric.labels, (self._run.name, value), strict=False)))
        self._num_observed = len(self._recorder.recoveries.records)


def _register(metric: Metric) -> Gauge | Histogram:
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.meaning, BUCKETS_S, metric.labels)
    return Gauge(metric.name, metric.meaning, metric.labels)


def step_flops(task: TrainingTask) -> float | None:
    """None with a pattern: what its attention leaves out is not counted."""
    return task.flops * task.step.global_batch if task.flops is not None and task.pattern is None else None
