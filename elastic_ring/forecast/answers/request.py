"""A user's words to a forecast: amounts, deadlines, runs to learn from, and plans in stages with gates."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from elastic_ring.forecast.answers.report import short
from elastic_ring.forecast.goodput import DAY, Failures
from elastic_ring.forecast.scenario import Scenario, forecast
from elastic_ring.forecast.sizing.machines import Z, read_toml
from elastic_ring.validation import Must, from_plain, settings

SCALES: Mapping[str, float] = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
SECONDS: Mapping[str, float] = {"h": 3600.0, "d": 86400.0, "w": 604800.0}
MEASURED_SPREAD = 0.02
"""The spread of a step's logarithm on the machine that measured it; steps of one host varied by 0.2 to 3.3 %."""


def amount(text: str, flag: str) -> float:
    """1T, 12M, 300e9. Raises ValueError for anything but a number above 0."""
    match = re.match(r"^\$?([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([KMBT]?)$", text.strip().replace("_", ""), re.IGNORECASE)
    value = float(match[1]) * SCALES[match[2].upper()] if match else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{flag} {text}: must be a number above 0, such as 300B or 1T")
    return value


def deadline_s(text: str, days: int | None) -> float:
    """Seconds of 90d, 36h, 6w, or until a date in `days`, by the caller's clock. Raises ValueError for a date in the
    past."""
    match = re.match(r"^([0-9]*\.?[0-9]+)\s*([hdw])$", text.strip())
    if match and float(match[1]) > 0:
        return float(match[1]) * SECONDS[match[2]]
    if days is None:
        raise ValueError(f"--deadline {text}: must be a duration such as 90d, 36h, 6w, or a date such as 2027-03-01")
    if days <= 0:
        raise ValueError(f"--deadline {text}: lies in the past")
    return days * SECONDS["d"]


@dataclass(frozen=True)
class Learned:
    """A finished run's evidence: measured step over forecast, losses, the GPU-hours in which they came, and (GPUs,
    parameters)."""

    step_ratio: float
    losses: int
    gpu_hours: float
    size: tuple[int, float] = (0, 0.0)


def with_learned(scenario: Scenario, learned: Learned) -> Scenario:
    """The scenario with a corrected step and a narrower prior of losses."""
    seen = scenario.eff.seen
    eff = dataclasses.replace(scenario.eff, seen=(max(learned.size[0], seen[0]), max(learned.size[1], seen[1])))
    correction, failures = (learned.step_ratio, MEASURED_SPREAD), narrower(scenario.failures, learned)
    return dataclasses.replace(scenario, eff=eff, correction=correction, failures=failures)


def narrower(prior: Failures, learned: Learned) -> Failures:
    """The prior, counted as so many earlier losses, with the losses of the run added."""
    low, middle, high = prior.gpu_hours
    if high <= low:
        return prior
    weight = (2 * Z / math.log(high / low)) ** 2
    hours = (weight * middle + learned.gpu_hours) / (weight + learned.losses)
    wide = math.exp(Z / math.sqrt(weight + learned.losses))
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
    rows = read_toml(path, "--stages").get("stage")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"--stages {path}: has no [[stage]] tables")
    stages: list[Stage] = []
    for row in rows:
        try:
            stages.append(from_plain(Stage, row, "stage."))
        except ValueError as error:
            raise ValueError(f"--stages {path}: stage {len(stages) + 1}: {error}") from error
    return stages


def stage_lines(stages: Sequence[Stage], make: Callable[[Stage], Scenario]) -> list[str]:
    """Each stage and the chance that it and all before it pass. The draws of an input are the same in all stages: an
    error in the first is in the last, too."""
    lines, passed = [], np.array(True)
    for stage in stages:
        result = forecast(make(stage))
        scenario, draws = result.scenario, result.draws
        in_time = (draws["run_s"] <= stage.most_days * DAY) & (draws["usd"] <= stage.most_usd)
        gate = in_time & (draws["goodput"] >= stage.least_goodput) & scenario.fits
        passed = passed & gate
        days, usd = result.quantiles("run_s"), result.quantiles("usd")
        fits = "fits" if scenario.fits else f"does not fit ({scenario.plan.needed_bytes / 2**30:.0f} GiB)"
        lines += [
            f"{stage.name}: {short(scenario.plan.num_parameters)} parameters on {scenario.num_gpus} "
            f"{scenario.fleet.gpu}, {fits}",
            f"  medians: days {days[1] / DAY:.3g} (80 %: {days[0] / DAY:.3g} to {days[2] / DAY:.3g}), USD "
            f"{short(usd[1])} ({short(usd[0])} to {short(usd[2])}), goodput {result.quantiles('goodput')[1]:.1%}",
            f"  passes its gate: {gate.mean():.0%}; all until here: {passed.mean():.0%}",
        ]
    return lines
