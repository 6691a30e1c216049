"""From the options of `elastic-ring forecast` and the settings of `train` to a scenario and its forecast."""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from elastic_ring.cli.forecasts import seen
from elastic_ring.cli.forecasts.attention import work_of
from elastic_ring.cli.settings import parse
from elastic_ring.config import check_copies, check_together
from elastic_ring.forecast.answers import report, request
from elastic_ring.forecast.answers.money import PriceList, read_prices
from elastic_ring.forecast.answers.request import Stage, read_stages, stage_lines, with_learned
from elastic_ring.forecast.answers.search import search
from elastic_ring.forecast.goodput import read_failures
from elastic_ring.forecast.pass_choice import with_choice
from elastic_ring.forecast.scenario import Scenario, default_efficiency, forecast
from elastic_ring.forecast.sizing.machines import Fleet, read_fleet
from elastic_ring.forecast.sizing.rates import Rates, read_rates
from elastic_ring.gpus import GPUS, gpu_type

log = logging.getLogger(__name__)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    fleet, prices = read_fleet(options.fleet), read_prices(options.prices)
    for index, row in enumerate(prices.rows, 1):
        if days_to(row.date) is None:
            raise ValueError(f"--prices {prices.path}: row {index}: price.date={row.date!r}: is no day")
    if options.score:
        print("\n".join(seen.score(options.score, fleet)))
        return 0
    if options.stages:
        stages = read_stages(options.stages)
        print("\n".join(stage_lines(stages, lambda stage: _of_stage(stage, options, prices))))
        return 0
    deadline_s = None if options.deadline is None else request.deadline_s(options.deadline, days_to(options.deadline))
    budget = None if options.budget is None else request.amount(options.budget, "--budget")
    scenario = scenario_of(options, rest, fleet, prices)
    if options.search:
        front, tried = search(scenario, prices, options.price, deadline_s, budget, list(GPUS))
        if options.json:
            names = ("usd", "run_s", "goodput", "success")
            rows = [{"line": point.line(), **{name: getattr(point, name) for name in names}} for point in front]
            print(json.dumps({"tried": tried, "front": rows}, indent=1))
            return 0
        print(f"{tried:,} configurations; the front of mean cost and mean time:")
        print("\n".join(f"  {point.line()}" for point in front) or "  none fits")
        return 0
    warnings = []
    if scenario.price is not None:
        warnings += prices.warnings(scenario.price, -(days_to(scenario.price.date) or 0))
    if scenario.step.linears == "fp8":
        warnings.append("--linears fp8 is forecast at bfloat16's rate")
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
    work, num_gpus = work_of(train), train.scaling.num_workers
    check_together(train.scaling, train.step, ())
    check_copies(train.scaling.mesh, train.run.copies)
    if options.measured_step is not None and not 0 < options.measured_step < math.inf:
        raise ValueError(f"--measured-step {options.measured_step}: must be a positive number of seconds")
    if fleet.num_gpus and fleet.num_gpus < num_gpus:
        raise ValueError(
            f"--fleet {options.fleet}: num_gpus={fleet.num_gpus} is less than dp x cp + spares = {num_gpus}: lower "
            "them, or take a larger fleet"
        )
    rates = None if options.machine is None else rates_of(options.machine, fleet.gpu)
    fleet = fleet if rates is None else rates.fleet(fleet)
    is_owned = options.price == "owned"
    scenario = Scenario(
        scaling=train.scaling,
        step=train.step,
        run=train.run,
        fleet=fleet,
        eff=default_efficiency(fleet, rates),
        failures=failures,
        price=prices.owned_price(fleet, num_gpus) if is_owned else prices.find(fleet.gpu, options.price),
        tokens=tokens,
        measured_step_s=options.measured_step,
        doubled_s=None if rates is None else rates.doubled_s(),
        **work,
    )
    scenario = with_choice(scenario)
    if options.from_run is None:
        return scenario
    return with_learned(scenario, seen.learned(options.from_run, fleet, rates))


def rates_of(path: Path, gpu: str) -> Rates:
    """The rates in a file of `elastic-ring calibrate`. Logs a warning if it is from another type of GPU."""
    rates = read_rates(path)
    if rates.device is not None and gpu_type(rates.device) != gpu:
        log.warning(
            "--machine %s: was measured on %s, and the fleet has %s: this is no forecast of it", path, rates.device, gpu
        )
    return rates


def _of_stage(stage: Stage, options: argparse.Namespace, prices: PriceList) -> Scenario:
    """The scenario of a stage, with the command's options where the stage has none."""
    own = argparse.Namespace(**{**vars(options), "fleet": stage.fleet, "tokens": stage.tokens})
    if stage.from_run is not None:
        own.from_run = Path(stage.from_run)
    try:
        return scenario_of(own, stage.train, read_fleet(stage.fleet), prices)
    except ValueError as error:
        raise ValueError(f"--stages {options.stages}: {stage.name}: {error}") from error


def days_to(text: str) -> int | None:
    """Days from today to a date, below 0 for the past; None for text that is no date."""
    try:
        return (datetime.date.fromisoformat(text) - datetime.date.today()).days
    except ValueError:
        return None
