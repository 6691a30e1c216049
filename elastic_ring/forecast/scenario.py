"""Memory, step time, losses, price and probability of one configuration, joined: the forecast."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from elastic_ring.config import RunConfig, ScalingConfig, StepConfig
from elastic_ring.control.options import AUTO, parse_copies
from elastic_ring.forecast.answers.money import Price, energy_kw
from elastic_ring.forecast.goodput import HOUR, Failures, RunShape, Spot
from elastic_ring.forecast.renewal import WALKS_OF_A_POINT, CommonRandomNumbers, mean_goodput, simulate_goodput
from elastic_ring.forecast.sizing.machines import Efficiency, Fleet, Number, Range, around, efficiency_of, quantiles
from elastic_ring.forecast.sizing.memory import SNAPSHOT_BYTES, ModelPlan, plan_of
from elastic_ring.forecast.sizing.rates import Rates
from elastic_ring.forecast.sizing.step_time import DENSE, Attention, Job, Latent, StepTime, job_of, step_time
from elastic_ring.model.config import ModelConfig

Draws = Mapping[str, Number]
NUM_DRAWS = 2_000
DETECT_S = {"process": 0.01, "host": 5.0}
"""Time to detect a death: of a process 0.002 to 0.011 s (benchmarks/results/recovery), of a host up to 5.4."""
CHECKPOINT_WAIT_S = 0.05
"""Training waits for a checkpoint of 12 GB a rank: 0.04 s (benchmarks/results/checkpoint)."""
REBUILD_S: Mapping[str, tuple[float, float]] = {"cuda": (0.23, 0.23), "cpu": (0.12, 0.0)}
"""Groups of one rank, and what each doubling of the ranks adds: 0.46 s in fifty kills on two H200s, 0.69 on four while
no process starts (benchmarks/results/recovery); on a quiet CPU host. Beyond four ranks it is assumed."""
CORE_RANK_S = 1.1e-4
"""CPU time of the control core for each rank of a recovery: 0.12 s of 1,024, 1.8 s of 16,384
(benchmarks/results/recovery/core_curve)."""
FIRST_STEP_S: Mapping[str, float] = {"cuda": 0.19, "cpu": 0.0}
"""Extra time of the step that runs again, in the same series."""
HEAL_S = 0.1
"""Time of a heal's link and its digests."""
HEAL_SHARE = 0.6
"""A heal's share of a link's rate: 0.57 to 0.68 of a plain copy were measured."""
COPY_SHARE = 0.003
"""The cost of copies in peers as a share of a step: at most 0.30 % measured, k = 1."""


