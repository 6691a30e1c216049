"""The table of a run's metrics: the one place that names them. Exporter, documentation and dashboard come from it.

`runtime.coordinator.metrics_exporter` sets each entry every four seconds and no other metric. Ray puts `ray_` before
the name and adds labels of its own. No entry without a value that the coordinator knows; no Ray in here.

Every sum since the run's start is a gauge, not a counter: a counter of Ray cannot start at 0, so that Prometheus would
miss the first event; it begins anew with a new coordinator; and a node shows it as long as it lives, even when the run
has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

PREFIX = "ray_"
"""What Ray puts before the name of every metric."""

PHASES = ("idle", "forming", "building", "running", "closing", "waiting", "finishing", "reconnecting", "ended")
CAUSES = (
    "died",
    "hung",
    "exited",
    "node lost",
    "unreachable",
    "start-failed",
    "device error",
    "poisoned device",
    "computed wrongly",
    "out of memory",
    "drained",
    "peer",
    "user",
    "memory",
    "corrupt",
    "coordinator",
)
"""Why a recovery began: the reason of its first loss; `drained` after a notice; without a loss `peer` for a broken
exchange, `user` for an error of the user's code, `memory` for a step that ran out of memory, `corrupt` for ranks that
did not agree; `coordinator` when only that was replaced."""
LOSSES = CAUSES[:10]
"""Why a worker was lost."""
CLOCK_PARTS = ("idle", "forward", "backward", "reduce", "vote", "apply", "other", "data")
"""Parts of a step on one rank; `other` has the rare ones: validating, saving, compiling, rebuilding. Waits for
data lie within the other parts."""
TIME_PARTS = (
    "steps",
    "startup",
    "waiting",
    "validation",
    "checkpoint",
    "recovery",
    "rerun",
    "undone",
    "resize",
    "other",
)
RECOVERY_PARTS = ("detect", "close", "heal", "rerun", "total")
GPU_METRICS = {
    "utilisation": "elastic_ring_gpu_utilisation_ratio",
    "power_watts": "elastic_ring_gpu_power_watts",
    "temperature_celsius": "elastic_ring_gpu_temperature_celsius",
    "ecc_errors": "elastic_ring_gpu_ecc_errors",
    "remapped_rows": "elastic_ring_gpu_remapped_rows",
    "needs_reset": "elastic_ring_gpu_needs_reset",
    "xid_errors": "elastic_ring_gpu_xid_errors",
    "slowed": "elastic_ring_gpu_slowed",
}
"""Metrics by the keys of `runtime.agent.gpu_health`."""
BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 300.0)


@dataclass(frozen=True)
class Metric:
    """One metric. `values` are those of its second label, `label`; `only` says when it is exported, if not always."""

    name: str
    unit: str
    meaning: str
    label: Literal["", "cause", "part"] = ""
    values: tuple[str, ...] = ()
    only: str = ""
    kind: Literal["gauge", "histogram"] = "gauge"
    open_values: str = ""
    """What the values of `label` are where they are not known beforehand."""

    @property
    def labels(self) -> tuple[str, ...]:
        return ("run", self.label) if self.label else ("run",)

    @property
    def exported_name(self) -> str:
        """The name at Ray's endpoint and in Prometheus."""
        return PREFIX + self.name


NODE, GPU = "the node's address", "the node's address / the GPU's index"
FOUND = "loss, perplexity and each metric, of all sets and of each (SET_loss)"
NETWORK = "the node's interfaces since its boot, but for the loopback"
IB, IB_ONLY = "InfiniBand ports of the node since they were reset", "where there are such ports"
NVML = "on GPUs, with nvidia-ml-py"
STEP_1, CHECKPOINT_1, COPIES_1 = "after the first step", "after the first checkpoint", "with copies"


def _known_later(only: str, name: str, unit: str, meaning: str, *more: Any, **named: Any) -> Metric:
    return replace(Metric(f"elastic_ring_{name}", unit, meaning, *more, **named), only=only)


def _of_gpu(name: str, unit: str, meaning: str) -> Metric:
    return Metric(f"elastic_ring_gpu_{name}", unit, meaning, "part", only=NVML, open_values=GPU)


def _of_infiniband(name: str, unit: str, meaning: str) -> Metric:
    name, meaning = f"elastic_ring_network_infiniband_{name}", f"{IB}: {meaning}"
    return Metric(name, unit, meaning, "part", only=IB_ONLY, open_values=NODE)


_of_step = partial(_known_later, STEP_1)
_of_checkpoint = partial(_known_later, CHECKPOINT_1)
_of_copies = partial(_known_later, COPIES_1)

