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

from elastic_ring.cli.forecasts import seen
from elastic_ring.cli.forecasts.attention import work_of
from elastic_ring.cli.settings import parse
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


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    fleet, prices = read_fleet(options.fleet), read_prices(options.prices)
    check_dates(prices)
    if options.score:
        print("\n".join(seen.score(options.score, fleet)))
        return 0
    if options.stages:
        stages = read_stages(options.stages)
        print("\n".join(stage_lines(stages, lambda stage: _of_stage(stage, options, prices))))
        return 0
    deadline_s = (
        None if options.deadline is None else request.deadline_s(options.deadline, days_until(options.deadline))
    )
    budget = None if options.budget is None else request.amount(options.budget, "--budget")
    scenario = scenario_of(options, rest, fleet, prices)
    warnings = (
        prices.warnings(scenario.price, {scenario.price.date: -days_to(scenario.price.date)}) if scenario.price else []
    )
    if scenario.step.linears == "fp8":
        warnings = [*warnings, "--linears fp8 is forecast at bfloat16's rate"]
    if options.search:
        return _search(scenario, prices, options, deadline_s, budget)
    result = forecast(scenario)
    if options.plot is not None:
        from elastic_ring.cli.forecasts.plots import write

        try:
            write(result, options.plot, deadline_s, budget)
        except OSError as error:
            raise ValueError(f"--plot {options.plot}: cannot be written ({error})") from error
    if options.json:
        print(json.dumps(report.as_json(result, deadline_s, budget, warnings), indent=1))
    else:
        print("\n".join(report.lines(result, deadline_s, budget, warnings)))
    return 0


def scenario_of(options: argparse.Namespace, rest: Sequence[str], fleet: Fleet, prices: PriceList) -> Scenario:
    """The settings of train on the fleet. Raises ValueError for contradictory settings."""
    failures, tokens = read_failures(options.failures), request.amount(options.tokens, "--tokens")
    train = parse(list(rest))
    work = work_of(train)
    check_together(train.scaling, train.step, ())
    check_copies(train.scaling.mesh, train.run.copies)
    if options.measured_step is not None and not 0 < options.measured_step < math.inf:
        raise ValueError(f"--measured-step {options.measured_step}: must be a positive number of seconds")
    if fleet.num_gpus and fleet.num_gpus < train.scaling.mesh.size + train.scaling.spares:
        raise ValueError(
            f"--fleet {options.fleet}: num_gpus={fleet.num_gpus} is less than dp x cp + spares = "
            f"{train.scaling.mesh.size + train.scaling.spares}: lower them, or take a larger fleet"
        )
    rates = None if options.machine is None else rates_of(options.machine, fleet.gpu)
    fleet = fleet if rates is None else rates.fleet(fleet)
    size = train.scaling.mesh.size + train.scaling.spares
    if options.price == "owned":
        price: Any = prices.owned_price(fleet, size)
    else:
        price = prices.find(fleet.gpu, options.price)
    scenario = Scenario(
        scaling=train.scaling,
        step=train.step,
        run=train.run,
        fleet=fleet,
        eff=default_efficiency(fleet, rates),
        failures=failures,
        price=price,
        tokens=tokens,
        measured_step_s=options.measured_step,
        doubled_s=None if rates is None else rates.doubled_s(),
        **work,
    )
    scenario = with_choice(scenario)
    return (
        scenario if options.from_run is None else with_learned(scenario, seen.learned(options.from_run, fleet, rates))
    )


def rates_of(path: Path, gpu: str) -> Rates:
    """The rates in a file of `elastic-ring calibrate`, with a warning for one of another type of GPU."""
    rates = read_rates(path)
    if rates.device is not None and gpu_type(rates.device) != gpu:
        log.warning(
            "--machine %s: was measured on %s, and the fleet has %s: this is no forecast of it", path, rates.device, gpu
        )
    return rates


def _of_stage(stage: Stage, options: argparse.Namespace, prices: PriceList) -> Scenario:
    """The scenario of a stage; options that it does not have are those of the command."""
    own = argparse.Namespace(**{**vars(options), "fleet": stage.fleet, "tokens": stage.tokens})
    if stage.from_run is not None:
        own.from_run = Path(stage.from_run)
    try:
        return scenario_of(own, stage.train, read_fleet(stage.fleet), prices)
    except ValueError as error:
        raise ValueError(f"--stages {options.stages}: {stage.name}: {error}") from error


def _search(
    scenario: Scenario, prices: PriceList, options: argparse.Namespace, deadline_s: float | None, budget: float | None
) -> int:
    from elastic_ring.forecast.answers.search import search

    front, tried = search(scenario, prices, options.price, deadline_s, budget, list(GPUS))
    if options.json:
        rows = [
            {
                "line": point.line(),
                "usd": point.usd,
                "run_s": point.run_s,
                "goodput": point.goodput,
                "success": point.success,
            }
            for point in front
        ]
        print(json.dumps({"tried": tried, "front": rows}, indent=1))
        return 0
    print(f"{tried:,} configurations; the front of cost and time:")
    print("\n".join(f"  {point.line()}" for point in front) or "  none fits")
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
