"""The table of a run's metrics: name, unit, meaning, labels, and the function that computes the value.

Exporter, documentation and dashboard loop over it: a new metric is a row. Ray puts `ray_` before the name and adds
labels of its own. No Ray and no torch in here.

Every sum since the run's start is a gauge, not a counter: a counter of Ray cannot start at 0, so that Prometheus would
miss the first event; it begins anew with a new coordinator; and a node shows it as long as it lives, even when the run
has ended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from elastic_ring.config import RunConfig
from elastic_ring.control.decisions.detectors import PressureWatch
from elastic_ring.control.facts import CheckpointMissed, LossSpiked, MemoryNearlyFull, RankStraggled, WrongResult
from elastic_ring.control.state import State, members, mesh_of, phase_name, spares
from elastic_ring.gpus import peak_flops
from elastic_ring.monitor.goodput import CLOCK_PARTS, TIME_PARTS
from elastic_ring.monitor.metrics import CheckpointEvent, Recovery, StepMetrics, Validation
from elastic_ring.runtime.coordinator.folds.run_totals import Live
from elastic_ring.runtime.notices import Copied

if TYPE_CHECKING:
    from elastic_ring.runtime.coordinator.recorder import RunRecorder

PREFIX = "ray_"
"""What Ray puts before the name of every metric."""
MOST_RANKS = 1500
"""Ray folds what a metric has above 2,000 series."""

PHASES = ("idle", "forming", "building", "running", "closing", "waiting", "finishing", "reconnecting", "ended")
LOSSES = (
    *("died", "hung", "exited", "node lost", "unreachable", "start-failed"),
    *("device error", "poisoned device", "computed wrongly", "out of memory"),
)
"""Why a worker was lost."""
CAUSES = (*LOSSES, "drained", "peer", "user", "memory", "corrupt", "coordinator")
"""Why a recovery began: the reason of its first loss; `drained` after a notice; without a loss `peer` for a broken
exchange, `user` for an error of the user's code, `memory` for a step that ran out of memory, `corrupt` for ranks that
did not agree; `coordinator` when only that was replaced."""
RECOVERY_PARTS = ("detect", "close", "heal", "rerun", "total")
Counters = list[tuple[str, Mapping[str, float]]]
"""Of nodes or GPUs, by name."""


@dataclass(frozen=True)
class Reading:
    """Input of every metric. `step_flops`: of one step; None if unknown. `num_observed`: recoveries that are in the
    histogram already. `failed`: whether the run ended with an error, None while it goes on."""

    run: RunConfig
    recorder: RunRecorder
    step_flops: float | None
    started_unix_s: float
    state: State
    num_observed: int = 0
    failed: bool | None = None

    @property
    def live(self) -> Live:
        return self.recorder.live

    def utilisation(self) -> float | None:
        """None where model or peak is unknown."""
        step, recoveries = self.recorder.metrics.newest.step, self.recorder.recoveries
        peak = self.run.peak_tflops * 1e12 if self.run.peak_tflops else peak_flops(recoveries.bits.gpu())
        if step is None or self.step_flops is None or peak is None:
            return None
        return self.step_flops / (step.step_s * step.mesh.size * peak)

    def is_bit_exact(self) -> bool:
        recoveries = self.recorder.recoveries
        is_exact = recoveries.bits.are_promised and all(recovery.exact for recovery in recoveries.records)
        return is_exact and self.state.promise == "bit-exact"

    def phases(self) -> dict[str, float]:
        present = phase_name(self.state) if self.failed is None else "ended"
        return {phase: phase == present for phase in PHASES}

    def num_workers(self) -> dict[str, float]:
        waiting, num_by_part = set(spares(self.state)), dict.fromkeys(("member", "spare", "starting", "leaving"), 0.0)
        for worker in self.state.workers.values():
            part = "spare" if worker.worker in waiting else "member"
            part = "starting" if worker.status == "starting" else part
            num_by_part["leaving" if worker.status == "stopping" or worker.draining else part] += 1
        return num_by_part

    def worker_memory_bytes(self) -> dict[str, float | None]:
        readings = list(self.live.workers.values())
        return {
            "rss": max((read["rss_bytes"] for read in readings if "rss_bytes" in read), default=None),
            "peak": max((read["peak_rss_bytes"] for read in readings if "peak_rss_bytes" in read), default=None),
            "shared": max((read["shared_bytes"] for read in readings if "shared_bytes" in read), default=None),
        }

    @cached_property
    def clocks(self) -> list[Mapping[str, float]] | None:
        """Of the members that have a clock; None without any."""
        readings = [self.live.workers.get(worker, {}) for worker in members(self.state)]
        return [reading["clock"] for reading in readings if "clock" in reading] or None

    def rank_work_s(self) -> dict[str, float]:
        work_s = self.live.work_s
        ranks = work_s[:MOST_RANKS] if len(work_s) == len(members(self.state)) else ()
        return {str(rank): rank_s for rank, rank_s in enumerate(ranks)}

    @cached_property
    def networks(self) -> Counters:
        return [(address, node["network"]) for address, node in sorted(self.live.health.items())[:MOST_RANKS]]

    @cached_property
    def gpus(self) -> Counters:
        nodes = sorted(self.live.health.items())
        gpus = ((f"{address}/{i}", gpu) for address, node in nodes for i, gpu in sorted(node["gpus"].items()))
        return list(islice(gpus, MOST_RANKS))


Samples = float | Mapping[str, float | None] | Sequence[tuple[str, float]] | None
"""A number, or numbers by the value of the second label; None if unknown."""
S = TypeVar("S")


@dataclass(frozen=True)
class Metric:
    """A row. `values`: of the second label, `label`, or a text where they are not known beforehand. `only`: when the
    metric is exported, if not always."""

    meaning: str
    compute: Callable[[Reading], Samples]
    values: tuple[str, ...] | str = ()
    label: Literal["cause", "part"] = "part"
    only: str = ""
    kind: Literal["gauge", "histogram"] = "gauge"
    name: str = ""
    unit: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        return ("run", self.label) if self.values else ("run",)

    @property
    def exported_name(self) -> str:
        """The name at Ray's endpoint and in Prometheus."""
        return PREFIX + self.name

    def samples(self, reading: Reading) -> list[tuple[str, float | None]]:
        """Pairs of the second label's value (empty without a label) and a number."""
        computed = self.compute(reading)
        if isinstance(computed, Mapping):
            return list(computed.items())
        return list(computed) if isinstance(computed, Sequence) else [("", computed)]