TABLE: tuple[Metric, ...] = (
    # where the run stands
    Metric("elastic_ring_phase", "1", "1 for the phase that the run is in, 0 for the others", "part", PHASES),
    Metric("elastic_ring_failed", "1", "1 once the run has ended with an error, else 0"),
    Metric("elastic_ring_committed_steps", "steps", "steps whose result is committed"),
    Metric("elastic_ring_planned_steps", "steps", "steps that the run is to train"),
    Metric(
        "elastic_ring_last_commit_timestamp_seconds",
        "seconds",
        "Unix time at which the coordinator heard of the newest committed step; of its own start before the first",
    ),
    Metric("elastic_ring_term", "1", "number of the coordinator that decides; rises with each new one"),
    Metric("elastic_ring_generation", "1", "number of the membership; rises with each change"),
    Metric("elastic_ring_bit_exact", "1", "1 as long as the run promises equal bits, 0 once only equal samples"),
    Metric("elastic_ring_driver_silent_seconds", "seconds", "time since a driver last called"),
    Metric("elastic_ring_driver_lease_seconds", "seconds", "silence of the driver after which the run ends (lease_s)"),
    # training
    _of_step("loss", "1", "mean loss of the newest committed step's tokens; missing while not finite"),
    Metric(
        "elastic_ring_validation_loss",
        "1",
        "loss of the newest validation, the weighted mean of its sets",
        only="after the first validation",
    ),
    Metric(
        "elastic_ring_validation",
        "1",
        "what the newest validation found",
        "part",
        only="after the first validation",
        open_values=FOUND,
    ),
    _of_step("gradient_norm", "1", "norm of the gradient before clipping; missing while not finite"),
    _of_step("learning_rate", "1", "learning rate of the newest committed step"),
    _of_step("step_seconds", "seconds", "duration of the newest committed step on global rank 0"),
    _of_step("tokens_per_second", "tokens/s", "tokens of the newest committed step by its duration"),
    Metric(
        "elastic_ring_mfu_ratio",
        "1",
        "model FLOP utilisation of the newest committed step: 6 for each parameter and token and causal attention, "
        "recomputation not counted, by its duration and the devices' peak (peak_tflops)",
        only="where model and peak are known, without a pattern",
    ),
    Metric(
        "elastic_ring_skipped_steps",
        "steps",
        "steps so far that a non-finite gradient, or a loss spike, made the run skip",
    ),
    Metric(
        "elastic_ring_loss_spikes",
        "steps",
        "steps so far whose loss was far above those before (loss_spike), whatever was done about it",
    ),
    Metric(
        "elastic_ring_stragglers",
        "ranks",
        "how often so far a rank was slower than its peers for a whole window (straggler)",
    ),
    _of_step(
        "slowest_rank_ratio",
        "1",
        "how many times as long as its peers the slowest rank worked in the newest step that measured it",
    ),
    Metric(
        "elastic_ring_expert_load_ratio",
        "1",
        "how many times its fair share of tokens the fullest expert of a layer got in the newest committed step",
        only="with experts",
    ),
    _of_step(
        "expert_parts",
        "passes",
        "passes of layers in the newest committed step whose tokens came to their experts in parts, to spare memory",
    ),
    Metric(
        "elastic_ring_wrong_results",
        "findings",
        "how often so far ranks that must agree did not (corruption), whatever was done about it",
    ),
    # the mesh
    Metric("elastic_ring_mesh", "ranks", "rings (dp) and ranks of a ring (cp); 0 without a mesh", "part", ("dp", "cp")),
    Metric(
        "elastic_ring_wanted_rings", "rings", "min_dp, dp and max_dp of the settings", "part", ("min", "start", "max")
    ),
    Metric(
        "elastic_ring_workers",
        "workers",
        "workers by what they do; leaving ones are draining or stopping",
        "part",
        ("member", "spare", "starting", "leaving"),
    ),
    Metric("elastic_ring_wanted_spares", "workers", "spares of the settings"),
    Metric(
        "elastic_ring_nodes",
        "nodes",
        "nodes that the coordinator may use, and those among them that drain",
        "part",
        ("usable", "draining"),
    ),
    Metric("elastic_ring_failed_starts", "starts", "failed starts in a row, of the node with most of them"),
    # recoveries
    Metric("elastic_ring_recoveries", "recoveries", "recoveries so far, by the cause of each", "cause", CAUSES),
    Metric("elastic_ring_lost_workers", "workers", "members lost so far, by reason", "cause", LOSSES),
    Metric(
        "elastic_ring_recovery_sum_seconds", "seconds", "time of all recoveries so far, by part", "part", RECOVERY_PARTS
    ),
    Metric(
        "elastic_ring_recovery_duration_seconds",
        "seconds",
        "durations of the recoveries that this coordinator saw; Ray makes its sum of bucket midpoints, so take "
        "sums from elastic_ring_recovery_sum_seconds",
        "part",
        RECOVERY_PARTS,
        "after the first recovery",
        "histogram",
    ),
    Metric("elastic_ring_memory_shortages", "attempts", "attempts at a step so far that ran out of memory"),
    Metric("elastic_ring_memory_reliefs", "reliefs", "reliefs of the memory ladder in force; 0 while memory suffices"),
    Metric(
        "elastic_ring_memory_tight",
        "times",
        "how often so far memory was nearly full for eight steps in a row (memory pressure)",
    ),
    Metric(
        "elastic_ring_memory_share_ratio",
        "1",
        "how full memory was in the newest step: of what the fullest rank's device can give (device; 0 without a "
        "limit), of what the guard of the fullest node allows (host)",
        "part",
        ("device", "host"),
    ),
    # memory by kind
    Metric(
        "elastic_ring_worker_memory_bytes",
        "bytes",
        "host memory of the worker that has most of each kind: resident (rss), resident at most so far (peak), "
        "shared memory (shared)",
        "part",
        ("rss", "peak", "shared"),
    ),
    Metric(
        "elastic_ring_gpu_memory_bytes",
        "bytes",
        "GPU memory of global rank 0 after the newest step: tensors (allocated), what torch holds for them "
        "(reserved), free pieces of blocks that are in use (fragmented), the most that tensors took so far (peak)",
        "part",
        ("allocated", "reserved", "fragmented", "peak"),
        "on GPUs",
    ),
    Metric(
        "elastic_ring_memory_pressure_ratio",
        "1",
        "share of the last 10 s in which some or all tasks (full) of a node or its container waited for memory; of "
        "the node that waits most (PSI)",
        "part",
        ("some", "full"),
        "where the kernel tells",
    ),
    Metric("elastic_ring_undone_steps", "steps", "committed steps so far that a recovery undid"),
    Metric("elastic_ring_rerun_steps", "steps", "steps so far that ran again because nobody held their result"),
    # checkpoints
    Metric("elastic_ring_checkpoints", "checkpoints", "checkpoints so far that count"),
    Metric(
        "elastic_ring_checkpoints_missed",
        "checkpoints",
        "checkpoints so far that were due and do not count: not written, or the last one was still being written",
    ),
    Metric(
        "elastic_ring_last_checkpoint_timestamp_seconds",
        "seconds",
        "Unix time at which the newest checkpoint began to count; of the coordinator's start before the first",
        only="with checkpoints",
    ),
    _of_checkpoint("checkpoint_step", "steps", "steps that the newest checkpoint contains"),
    _of_checkpoint("checkpoint_size_bytes", "bytes", "size of the newest checkpoint"),
    _of_checkpoint(
        "checkpoint_seconds",
        "seconds",
        "the newest checkpoint: all of it (total), and how long training waited for it (blocked)",
        "part",
        ("total", "blocked"),
    ),
    Metric(
        "elastic_ring_checkpoint_intervals_missed",
        "intervals",
        "intervals of training without a checkpoint that counts, for whatever reason; 0 in the first 30 s of it",
    ),
    Metric(
        "elastic_ring_checkpoint_failing_seconds",
        "seconds",
        "for how long no checkpoint could be written, for whatever reason; 0 when the last one could",
    ),
    # copies in peers' memory
    _of_copies(
        "copy_step",
        "steps",
        "steps that the newest snapshot contains whose exchange with the peers of global rank 0 is complete",
    ),
    _of_copies("copy_size_bytes", "bytes", "size of this snapshot of global rank 0"),
    _of_copies(
        "copy_seconds",
        "seconds",
        "its exchange: all of it (total), and how long training waited for it (blocked)",
        "part",
        ("total", "blocked"),
    ),
    _of_copies(
        "copies_skipped",
        "snapshots",
        "snapshots that this process of global rank 0 left out because the last was still under way",
    ),
    # where time goes
    Metric("elastic_ring_goodput_ratio", "1", "time of steps that stayed committed by time since the run's start"),
    Metric(
        "elastic_ring_time_seconds",
        "seconds",
        "time since the run's start: in steps that stayed committed (steps); before the first one (startup); "
        "without enough workers (waiting); computing held-out sequences; waiting for checkpoints; in recoveries "
        "while no step ran (recovery: detect, close, heal); in attempts that broke off (rerun) and in committed "
        "steps that were undone; in planned changes of the mesh, drains too (resize); and other",
        "part",
        TIME_PARTS,
    ),
    _of_step("data_wait_seconds", "seconds", "how long global rank 0 waited for its data in the newest committed step"),
    _of_step("data_wait_ratio", "1", "share of the last 20 steps' time that it waited so; 0 before there are so many"),
    _of_step(
        "step_part_mean_seconds",
        "seconds",
        "clock of the newest whole step by part, mean over the ranks: waits for other ranks are in the part where "
        "they happen, those for data also in data; on GPUs the host's clock",
        "part",
        CLOCK_PARTS,
    ),
    _of_step(
        "step_part_longest_seconds",
        "seconds",
        "the same on the rank on which the part took longest",
        "part",
        CLOCK_PARTS,
    ),
    _of_step(
        "rank_work_seconds",
        "seconds",
        "how long each rank worked itself for one sequence, without waits for others and for data, in the newest "
        "step that measured it",
        "part",
        open_values="the global rank",
    ),
    Metric("elastic_ring_late_compilations", "compilations", "compilations so far that the warm-up did not cover"),
    # nodes, as their agents read them every 5 s
    Metric("elastic_ring_network_errors", "errors", f"errors of {NETWORK}", "part", open_values=NODE),
    Metric("elastic_ring_network_drops", "packets", f"packets dropped by {NETWORK}", "part", open_values=NODE),
    _of_infiniband("errors", "errors", "symbol errors, recoveries, lost links, errors on receipt, overruns"),
    _of_infiniband("drops", "packets", "packets discarded"),
    _of_infiniband("sent_bytes", "bytes", "data sent"),
    _of_infiniband("received_bytes", "bytes", "data received"),
    _of_gpu("utilisation_ratio", "1", "share of the time in which the GPU computed"),
    _of_gpu("power_watts", "watts", "power that the GPU takes"),
    _of_gpu("temperature_celsius", "degrees", "temperature of the GPU"),
    _of_gpu("ecc_errors", "errors", "uncorrected memory errors since the driver's start"),
    _of_gpu(
        "remapped_rows",
        "rows",
        "rows of memory that were remapped in the GPU's life; pages that were retired, before Ampere",
    ),
    _of_gpu("needs_reset", "1", "1 while a row of memory waits for a reset to be remapped, or could not be"),
    _of_gpu("xid_errors", "errors", "Xid errors since the agent's start, without those that programs cause"),
    _of_gpu("slowed", "1", "1 while the GPU is slowed down for heat, or by its hardware"),
    # K/V exchange of global rank 0 in the newest step that measured it
    _of_step("hop_sent_bytes", "bytes", "K/V and gradients sent in one step"),
    _of_step("hop_exposed_wait_seconds", "seconds", "time of one step in which nothing was left to compute"),
    Metric(
        "elastic_ring_hop_latency_seconds",
        "seconds",
        "one exchange, from ready to start until arrived",
        "part",
        ("mean", "p99"),
        "on GPUs",
    ),
)

