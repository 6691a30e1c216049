"""A forecast as text and as JSON: every number with where it is from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ring.forecast.goodput import DAY
from elastic_ring.forecast.scenario import Forecast, Scenario, curves
from elastic_ring.forecast.sizing.machines import Origin
from elastic_ring.forecast.sizing.memory import EXPANDABLE, ModelPlan
from elastic_ring.forecast.sizing.step_time import Attention
from elastic_ring.gpus import GPUS

NAMES: Mapping[str, str] = {
    "step": "step time",
    "links": "links",
    "jitter": "slowest rank",
    "gpu_hours": "time between losses",
    "repair": "repair of a host",
    "rebuild": "rebuild of groups",
    "storage": "storage",
    "price": "price",
    "on_hours": "until a host is taken",
    "off_hours": "until it comes back",
    "dry_hours": "until all are taken",
}
INTERVALS_S = (60.0, 300.0, 900.0, 3600.0, 14_400.0)
SPARE_HOSTS = (0, 1, 2, 4, 8)


def short(value: float) -> str:
    """1.23 T, 45.6 M, 789."""
    for scale, sign in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " K")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{sign}"
    return f"{value:.3g}"


def origins(found: Forecast) -> dict[str, Origin]:
    """Where each figure is from: as weak as the weakest that it needs."""
    scenario = found.scenario
    step: Origin = "measured" if scenario.measured_step_s or scenario.correction else scenario.eff.origin
    price: Origin = "specified" if scenario.price else "assumed"
    return {"memory": "calibrated", "step_s": step, "goodput": "assumed", "run_s": "assumed", "usd": price}


def verdicts(plan: ModelPlan, own_gib: float, own: str) -> dict[str, tuple[float, float]]:
    """(memory, margin) in GiB by GPU type, the fleet's own first."""
    types = {own: own_gib, **{gpu.name: gpu.gib for gpu in GPUS.values() if gpu.name != own}}
    return {gpu: (gib, plan.margin_gib(gib)) for gpu, gib in types.items()}


def lines(found: Forecast, deadline_s: float | None, budget_usd: float | None, warnings: Sequence[str]) -> list[str]:
    scenario, tags = found.scenario, origins(found)
    plan, mesh = scenario.plan, scenario.scaling.mesh
    gib = scenario.fleet.memory_gib
    allocator = scenario.run.env.get("PYTORCH_CUDA_ALLOC_CONF", "")
    low, middle, high = plan.reserved_bytes(gib, expandable=EXPANDABLE in allocator)
    told = [
        f"{short(plan.num_parameters)} parameters, {mesh}, {scenario.scaling.spares} spare(s) on {scenario.num_gpus} "
        f"{scenario.fleet.gpu}{_of_fleet(scenario)}, {short(scenario.tokens)} tokens",
        *(
            f"extrapolated x {ratio:.3g} in {what}, beyond the largest shape that was seen"
            for what, ratio in scenario.extrapolated.items()
        ),
        f"memory of a rank {plan.needed_bytes / 2**30:.1f} GiB with reserve, {plan.gpu_bytes / 2**30:.1f} of tensors, "
        f"{plan.floor_bytes / 2**30:.1f} on any number of ranks [{tags['memory']}]",
        *(
            f"  {gpu:<8} {of:6.1f} GiB: {'fits' if left >= 0 else 'does not fit'}, {left:+.1f} GiB"
            for gpu, (of, left) in verdicts(plan, gib, scenario.fleet.gpu).items()
        ),
        *(
            [f"  the allocator will show {low / 2**30:.1f} to {high / 2**30:.1f} GiB, {middle / 2**30:.1f} likely"]
            if scenario.fits
            else [f"  {change}" for change in changes_that_fit(found)]
        ),
        *_of_pattern(scenario.attention),
        _row("step", found, "step_s", 1.0, "s", tags["step_s"]),
        *_parts(found),
        _row("goodput", found, "goodput", 0.01, "%", tags["goodput"]),
        _row("time", found, "run_s", DAY, "days", tags["run_s"]),
        _row("GPU-hours", found, "gpu_hours", 1.0, "", tags["run_s"]),
        _row("energy", found, "mwh", 1.0, "MWh", "specified"),
    ]
    if "usd" in found.draws and scenario.price:
        a_token = found.middle["usd"] / scenario.tokens * 1e6
        told += [
            _row("cost", found, "usd", 1.0, "USD", tags["usd"]),
            f"  {a_token:.3g} USD a million committed tokens; {scenario.price.kind}, {scenario.price.date}, "
            f"{scenario.price.source}",
        ]
    told += _of_spot(scenario)
    told += [
        f"probability of {name}: {chance:.0%}" for name, chance in found.probability(deadline_s, budget_usd).items()
    ]
    if not scenario.fits:
        told.append(f"a rank does not fit a {scenario.fleet.gpu}: nothing of this runs there")
    by = "cost, USD" if "usd" in found.draws else "time, s"
    told += [f"what moves it most ({by}, at P10 and P90 of the input):"]
    inputs = scenario.inputs()
    told += [
        f"  {NAMES[name]:<22} {short(one):>9} {short(two):>9} [{inputs[name].origin}]"
        for name, one, two in found.tornado
    ]
    return [*told, *_curves(found), *(f"warning: {one}" for one in warnings)]


