"""Compares a run's forecast with its measurements: for `train`, `forecast --score` and `--from-run`."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_ring.cli.forecasts.attention import work_of
from elastic_ring.cli.settings import TrainSettings, parse
from elastic_ring.forecast.answers.request import Learned
from elastic_ring.forecast.goodput import PRIORS, goodput_with
from elastic_ring.forecast.pass_choice import PassChoice
from elastic_ring.forecast.scenario import Scenario, default_efficiency, totals_at
from elastic_ring.forecast.sizing.machines import Fleet, Links, named_fleet
from elastic_ring.forecast.sizing.rates import Rates, read_rates
from elastic_ring.monitor.goodput import WARM_STEPS, seen_of
from elastic_ring.monitor.json_files import as_written, read_json, readable_json
from elastic_ring.monitor.metrics import CONFIG_NAME, METRICS_NAME, SUMMARY_NAME

CORE_FLOPS, CPU_STEP_S = 36e9, 0.1
"""FLOP/s of a CPU core in fp32, and the fixed seconds of a step: two cores take 1.37 s for the laptop preset
(benchmarks/results/checkpoint), and 0.57 s for half of its tokens."""
COORDINATOR_DIED, NODE_GONE = "the coordinator died", "node lost|unreachable"
UNITS = {"step_s": ("step", 1.0, "s"), "gpu_bytes": ("memory", 2.0**30, "GiB")}
UNITS |= {"goodput": ("goodput after the start", 0.01, "%")}


@dataclass(frozen=True)
class Seen:
    """The measurements of a run that has ended. `forecast`: as recorded at its start; `figures`: of `seen_of`;
    `losses`: lost members by scope; `kept_s`: seconds of committed steps, `mean_step_s` each; `gpu_hours`: of all
    ranks; `alone_step_s`: as in `Scenario`."""

    forecast: Mapping[str, float]
    figures: Mapping[str, float]
    losses: Mapping[str, int]
    kept_s: float
    gpu_hours: float
    mean_step_s: float
    alone_step_s: float | None = None


def scenario_of_run(settings: TrainSettings, fleet: Fleet, rates: Rates | None = None) -> Scenario:
    return Scenario(
        scaling=settings.scaling,
        step=settings.step,
        run=settings.run,
        fleet=fleet,
        eff=default_efficiency(fleet, rates),
        failures=PRIORS["published"],
        price=None,
        tokens=float(settings.step.steps) * settings.step.tokens_per_step,
        **work_of(settings),
    )


def on_cores(settings: TrainSettings, num_cores: int, load: float = 0.0) -> Scenario:
    """The scenario of ranks on one host's cores, shared with `load` other threads. A step takes its FLOP at the cores'
    rate, links have the rate of memory; no figure of the fleet's GPU type enters."""
    ranks = settings.scaling.mesh.size
    links = Links(nvlink_gb_s=2.0, nic_gb_s=2.0)
    fleet = Fleet(gpu="A100-40", links=links, name="CPU", gpus_per_host=ranks + settings.scaling.spares)
    scenario = scenario_of_run(settings, fleet)
    flops = scenario.plan.flops * settings.step.global_batch
    threads = ranks * settings.scaling.num_threads
    cores = min(threads, num_cores)
    alone_s = flops / (CORE_FLOPS * cores) + CPU_STEP_S
    slow = max(1.0, cores * (threads + load) / (num_cores * threads))
    return dataclasses.replace(scenario, measured_step_s=alone_s * slow, alone_step_s=alone_s)


def planned(settings: TrainSettings, gpu: str | None, num_cores: int, load: float = 0.0) -> dict[str, float]:
    """The forecast step and goodput of ranks on GPUs of a type, or on `num_cores` shared with `load` other threads;
    empty for GPUs of an unknown type."""
    if settings.scaling.device == "cuda":
        if gpu is None:
            return {}
        rates = None if settings.machine is None else read_rates(Path(settings.machine))
        fleet = named_fleet(gpu) if rates is None else rates.fleet(named_fleet(gpu))
        scenario = scenario_of_run(settings, fleet, rates)
    else:
        scenario = on_cores(settings, num_cores, load)
    [figures] = totals_at([(scenario, scenario.medians())])
    alone = {} if scenario.alone_step_s is None else {"alone_step_s": scenario.alone_step_s}
    return {"step_s": figures["step_s"], "goodput": figures["goodput"], **alone}


def forecast_on_record(folder: Path) -> dict[str, float]:
    """The forecast with which the run of this folder began; empty without a record."""
    recorded = readable_json(folder / CONFIG_NAME) or {}
    with as_written(str(folder)):
        return {name: float(recorded[f"planned_{name}"]) for name in UNITS if f"planned_{name}" in recorded}


