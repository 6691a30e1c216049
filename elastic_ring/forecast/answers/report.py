"""A forecast as text and as JSON: every number with its origin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from elastic_ring.forecast.answers.search import fitting_changes
from elastic_ring.forecast.goodput import DAY
from elastic_ring.forecast.scenario import Forecast, Scenario, curves
from elastic_ring.forecast.sizing.machines import Origin
from elastic_ring.forecast.sizing.memory import EXPANDABLE, ModelPlan
from elastic_ring.gpus import GPUS

NAMES: Mapping[str, str] = {
    "step": "step time",
    "links": "links",
    "jitter": "slowest rank",
    "gpu_hours": "time between failures",
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


def origins(forecast: Forecast) -> dict[str, Origin]:
    """The origin of each figure: the weakest of its inputs."""
    scenario = forecast.scenario
    step: Origin = "measured" if scenario.measured_step_s or scenario.correction else scenario.eff.origin
    price: Origin = "specified" if scenario.price else "assumed"
    return {"memory": "calibrated", "step_s": step, "goodput": "assumed", "run_s": "assumed", "usd": price}


def verdicts(plan: ModelPlan, own_gib: float, own: str) -> dict[str, tuple[float, float]]:
    """(memory, margin) in GiB by GPU type, the fleet's own first."""
    types = {own: own_gib, **{gpu.name: gpu.gib for gpu in GPUS.values() if gpu.name != own}}
    return {gpu: (gib, plan.margin_gib(gib)) for gpu, gib in types.items()}


def lines(forecast: Forecast, deadline_s: float | None, budget_usd: float | None, warnings: Sequence[str]) -> list[str]:
    scenario, tags, cost = forecast.scenario, origins(forecast), "usd" in forecast.draws
    inputs = scenario.inputs()

    def row(name: str, key: str, unit: float, label: str, origin: Origin) -> str:
        low, middle, high = (short(value / unit) for value in forecast.quantiles(key))
        return f"{name} {middle} {label}".rstrip() + f" (median, 80 %: {low} to {high}) [{origin}]"

    text = [
        *_memory_lines(scenario, tags["memory"]),
        *_attention_lines(scenario),
        row("step", "step_s", 1.0, "s", tags["step_s"]),
    ]
    if scenario.measured_step_s is None:
        parts = {name: float(part) for name, part in scenario.step_of(scenario.medians()).parts.items()}
        whole = sum(parts.values())
        ranked = sorted(parts.items(), key=lambda part: -part[1])
        text += [f"  {part / whole:4.0%}  {name}" for name, part in ranked if part > 0.005 * whole]
    text += [
        row("goodput", "goodput", 0.01, "%", tags["goodput"]),
        row("time", "run_s", DAY, "days", tags["run_s"]),
        row("GPU-hours", "gpu_hours", 1.0, "", tags["run_s"]),
        row("energy", "mwh", 1.0, "MWh", "specified"),
    ]
    if cost and scenario.price:
        a_token = forecast.quantiles("usd")[1] / scenario.tokens * 1e6
        text += [
            row("cost", "usd", 1.0, "USD", tags["usd"]),
            f"  {a_token:.3g} USD a million committed tokens (median); {scenario.price.kind}, {scenario.price.date}, "
            f"{scenario.price.source}",
        ]
    spot = scenario.shape(scenario.medians(), 1.0).spot
    if scenario.price and spot:
        hours = (f"{values.p50:g} h" for values in scenario.price.capacity().values())
        text.append(
            "spot capacity: a host is taken back after {}, comes back after {}, all are taken after {}; ".format(*hours)
            + f"{spot.share_paid:.1%} of the hours are paid [assumed]"
        )
    chances = forecast.probability(deadline_s, budget_usd)
    text += [f"probability of {name}: {chance:.0%}" for name, chance in chances.items()]
    if not scenario.fits:
        text.append(f"a rank does not fit a {scenario.fleet.gpu}: nothing of this runs there")
    text.append(f"what moves it most (mean {'cost, USD' if cost else 'time, s'}, at P10 and P90 of the input):")
    text += [
        f"  {NAMES[name]:<22} {short(low):>9} {short(high):>9} [{inputs[name].origin}]"
        for name, low, high in forecast.tornado
    ]
    hosts = [float(number * scenario.fleet.gpus_per_host) for number in SPARE_HOSTS]
    copies = [0.0, 1.0] if scenario.scaling.mesh.size > 1 else []
    for axis, points in curves(scenario, {"interval": INTERVALS_S, "spares": hosts, "copies": copies}).items():
        text.append(f"mean goodput{' and USD a million tokens' * cost} over {axis}{', s' * (axis == 'interval')}:")
        text.append("  " + "   ".join(f"{value:g}: {good:.2%}{f' {usd:.4g}' * cost}" for value, good, usd in points))
    return [*text, *(f"warning: {warning}" for warning in warnings)]


