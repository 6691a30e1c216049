"""Memory, step time, losses, price and probability of one configuration, joined: the forecast."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_ring.config import RunConfig, ScalingConfig, StepConfig
from elastic_ring.control.options import AUTO, parse_copies
from elastic_ring.forecast.answers.money import Price, energy_kw
from elastic_ring.forecast.goodput import HOUR, Failures, RunShape, Spot, mean_goodput
from elastic_ring.forecast.renewal import Luck, mean_walked, simulate_goodput
from elastic_ring.forecast.sizing.jobs import job_of
from elastic_ring.forecast.sizing.machines import Efficiency, Fleet, Number, efficiency_of
from elastic_ring.forecast.sizing.memory import SNAPSHOT_BYTES, ModelPlan, plan_of
from elastic_ring.forecast.sizing.rates import Rates
from elastic_ring.forecast.sizing.step_time import DENSE, Attention, Job, Latent, StepTime, step_time
from elastic_ring.forecast.sizing.uncertain import Range, around, quantiles
from elastic_ring.model.config import ModelConfig

Draws = Mapping[str, Number]
NUM_DRAWS = 10_000
WALKED_DRAWS, WALKED_SPOT_DRAWS, WALKS_OF_A_POINT = 400, 150, 64
"""Draws that the renewal simulation walks; what they differ by from the closed form is dealt out to the others. Hosts
that come and go make a walk longer. What is told of one point of spot capacity is the mean of so many walks."""
DETECT_S = {"process": 0.01, "host": 5.0}
"""Time to detect a death: of a process 0.002 to 0.011 s (benchmarks/results/recovery), of a host up to 5.4."""
CHECKPOINT_WAIT_S = 0.05
"""What training waits for a checkpoint of 12 GB a rank: 0.04 s (benchmarks/results/checkpoint)."""
REBUILD_S: Mapping[str, tuple[float, float]] = {"cuda": (0.23, 0.23), "cpu": (0.12, 0.0)}
"""Groups of one rank, and what each doubling of the ranks adds: 0.46 s in fifty kills on two H200s, 0.69 on four while
no process starts (benchmarks/results/recovery); on a quiet CPU host. Beyond four ranks it is assumed."""
CORE_RANK_S = 1.1e-4
"""CPU time of the control core for each rank of a recovery: 0.12 s of 1,024, 1.8 s of 16,384
(benchmarks/results/recovery/core_curve)."""
FIRST_STEP_S: Mapping[str, float] = {"cuda": 0.19, "cpu": 0.0}
"""What the step that runs again takes beside a step: of the same series."""
HEAL_S = 0.1
"""A heal's link and its digests."""
HEAL_SHARE = 0.6
"""A heal's share of a link's rate: 0.57 to 0.68 of a plain copy were measured."""
COPY_SHARE = 0.003
"""The cost of copies in peers as a share of a step: at most 0.30 % measured, k = 1."""


