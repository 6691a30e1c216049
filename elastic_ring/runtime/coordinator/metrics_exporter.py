"""Exports a run's metrics through Ray: what status.json shows, as the gauges of `monitor.metrics_table`.

The coordinator's deciding thread calls it, never a step. A gauge that is not set again disappears from Ray's endpoint
after 20 to 30 s, so all are set every few seconds, and an ended run has none soon. No decisions here.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.metrics import Gauge, Histogram

from elastic_ring.config import RunConfig
from elastic_ring.control.state import State, members, mesh_of, phase_name, spares
from elastic_ring.gpus import peak_flops
from elastic_ring.monitor.metrics_table import (
    BUCKETS_S,
    CAUSES,
    CLOCK_PARTS,
    GPU_METRICS,
    LOSSES,
    PHASES,
    RECOVERY_PARTS,
    TABLE,
    Metric,
    by_name,
)
from elastic_ring.runtime.coordinator.recorder import RunRecorder
from elastic_ring.train.task import TrainingTask

log = logging.getLogger(__name__)

PERIOD_S = 4.0
MOST_RANKS = 1500
"""Ray folds what a metric has above 2,000 series."""
DURATION = "elastic_ring_recovery_duration_seconds"

Sample = tuple[str, str, float | None]
"""Name, value of the second label (empty without one), value (None: not known)."""


@dataclass(frozen=True)
class Work:
    """A step's computation in FLOP, and one device's peak in TFLOP/s. None: unknown; the peak then follows from the
    GPU's name."""

    flops: float | None = None
    peak_tflops: float | None = None

    @classmethod
    def of(cls, run: RunConfig, task: TrainingTask) -> Work:
        """Unknown with a pattern: what its attention leaves out is not counted."""
        known = task.flops is not None and task.pattern is None
        return cls((task.flops or 0.0) * task.step.global_batch if known else None, run.peak_tflops)

    def utilisation(self, step_s: float, num_ranks: int, gpu: str) -> float | None:
        peak = self.peak_tflops * 1e12 if self.peak_tflops else peak_flops(gpu)
        return self.flops / (step_s * num_ranks * peak) if self.flops is not None and peak else None


class MetricsExporter:
    """The metrics of one run. Not thread-safe: the deciding thread alone uses it."""

    def __init__(
        self, run: RunConfig, recorder: RunRecorder, checkpoint_failing_s: Callable[[], float], work: Work | None = None
    ) -> None:
        """`checkpoint_failing_s` says for how long no checkpoint could be written."""
        self._work = work or Work()
        self._config, self._run, self._recorder = run, run.name, recorder
        self._checkpoint_failing_s = checkpoint_failing_s
        self._started_unix_s = time.time()
        self._exported_at = -math.inf
        self._num_observed = len(recorder.recoveries.records)  # an earlier coordinator observed these
        self._table = by_name()
        self._metrics: Mapping[str, Gauge | Histogram] = {}
        self._closed = False

    def export(self, state: State, driver_silent_s: float, now: float) -> None:
        """Set every gauge, at most once in PERIOD_S. A defect in here ends the metrics, not the training."""
        if self._closed or time.monotonic() - self._exported_at < PERIOD_S:
            return
        self._exported_at = time.monotonic()
        try:
            self._export(state, driver_silent_s, now)
        except Exception:
            log.exception("metrics are not exported any more")
            self._closed = True

    def close(self, state: State, driver_silent_s: float, now: float, *, failed: bool) -> None:
        """The last export: how the run ended."""
        self._exported_at = -math.inf
        self.export(state, driver_silent_s, now)
        if not self._closed:
            for name, value, number in of_end(failed):
                self._set(name, value, number)
        self._closed = True

    def _export(self, state: State, driver_silent_s: float, now: float) -> None:
        self._metrics = self._metrics or {metric.name: _made(metric) for metric in TABLE}
        others = [
            ("elastic_ring_driver_silent_seconds", "", driver_silent_s),
            ("elastic_ring_driver_lease_seconds", "", self._config.timeouts.lease_s),
            ("elastic_ring_checkpoints_missed", "", self._recorder.totals.num_checkpoints_missed),
            ("elastic_ring_checkpoint_failing_seconds", "", self._checkpoint_failing_s()),
        ]
        if self._config.checkpoint_config.is_on:
            newest_unix_s = self._recorder.totals.checkpoint_unix_s or self._started_unix_s
            others.append(("elastic_ring_last_checkpoint_timestamp_seconds", "", newest_unix_s))
        for name, value, number in [*samples(state, self._recorder, now, self._started_unix_s, self._work), *others]:
            self._set(name, value, number)
        for record in self._recorder.recoveries.records[self._num_observed :]:
            for part, duration_s in parts_of(record).items():
                self._metrics[DURATION].observe(duration_s, {"run": self._run, "part": part})
            self._num_observed += 1

    def _set(self, name: str, value: str, number: float | None) -> None:
        if number is None or not math.isfinite(number):  # Ray drops these without a word
            return
        label = self._table[name].label
        self._metrics[name].set(float(number), {"run": self._run, label: value} if label else {"run": self._run})