def _memory_lines(scenario: Scenario, origin: Origin) -> list[str]:
    """Sizes and memory of the configuration, with the cheapest change that fits if it does not."""
    plan, fleet, mesh = scenario.plan, scenario.fleet, scenario.scaling.mesh
    gib, allocator = fleet.memory_gib, scenario.run.env.get("PYTORCH_CUDA_ALLOC_CONF", "")
    low, middle, high = (each / 2**30 for each in plan.reserved_bytes(gib, expandable=EXPANDABLE in allocator))
    if scenario.fits:
        last = f"  the allocator will show {low:.1f} to {high:.1f} GiB, {middle:.1f} likely"
    elif changes := fitting_changes(scenario):
        name, ratio = changes[0]
        last = f"  cheapest change that fits: {name} ({ratio:.3g} x the GPU time a token)"
    else:
        last = "  no change of offload, recomputation or cp makes it fit"
    step = scenario.step
    return [
        f"{short(plan.num_parameters)} parameters, {mesh}, {scenario.scaling.spares} spare(s) on {scenario.num_gpus} "
        f"{fleet.gpu}{f' of {fleet.name}' * (fleet.name not in ('own', fleet.gpu))}",
        f"{short(scenario.tokens)} tokens in {math.ceil(scenario.num_steps):,} steps of {step.tokens_per_step:,}: "
        f"{step.global_batch:,} sequences, context {step.context_tokens:,}",
        *(
            f"extrapolated x {ratio:.3g} in {size}, beyond the largest shape that was seen"
            for size, ratio in scenario.extrapolated.items()
        ),
        f"memory of a rank {plan.needed_bytes / 2**30:.1f} GiB with reserve, {plan.gpu_bytes / 2**30:.1f} of tensors, "
        f"{plan.floor_bytes / 2**30:.1f} on any number of ranks [{origin}]",
        *(
            f"  {gpu:<8} {memory:6.1f} GiB: {'fits' if left >= 0 else 'does not fit'}, {left:+.1f} GiB"
            for gpu, (memory, left) in verdicts(plan, gib, fleet.gpu).items()
        ),
        last,
    ]


def _attention_lines(scenario: Scenario) -> list[str]:
    attention = scenario.attention
    most = "at most " * attention.is_bound
    hops = "" if attention.hops is None else f" in {attention.hops:.3g} messages a layer"
    return [
        f"attention keeps {most}{attention.density:.3g} of its pairs, {attention.slowest:.2f} of the mean on the "
        f"slowest rank; a rank receives {most}{attention.fetched:.3g} of a dense ring's K/V{hops}"
    ] * (attention.sparse > 0)


def as_json(
    forecast: Forecast, deadline_s: float | None, budget_usd: float | None, warnings: Sequence[str]
) -> dict[str, object]:
    scenario, tags = forecast.scenario, origins(forecast)
    plan = scenario.plan
    figures = {
        name: {"p10": low, "p50": middle, "p90": high, "origin": tags.get(name, "assumed")}
        for name in forecast.draws
        for low, middle, high in [forecast.quantiles(name)]
    }
    return {
        "parameters": plan.num_parameters,
        "dp": scenario.scaling.dp,
        "cp": scenario.scaling.cp,
        "spares": scenario.scaling.spares,
        "gpu": scenario.fleet.gpu,
        "num_gpus": scenario.num_gpus,
        "tokens": scenario.tokens,
        "tokens_per_step": scenario.step.tokens_per_step,
        "context_tokens": scenario.step.context_tokens,
        "steps": math.ceil(scenario.num_steps),
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
        "median_inputs": dict(forecast.middle),
        "inputs": {name: vars(values) for name, values in scenario.inputs().items()},
        "probability": forecast.probability(deadline_s, budget_usd),
        "tornado": [{"input": name, "p10": low, "p90": high} for name, low, high in forecast.tornado],
        "warnings": list(warnings),
    }