@dataclass(frozen=True)
class Scenario:
    """One configuration on one fleet. `pattern`: what it leaves of attention in a ring of so many ranks;
    `measured_step_s`: in place of the model of step time; `correction`: by which an earlier run's step differed from
    its forecast, with what is left of its spread; `built_in` and `num_trained` as in `StepMemory`, `num_own` as in
    `plan_of`, `latent` as in `Job`; `doubled_s`: what each doubling of the ranks adds to a rebuild, in place of
    `REBUILD_S`; `alone_step_s`: a step on cores that nothing else wants, since a recovery takes
    as many times longer as a step does."""

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
        return float(self.step.global_batch) * self.step.context_tokens

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
        """How many times larger the configuration is than the largest case that the class was fitted on."""
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
        """What a forecast is uncertain of. Factors have a median of 1."""
        spread, origin = self.eff.spread, self.eff.origin
        if self.measured_step_s is not None:
            spread, origin = 0.02, "measured"
        elif self.correction is not None:
            spread, origin = self.correction[1], "measured"
        if self.measured_step_s is None:
            spread += 0.02 * math.log10(max([1.0, *self.extrapolated.values()]))
        found = {
            "step": around(1.0, spread, "x", origin),
            "links": Range(0.7, 1.0, 1.15, "x"),
            "jitter": Range(0.4, 1.0, 3.0, "x", self.eff.jitter_origin),
            "gpu_hours": Range(*self.failures.gpu_hours, "GPU-hours between losses", "specified"),
            "repair": Range(0.3, 1.0, 3.0, "x"),
            "rebuild": Range(0.4, 1.0, 3.0, "x"),
            "storage": Range(0.5, 1.0, 1.2, "x"),
        }
        return found | ({"price": self.price.range(), **self.price.capacity()} if self.price else {})

    def shape(self, draws: Draws, step_s: Number) -> RunShape:
        spec, ranks = self.fleet.spec, self.scaling.mesh.size
        one_host = self.num_gpus <= self.fleet.gpus_per_host
        link = (spec.nvlink_bytes_s if one_host else spec.nic_bytes_s) * HEAL_SHARE * draws["links"]
        alone, doubled = REBUILD_S[self.scaling.device]
        doubled = doubled if self.doubled_s is None else self.doubled_s
        slow: Number = 1.0 if self.alone_step_s is None else np.maximum(1.0, step_s / self.alone_step_s)
        rebuild_s = alone + doubled * math.log2(ranks) + FIRST_STEP_S[self.scaling.device] + CORE_RANK_S * ranks
        written_s = self.checkpoint_bytes / (self.fleet.links.storage_gb_s * 1e9 * draws["storage"])
        interval_s: Number = self._interval_s(step_s, written_s)
        return RunShape(
            self.scaling.dp,
            self.scaling.cp,
            self.scaling.spares,
            self.fleet.gpus_per_host,
            self.fleet.hosts_per_switch,
            self.fleet.hosts_per_power_domain,
            step_s,
            heal_s=(SNAPSHOT_BYTES * self.plan.memory.shard / link + HEAL_S) * slow,
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

    def _interval_s(self, step_s: Number, written_s: Number) -> Number:
        """As the settings say, else as often as one is written; without checkpoints as long as the run."""
        asked = self.run.checkpoint_config
        if not asked.is_on:
            return self.tokens / self.tokens_per_step * np.asarray(step_s, dtype=float)
        if asked.every_s is not None:
            return np.maximum(asked.every_s, written_s)
        return np.maximum(asked.every_steps * step_s if asked.every_steps else 600.0, written_s)

    def evaluate(self, draws: Draws) -> dict[str, Number]:
        """Step, goodput in closed form, seconds, GPU-hours and dollars."""
        step_s = self.step_s(draws)
        goodput = mean_goodput(self.shape(draws, step_s), self.failures, draws["gpu_hours"], draws["repair"])
        return self._totals(step_s, goodput, draws)

    def _totals(self, step_s: Number, goodput: Number, draws: Draws) -> dict[str, Number]:
        # Of spot capacity no more is committed than is there and paid for.
        spot = self._spot(draws)
        goodput = np.maximum(goodput, 0.02)
        if spot is not None:
            goodput = np.minimum(goodput, spot.share_paid * self.num_gpus / self.scaling.mesh.size)
        run_s = self.tokens / self.tokens_per_step * step_s / goodput
        gpu_hours = run_s / HOUR * self.num_gpus
        found = {"step_s": step_s, "goodput": goodput, "run_s": run_s, "gpu_hours": gpu_hours}
        found["paid_hours"] = gpu_hours if spot is None else gpu_hours * spot.share_paid
        found["mwh"] = found["paid_hours"] * energy_kw(self.fleet, 1) / 1e3
        return found | ({"usd": found["paid_hours"] * draws["price"]} if "price" in draws else {})

    def medians(self) -> dict[str, Number]:
        return {name: one.p50 for name, one in self.inputs().items()}


@dataclass(frozen=True)
class Forecast:
    """The answer: medians, draws and their quantiles, and what moves them."""

    scenario: Scenario
    middle: Mapping[str, Any]
    draws: Mapping[str, NDArray[np.float64]]
    tornado: list[tuple[str, float, float]] = field(default_factory=list)

    def quantiles(self, name: str) -> tuple[float, float, float]:
        return quantiles(self.draws[name])

    def probability(self, deadline_s: float | None, budget_usd: float | None) -> dict[str, float]:
        """That the run is done in time, within the money, and both; 0 where a rank does not fit its GPU."""
        num = len(self.draws["run_s"])
        in_time = self.draws["run_s"] <= deadline_s if deadline_s is not None else np.ones(num, bool)
        paid = self.draws["usd"] <= budget_usd if budget_usd is not None else np.ones(num, bool)
        fits = float(self.scenario.fits)
        found = {"deadline": fits * float(in_time.mean()), "budget": fits * float(paid.mean())}
        asked = {"deadline": deadline_s is not None, "budget": budget_usd is not None}
        found = {name: chance for name, chance in found.items() if asked[name]}
        return found | ({"both": fits * float((in_time & paid).mean())} if all(asked.values()) else {})


def forecast(scenario: Scenario, seed: int = 0, num_draws: int = NUM_DRAWS) -> Forecast:
    """The forecast of a scenario: `num_draws` draws of its inputs, and of chance within a run."""
    rng = np.random.default_rng(seed)
    inputs = scenario.inputs()
    drawn = {name: one.draw(num_draws, rng) for name, one in inputs.items()}
    found = scenario.evaluate(drawn)
    goodput = _with_chance(scenario, drawn, found, rng)
    totals = scenario._totals(found["step_s"], goodput, drawn)
    draws = {name: np.broadcast_to(np.asarray(one, dtype=float), (num_draws,)) for name, one in totals.items()}
    middle = scenario.medians()
    rows = _ends(scenario)
    first, *rest = totals_at([(scenario, middle), *((scenario, {**middle, name: end}) for name, end in rows)])
    return Forecast(scenario, first, draws, _largest(rows, rest))


def _with_chance(scenario: Scenario, drawn: Draws, found: Mapping[str, Number], rng: np.random.Generator) -> Number:
    """How many times the loss of the closed form the walked draws lose, dealt out to all draws."""
    walks = WALKED_DRAWS if scenario._spot(drawn) is None else WALKED_SPOT_DRAWS
    some = {name: one[:walks] for name, one in drawn.items()}
    step_s = np.broadcast_to(np.asarray(found["step_s"], dtype=float), np.shape(drawn["step"]))[:walks]
    closed = np.asarray(found["goodput"], dtype=float)
    shape = scenario.shape(some, step_s)
    planned_s = quantiles(np.asarray(found["run_s"]))[1]
    luck = Luck(rng, min(walks, len(closed)))
    walked = simulate_goodput(shape, scenario.failures, some["gpu_hours"], planned_s, luck, some["repair"], True)
    times = (1.0 - walked) / np.maximum(1.0 - closed[:walks], 1e-6)
    return np.clip(1.0 - (1.0 - closed) * rng.choice(times, size=len(closed)), 0.02, 1.0)


def totals_at(asked: Sequence[tuple[Scenario, Draws]]) -> list[dict[str, float]]:
    """The figures of scenarios on one fleet, each at one point, in closed form. Of spot capacity each number of spares
    and each way in which hosts come and go is walked too: what a walk loses beside the closed form, all others of it
    lose."""
    totals = [one.evaluate(draws) for one, draws in asked]
    shapes = [one.shape(draws, found["step_s"]) for (one, draws), found in zip(asked, totals, strict=True)]
    if shapes[0].spot is not None:
        kinds = [(shape.spares, shape.spot) for shape in shapes]
        some = {kind: kinds.index(kind) for kind in kinds}
        walked = mean_walked(
            [shapes[index] for index in some.values()],
            asked[0][0].failures,
            [float(asked[index][1]["gpu_hours"]) for index in some.values()],
            [float(asked[index][1]["repair"]) for index in some.values()],
            float(totals[0]["run_s"]),
            WALKS_OF_A_POINT,
        )
        times = {
            kind: (1.0 - good) / (1.0 - float(totals[index]["goodput"]))
            for (kind, index), good in zip(some.items(), walked, strict=True)
        }
        totals = [
            one._totals(found["step_s"], 1.0 - (1.0 - found["goodput"]) * times[kind], draws)
            for (one, draws), found, kind in zip(asked, totals, kinds, strict=True)
        ]
    return [{name: float(one) for name, one in found.items()} for found in totals]


def tornado(scenario: Scenario) -> list[tuple[str, float, float]]:
    """(input, result at its P10, at its P90), the largest swing first; of dollars, or of time where nothing has a
    price."""
    middle, rows = scenario.medians(), _ends(scenario)
    return _largest(rows, totals_at([(scenario, {**middle, name: end}) for name, end in rows]))


def _ends(scenario: Scenario) -> list[tuple[str, float]]:
    return [(name, end) for name, one in scenario.inputs().items() for end in (one.p10, one.p90)]


def _largest(
    rows: Sequence[tuple[str, float]], totals: Sequence[Mapping[str, float]]
) -> list[tuple[str, float, float]]:
    by = "usd" if "usd" in totals[0] else "run_s"
    found = [
        (name, low[by], high[by]) for (name, _), low, high in zip(rows[::2], totals[::2], totals[1::2], strict=True)
    ]
    return sorted(found, key=lambda row: -abs(row[2] - row[1]))[:8]


Curves = dict[str, list[tuple[float, float, float]]]


def curves(scenario: Scenario, asked: Mapping[str, Sequence[float]]) -> Curves:
    """(value, goodput, dollars a million committed tokens) over `interval` in seconds, over `spares`, or `copies`."""
    points = [(what, value) for what, values in asked.items() for value in values]
    changed = [_with(scenario, what, value) for what, value in points]
    found: Curves = {what: [] for what in asked}
    for (what, value), totals in zip(points, totals_at([(one, one.medians()) for one in changed]), strict=True):
        found[what].append((value, totals["goodput"], totals.get("usd", math.nan) / scenario.tokens * 1e6))
    return found


def _with(scenario: Scenario, what: str, value: float) -> Scenario:
    if what == "spares":
        return dataclasses.replace(scenario, scaling=dataclasses.replace(scenario.scaling, spares=int(value)))
    if what == "copies":
        return dataclasses.replace(scenario, run=dataclasses.replace(scenario.run, copies=f"{value:g}"))
    config = dataclasses.replace(scenario.run.checkpoint_config, every_s=float(value), every_steps=None)
    return dataclasses.replace(scenario, run=dataclasses.replace(scenario.run, checkpoint_config=config))


def default_efficiency(fleet: Fleet, rates: Rates | None = None) -> Efficiency:
    """The class of the fleet's GPUs; with the rates of `elastic-ring calibrate` where they were measured there."""
    eff = efficiency_of(fleet.spec.arch)
    return eff if rates is None else rates.efficiency(eff, fleet)