def _made(metric: Metric) -> Gauge | Histogram:
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.meaning, list(BUCKETS_S), metric.labels)
    return Gauge(metric.name, metric.meaning, metric.labels)


def samples(state: State, recorder: RunRecorder, now: float, started_unix_s: float, work: Work) -> Iterator[Sample]:
    """Every gauge of the table but those that the recorder and the state do not know."""
    yield from _standing(state, recorder, started_unix_s)
    yield from _of_mesh(state)
    yield from _of_steps(recorder, work)
    yield from _of_recoveries(recorder.recoveries.records, recorder.recoveries.num_lost())
    yield from _of_checkpoints(recorder.totals.checkpoints)
    yield "elastic_ring_checkpoint_intervals_missed", "", recorder.overdue.num_intervals
    yield from _of_copies(recorder.latest.copied)
    yield from _of_memory(state, recorder)
    yield from _of_time(recorder, now)
    yield from _of_clocks(state, recorder)
    yield from _of_nodes(recorder)


def of_end(failed: bool) -> Iterator[Sample]:
    """What the end of a run changes, whatever phase it came in."""
    yield from (("elastic_ring_phase", phase, float(phase == "ended")) for phase in PHASES)
    yield "elastic_ring_failed", "", float(failed)


def _standing(state: State, recorder: RunRecorder, started_unix_s: float) -> Iterator[Sample]:
    phase, newest = phase_name(state), recorder.metrics.newest
    yield from (("elastic_ring_phase", known, float(known == phase)) for known in PHASES)
    yield "elastic_ring_failed", "", 0.0
    yield "elastic_ring_committed_steps", "", recorder.metrics.last_step + 1
    yield "elastic_ring_planned_steps", "", state.options.total_steps
    last_unix_s = started_unix_s if newest.unix_s is None else newest.unix_s
    yield "elastic_ring_last_commit_timestamp_seconds", "", last_unix_s
    yield "elastic_ring_term", "", state.term
    yield "elastic_ring_generation", "", state.generation
    kept = recorder.recoveries.same_environment and all(record["exact"] for record in recorder.recoveries.records)
    yield "elastic_ring_memory_shortages", "", state.memory.num_shortages
    yield "elastic_ring_memory_reliefs", "", state.memory.num_reliefs
    yield "elastic_ring_memory_tight", "", recorder.totals.num_tight
    if (memory := recorder.detectors.memory) is not None:
        yield "elastic_ring_memory_share_ratio", "device", memory.device_share
        yield "elastic_ring_memory_share_ratio", "host", memory.host_share
    yield "elastic_ring_bit_exact", "", float(kept and state.promise == "bit-exact")


