"""Search over mesh, pass size, offload, interval, copies, spares, GPU type, and a given pattern or dense attention: the
front of cost and time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from elastic_ring.forecast.answers.money import PriceList
from elastic_ring.forecast.scenario import Scenario, default_efficiency, forecast, totals_at
from elastic_ring.forecast.sizing.machines import named_fleet

OFFLOADS = ("none", "optimizer", "all")
FRONT_DRAWS, WALKS = 1_000, 16
"""Draws of the front's figures; walks by which the front is found."""


class Change(TypedDict, total=False):
    """Settings that `fitting_changes` varies."""

    checkpoint_activations: bool
    keep_activations: bool
    offload_activations: bool
    cpu_offload: str
    cp: int
    sequences_per_pass: int


RECOMPUTED: Change = {"checkpoint_activations": True, "keep_activations": False}


@dataclass(frozen=True)
class Candidate:
    """A configuration with its cost and time; `success`, on the front: chance to meet deadline and budget."""

    scenario: Scenario
    usd: float
    run_s: float
    goodput: float
    success: float | None = None

    def line(self) -> str:
        s = self.scenario
        chance = "" if self.success is None else f", success {self.success:.0%}"
        return (
            f"{s.num_gpus} {s.fleet.gpu}: dp {s.scaling.dp} cp {s.scaling.cp}, {s.step.micro_batch} sequences a "
            f"pass, offload {s.scaling.cpu_offload}{' + activations' * s.model.offload_activations}"
            f"{', the pattern' * (s.pattern is not None)}, copies "
            f"{s.run.copies}, spares {s.scaling.spares}, checkpoint every {s.run.checkpoint_config.every_s or 600:.0f} "
            f"s: {self.run_s / 86400:.3g} days, {self.usd:.4g} USD, goodput {self.goodput:.1%}{chance}"
        )


def changed(base: Scenario, **fields: Any) -> Scenario:
    """`base` with settings of any of its parts changed, each by its name; fields of the scenario itself too."""
    parts = {part: getattr(base, part) for part in ("model", "scaling", "step", "run")}
    for part, current in parts.items():
        own = [name for name in fields if name not in Scenario.__dataclass_fields__ and hasattr(current, name)]
        parts[part] = dataclasses.replace(current, **{name: fields.pop(name) for name in own}) if own else current
    unknown = fields.keys() - Scenario.__dataclass_fields__.keys()
    if unknown:
        raise ValueError(f"search: {min(unknown)}: is no setting")
    return dataclasses.replace(base, **parts, **fields)


def fitting_changes(base: Scenario) -> list[tuple[str, float]]:
    """(change, GPU-seconds a token over those of `base`) of single and paired changes that fit, the cheapest first."""
    moves: list[tuple[str, Change]] = [
        ("checkpointed activations", RECOMPUTED),
        ("--offload-activations", {**RECOMPUTED, "offload_activations": True}),
        ("--cpu-offload optimizer", {"cpu_offload": "optimizer"}),
        ("--cpu-offload all", {"cpu_offload": "all"}),
        *((f"--cp {base.scaling.cp * k}", Change(cp=base.scaling.cp * k)) for k in (2, 4, 8)),
        ("one sequence a pass", {"sequences_per_pass": 1}),
    ]
    moves += [(f"{a} and {b}", {**first, **then}) for (a, first), (b, then) in itertools.combinations(moves, 2)]

    def gpu_seconds(scenario: Scenario) -> float:
        return float(scenario.step_s(scenario.medians())) * scenario.num_gpus / scenario.tokens_per_step

    costs: dict[str, float] = {}
    base_cost = gpu_seconds(base)
    for name, change in moves:
        scenario = changed(base, **change)
        if scenario.fits and scenario.scaling.cp <= scenario.step.longest_ring:
            costs[name] = gpu_seconds(scenario) / base_cost
    return sorted(costs.items(), key=lambda cost: (cost[1], len(cost[0])))


