"""The Grafana dashboard, generated from the table of metrics: python deploy/monitoring/make_dashboard.py

Writes dashboard.json beside itself. A panel for each metric; unit and description are the table's. What Grafana needs
to know beyond the table (rows, a few ratios, Ray's own metrics) is in here.
"""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import BigValueTextMode, LegendDisplayMode, LegendPlacement, StackingMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh

from elastic_ring.runtime.coordinator.folds.metrics_table import TABLE, Metric

ROWS = {
    "Training": (
        "loss",
        "validation_loss",
        "validation",
        "gradient_norm",
        "learning_rate",
        "tokens_per_second",
        "step_seconds",
        "mfu_ratio",
        "skipped_steps",
        "loss_spikes",
        "stragglers",
        "wrong_results",
        "slowest_rank_ratio",
        "expert_load_ratio",
        "expert_parts",
        "last_commit_timestamp_seconds",
    ),
    "Mesh": ("phase", "mesh", "wanted_rings", "workers", "wanted_spares", "nodes", "failed_starts", "generation"),
    "Recoveries": (
        "recoveries",
        "lost_workers",
        "recovery_sum_seconds",
        "recovery_duration_seconds",
        "undone_steps",
        "rerun_steps",
    ),
    "Memory": (
        "worker_memory_bytes",
        "gpu_memory_bytes",
        "memory_pressure_ratio",
        "memory_shortages",
        "memory_reliefs",
        "memory_tight",
        "memory_share_ratio",
    ),
    "Checkpoints": (
        "checkpoints",
        "checkpoints_missed",
        "last_checkpoint_timestamp_seconds",
        "checkpoint_step",
        "checkpoint_size_bytes",
        "checkpoint_seconds",
        "checkpoint_intervals_missed",
        "checkpoint_failing_seconds",
    ),
    "Copies in peers' memory": ("copy_step", "copy_size_bytes", "copy_seconds", "copies_skipped"),
    "Where time goes": (
        "time_seconds",
        "goodput_ratio",
        "data_wait_seconds",
        "data_wait_ratio",
        "step_part_mean_seconds",
        "step_part_longest_seconds",
        "rank_work_seconds",
        "late_compilations",
    ),
    "Nodes": (
        "network_errors",
        "network_drops",
        "network_infiniband_errors",
        "network_infiniband_drops",
        "network_infiniband_sent_bytes",
        "network_infiniband_received_bytes",
    ),
    "GPUs": (
        "gpu_utilisation_ratio",
        "gpu_power_watts",
        "gpu_temperature_celsius",
        "gpu_slowed",
        "gpu_ecc_errors",
        "gpu_remapped_rows",
        "gpu_needs_reset",
        "gpu_xid_errors",
    ),
    "Exchange of keys and values": ("hop_sent_bytes", "hop_exposed_wait_seconds", "hop_latency_seconds"),
    "Coordinator and driver": (
        "term",
        "bit_exact",
        "driver_silent_seconds",
        "driver_lease_seconds",
        "failed",
        "committed_steps",
        "planned_steps",
    ),
}
"""Rows of panels: names of the table without `elastic_ring_`."""
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
AT_A_GLANCE = ("committed_steps", "loss", "tokens_per_second", "goodput_ratio", "generation")
STACKED = ("time_seconds", "workers", "phase")
UNITS = {"seconds": "s", "bytes": "bytes", "1": "short", "watts": "watt", "degrees": "celsius"}
UNITS_OF_RAY = {
    "bytes": "bytes",
    "MiB": "mbytes",
    "percent": "percent",
    "power": "mwatt",
    "temperature": "celsius",
}
BY_NAME = {metric.name.removeprefix("elastic_ring_"): metric for metric in TABLE}
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")


def expression(metric: Metric) -> str:
    """What a panel shows of a metric: reduced to the run, since a new coordinator has other series."""
    labels = ", ".join(metric.labels)
    if metric.kind == "histogram":
        buckets = f'sum by (le, {labels}) ({metric.exported_name}_bucket{{run=~"$run"}})'
        return f"histogram_quantile(0.95, {buckets})"
    shown = f'max by ({labels}) ({metric.exported_name}{{run=~"$run"}})'
    return f"time() - {shown}" if metric.name.endswith("_timestamp_seconds") else shown