def _of_mesh(state: State) -> Iterator[Sample]:
    mesh, options = mesh_of(state), state.options
    yield "elastic_ring_mesh", "dp", mesh.dp if mesh else 0
    yield "elastic_ring_mesh", "cp", mesh.cp if mesh else 0
    yield "elastic_ring_wanted_rings", "min", options.scaling.min_dp
    yield "elastic_ring_wanted_rings", "start", options.scaling.dp
    yield "elastic_ring_wanted_rings", "max", options.scaling.most_rings
    waiting = set(spares(state))
    doing = Counter(
        "leaving"
        if worker.status == "stopping" or worker.draining
        else "starting"
        if worker.status == "starting"
        else "spare"
        if worker.worker in waiting
        else "member"
        for worker in state.workers.values()
    )
    yield from (("elastic_ring_workers", what, doing[what]) for what in by_name()["elastic_ring_workers"].values)
    yield "elastic_ring_wanted_spares", "", options.scaling.spares
    nodes = list(state.nodes.values())
    yield "elastic_ring_nodes", "usable", len(nodes)
    yield "elastic_ring_nodes", "draining", sum(node.draining for node in nodes)
    yield "elastic_ring_failed_starts", "", max((node.start_failures for node in nodes), default=0)


def _of_steps(recorder: RunRecorder, work: Work) -> Iterator[Sample]:
    newest = recorder.metrics.newest
    yield "elastic_ring_skipped_steps", "", newest.num_skipped
    yield "elastic_ring_loss_spikes", "", recorder.totals.num_spikes
    yield "elastic_ring_wrong_results", "", recorder.totals.num_wrong
    yield "elastic_ring_stragglers", "", recorder.totals.num_stragglers
    found = {name.removeprefix("val_"): value for name, value in newest.validation.items() if name != "step"}
    yield "elastic_ring_validation_loss", "", found.get("loss")
    yield from (("elastic_ring_validation", name, value) for name, value in found.items())
    if (step := newest.step) is not None:
        yield "elastic_ring_loss", "", step.loss
        yield "elastic_ring_gradient_norm", "", step.grad_norm
        yield "elastic_ring_learning_rate", "", step.lr
        yield "elastic_ring_step_seconds", "", step.step_s
        yield "elastic_ring_tokens_per_second", "", step.tokens_per_s
        yield "elastic_ring_mfu_ratio", "", work.utilisation(step.step_s, step.mesh.size, recorder.recoveries.gpu())
        yield "elastic_ring_data_wait_seconds", "", step.data_wait_s
        yield "elastic_ring_data_wait_ratio", "", recorder.detectors.data.share
        yield "elastic_ring_hop_sent_bytes", "", step.hop_bytes
        yield "elastic_ring_expert_load_ratio", "", step.expert_load_max
        yield "elastic_ring_expert_parts", "", step.expert_parts
        stragglers = recorder.detectors.stragglers
        yield "elastic_ring_slowest_rank_ratio", "", stragglers.slowest if stragglers else None
    if (timed := newest.timed) is not None:
        yield "elastic_ring_hop_exposed_wait_seconds", "", timed.exposed_hop_wait_s
        yield "elastic_ring_hop_latency_seconds", "mean", timed.hop_latency_mean_s
        yield "elastic_ring_hop_latency_seconds", "p99", timed.hop_latency_p99_s


def _of_recoveries(records: list[dict[str, Any]], num_lost: Mapping[str, int]) -> Iterator[Sample]:
    kinds, sums = Counter(record["kind"] for record in records), Counter[str]()
    for record in records:
        sums.update(parts_of(record))
    yield from (("elastic_ring_recoveries", kind, kinds[kind]) for kind in dict.fromkeys([*CAUSES, *kinds]))
    yield from (("elastic_ring_lost_workers", why, num_lost.get(why, 0)) for why in dict.fromkeys([*LOSSES, *num_lost]))
    yield from (("elastic_ring_recovery_sum_seconds", part, sums[part]) for part in RECOVERY_PARTS)
    yield "elastic_ring_undone_steps", "", sum(record["steps_undone"] for record in records)
    yield "elastic_ring_rerun_steps", "", sum(record["steps_rerun"] for record in records)