@dataclass(frozen=True)
class Scenario:
    """One configuration on one fleet. `pattern`: attention's work by the length of the ring. `measured_step_s` replaces
    the model of step time; `correction`: ratio of an earlier run's step to its forecast, and the spread left.
    `built_in`, `num_trained` as in `StepMemory`, `num_own` as in `plan_of`, `latent` as in `Job`. `doubled_s`: rebuild
    time added by each doubling of the ranks, in place of `REBUILD_S`. `alone_step_s`: a step on idle cores; a recovery
    slows down with the step."""

    model: ModelConfig
    scaling: ScalingConfig
    step: StepConfig
    run: RunConfig
    fleet: Fleet
    eff: Efficiency
    failures: Failures
    price: Price | None
    tokens: float
    pattern: Callable[[int], Attention] | None = None
    measured_step_s: float | None = None
    correction: tuple[float, float] | None = None
    built_in: bool = True
    num_own: int | None = None
    latent: Latent | None = None
    num_trained: int | None = None
    doubled_s: float | None = None
    alone_step_s: float | None = None

    def with_settings(self, step: StepConfig, scaling: ScalingConfig) -> Scenario:
        return dataclasses.replace(self, step=step, scaling=scaling)

    @cached_property
    def attention(self) -> Attention:
        return DENSE if self.pattern is None else self.pattern(self.scaling.cp)

    @cached_property
    def job(self) -> Job:
        return job_of(self.model, self.scaling, self.step, self.attention, self.num_own, self.latent)

    @cached_property
    def plan(self) -> ModelPlan:
        return plan_of(
            self.model,
            self.scaling,
            self.step,
            self.run.copies,
            saves=self.run.checkpoint_config.is_on,
            built_in=self.built_in,
            density=self.attention.density,
            num_own=self.num_own,
            latent=0 if self.latent is None or self.attention.is_bound else self.latent.numbers,
            num_trained=self.num_trained,
        )

    @property
    def fits(self) -> bool:
        return self.plan.margin_gib(self.fleet.memory_gib) >= 0

    @property
    def num_gpus(self) -> int:
        return self.scaling.dp * self.scaling.cp + self.scaling.spares

    @property
    def tokens_per_step(self) -> float:
        return float(self.step.tokens_per_step)

    @property
    def num_steps(self) -> float:
        return self.tokens / self.tokens_per_step

    @property
    def checkpoint_bytes(self) -> float:
        return float(SNAPSHOT_BYTES) * self.plan.num_parameters

    @property
    def num_copies(self) -> int:
        if self.run.copies == AUTO:
            return parse_copies(AUTO, self.scaling.dp).num_copies if self.scaling.mesh.size > 1 else 0
        return 0 if self.run.copies == "0" else 1

    @cached_property
    def extrapolated(self) -> dict[str, float]:
        """Ratios above 1.05 of the configuration's sizes to the largest case that the class was fitted on."""
        gpus, parameters = self.eff.seen
        ratios = {"GPUs": self.scaling.mesh.size / gpus, "parameters": self.plan.num_parameters / parameters}
        return {name: ratio for name, ratio in ratios.items() if ratio > 1.05}

    def step_of(self, draws: Draws) -> StepTime:
        eff = dataclasses.replace(
            self.eff, link=self.eff.link * draws["links"], jitter=self.eff.jitter * draws["jitter"]
        )
        return step_time(self.job, self.fleet.spec, eff, self.fleet.gpus_per_host)

    def step_s(self, draws: Draws) -> Number:
        """Seconds of a step, copies included."""
        scale = draws["step"] * (1.0 + COPY_SHARE * (self.num_copies > 0))
        if self.measured_step_s is not None:
            return self.measured_step_s * scale
        return self.step_of(draws).total_s * scale * (self.correction or (1.0, 0.0))[0]

    def inputs(self) -> dict[str, Range]:
        """The uncertain inputs of a forecast. Factors have a median of 1."""
        spread, origin = self.eff.spread, self.eff.origin
        if self.measured_step_s is not None:
            spread, origin = 0.02, "measured"
        elif self.correction is not None:
            spread, origin = self.correction[1], "measured"
        if self.measured_step_s is None:
            spread += 0.02 * math.log10(max([1.0, *self.extrapolated.values()]))
        inputs = {
            "step": around(1.0, spread, "x", origin),
            "links": Range(0.7, 1.0, 1.15, "x"),
            "jitter": Range(0.4, 1.0, 3.0, "x", self.eff.jitter_origin),
            "gpu_hours": Range(*self.failures.gpu_hours, "GPU-hours between failures", "specified"),
            "repair": Range(0.3, 1.0, 3.0, "x"),
            "rebuild": Range(0.4, 1.0, 3.0, "x"),
            "storage": Range(0.5, 1.0, 1.2, "x"),
        }
        return inputs | ({"price": self.price.range(), **self.price.capacity()} if self.price else {})

    def shape(self, draws: Draws, step_s: Number) -> RunShape:
        spec, ranks = self.fleet.spec, self.scaling.mesh.size
        one_host = self.num_gpus <= self.fleet.gpus_per_host
        link = (spec.nvlink_bytes_s if one_host else spec.nic_bytes_s) * HEAL_SHARE * draws["links"]
        alone, doubled = REBUILD_S[self.scaling.device]
        doubled = doubled if self.doubled_s is None else self.doubled_s
        slow: Number = 1.0 if self.alone_step_s is None else np.maximum(1.0, step_s / self.alone_step_s)
        rebuild_s = alone + doubled * math.log2(ranks) + FIRST_STEP_S[self.scaling.device] + CORE_RANK_S * ranks
        written_s = self.checkpoint_bytes / (self.fleet.links.storage_gb_s * 1e9 * draws["storage"])
        checkpoints = self.run.checkpoint_config
        if not checkpoints.is_on:  # as long as the run
            interval_s: Number = self.num_steps * np.asarray(step_s, dtype=float)
        elif checkpoints.every_s is not None:
            interval_s = np.maximum(checkpoints.every_s, written_s)
        else:
            interval_s = np.maximum(checkpoints.every_steps * step_s if checkpoints.every_steps else 600.0, written_s)
        return RunShape(
            self.scaling.dp,
            self.scaling.cp,
            self.scaling.spares,
            self.fleet.gpus_per_host,
            self.fleet.hosts_per_switch,
            self.fleet.hosts_per_power_domain,
            step_s,
            heal_s=(SNAPSHOT_BYTES * self.plan.memory.units.shard / link + HEAL_S) * slow,
            rebuild_s=rebuild_s * draws["rebuild"] * slow,
            detect_s=DETECT_S["host"],
            process_detect_s=DETECT_S["process"],
            frozen_detect_s=DETECT_S["process"] + self.run.timeouts.stopped_s,
            interval_s=interval_s,
            wait_s=CHECKPOINT_WAIT_S,
            restore_s=written_s + 30.0,
            copies_hold=self.num_copies > 0 and self.num_gpus > self.fleet.gpus_per_host,
            copies_of_one_ring=self.run.copies == AUTO and self.num_gpus > self.fleet.gpus_per_host,
            copy_steps=self.run.copy_every_steps,
            spot=self._spot(draws),
        )

    def _spot(self, draws: Draws) -> Spot | None:
        if self.price is None or "on_hours" not in draws:
            return None
        on_s, off_s, dry_s = (draws[name] * HOUR for name in ("on_hours", "off_hours", "dry_hours"))
        return Spot(on_s, off_s, dry_s, self.price.notice_s)

    def totals(self, step_s: Number, goodput: Number, draws: Draws) -> dict[str, Number]:
        """Step, goodput, seconds, GPU-hours, energy and dollars of a run with that goodput. Spot capacity commits no
        more than is there and paid for."""
        spot, goodput = self._spot(draws), np.maximum(goodput, 0.02)
        if spot is not None:
            goodput = np.minimum(goodput, spot.share_paid * self.num_gpus / self.scaling.mesh.size)
        run_s = self.num_steps * step_s / goodput
        gpu_hours = run_s / HOUR * self.num_gpus
        totals = {"step_s": step_s, "goodput": goodput, "run_s": run_s, "gpu_hours": gpu_hours}
        totals["paid_hours"] = gpu_hours if spot is None else gpu_hours * spot.share_paid
        totals["mwh"] = totals["paid_hours"] * energy_kw(self.fleet, 1) / 1e3
        return totals | ({"usd": totals["paid_hours"] * draws["price"]} if "price" in draws else {})

    def medians(self) -> dict[str, Number]:
        return {name: values.p50 for name, values in self.inputs().items()}