def _of_fleet(scenario: Scenario) -> str:
    fleet = scenario.fleet
    return "" if fleet.name in ("own", fleet.gpu) else f" of {fleet.name}"


def _of_pattern(told: Attention) -> list[str]:
    most = "at most " * told.is_bound
    hops = "" if told.hops is None else f" in {told.hops:.3g} messages a layer"
    return [
        f"attention keeps {most}{told.density:.3g} of its pairs, {told.slowest:.2f} of the mean on the slowest rank; a "
        f"rank receives {most}{told.fetched:.3g} of a dense ring's K/V{hops}"
    ] * (told.sparse > 0)


def _of_spot(scenario: Scenario) -> list[str]:
    if scenario.price is None or scenario.price.kind != "spot":
        return []
    spot = scenario.shape(scenario.medians(), 1.0).spot
    hours = (f"{one.p50:g} h" for one in scenario.price.capacity().values())
    return [
        "spot capacity: a host is taken back after {}, comes back after {}, all are taken after {}; ".format(*hours)
        + (f"{spot.share_paid:.1%} of the hours are paid [assumed]" if spot else ""),
    ]


def _row(name: str, found: Forecast, key: str, unit: float, says: str, origin: Origin) -> str:
    low, middle, high = (short(value / unit) for value in found.quantiles(key))
    return f"{name} {middle} {says}".rstrip() + f" (80 %: {low} to {high}) [{origin}]"


def _parts(found: Forecast) -> list[str]:
    if found.scenario.measured_step_s is not None:
        return []
    parts = found.scenario.step_of(found.scenario.medians()).parts
    whole = float(sum(parts.values()))
    ranked = sorted(parts.items(), key=lambda part: -float(part[1]))
    return [f"  {float(part) / whole:4.0%}  {name}" for name, part in ranked if float(part) > 0.005 * whole]


def _curves(found: Forecast) -> list[str]:
    scenario, told = found.scenario, []
    cost = "usd" in found.draws
    hosts = [float(one * scenario.fleet.gpus_per_host) for one in SPARE_HOSTS]
    copies = [0.0, 1.0] if scenario.scaling.mesh.size > 1 else []
    for what, rows in curves(scenario, {"interval": INTERVALS_S, "spares": hosts, "copies": copies}).items():
        told.append(f"mean goodput{' and USD a million tokens' * cost} over {what}{', s' * (what == 'interval')}:")
        told.append("  " + "   ".join(f"{value:g}: {good:.2%}{f' {usd:.4g}' * cost}" for value, good, usd in rows))
    return told


def changes_that_fit(found: Forecast) -> list[str]:
    """The cheapest change with which a rank fits, by GPU-seconds a token."""
    from elastic_ring.forecast.answers.search import fitting_changes

    best = fitting_changes(found.scenario)
    return [
        f"cheapest change that fits: {name} ({seconds:.3g} x the GPU time a token)" for name, seconds in best[:1]
    ] or ["no change of offload, recomputation or cp makes it fit"]


def as_json(
    found: Forecast, deadline_s: float | None, budget_usd: float | None, warnings: Sequence[str]
) -> dict[str, Any]:
    scenario, tags = found.scenario, origins(found)
    plan = scenario.plan
    figures = {
        name: {"p10": low, "p50": middle, "p90": high, "origin": tags.get(name, "assumed")}
        for name in found.draws
        for low, middle, high in [found.quantiles(name)]
    }
    return {
        "parameters": plan.num_parameters,
        "dp": scenario.scaling.dp,
        "cp": scenario.scaling.cp,
        "spares": scenario.scaling.spares,
        "gpu": scenario.fleet.gpu,
        "num_gpus": scenario.num_gpus,
        "tokens": scenario.tokens,
        "memory": {
            "needed_bytes": plan.needed_bytes,
            "tensor_bytes": plan.gpu_bytes,
            "floor_bytes": plan.floor_bytes,
            "fits": scenario.fits,
            "origin": tags["memory"],
            "terms": dict(plan.memory.fullest.terms),
            "margin_gib": {
                gpu: left for gpu, (_, left) in verdicts(plan, scenario.fleet.memory_gib, scenario.fleet.gpu).items()
            },
        },
        "extrapolated": scenario.extrapolated,
        "figures": figures,
        "median_inputs": dict(found.middle),
        "inputs": {name: vars(one) for name, one in scenario.inputs().items()},
        "probability": found.probability(deadline_s, budget_usd),
        "tornado": [{"input": name, "p10": one, "p90": two} for name, one, two in found.tornado],
        "warnings": list(warnings),
    }