def candidates(base: Scenario, prices: PriceList, kind: str, gpu: str) -> Iterator[Scenario]:
    """All meshes on at most `base.num_gpus` of this type, the largest first, with each pass size, offload and pattern;
    none without a price."""
    if not any((row.gpu, row.kind) == (gpu, kind) for row in prices.rows):
        return
    base = changed(base, price=prices.find(gpu, kind), min_dp=1, max_dp=None, **RECOMPUTED)
    if gpu != base.fleet.gpu:
        fleet = named_fleet(gpu)
        base = changed(base, fleet=fleet, eff=default_efficiency(fleet), doubled_s=None)
    most = base.num_gpus
    powers = [2**k for k in range(15) if 2**k <= most]
    for cp, dp in sorted(itertools.product(powers, powers), key=lambda mesh: -mesh[0] * mesh[1]):
        if cp * dp > most or cp > base.step.longest_ring or dp > base.step.global_batch:
            continue
        patterns = dict.fromkeys((base.pattern, None))
        for offload, together, offloads, pattern in itertools.product(OFFLOADS, (1, 2, 4), (False, True), patterns):
            if together <= -(-base.step.global_batch // dp):
                sizes = {"dp": dp, "cp": cp, "cpu_offload": offload, "sequences_per_pass": together}
                yield changed(base, **sizes, offload_activations=offloads, pattern=pattern)


def search(
    base: Scenario,
    prices: PriceList,
    kind: str,
    deadline_s: float | None,
    budget_usd: float | None,
    gpus: Sequence[str],
    limit: int = 10_000,
) -> tuple[list[Candidate], int]:
    """The front of cost and time with the probability of each, and the number of configurations priced. If one fits,
    spares, copies and intervals are tried too. A configuration is walked only if nothing would beat it without losses;
    the figures of the front are the medians of a forecast. Raises ValueError for a kind that no row has."""
    if not any(row.kind == kind for row in prices.rows):
        kinds = ", ".join(sorted({row.kind for row in prices.rows}))
        raise ValueError(f"--search --price {kind}: {prices.path} has no row of it; add one, or take one of {kinds}")
    lossless: list[Candidate] = []
    tried = 0
    streams = [candidates(base, prices, kind, gpu) for gpu in gpus]
    for scenario in itertools.chain.from_iterable(itertools.zip_longest(*streams)):
        if scenario is None or tried >= limit:
            continue
        tried += 1
        if not scenario.fits:
            continue
        medians = scenario.medians()
        step_s = float(changed(scenario, copies="0").step_s(medians))
        for spares, copies, every_s in itertools.product((0, 8, 32), ("0", "1"), (300.0, 1800.0)):
            if tried >= limit or (copies == "1" and scenario.scaling.mesh.size < 2):
                continue
            tried += 1
            config = dataclasses.replace(scenario.run.checkpoint_config, every_s=every_s, every_steps=None)
            option = changed(scenario, spares=spares, copies=copies, checkpoint_config=config)
            totals = option.totals(step_s, 1.0, medians)
            lossless.append(Candidate(option, *(float(totals[name]) for name in ("usd", "run_s", "goodput"))))
    priced: list[Candidate] = []
    for ideal in sorted(lossless, key=lambda option: (option.usd, option.run_s)):
        if not any(option.usd <= ideal.usd and option.run_s <= ideal.run_s for option in priced):
            [figures] = totals_at([(ideal.scenario, ideal.scenario.medians())], WALKS)
            priced.append(Candidate(ideal.scenario, figures["usd"], figures["run_s"], figures["goodput"]))
    front = []
    for candidate in pareto(priced):
        result = forecast(candidate.scenario, num_draws=FRONT_DRAWS)
        success = min(result.probability(deadline_s, budget_usd).values(), default=1.0)
        usd, run_s, goodput = (result.quantiles(name)[1] for name in ("usd", "run_s", "goodput"))
        front.append(Candidate(candidate.scenario, usd, run_s, goodput, success))
    return pareto(front), tried


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other beats in both cost and time, the cheapest first."""
    best: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda each: (each.usd, each.run_s)):
        if not best or candidate.run_s < best[-1].run_s:
            best.append(candidate)
    return best
