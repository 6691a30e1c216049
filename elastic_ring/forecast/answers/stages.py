"""A plan in stages with gates: each stage's forecast, the chance that all pass, and what a finished stage narrows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from elastic_ring.forecast.answers.report import short
from elastic_ring.forecast.goodput import DAY, Failures
from elastic_ring.forecast.scenario import Forecast, Scenario, forecast
from elastic_ring.forecast.sizing.machines import read_toml
from elastic_ring.forecast.sizing.uncertain import Z
from elastic_ring.validation import Must, from_plain, settings

MEASURED_SPREAD = 0.02
"""The spread of a step's logarithm on the machine that measured it; steps of one host varied by 0.2 to 3.3 %."""


@dataclass(frozen=True)
class Learned:
    """What a finished run shows: seen step over forecast, losses, GPU-hours in which they came, GPUs and parameters."""

    step_ratio: float
    losses: int
    gpu_hours: float
    size: tuple[int, float] = (0, 0.0)


def with_learned(scenario: Scenario, told: Learned) -> Scenario:
    """The scenario with a corrected step and a narrower prior of losses."""
    failures = narrower(scenario.failures, told)
    largest = (max(told.size[0], scenario.eff.seen[0]), max(told.size[1], scenario.eff.seen[1]))
    eff = dataclasses.replace(scenario.eff, seen=largest)
    return dataclasses.replace(scenario, eff=eff, correction=(told.step_ratio, MEASURED_SPREAD), failures=failures)


def narrower(prior: Failures, told: Learned) -> Failures:
    """The prior as so many losses that were seen before: those of the run are added."""
    low, middle, high = prior.gpu_hours
    if high <= low:
        return prior
    weight = (2 * Z / math.log(high / low)) ** 2
    hours = (weight * middle + told.gpu_hours) / (weight + told.losses)
    wide = math.exp(Z / math.sqrt(weight + told.losses))
    return dataclasses.replace(prior, gpu_hours=(hours / wide, hours, hours * wide))


@settings
class Stage:
    """`train`: settings as flags of `elastic-ring train`; `least_goodput`, `most_days`, `most_usd`: its gate."""

    _prefix = "stage "

    name: Annotated[str, Field(min_length=1), Must("a name")]
    tokens: str
    train: list[str]
    fleet: str
    least_goodput: float = 0.0
    most_days: float = math.inf
    most_usd: float = math.inf
    from_run: str | None = None


def read_stages(path: str) -> list[Stage]:
    """[[stage]] tables of a TOML file. Raises ValueError that names the stage and what is wrong."""
    rows: Any = read_toml(path, "--stages").get("stage")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"--stages {path}: has no [[stage]] tables")
    found = []
    for index, row in enumerate(rows, 1):
        try:
            found.append(from_plain(Stage, row, "stage."))
        except ValueError as error:
            raise ValueError(f"--stages {path}: stage {index}: {error}") from error
    return found


def lines(stages: Sequence[Stage], make: Callable[[Stage], Scenario]) -> list[str]:
    """Each stage and the chance that it and all before it pass. The draws of an input are the same in all stages: what
    is wrong in the first is wrong in the last."""
    told, passed = [], None
    for stage in stages:
        found = forecast(make(stage))
        gate = _passes(stage, found)
        passed = gate if passed is None else passed & gate
        days, usd = found.quantiles("run_s"), found.quantiles("usd")
        fits = "fits" if found.scenario.fits else f"does not fit ({found.scenario.plan.needed_bytes / 2**30:.0f} GiB)"
        told += [
            f"{stage.name}: {short(found.scenario.plan.num_parameters)} parameters on {found.scenario.num_gpus} "
            f"{found.scenario.fleet.gpu}, {fits}",
            f"  days {days[1] / DAY:.3g} (80 %: {days[0] / DAY:.3g} to {days[2] / DAY:.3g}), USD {short(usd[1])} "
            f"({short(usd[0])} to {short(usd[2])}), goodput {found.quantiles('goodput')[1]:.1%}",
            f"  passes its gate: {gate.mean():.0%}; all until here: {passed.mean():.0%}",
        ]
    return told


def _passes(stage: Stage, found: Forecast) -> np.ndarray[Any, np.dtype[np.bool_]]:
    draws = found.draws
    in_time = (draws["run_s"] <= stage.most_days * DAY) & (draws["usd"] <= stage.most_usd)
    return in_time & (draws["goodput"] >= stage.least_goodput) & found.scenario.fits
