"""What `elastic-ring forecast` answers: from its options and the settings of `train` to a scenario and its forecast."""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_ring.cli import settings
from elastic_ring.cli.forecasts import seen
from elastic_ring.cli.forecasts.attention import work_of
from elastic_ring.config import check_copies, check_together
from elastic_ring.forecast.answers import report, request
from elastic_ring.forecast.answers.money import PriceList, read_prices
from elastic_ring.forecast.answers.request import Stage, read_stages, stage_lines, with_learned
from elastic_ring.forecast.goodput import read_failures
from elastic_ring.forecast.pass_choice import with_choice
from elastic_ring.forecast.scenario import Scenario, default_efficiency, forecast
from elastic_ring.forecast.sizing.machines import Fleet, read_fleet
from elastic_ring.forecast.sizing.rates import Rates, read_rates
from elastic_ring.gpus import GPUS, gpu_type

log = logging.getLogger(__name__)


def run(given: argparse.Namespace, rest: Sequence[str]) -> int:
    fleet, prices = read_fleet(given.fleet), read_prices(given.prices)
    check_dates(prices)
    if given.score:
        print("\n".join(seen.score(given.score, fleet)))
        return 0
    if given.stages:
        stages = read_stages(given.stages)
        print("\n".join(stage_lines(stages, lambda stage: _of_stage(stage, given, prices))))
        return 0
    deadline_s = None if given.deadline is None else request.deadline_s(given.deadline, days_until(given.deadline))
    budget = None if given.budget is None else request.amount(given.budget, "--budget")
    scenario = scenario_of(given, rest, fleet, prices)
    warnings = (
        prices.warnings(scenario.price, {scenario.price.date: -days_to(scenario.price.date)}) if scenario.price else []
    )
    if scenario.step.linears == "fp8":
        warnings = [*warnings, "--linears fp8 is forecast at bfloat16's rate"]
    if given.search:
        return _search(scenario, prices, given, deadline_s, budget)
    found = forecast(scenario)
    if given.plot is not None:
        from elastic_ring.cli.forecasts.plots import write

        try:
            write(found, given.plot, deadline_s, budget)
        except OSError as error:
            raise ValueError(f"--plot {given.plot}: cannot be written ({error})") from error
    if given.json:
        print(json.dumps(report.as_json(found, deadline_s, budget, warnings), indent=1))
    else:
        print("\n".join(report.lines(found, deadline_s, budget, warnings)))
    return 0


def scenario_of(given: argparse.Namespace, rest: Sequence[str], fleet: Fleet, prices: PriceList) -> Scenario:
    """The settings of train on the fleet. Raises ValueError for contradictory settings."""
    failures, tokens = read_failures(given.failures), request.amount(given.tokens, "--tokens")
    train = settings.parse(list(rest))
    work = work_of(train)
    check_together(train.scaling, train.step, ())
    check_copies(train.scaling.mesh, train.run.copies)
    if given.measured_step is not None and not 0 < given.measured_step < math.inf:
        raise ValueError(f"--measured-step {given.measured_step}: must be a positive number of seconds")
    if fleet.num_gpus and fleet.num_gpus < train.scaling.mesh.size + train.scaling.spares:
        raise ValueError(
            f"--fleet {given.fleet}: num_gpus={fleet.num_gpus} is less than dp x cp + spares = "
            f"{train.scaling.mesh.size + train.scaling.spares}: lower them, or take a larger fleet"
        )
    rates = None if given.machine is None else rates_of(given.machine, fleet.gpu)
    fleet = fleet if rates is None else rates.fleet(fleet)
    size = train.scaling.mesh.size + train.scaling.spares
    if given.price == "owned":
        price: Any = prices.owned_price(fleet, size)
    else:
        price = prices.find(fleet.gpu, given.price)
    made = Scenario(
        scaling=train.scaling,
        step=train.step,
        run=train.run,
        fleet=fleet,
        eff=default_efficiency(fleet, rates),
        failures=failures,
        price=price,
        tokens=tokens,
        measured_step_s=given.measured_step,
        doubled_s=None if rates is None else rates.doubled_s(),
        **work,
    )
    made = with_choice(made)
    return made if given.from_run is None else with_learned(made, seen.learned(given.from_run, fleet, rates))


def rates_of(path: Path, gpu: str) -> Rates:
    """The rates in a file of `elastic-ring calibrate`, with a warning for one of another type of GPU."""
    rates = read_rates(path)
    if rates.device is not None and gpu_type(rates.device) != gpu:
        log.warning(
            "--machine %s: was measured on %s, and the fleet has %s: this is no forecast of it", path, rates.device, gpu
        )
    return rates


def _of_stage(stage: Stage, given: argparse.Namespace, prices: PriceList) -> Scenario:
    """The scenario of a stage; options that it does not have are those of the command."""
    own = argparse.Namespace(**{**vars(given), "fleet": stage.fleet, "tokens": stage.tokens})
    if stage.from_run is not None:
        own.from_run = Path(stage.from_run)
    try:
        return scenario_of(own, stage.train, read_fleet(stage.fleet), prices)
    except ValueError as error:
        raise ValueError(f"--stages {given.stages}: {stage.name}: {error}") from error


def _search(
    scenario: Scenario, prices: PriceList, given: argparse.Namespace, deadline_s: float | None, budget: float | None
) -> int:
    from elastic_ring.forecast.answers.search import search

    front, tried = search(scenario, prices, given.price, deadline_s, budget, list(GPUS))
    if given.json:
        rows = [
            {"line": one.line(), "usd": one.usd, "run_s": one.run_s, "goodput": one.goodput, "success": one.success}
            for one in front
        ]
        print(json.dumps({"tried": tried, "front": rows}, indent=1))
        return 0
    print(f"{tried:,} configurations; the front of cost and time:")
    print("\n".join(f"  {one.line()}" for one in front) or "  none fits")
    return 0


def check_dates(prices: PriceList) -> None:
    """Raises ValueError for a row whose date no calendar has."""
    for index, row in enumerate(prices.rows, 1):
        if not days_until(row.date):
            raise ValueError(f"--prices {prices.path}: row {index}: price.date={row.date!r}: is no day")


def days_to(date: str) -> int:
    """Days from today; below 0 for the past."""
    return (datetime.date.fromisoformat(date) - datetime.date.today()).days


def days_until(text: str) -> dict[str, int]:
    """As `days_to`, empty for what is no date."""
    try:
        return {text: days_to(text)}
    except ValueError:
        return {}