def read_run(folder: Path) -> tuple[TrainSettings, Seen]:
    """The settings of a run that has ended, and its measurements. Raises ValueError for a folder without them."""
    from elastic_ring.monitor.metrics_log import StepTable

    summary = read_json(folder / SUMMARY_NAME) if (folder / SUMMARY_NAME).exists() else None
    if not summary or not (folder / "config.toml").exists() or not (folder / METRICS_NAME).exists():
        raise ValueError(f"{folder}: is no run that has ended: summary.json, config.toml or metrics.jsonl is not there")
    settings = parse(["--config", str(folder / "config.toml")])
    recorded = (read_json(folder / CONFIG_NAME) or {}) if (folder / CONFIG_NAME).exists() else {}
    with as_written(str(folder)):  # what was "auto" is a number there
        number = recorded.get("step", {}).get("sequences_per_pass", 1)
        kept = recorded.get("scaling", {}).get("keep_activations", False)
        step, scaling = PassChoice(number, kept, "").settings(settings.step, settings.scaling)
        settings = dataclasses.replace(settings, step=step, scaling=scaling)
    with as_written(str(folder / METRICS_NAME)):
        with StepTable.load(folder / METRICS_NAME) as table:
            steps_s = table.rows.values("step_s")
        figures = seen_of(steps_s, summary)
    if "step_s" not in figures:
        raise ValueError(f"{folder}: its metrics.jsonl has no steps")
    with as_written(str(folder)):
        parts = summary.get("time_s") or {}
        hours = sum(parts.values()) / 3600 * settings.scaling.mesh.size
        losses, kept_s = losses_of(summary["recoveries"]), float(parts.get("steps", 0.0))
        alone = recorded.get("planned_alone_step_s")
        mean_s = statistics.fmean(steps_s[WARM_STEPS:] or steps_s)
        alone_s = None if alone is None else float(alone)
        return settings, Seen(forecast_on_record(folder), figures, losses, kept_s, hours, mean_s, alone_s)


def losses_of(recoveries: Sequence[Mapping[str, object]]) -> Counter[str]:
    """The number of recoveries by the scope of the loss. A lost coordinator is none: training goes on meanwhile."""
    causes = [str(recovery["cause"]) for recovery in recoveries if recovery["cause"] != COORDINATOR_DIED]
    return Counter(
        "frozen" if " hung " in cause else "host" if re.search(NODE_GONE, cause) else "process" for cause in causes
    )


def beside(name: str, forecast: float, seen: float) -> str:
    """For example `step: forecast 5.04 s, seen 5.11 s (-1 %)`, or of goodput the difference in points."""
    title, scale, unit = UNITS[name]
    off = f"{100 * (forecast - seen):+.1f} points" if name == "goodput" else f"{100 * (forecast / seen - 1):+.0f} %"
    return f"{title}: forecast {forecast / scale:.3g} {unit}, seen {seen / scale:.3g} {unit} ({off})"


def lines_of_end(settings: TrainSettings, forecast: Mapping[str, float], seen: Mapping[str, float]) -> list[str]:
    """What `train` ends with. The step is left out where no measurement of this machine was the forecast's."""
    is_calibrated = settings.machine is not None and settings.scaling.device == "cuda"
    names = [name for name in ("step_s", "goodput") if name in forecast and name in seen]
    return [beside(name, forecast[name], seen[name]) for name in names if name == "goodput" or is_calibrated]


def score(folders: list[Path], fleet: Fleet) -> list[str]:
    """A line for each run and figure with the error of its forecast, the recorded one or else a new one. Goodput is
    also forecast with the run's own losses."""
    lines, off, points = [], [], []
    for folder in folders:
        settings, seen = read_run(folder)
        forecast = dict(seen.forecast)
        if settings.scaling.device == "cuda":
            scenario = scenario_of_run(settings, fleet)
            [today] = totals_at([(scenario, scenario.medians())])
            forecast = {**today, "gpu_bytes": scenario.plan.gpu_bytes, **forecast}
        elif "step_s" not in forecast:
            lines.append(f"{folder.name}: no forecast of its ranks on CPUs is on record")
            continue
        else:
            scenario = dataclasses.replace(on_cores(settings, 1), alone_step_s=seen.alone_step_s)
        both = [name for name in UNITS if name in forecast and name in seen.figures]
        lines += [f"{folder.name}: {beside(name, float(forecast[name]), seen.figures[name])}" for name in both]
        off.append(abs(forecast["step_s"] / seen.figures["step_s"] - 1))
        if "goodput" in seen.figures:
            shape = scenario.shape(scenario.medians(), seen.figures["step_s"])
            # A loss breaks off half of the mean step, which slow steps lengthen.
            shape = dataclasses.replace(shape, step_s=seen.mean_step_s)
            goodput = goodput_with(shape, seen.kept_s, seen.losses)
            points.append(abs(goodput - seen.figures["goodput"]))
            losses = ", ".join(f"{number} {scope}" for scope, number in seen.losses.items()) or "none"
            lines.append(
                f"{folder.name}: with its failures ({losses}) {beside('goodput', goodput, seen.figures['goodput'])}"
            )
    if off:
        lines.append(f"steps of {len(off)} runs: {statistics.mean(off):.1%} wrong on average")
    if points:
        lines.append(f"goodput of {len(points)} runs: {100 * statistics.mean(points):.2f} points wrong on average")
    return lines


def learned(folder: Path, fleet: Fleet, rates: Rates | None = None) -> Learned:
    """A run's evidence for a forecast: its step over its forecast, with the `rates` of its machine if given, and its
    losses. Raises ValueError for a run on CPUs."""
    settings, seen = read_run(folder)
    if settings.scaling.device != "cuda":
        raise ValueError(f"--from-run {folder}: ran on CPUs, whose steps say nothing about GPUs; name a run on GPUs")
    scenario = scenario_of_run(settings, fleet, rates)
    ratio = seen.figures["step_s"] / float(scenario.step_s(scenario.medians()))
    size = (settings.scaling.mesh.size, float(scenario.plan.num_parameters))
    return Learned(ratio, sum(seen.losses.values()), seen.gpu_hours, size)