def query() -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(SOURCE).ref_id("A")


def target(metric: Metric) -> prometheus.Dataquery:
    return query().expr(expression(metric)).legend_format(" ".join(f"{{{{{label}}}}}" for label in metric.labels))


def title(metric: Metric) -> str:
    words = metric.name.removeprefix("elastic_ring_").removesuffix("_seconds").replace("_", " ")
    if metric.name.endswith("_timestamp_seconds"):
        return f"time since the {words.removesuffix(' timestamp')}"
    return f"{words}, 95 % of them are shorter" if metric.kind == "histogram" else words


def panel(metric: Metric) -> timeseries.Panel:
    made = graph(title(metric), metric.meaning, unit(metric)).with_target(target(metric))
    if metric.name.removeprefix("elastic_ring_") in STACKED:
        made.fill_opacity(40).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return made


def unit(metric: Metric) -> str:
    return "percentunit" if metric.name.endswith("_ratio") else UNITS.get(metric.unit, "short")


def graph(name: str, description: str, of_unit: str) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    made = timeseries.Panel().title(name).description(description).unit(of_unit).datasource(SOURCE)
    return made.height(7).span(8).legend(legend.show_legend(True))


def glance(metric: Metric) -> stat.Panel:
    return number(title(metric), metric.meaning).unit(unit(metric)).with_target(target(metric))


def number(name: str, description: str) -> stat.Panel:
    made = stat.Panel().title(name).description(description).datasource(SOURCE).height(4).span(4)
    return made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def current_phase() -> stat.Panel:
    metric = BY_NAME["phase"]
    shown = query().expr(f"{expression(metric)} == 1").legend_format("{{part}}")
    return number("phase", metric.meaning).text_mode(BigValueTextMode.NAME).with_target(shown)


def panel_of_ray(name: str) -> timeseries.Panel:
    """One of Ray's own metrics, by node and GPU."""
    labels = "ip, GpuIndex" if "_gp" in name or "_gram" in name else "ip"
    legend = " ".join(f"{{{{{label}}}}}" for label in labels.split(", "))
    shown = query().expr(f"max by ({labels}) ({name})").legend_format(legend)
    of_unit = next((unit for word, unit in UNITS_OF_RAY.items() if OF_RAY[name].startswith(word)), "short")
    return graph(name.removeprefix("ray_node_").replace("_", " "), OF_RAY[name], of_unit).with_target(shown)


def build() -> str:
    """The dashboard as JSON."""
    made = (
        dashboard.Dashboard("elastic_ring")
        .uid("elastic-ring")
        .tags(["elastic_ring"])
        .refresh("15s")
        .time("now-6h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(dashboard.DatasourceVariable("source").label("data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("run")
            .label("run")
            .datasource(SOURCE)
            .multi(True)
            .include_all(True)
            .query("label_values(ray_elastic_ring_phase, run)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
        .with_row(dashboard.Row("At a glance"))
        .with_panel(current_phase())
    )
    for name in AT_A_GLANCE:
        made.with_panel(glance(BY_NAME[name]))
    for row, names in rows().items():
        made.with_row(dashboard.Row(row))
        for name in names:
            made.with_panel(panel(BY_NAME[name]))
    made.with_row(dashboard.Row("Nodes and GPUs, from Ray"))
    for name in OF_RAY:
        made.with_panel(panel_of_ray(name))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def rows() -> dict[str, list[str]]:
    """The metrics by row: those of ROWS; each other one follows the metric above it in the table."""
    listed, above = {row: list(names) for row, names in ROWS.items()}, ""
    for name in BY_NAME:
        if not any(name in names for names in listed.values()):
            names = next(names for names in listed.values() if above in names)
            names.insert(names.index(above) + 1, name)
        above = name
    return listed


if __name__ == "__main__":
    Path(__file__).with_name("dashboard.json").write_text(build(), encoding="utf-8")