OF_RAY: dict[str, str] = {
    "ray_node_cpu_utilization": "percent of the node's CPUs in use",
    "ray_node_mem_used": "bytes of the node's memory in use",
    "ray_node_mem_total": "bytes of the node's memory",
    "ray_node_mem_shared_bytes": "bytes of shared memory in use on the node",
    "ray_node_gpus_utilization": "percent of one GPU in use",
    "ray_node_gram_used": "MiB of one GPU's memory in use",
    "ray_node_gram_available": "MiB of one GPU's memory that are free",
    "ray_node_gpu_power_milliwatts": "power of one GPU",
    "ray_node_gpu_temperature_celsius": "temperature of one GPU",
    "ray_node_network_send_speed": "bytes a second that the node sends",
    "ray_node_network_receive_speed": "bytes a second that the node receives",
}
"""Ray's own metrics that the dashboard and the alert rules use; those of GPUs exist where Ray sees one."""


def by_name() -> dict[str, Metric]:
    return {metric.name: metric for metric in TABLE}


def markdown() -> str:
    """The table as `elastic-ring metrics --table` prints it and docs/metrics.md shows it."""
    rows = [("name", "type", "unit", "labels", "meaning"), ("---",) * 5]
    rows += [(f"`{m.name}`", m.kind, m.unit, _labels(m), _meaning(m)) for m in TABLE]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _labels(metric: Metric) -> str:
    values = metric.open_values or _listed(metric.values)
    return ", ".join(["`run`", *([f"`{metric.label}`: {values}"] if metric.label else [])])


def _listed(values: Iterable[str]) -> str:
    return ", ".join(values)


def _meaning(metric: Metric) -> str:
    return f"{metric.meaning} ({metric.only})" if metric.only else metric.meaning
