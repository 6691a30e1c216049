"""What a run was forecast to take beside what was seen: for the end of `train`, `forecast --score` and `--from-run`."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from elastic_ring.cli import settings
from elastic_ring.cli.settings import TrainSettings
from elastic_ring.forecast.answers.stages import Learned
from elastic_ring.forecast.goodput import PRIORS
from elastic_ring.forecast.scenario import Scenario, default_efficiency
from elastic_ring.forecast.sizing.machines import GPUS, Fleet, named_fleet
from elastic_ring.monitor.json_files import read_json
from elastic_ring.monitor.metrics import METRICS_NAME, SUMMARY_NAME, read_metrics

WARM_STEPS = 3
"""First steps of a run that compile and pin memory; no forecast is of them."""


@dataclass(frozen=True)
class Seen:
    """Of a run that has ended. `losses`: recoveries; `gpu_hours`: of all its ranks."""

    step_s: float
    goodput: float
    peak_gpu_bytes: int
    losses: int
    gpu_hours: float


def gpu_type(name: str) -> str | None:
    """A type of `machines.GPUS` by the name that CUDA tells, 40 or 80 GB by what it says; None for others."""
    found = re.search(r"A100|H100|H200|B200", name)
    if found is None:
        return None
    kind = {"A100": "A100-40" if "40GB" in name else "A100-80", "H100": "H100-80"}.get(found[0], found[0])
    return kind if kind in GPUS else None


def scenario_of_run(asked: TrainSettings, fleet: Fleet) -> Scenario:
    eff = default_efficiency(fleet)
    tokens = float(asked.step.steps) * asked.step.global_batch * asked.step.context_tokens
    failures = PRIORS["published"]
    return Scenario(asked.model, asked.scaling, asked.step, asked.run, fleet, eff, failures, None, tokens)


def planned_step_s(asked: TrainSettings, gpu: str) -> float | None:
    """Seconds of a step on GPUs of that name; None for GPUs that no class is of."""
    kind = gpu_type(gpu)
    if kind is None or asked.scaling.device != "cuda":
        return None
    scenario = scenario_of_run(asked, named_fleet(kind))
    return float(scenario.step_s(scenario.medians()))


def seen_step_s(folder: Path) -> float | None:
    """The median of a run's steps after the first; None where they are not on record."""
    if not (folder / METRICS_NAME).exists():
        return None
    steps = [float(line["step_s"]) for line in read_metrics(folder)]
    return statistics.median(steps[WARM_STEPS:] or steps) if steps else None


def read_run(folder: Path) -> tuple[TrainSettings, Seen]:
    """The settings of a run that has ended, and what was seen. Raises ValueError for a folder without them."""
    summary = read_json(folder / SUMMARY_NAME) if (folder / SUMMARY_NAME).exists() else None
    if not summary or not (folder / "config.toml").exists() or not (folder / METRICS_NAME).exists():
        raise ValueError(f"{folder}: is no run that has ended: summary.json, config.toml or metrics.jsonl is not there")
    asked = settings.parse(["--config", str(folder / "config.toml")])
    step_s = seen_step_s(folder)
    if step_s is None:
        raise ValueError(f"{folder}: its metrics.jsonl has no steps")
    total_s = sum((summary.get("time_s") or {}).values())
    hours = total_s / 3600 * asked.scaling.mesh.size
    seen = Seen(step_s, summary["goodput"], summary.get("peak_gpu_bytes", 0), len(summary["recoveries"]), hours)
    return asked, seen


def beside(what: str, forecast: float, seen: float, unit: str) -> str:
    """For example `step: forecast 5.04 s, seen 5.11 s (-1 %)`."""
    return f"{what}: forecast {forecast:.3g} {unit}, seen {seen:.3g} {unit} ({100 * (forecast / seen - 1):+.0f} %)"


def score(folders: list[Path], fleet: Fleet) -> list[str]:
    """A line for each run and figure, and how wrong the forecasts were."""
    lines, off = [], []
    for folder in folders:
        asked, seen = read_run(folder)
        scenario = scenario_of_run(asked, fleet)
        middle = scenario.medians()
        if asked.scaling.device != "cuda":
            lines.append(f"{folder.name}: ran on CPUs, of which no class is; step seen {seen.step_s:.3g} s")
            continue
        step_s = float(scenario.step_s(middle))
        off.append(abs(step_s / seen.step_s - 1))
        lines.append(f"{folder.name}: {beside('step', step_s, seen.step_s, 's')}")
        if seen.peak_gpu_bytes:
            peak = beside("memory", scenario.plan.gpu_bytes / 2**30, seen.peak_gpu_bytes / 2**30, "GiB")
            lines.append(f"{folder.name}: {peak}")
    return [*lines, *([f"steps of {len(off)} runs: {statistics.mean(off):.1%} wrong on average"] if off else [])]


def learned(folder: Path, fleet: Fleet) -> Learned:
    """What a run tells of the next. Raises ValueError for one on CPUs: of these there is no forecast."""
    asked, seen = read_run(folder)
    if asked.scaling.device != "cuda":
        raise ValueError(f"--from-run {folder}: ran on CPUs, of which there is no forecast; name a run on GPUs")
    scenario = scenario_of_run(asked, fleet)
    ratio = seen.step_s / float(scenario.step_s(scenario.medians()))
    size = (asked.scaling.mesh.size, float(scenario.plan.num_parameters))
    return Learned(ratio, seen.losses, seen.gpu_hours, size)
