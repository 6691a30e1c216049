"""A run's timeline on a cluster that changes, as an SVG: nodes, members and what was asked for over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

GAP_S = 3.0
"""Between samples further apart than this nothing is drawn: nobody looked."""

Samples = Sequence[tuple[float, int, int, int]]


def draw(path: Path, samples: Samples, events: Sequence[tuple[float, str]]) -> None:
    """`samples`: (seconds, nodes, members, workers asked for), rising. `events`: (seconds, what)."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasSVG(figure)
    (upper, told), (lower, rest) = figure.subplots(2, 2, sharex="col", height_ratios=(3, 2), width_ratios=(3, 1))
    rest.axis("off")
    told.axis("off")
    series = with_gaps(samples)
    times = [sample[0] for sample in series]
    upper.step(times, [sample[2] for sample in series], where="post", label="members", color="tab:blue", linewidth=2)
    upper.step(
        times,
        [sample[3] for sample in series],
        where="post",
        label="asked for by the coordinator",
        color="tab:orange",
        linestyle="--",
    )
    lower.step(times, [sample[1] for sample in series], where="post", color="tab:green", linewidth=2)
    for axes in (upper, lower):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=True, alpha=0.3)
        for at, _ in events:
            axes.axvline(at, color="grey", linewidth=0.6)
    top = max(max(sample[2], sample[3]) for sample in samples)
    upper.set_ylim(0, top * 1.9)
    lower.set_ylim(bottom=0)
    for number, (at, _) in enumerate(events):
        upper.text(at, top * (1.1 + 0.1 * (number % 6)), f"{number + 1}", fontsize=8, ha="center")
    lines = [f"{number + 1:2d}  {at:5.0f} s  {what}" for number, (at, what) in enumerate(events)]
    told.text(0, 1, "\n".join(lines), fontsize=7, va="top", family="monospace")
    upper.legend(loc="upper right", fontsize=8)
    lower.set_xlabel("seconds since the submission")
    lower.set_ylabel("nodes")
    upper.set_ylabel("workers")
    figure.savefig(path, metadata={"Date": None})


def with_gaps(samples: Samples) -> list[tuple[float, float, float, float]]:
    """The samples, with nothing where none was taken for GAP_S."""
    found: list[tuple[float, float, float, float]] = []
    for sample in samples:
        if found and sample[0] - found[-1][0] > GAP_S:
            found.append((found[-1][0] + GAP_S / 2, math.nan, math.nan, math.nan))
        found.append(sample)
    return found