def _of_checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
    yield "elastic_ring_checkpoints", "", len(checkpoints)
    for newest in checkpoints[-1:]:
        yield "elastic_ring_checkpoint_step", "", newest["step"]
        yield "elastic_ring_checkpoint_size_bytes", "", newest["bytes"]
        yield "elastic_ring_checkpoint_seconds", "total", newest["total_s"]
        yield "elastic_ring_checkpoint_seconds", "blocked", newest["blocked_s"]


def _of_copies(newest: Mapping[str, Any] | None) -> Iterator[Sample]:
    if newest is not None:
        yield "elastic_ring_copy_step", "", newest["step"]
        yield "elastic_ring_copy_size_bytes", "", newest["bytes"]
        yield "elastic_ring_copy_seconds", "total", newest["total_s"]
        yield "elastic_ring_copy_seconds", "blocked", newest["blocked_s"]
        yield "elastic_ring_copies_skipped", "", newest["skipped"]


def _of_memory(state: State, recorder: RunRecorder) -> Iterator[Sample]:
    told = [recorder.nodes.progress(worker) for worker in state.workers]
    for part, key in (("rss", "rss_bytes"), ("peak", "peak_rss_bytes"), ("shared", "shared_bytes")):
        yield "elastic_ring_worker_memory_bytes", part, max((one[key] for one in told if key in one), default=None)
    yield from (("elastic_ring_gpu_memory_bytes", kind, size) for kind, size in recorder.latest.gpu_memory.items())
    yield from (
        ("elastic_ring_memory_pressure_ratio", part, share) for part, share in recorder.nodes.pressure().items()
    )


def _of_clocks(state: State, recorder: RunRecorder) -> Iterator[Sample]:
    told = [recorder.nodes.progress(worker) for worker in members(state)]
    clocks = [one["clock"] for one in told if "clock" in one]
    for part in CLOCK_PARTS if clocks else ():
        seconds = [clock[part] for clock in clocks]
        yield "elastic_ring_step_part_mean_seconds", part, math.fsum(seconds) / len(seconds)
        yield "elastic_ring_step_part_longest_seconds", part, max(seconds)
    ranks = recorder.latest.work_s[:MOST_RANKS] if len(recorder.latest.work_s) == len(members(state)) else ()
    yield from (("elastic_ring_rank_work_seconds", str(rank), work_s) for rank, work_s in enumerate(ranks))


def _of_nodes(recorder: RunRecorder) -> Iterator[Sample]:
    for address, read in sorted(recorder.nodes.health().items())[:MOST_RANKS]:
        yield from ((f"elastic_ring_network_{key}", address, number) for key, number in read["network"].items())
    gpus = [
        (f"{address}/{index}", gpu)
        for address, read in sorted(recorder.nodes.health().items())
        for index, gpu in sorted(read["gpus"].items())
    ]
    for name, gpu in gpus[:MOST_RANKS]:
        yield from ((GPU_METRICS[key], name, number) for key, number in sorted(gpu.items()))


def parts_of(record: Mapping[str, Any]) -> dict[str, float]:
    """A recovery's durations by part."""
    return {part: float(record[f"{part}_s"]) for part in RECOVERY_PARTS}


def _of_time(recorder: RunRecorder, now: float) -> Iterator[Sample]:
    goodput = recorder.goodput
    yield "elastic_ring_goodput_ratio", "", goodput.ratio(now)
    yield from (("elastic_ring_time_seconds", part, seconds) for part, seconds in recorder.time_s(now).items())
    yield "elastic_ring_late_compilations", "", recorder.totals.num_compiled_late