@dataclass(frozen=True)
class _Source(Generic[S]):
    """Makes rows that compute from the result of `read`; without a value while that is None."""

    read: Callable[[Reading], S | None]
    only: str = ""

    def __call__(
        self, meaning: str, value: Callable[[S], Samples], values: tuple[str, ...] | str = (), **more: Any
    ) -> Metric:
        def compute(reading: Reading) -> Samples:
            source = self.read(reading)
            return None if source is None else value(source)

        return Metric(meaning, compute, values, **{"only": self.only, **more})


STEP_1, VALIDATION_1, CHECKPOINT_1 = "after the first step", "after the first validation", "after the first checkpoint"
_run = _Source[Reading](lambda r: r)
_state = _Source[State](lambda r: r.state)
_recorder = _Source["RunRecorder"](lambda r: r.recorder)
_recoveries = _Source[Sequence[Recovery]](lambda r: r.recorder.recoveries.records)
_step = _Source[StepMetrics](lambda r: r.recorder.metrics.newest.step, STEP_1)
_validation = _Source[Validation](lambda r: r.recorder.metrics.newest.validation, VALIDATION_1)
_timed = _Source[StepMetrics](lambda r: r.recorder.metrics.newest.timed, STEP_1)
_clock = _Source[list[Mapping[str, float]]](lambda r: r.clocks, STEP_1)
_checkpoint = _Source[CheckpointEvent](lambda r: next(iter(r.recorder.totals.checkpoints[-1:]), None), CHECKPOINT_1)
_copy = _Source[Copied](lambda r: r.live.copied, "with copies")
_live = _Source[Live](lambda r: r.live)
_memory = _Source[PressureWatch](lambda r: r.recorder.detectors.memory)


def _each(read: Callable[[Reading], Counters], values: str, key: str, meaning: str, only: str = "") -> Metric:
    """A row for `key` of each node or GPU."""

    def compute(reading: Reading) -> Samples:
        return {name: counters[key] for name, counters in read(reading) if key in counters}

    return Metric(meaning, compute, values, only=only)


NODE, GPU = "the node's address", "the node's address / the GPU's index"
IB = "InfiniBand ports of the node since they were reset"
_network = partial(_each, lambda r: r.networks, NODE)
_infiniband = partial(_network, only="where there are such ports")
_gpu = partial(_each, lambda r: r.gpus, GPU, only="on GPUs, with nvidia-ml-py")

# By "name, unit"; without a unit it is 1.
_ROWS: dict[str, Metric] = {
    # where the run stands
    "phase": _run("1 for the phase that the run is in, 0 for the others", Reading.phases, PHASES),
    "failed": _run("1 once the run has ended with an error, else 0", lambda r: bool(r.failed)),
    "committed_steps, steps": _recorder("steps whose result is committed", lambda r: r.metrics.last_step + 1),
    "planned_steps, steps": _state("steps that the run is to train", lambda s: s.options.total_steps),
    "last_commit_timestamp_seconds, seconds": _run(
        "Unix time at which the coordinator heard of the newest committed step; of its own start before the first",
        lambda r: r.started_unix_s if (s := r.recorder.metrics.newest.unix_s) is None else s,
    ),
    "term": _state("number of the coordinator that decides; rises with each new one", lambda s: s.term),
    "generation": _state("number of the membership; rises with each change", lambda s: s.generation),
    "bit_exact": _run("1 as long as the run promises equal bits, 0 once only equal samples", Reading.is_bit_exact),
    "driver_silent_seconds, seconds": _live("time since a driver last called", lambda live: live.driver_silent_s),
    "driver_lease_seconds, seconds": _run(
        "silence of the driver after which the run ends (lease_s)", lambda r: r.run.timeouts.lease_s
    ),
    # training
    "loss": _step("mean loss of the newest committed step's tokens; missing while not finite", lambda s: s.loss),
    "validation_loss": _validation(
        "loss of the newest validation, the weighted mean of its sets", lambda v: v.values.get("val_loss")
    ),
    "validation": _validation(
        "what the newest validation found",
        lambda v: {name.removeprefix("val_"): number for name, number in v.values.items()},
        "loss, perplexity and each metric, of all sets and of each (SET_loss)",
    ),
    "gradient_norm": _step("norm of the gradient before clipping; missing while not finite", lambda s: s.grad_norm),
    "learning_rate": _step("learning rate of the newest committed step", lambda s: s.lr),
    "step_seconds, seconds": _step("duration of the newest committed step on global rank 0", lambda s: s.step_s),
    "tokens_per_second, tokens/s": _step(
        "tokens of the newest committed step by its duration", lambda s: s.tokens_per_s
    ),
    "mfu_ratio": _run(
        "model FLOP utilisation of the newest committed step: 6 for each parameter and token and causal attention, "
        "recomputation not counted, by its duration and the devices' peak (peak_tflops)",
        Reading.utilisation,
        only="where model and peak are known, without a pattern",
    ),
    "skipped_steps, steps": _recorder(
        "steps so far that a non-finite gradient, a loss spike, or no counted target, made the run skip",
        lambda r: r.metrics.newest.num_skipped,
    ),
    "loss_spikes, steps": _recorder(
        "steps so far whose loss was far above those before (loss_spike), whatever was done about it",
        lambda r: r.totals.num[LossSpiked],
    ),
    "stragglers, ranks": _recorder(
        "how often so far a rank was slower than its peers for a whole window (straggler)",
        lambda r: r.totals.num[RankStraggled],
    ),
    "slowest_rank_ratio": _recorder(
        "how many times as long as its peers the slowest rank worked in the newest step that measured it",
        lambda r: watch.slowest if r.metrics.newest.step and (watch := r.detectors.stragglers) else None,
        only=STEP_1,
    ),
    "expert_load_ratio": _step(
        "how many times its fair share of tokens the fullest expert of a layer got in the newest committed step",
        lambda s: s.expert_load_max,
        only="with experts",
    ),
    "expert_parts, passes": _step(
        "passes of layers in the newest committed step whose tokens came to their experts in parts, to spare memory",
        lambda s: s.expert_parts,
    ),
    "wrong_results, findings": _recorder(
        "how often so far ranks that must agree did not (corruption), whatever was done about it",
        lambda r: r.totals.num[WrongResult],
    ),
    # the mesh
    "mesh, ranks": _state(
        "rings (dp) and ranks of a ring (cp); 0 without a mesh",
        lambda s: {"dp": mesh.dp, "cp": mesh.cp} if (mesh := mesh_of(s)) else {"dp": 0, "cp": 0},
        ("dp", "cp"),
    ),
    "wanted_rings, rings": _state(
        "min_dp, dp and max_dp of the settings",
        lambda s: {"min": (c := s.options.scaling).min_dp, "start": c.dp, "max": c.most_rings},
        ("min", "start", "max"),
    ),
    "workers, workers": _run(
        "workers by what they do; leaving ones are draining or stopping",
        Reading.num_workers,
        ("member", "spare", "starting", "leaving"),
    ),
    "wanted_spares, workers": _state("spares of the settings", lambda s: s.options.scaling.spares),
    "nodes, nodes": _state(
        "nodes that the coordinator may use, and those among them that drain",
        lambda s: {"usable": len(s.nodes), "draining": sum(node.draining for node in s.nodes.values())},
        ("usable", "draining"),
    ),
    "failed_starts, starts": _state(
        "failed starts in a row, of the node with most of them",
        lambda s: max((node.start_failures for node in s.nodes.values()), default=0),
    ),
    # recoveries
    "recoveries, recoveries": _recoveries(
        "recoveries so far, by the cause of each",
        lambda records: {**dict.fromkeys(CAUSES, 0), **Counter(record.kind for record in records)},
        CAUSES,
        label="cause",
    ),
    "lost_workers, workers": _recorder(
        "members lost so far, by reason",
        lambda r: {**dict.fromkeys(LOSSES, 0), **r.recoveries.num_lost()},
        LOSSES,
        label="cause",
    ),
    "recovery_sum_seconds, seconds": _recoveries(
        "time of all recoveries so far, by part",
        lambda records: {part: sum(record.seconds(part) for record in records) for part in RECOVERY_PARTS},
        RECOVERY_PARTS,
    ),
    "recovery_duration_seconds, seconds": _run(
        "durations of the recoveries that this coordinator saw; Ray makes its sum of bucket midpoints, so take "
        "sums from elastic_ring_recovery_sum_seconds",
        lambda r: [(p, d.seconds(p)) for d in r.recorder.recoveries.records[r.num_observed :] for p in RECOVERY_PARTS],
        RECOVERY_PARTS,
        only="after the first recovery",
        kind="histogram",
    ),
    "memory_shortages, attempts": _state(
        "attempts at a step so far that ran out of memory", lambda s: s.memory.num_shortages
    ),
    "memory_reliefs, reliefs": _state(
        "reliefs of the memory ladder in force; 0 while memory suffices", lambda s: s.memory.num_reliefs
    ),
    "memory_tight, times": _recorder(
        "how often so far memory was nearly full for eight steps in a row (memory pressure)",
        lambda r: r.totals.num[MemoryNearlyFull],
    ),
    "memory_share_ratio": _memory(
        "how full memory was in the newest step: of what the fullest rank's device can give (device; 0 without a "
        "limit), of what the guard of the fullest node allows (host)",
        lambda m: {"device": m.device_share, "host": m.host_share},
        ("device", "host"),
    ),
    # memory by kind
    "worker_memory_bytes, bytes": _run(
        "host memory of the worker that has most of each kind: resident (rss), resident at most so far (peak), "
        "shared memory (shared)",
        Reading.worker_memory_bytes,
        ("rss", "peak", "shared"),
    ),
    "gpu_memory_bytes, bytes": _live(
        "GPU memory of global rank 0 after the newest step: tensors (allocated), what torch holds for them "
        "(reserved), free pieces of blocks that are in use (fragmented), the most that tensors took so far (peak)",
        lambda live: live.gpu_memory,
        ("allocated", "reserved", "fragmented", "peak"),
        only="on GPUs",
    ),
    "memory_pressure_ratio": _live(
        "share of the last 10 s in which some or all tasks (full) of a node or its container waited for memory; of "
        "the node that waits most (PSI)",
        lambda live: live.pressure,
        ("some", "full"),
        only="where the kernel tells",
    ),
    "undone_steps, steps": _recoveries(
        "committed steps so far that a recovery undid", lambda records: sum(r.steps_undone for r in records)
    ),
    "rerun_steps, steps": _recoveries(
        "steps so far that ran again because nobody held their result",
        lambda records: sum(r.steps_rerun for r in records),
    ),
    # checkpoints
    "checkpoints, checkpoints": _recorder("checkpoints so far that count", lambda r: len(r.totals.checkpoints)),
    "checkpoints_missed, checkpoints": _recorder(
        "checkpoints so far that were due and do not count: not written, or the last one was still being written",
        lambda r: r.totals.num[CheckpointMissed],
    ),
    "last_checkpoint_timestamp_seconds, seconds": _run(
        "Unix time at which the newest checkpoint began to count; of the coordinator's start before the first",
        lambda r: (r.recorder.totals.checkpoint_unix_s or r.started_unix_s) if r.run.checkpoint_config.is_on else None,
        only="with checkpoints",
    ),
    "checkpoint_step, steps": _checkpoint("steps that the newest checkpoint contains", lambda c: c["step"]),
    "checkpoint_size_bytes, bytes": _checkpoint("size of the newest checkpoint", lambda c: c["bytes"]),
    "checkpoint_seconds, seconds": _checkpoint(
        "the newest checkpoint: all of it (total), and how long training waited for it (blocked)",
        lambda c: {"total": c["total_s"], "blocked": c["blocked_s"]},
        ("total", "blocked"),
    ),
    "checkpoint_intervals_missed, intervals": _recorder(
        "intervals of training without a checkpoint that counts, for whatever reason; 0 in the first 30 s of it",
        lambda r: r.detectors.checkpoints.num_intervals,
    ),
    "checkpoint_failing_seconds, seconds": _live(
        "for how long no checkpoint could be written, for whatever reason; 0 when the last one could",
        lambda live: live.checkpoint_failing_s,
    ),
    # copies in peers' memory
    "copy_step, steps": _copy(
        "steps that the newest snapshot contains whose exchange with the peers of global rank 0 is complete",
        lambda c: c.step,
    ),
    "copy_size_bytes, bytes": _copy("size of this snapshot of global rank 0", lambda c: c.bytes),
    "copy_seconds, seconds": _copy(
        "its exchange: all of it (total), and how long training waited for it (blocked)",
        lambda c: {"total": c.total_s, "blocked": c.blocked_s},
        ("total", "blocked"),
    ),
    "copies_skipped, snapshots": _copy(
        "snapshots that this process of global rank 0 left out because the last was still under way",
        lambda c: c.skipped,
    ),
    # where time goes
    "goodput_ratio": _run(
        "time of steps that stayed committed by time since the run's start",
        lambda r: r.recorder.goodput.ratio(r.live.now),
    ),
    "time_seconds, seconds": _run(
        "time since the run's start: in steps that stayed committed (steps); before the first one (startup); "
        "without enough workers (waiting); computing held-out sequences; waiting for checkpoints; in recoveries "
        "while no step ran (recovery: detect, close, heal); in attempts that broke off (rerun) and in committed "
        "steps that were undone; in planned changes of the mesh, drains too (resize); and other",
        lambda r: r.recorder.time_s(r.live.now),
        TIME_PARTS,
    ),
    "data_wait_seconds, seconds": _step(
        "how long global rank 0 waited for its data in the newest committed step", lambda s: s.data_wait_s
    ),
    "data_wait_ratio": _recorder(
        "share of the last 20 steps' time that it waited so; 0 before there are so many",
        lambda r: r.detectors.data.share if r.metrics.newest.step is not None else None,
        only=STEP_1,
    ),
    "step_part_mean_seconds, seconds": _clock(
        "clock of the newest whole step by part, mean over the ranks: waits for other ranks are in the part where "
        "they happen, those for data also in data; on GPUs the host's clock",
        lambda clocks: {
            part: math.fsum(clock.get(part, 0.0) for clock in clocks) / len(clocks) for part in CLOCK_PARTS
        },
        CLOCK_PARTS,
    ),
    "step_part_longest_seconds, seconds": _clock(
        "the same on the rank on which the part took longest",
        lambda clocks: {part: max(clock.get(part, 0.0) for clock in clocks) for part in CLOCK_PARTS},
        CLOCK_PARTS,
    ),
    "rank_work_seconds, seconds": _run(
        "how long each rank worked itself for one sequence, without waits for others and for data, in the newest "
        "step that measured it",
        Reading.rank_work_s,
        "the global rank",
        only=STEP_1,
    ),
    "late_compilations, compilations": _recorder(
        "compilations so far that the warm-up did not cover", lambda r: r.totals.num_compiled_late
    ),
    # nodes, as their agents read them every 5 s
    "network_errors, errors": _network(
        "errors", "errors of the node's interfaces since its boot, but for the loopback"
    ),
    "network_drops, packets": _network(
        "drops", "packets dropped by the node's interfaces since its boot, but for the loopback"
    ),
    "network_infiniband_errors, errors": _infiniband(
        "infiniband_errors", f"{IB}: symbol errors, recoveries, lost links, errors on receipt, overruns"
    ),
    "network_infiniband_drops, packets": _infiniband("infiniband_drops", f"{IB}: packets discarded"),
    "network_infiniband_sent_bytes, bytes": _infiniband("infiniband_sent_bytes", f"{IB}: data sent"),
    "network_infiniband_received_bytes, bytes": _infiniband("infiniband_received_bytes", f"{IB}: data received"),
    "gpu_utilisation_ratio": _gpu("utilisation", "share of the time in which the GPU computed"),
    "gpu_power_watts, watts": _gpu("power_watts", "power that the GPU takes"),
    "gpu_temperature_celsius, degrees": _gpu("temperature_celsius", "temperature of the GPU"),
    "gpu_ecc_errors, errors": _gpu("ecc_errors", "uncorrected memory errors since the driver's start"),
    "gpu_remapped_rows, rows": _gpu(
        "remapped_rows", "rows of memory that were remapped in the GPU's life; pages that were retired, before Ampere"
    ),
    "gpu_needs_reset": _gpu("needs_reset", "1 while a row of memory waits for a reset to be remapped, or could not be"),
    "gpu_xid_errors, errors": _gpu(
        "xid_errors", "Xid errors since the agent's start, without those that programs cause"
    ),
    "gpu_slowed": _gpu("slowed", "1 while the GPU is slowed down for heat, or by its hardware"),
    # K/V exchange of global rank 0 in the newest step that measured it
    "hop_sent_bytes, bytes": _step("K/V and gradients sent in one step", lambda s: s.hop_bytes),
    "hop_exposed_wait_seconds, seconds": _timed(
        "time of one step in which nothing was left to compute", lambda s: s.exposed_hop_wait_s
    ),
    "hop_latency_seconds, seconds": _timed(
        "one exchange, from ready to start until arrived",
        lambda s: {"mean": s.hop_latency_mean_s, "p99": s.hop_latency_p99_s},
        ("mean", "p99"),
        only="on GPUs",
    ),
}


TABLE = tuple(
    replace(metric, name=f"elastic_ring_{name}", unit=unit or "1")
    for (name, _, unit), metric in ((header.partition(", "), metric) for header, metric in _ROWS.items())
)


def markdown() -> str:
    """The table as `elastic-ring metrics --table` prints it and docs/metrics.md shows it."""
    rows = [("name", "type", "unit", "labels", "meaning"), ("---",) * 5]
    for metric in TABLE:
        values = metric.values if isinstance(metric.values, str) else ", ".join(metric.values)
        labels = f"`run`, `{metric.label}`: {values}" if values else "`run`"
        meaning = f"{metric.meaning} ({metric.only})" if metric.only else metric.meaning
        rows.append((f"`{metric.name}`", metric.kind, metric.unit, labels, meaning))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