@dataclass(frozen=True)
class Forecast:
    """Figures at the medians, draws of them, and the tornado: (input, result at its P10, at its P90), the largest swing
    first, in dollars, or seconds without a price."""

    scenario: Scenario
    middle: Mapping[str, float]
    draws: Mapping[str, NDArray[np.float64]]
    tornado: list[tuple[str, float, float]]

    def quantiles(self, name: str) -> tuple[float, float, float]:
        return quantiles(self.draws[name])

    def probability(self, deadline_s: float | None, budget_usd: float | None) -> dict[str, float]:
        """Chances that the run meets the deadline, the budget, and both; 0 if a rank does not fit its GPU."""
        met = {}
        if deadline_s is not None:
            met["deadline"] = self.draws["run_s"] <= deadline_s
        if budget_usd is not None:
            met["budget"] = self.draws["usd"] <= budget_usd
        if len(met) == 2:
            met["both"] = met["deadline"] & met["budget"]
        return {name: float(self.scenario.fits) * float(draws.mean()) for name, draws in met.items()}


def forecast(scenario: Scenario, seed: int = 0, num_draws: int = NUM_DRAWS) -> Forecast:
    """The forecast of a scenario: draws of its inputs, each with a walk through losses of its own."""
    rng = np.random.default_rng(seed)
    inputs = scenario.inputs()
    drawn = {name: values.draw(num_draws, rng) for name, values in inputs.items()}
    step_s = scenario.step_s(drawn)
    goodput = simulate_goodput(
        scenario.shape(drawn, step_s),
        scenario.failures,
        drawn["gpu_hours"],
        scenario.num_steps * step_s,
        CommonRandomNumbers(rng, num_draws),
        drawn["repair"],
        steady=True,
    )
    totals = scenario.totals(step_s, goodput, drawn)
    draws = {name: np.broadcast_to(np.asarray(value, dtype=float), (num_draws,)) for name, value in totals.items()}

    middle = scenario.medians()
    ends = [(scenario, {**middle, name: end}) for name, values in inputs.items() for end in (values.p10, values.p90)]
    first, *rest = totals_at([(scenario, middle), *ends])
    by = "usd" if "usd" in first else "run_s"
    swings = [(name, low[by], high[by]) for name, low, high in zip(inputs, rest[::2], rest[1::2], strict=True)]
    return Forecast(scenario, first, draws, sorted(swings, key=lambda row: -abs(row[2] - row[1]))[:8])


