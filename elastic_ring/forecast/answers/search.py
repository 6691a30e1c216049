"""Search over mesh, pass size, offload, interval, copies, spares, GPU type, and a pattern or dense attention where one
is given: the front of cost and time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_ring.forecast.answers.money import PriceList
from elastic_ring.forecast.scenario import Scenario, default_efficiency, forecast
from elastic_ring.forecast.sizing.machines import Fleet, named_fleet

OFFLOADS = ("none", "optimizer", "all")
RECOMPUTED = {"checkpoint_activations": True, "keep_activations": False}
FRONT_DRAWS = 1_000


@dataclass(frozen=True)
class Candidate:
    """`success`: that it is done in time and within the money; only of those on the front."""

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
    parts: dict[str, dict[str, Any]] = {"model": {}, "scaling": {}, "step": {}, "run": {}}
    own: dict[str, Any] = {}
    for name, value in fields.items():
        part = next((part for part in parts if hasattr(getattr(base, part), name)), None)
        if hasattr(Scenario, name) or name in Scenario.__dataclass_fields__:
            own[name] = value
        elif part is not None:
            parts[part][name] = value
        else:
            raise ValueError(f"search: {name}: is no setting")
    made = {part: dataclasses.replace(getattr(base, part), **some) for part, some in parts.items() if some}
    return dataclasses.replace(base, **made, **own)


def fitting_changes(base: Scenario) -> list[tuple[str, float]]:
    """(change, GPU-seconds a token over those of `base`) of single and paired changes that fit, the cheapest first."""
    moves: list[tuple[str, dict[str, Any]]] = [
        ("checkpointed activations", RECOMPUTED),
        ("--offload-activations", {**RECOMPUTED, "offload_activations": True}),
        ("--cpu-offload optimizer", {"cpu_offload": "optimizer"}),
        ("--cpu-offload all", {"cpu_offload": "all"}),
        *((f"--cp {base.scaling.cp * k}", {"cp": base.scaling.cp * k}) for k in (2, 4, 8)),
        ("one sequence a pass", {"sequences_per_pass": 1}),
    ]
    asked = [*(([one[0]], one[1]) for one in moves)]
    asked += [([a[0], b[0]], {**a[1], **b[1]}) for a, b in itertools.combinations(moves, 2)]
    cost = _gpu_seconds(base)
    found: dict[str, float] = {}
    for names, fields in asked:
        tried = changed(base, **fields)
        if tried.fits and tried.step.context_tokens >= tried.scaling.cp:
            found[" and ".join(names)] = _gpu_seconds(tried) / cost
    return sorted(found.items(), key=lambda item: (item[1], len(item[0])))


def _gpu_seconds(scenario: Scenario) -> float:
    middle = scenario.medians()
    return float(scenario.step_s(middle)) * scenario.num_gpus / scenario.tokens_per_step


def candidates(base: Scenario, prices: PriceList, kind: str, gpus: Sequence[str]) -> Iterator[Scenario]:
    """All meshes of at most the GPUs that `base` has, the largest first, and what else a run chooses."""
    most = base.num_gpus
    powers = [2**k for k in range(15) if 2**k <= most]
    priced = {row.gpu for row in prices.rows if row.kind == kind}
    for gpu in gpus:
        fleet: Fleet = base.fleet if gpu == base.fleet.gpu else named_fleet(gpu)
        if gpu not in priced:
            continue
        here = {
            "fleet": fleet,
            "eff": base.eff if gpu == base.fleet.gpu else default_efficiency(fleet),
            "doubled_s": base.doubled_s if gpu == base.fleet.gpu else None,
            "price": prices.find(gpu, kind),
        }
        for cp, dp in sorted(itertools.product(powers, powers), key=lambda mesh: -mesh[0] * mesh[1]):
            if cp * dp > most or cp > base.step.context_tokens or dp > base.step.global_batch:
                continue
            patterns = dict.fromkeys((base.pattern, None))
            for offload, together, acts, pattern in itertools.product(OFFLOADS, (1, 2, 4), (False, True), patterns):
                if together > -(-base.step.global_batch // dp):
                    continue
                made = changed(
                    base,
                    dp=dp,
                    cp=cp,
                    min_dp=1,
                    max_dp=None,
                    cpu_offload=offload,
                    sequences_per_pass=together,
                    offload_activations=acts,
                    pattern=pattern,
                    **RECOMPUTED,
                    **here,
                )
                yield made


def search(
    base: Scenario,
    prices: PriceList,
    kind: str,
    deadline_s: float | None,
    budget_usd: float | None,
    gpus: Sequence[str],
    limit: int = 10_000,
) -> tuple[list[Candidate], int]:
    """The front of cost and time with the probability of each, and how many configurations were priced. What does not
    fit is priced no further; of what fits, spares, copies and intervals are tried too. The front is found in closed
    form; its figures are the medians of a forecast. Raises ValueError for a kind that no row has."""
    if not any(row.kind == kind for row in prices.rows):
        kinds = ", ".join(sorted({row.kind for row in prices.rows}))
        raise ValueError(f"--search --price {kind}: {prices.path} has no row of it; add one, or take one of {kinds}")
    found: list[Candidate] = []
    tried = 0
    streams = [candidates(base, prices, kind, [gpu]) for gpu in gpus]
    for made in itertools.chain.from_iterable(itertools.zip_longest(*streams)):
        if made is None or tried >= limit:
            continue
        tried += 1
        if not made.fits:
            continue
        middle = made.medians()
        step_s = float(made.step_s(middle))
        for spares, copies, every_s in itertools.product((0, 8, 32), ("0", "1"), (300.0, 1800.0)):
            if tried >= limit or (copies == "1" and made.scaling.mesh.size < 2):
                continue
            tried += 1
            config = dataclasses.replace(made.run.checkpoint_config, every_s=every_s, every_steps=None)
            one = changed(made, spares=spares, copies=copies, checkpoint_config=config, measured_step_s=step_s)
            totals = one.evaluate(one.medians())
            found.append(
                Candidate(
                    dataclasses.replace(one, measured_step_s=made.measured_step_s),
                    float(totals["usd"]),
                    float(totals["run_s"]),
                    float(totals["goodput"]),
                )
            )
    return pareto([_with_chance(one, deadline_s, budget_usd) for one in pareto(found)]), tried


def _with_chance(one: Candidate, deadline_s: float | None, budget_usd: float | None) -> Candidate:
    made = forecast(one.scenario, num_draws=FRONT_DRAWS)
    chances = made.probability(deadline_s, budget_usd)
    usd, run_s, goodput = (made.quantiles(name)[1] for name in ("usd", "run_s", "goodput"))
    success = min(chances.values()) if chances else 1.0
    return dataclasses.replace(one, usd=usd, run_s=run_s, goodput=goodput, success=success)


def pareto(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in both cost and time, the cheapest first."""
    best: list[Candidate] = []
    fastest = np.inf
    for one in sorted(found, key=lambda one: (one.usd, one.run_s)):
        if one.run_s < fastest:
            best.append(one)
            fastest = one.run_s
    return best
