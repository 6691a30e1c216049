"""Five pictures of a forecast: memory by kind, a step's parts, goodput over spares, cost and time, the tornado."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from elastic_ring.forecast.answers.report import NAMES, SPARE_HOSTS, short
from elastic_ring.forecast.goodput import DAY
from elastic_ring.forecast.scenario import Forecast, curves

SHOWN_DRAWS = 2_000
LEAST_SWING = 1e-3
"""Inputs that move the answer less have no bar."""


def write(forecast: Forecast, folder: Path, deadline_s: float | None, budget_usd: float | None) -> list[Path]:
    """Write PNG files into `folder`, which is created; returns their paths. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in (
        ("memory", _memory),
        ("step", _step),
        ("spares", _spares),
        ("tornado", _tornado),
        ("cost_and_time", lambda axes, forecast: _cost_and_time(axes, forecast, deadline_s, budget_usd)),
    ):
        figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
        draw(axes, forecast)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=110)
        pyplot.close(figure)
    return written


def _bars(axes: Any, parts: list[tuple[str, float]], unit: str) -> None:
    parts = sorted(parts, key=lambda part: part[1])
    bars = axes.barh([name for name, _ in parts], [size for _, size in parts], color="tab:blue")
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_xlabel(unit)
    axes.margins(x=0.12)


def _memory(axes: Any, forecast: Forecast) -> None:
    plan = forecast.scenario.plan
    terms = [(name, size / 2**30) for name, size in plan.memory.fullest.terms.items() if size > 2**28]
    _bars(axes, terms, "GiB of a rank")
    whole = forecast.scenario.fleet.memory_gib
    axes.set_title(
        f"{plan.memory.fullest.name}: {plan.gpu_bytes / 2**30:.0f} GiB of tensors, "
        f"{plan.needed_bytes / 2**30:.0f} needed of {whole:.0f}",
        fontsize=10,
    )


def _step(axes: Any, forecast: Forecast) -> None:
    """The parts of a step one after the other, without the time that overlap hides."""
    timed = forecast.scenario.step_of(forecast.scenario.medians())
    begin = 0.0
    for name, part in timed.parts.items():
        if float(part) > 0:
            bar = axes.barh([name], [float(part)], left=[begin], color="tab:blue")
            axes.bar_label(bar, [f"{float(part):.3g}"], padding=3)
            begin += float(part)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * begin)
    axes.set_xlabel("seconds of a step")
    axes.set_title(f"A step of {float(timed.total_s):.3g} s", fontsize=10)


def _spares(axes: Any, forecast: Forecast) -> None:
    values = [float(hosts * forecast.scenario.fleet.gpus_per_host) for hosts in SPARE_HOSTS]
    rows = curves(forecast.scenario, {"spares": values})["spares"]
    axes.plot(values, [100 * good for _, good, _ in rows], "o-", color="tab:blue")
    axes.set_xlabel("spare GPUs")
    axes.set_ylabel("goodput, %", color="tab:blue")
    if "usd" in forecast.draws:
        right = axes.twinx()
        right.plot(values, [usd for _, _, usd in rows], "s--", color="tab:orange")
        right.set_ylabel("USD a million committed tokens", color="tab:orange")
    axes.set_title("Spares: what they save and what they cost", fontsize=10)


def _shortly(value: float, _: int) -> str:
    return short(value)


def _cost_and_time(axes: Any, forecast: Forecast, deadline_s: float | None, budget_usd: float | None) -> None:
    days = np.asarray(forecast.draws["run_s"])[:SHOWN_DRAWS] / DAY
    usd = np.asarray(forecast.draws.get("usd", forecast.draws["gpu_hours"]))[:SHOWN_DRAWS]
    axes.scatter(days, usd, s=4, alpha=0.3, color="tab:blue")
    axes.set_xlim(0.9 * days.min(), max(np.quantile(days, 0.99), (deadline_s or 0.0) / DAY) * 1.05)
    axes.set_ylim(0.9 * usd.min(), max(np.quantile(usd, 0.99), budget_usd or 0.0) * 1.05)
    if deadline_s is not None:
        axes.axvline(deadline_s / DAY, color="tab:red", label="deadline")
    if budget_usd is not None:
        axes.axhline(budget_usd, color="tab:orange", label="budget")
    chances = forecast.probability(deadline_s, budget_usd)
    chance_text = ", ".join(f"{name} {chance:.0%}" for name, chance in chances.items())
    axes.set_title(f"Draws of time and cost{f': {chance_text}' if chance_text else ''}", fontsize=10)
    axes.set_xlabel("days")
    axes.set_ylabel("USD" if "usd" in forecast.draws else "GPU-hours")
    axes.yaxis.set_major_formatter(_shortly)
    if chances:
        axes.legend()


def _tornado(axes: Any, forecast: Forecast) -> None:
    rows = [row for row in forecast.tornado[::-1] if abs(row[2] - row[1]) > LEAST_SWING * abs(row[1])]
    by = "usd" if "usd" in forecast.draws else "run_s"
    middle = forecast.middle[by]
    axes.barh(
        [NAMES[name] for name, _, _ in rows],
        [high - low for _, low, high in rows],
        left=[low for _, low, _ in rows],
        color="tab:blue",
    )
    axes.use_sticky_edges = False
    axes.axvline(middle, color="black", linewidth=1)
    axes.xaxis.set_major_formatter(_shortly)
    axes.set_xlabel("USD" if by == "usd" else "seconds")
    axes.set_title("From P10 to P90 of one input, the others at their medians", fontsize=10)