def totals_at(points: Sequence[tuple[Scenario, Draws]], walks: int = WALKS_OF_A_POINT) -> list[dict[str, float]]:
    """The mean figures of scenarios with one mesh on one fleet, each at one point."""
    steps_s = [scenario.step_s(draws) for scenario, draws in points]
    goodputs = mean_goodput(
        [scenario.shape(draws, step_s) for (scenario, draws), step_s in zip(points, steps_s, strict=True)],
        points[0][0].failures,
        [draws["gpu_hours"] for _, draws in points],
        [draws["repair"] for _, draws in points],
        walks,
    )
    return [
        {name: float(value) for name, value in scenario.totals(step_s, goodput, draws).items()}
        for (scenario, draws), step_s, goodput in zip(points, steps_s, goodputs, strict=True)
    ]


Curves = dict[str, list[tuple[float, float, float]]]


def curves(scenario: Scenario, axes: Mapping[str, Sequence[float]]) -> Curves:
    """(value, goodput, dollars a million committed tokens) over `interval` in seconds, over `spares`, or `copies`."""
    replace, checkpoints = dataclasses.replace, scenario.run.checkpoint_config

    def changed(axis: str, value: float) -> Scenario:
        if axis == "spares":
            return replace(scenario, scaling=replace(scenario.scaling, spares=int(value)))
        if axis == "copies":
            return replace(scenario, run=replace(scenario.run, copies=f"{value:g}"))
        every = replace(checkpoints, every_s=float(value), every_steps=None)
        return replace(scenario, run=replace(scenario.run, checkpoint_config=every))

    points = [(axis, value) for axis, values in axes.items() for value in values]
    scenarios = [changed(axis, value) for axis, value in points]
    rows: Curves = {axis: [] for axis in axes}
    for (axis, value), totals in zip(points, totals_at([(each, each.medians()) for each in scenarios]), strict=True):
        rows[axis].append((value, totals["goodput"], totals.get("usd", math.nan) / scenario.tokens * 1e6))
    return rows


def default_efficiency(fleet: Fleet, rates: Rates | None = None) -> Efficiency:
    """The class of the fleet's GPUs; with the rates of `elastic-ring calibrate` where they were measured there."""
    eff = efficiency_of(fleet.spec.arch)
    return eff if rates is None else rates.efficiency(eff, fleet)
