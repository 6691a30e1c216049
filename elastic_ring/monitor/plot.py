"""The plot of a run: loss, gradient norm, learning rate and tokens a second over its steps, with recoveries, resumes
and generations marked.

Uses matplotlib's object API on Agg: no display, no pyplot, no global state.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, cast

from elastic_ring.monitor.metrics import METRICS_NAME, MetricsLine, Recovery
from elastic_ring.monitor.report import seconds

_LOSS_COLOUR = "#1f4e79"
_RECOVERY_COLOUR, _RESUME_COLOUR = "#b3261e", "#2e7d32"
_BELOW = {"grad_norm": "gradient norm", "lr": "learning rate", "tokens_per_s": "tokens/s"}
"""Panels below the loss."""
if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger(__name__)

_SHADES = ("#ffffff", "#eef3f8")
_MAX_LABELS = 12
MAX_LINES = 4000
"""Of metrics.jsonl: more than the plot has points."""


def draw_run(run_folder: str | os.PathLike[str], recoveries: Sequence[Recovery], resumes: Sequence[int] = ()) -> Path:
    """Write RUN/loss.png from RUN/metrics.jsonl; warn where matplotlib is missing. Raises: JournalDamaged."""
    from elastic_ring.monitor.metrics_log import StepTable

    path = Path(run_folder) / "loss.png"
    try:
        with StepTable.load(Path(run_folder) / METRICS_NAME) as table:
            draw_loss(table.sample(MAX_LINES), recoveries, path, resumes)
    except ModuleNotFoundError as error:
        log.warning("no loss.png: %s is not installed; pip install '.[plot]'", error.name)
    return path


def draw_loss(
    steps: Sequence[MetricsLine],
    recoveries: Sequence[Recovery],
    path: str | os.PathLike[str],
    resumes: Sequence[int] = (),
) -> None:
    """Write a PNG. `steps`: lines of metrics.jsonl in order; `resumes`: the first
    steps after a resume."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.0, 7.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes, *below = figure.subplots(1 + len(_BELOW), sharex=True, gridspec_kw={"height_ratios": [4, *[1] * len(_BELOW)]})
    _draw_generations(axes, steps)
    _draw_line(axes, steps, "loss", 1.6)
    validations = loss_names(steps)
    for index, name in enumerate(validations):
        points = [point for point in values_of(steps, name) if point[1] is not None]
        label = "validation" if name == "val_loss" else name.removeprefix("val_").removesuffix("_loss")
        style = {"color": "#c77700"} if name == "val_loss" else {"color": f"C{index + 3}", "alpha": 0.8}
        axes.plot(*zip(*points, strict=True), "o-", linewidth=0.6, markersize=4, label=label, zorder=4, **style)
    skipped = [line["step"] for line in steps if line.get("skipped")]
    if skipped:
        axes.plot(
            skipped,
            [0.0] * len(skipped),
            "x",
            color="#6b7a89",
            markersize=5,
            label="skipped step",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            zorder=4,
        )
    if validations or skipped:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, frameon=False, fontsize=8)
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Loss of the committed steps", loc="left", fontsize=11)
    axes.margins(y=0.14)  # room for the generations' labels
    for name, panel in zip(_BELOW, below, strict=True):
        _draw_line(panel, steps, name, 1.2)
        panel.set_ylabel(_BELOW[name], fontsize=8)
        panel.tick_params(labelsize=7)
    below[-1].set_xlabel("step")
    below[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in (axes, *below):
        panel.grid(axis="y", color="#d9d9d9", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        _draw_marks(panel, [recovery.step for recovery in recoveries], _RECOVERY_COLOUR)
        _draw_marks(panel, resumes, _RESUME_COLOUR)
    if steps:
        last = max([steps[-1]["step"], *(recovery.step for recovery in recoveries)])
        axes.set_xlim(steps[0]["step"] - 0.5, last + 0.5)
    figure.align_ylabels()
    _label_recoveries(axes, recoveries)
    for step in resumes:
        axes.annotate(
            "resumed",
            (step - 0.5, 0.02),
            xycoords=axes.get_xaxis_transform(),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=7,
            color=_RESUME_COLOUR,
        )
    figure.savefig(os.fspath(path), format="png")


def _draw_line(axes: Axes, steps: Sequence[MetricsLine], name: str, width: float) -> None:
    """Plot one metric; values that are not finite leave a gap."""
    values = [math.nan if value is None else value for _, value in values_of(steps, name)]
    axes.plot([line["step"] for line in steps], values, color=_LOSS_COLOUR, linewidth=width, zorder=3)


def values_of(steps: Sequence[MetricsLine], name: str) -> list[tuple[int, float | None]]:
    """The value of each line by its step; None where it has none."""
    return [(line["step"], cast("Mapping[str, float | None]", line).get(name)) for line in steps]


def loss_names(steps: Sequence[MetricsLine]) -> list[str]:
    """Names of the validations' losses: the mean of all sets, then each set's."""
    names = {name for line in steps for name, value in line.items() if value is not None}
    return sorted((name for name in names if re.fullmatch("val_(.+_)?loss", name)), key=lambda name: (len(name), name))


def _draw_marks(axes: Axes, steps: Sequence[int], colour: str) -> None:
    """A line before each of these steps."""
    for step in steps:
        axes.axvline(step - 0.5, color=colour, linewidth=1.0, linestyle=(0, (4, 2)), zorder=2.5)


def short_cause(cause: str) -> str:
    """`rank 3 died in backward +1` for `rank 3 died in backward of step 21 (killed by SIGKILL); rank ...`."""
    first, *rest = cause.split("; ")
    text = re.sub(r" (of|in) step \d+", "", re.sub(r" \([^)]*\)?", "", first)).strip()
    if len(text) > 40:
        text = text[:37].rstrip() + "..."
    return f"{text} +{len(rest)}" if rest else text


def _draw_generations(axes: Axes, steps: Sequence[MetricsLine]) -> None:
    """A band for each generation, labelled at its bottom where there is room."""
    room = len(steps) / 14
    for index, (generation, lines) in enumerate(groupby(steps, key=lambda line: line["generation"])):
        band = list(lines)
        left, right = band[0]["step"] - 0.5, band[-1]["step"] + 0.5
        axes.axvspan(left, right, color=_SHADES[index % 2], linewidth=0, zorder=0)
        if right - left >= room:
            mesh = band[0].get("mesh")
            name = f"gen {generation}" + (f"\n{mesh['dp']}x{mesh['cp']}" if mesh else "")
            axes.text(
                (left + right) / 2,
                0.02,
                name,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=7,
                color="#6b7a89",
                zorder=2,
            )


def _label_recoveries(axes: Axes, recoveries: Sequence[Recovery]) -> None:
    """At most _MAX_LABELS labels, in staggered rows."""
    every = max(1, math.ceil(len(recoveries) / _MAX_LABELS))
    for index, recovery in enumerate(recoveries):
        at = recovery.step - 0.5
        if index % every:
            continue
        near_the_end = at > axes.get_xlim()[0] + 0.85 * (axes.get_xlim()[1] - axes.get_xlim()[0])
        side = -1 if near_the_end else 1
        text = f"{short_cause(recovery.cause)}\n{seconds(recovery.total_s)} s"
        axes.annotate(
            text,
            (at, 0.98 - 0.1 * (index // every % 4)),
            xycoords=axes.get_xaxis_transform(),
            xytext=(3 * side, 0),
            textcoords="offset points",
            ha="right" if near_the_end else "left",
            va="top",
            fontsize=7,
            color=_RECOVERY_COLOUR,
            zorder=5,
            in_layout=False,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )
