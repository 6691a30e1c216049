"""The plot of a run: the loss over its steps, with recoveries and generations marked.

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
from typing import TYPE_CHECKING, Any

from elastic_ring.monitor.metrics import read_metrics
from elastic_ring.monitor.report import seconds

_LOSS_COLOUR = "#1f4e79"
_RECOVERY_COLOUR = "#b3261e"
if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger(__name__)

_SHADES = ("#ffffff", "#eef3f8")
_MAX_LABELS = 12


def draw_run(run_folder: str | os.PathLike[str], recoveries: Sequence[Mapping[str, Any]]) -> Path:
    """Write RUN/loss.png from RUN/metrics.jsonl; warn where matplotlib is missing. Raises: JournalDamaged."""
    path = Path(run_folder) / "loss.png"
    try:
        draw_loss(read_metrics(run_folder), recoveries, path)
    except ModuleNotFoundError as error:
        log.warning("no loss.png: %s is not installed; pip install 'elastic-ring[plot]'", error.name)
    return path


def draw_loss(
    steps: Sequence[Mapping[str, Any]],
    recoveries: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    title: str = "Loss of the committed steps",
) -> None:
    """Write a PNG. `steps`: lines of metrics.jsonl in order; `recoveries`: those of the summary."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.0, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_generations(axes, steps)
    # nan leaves a gap in the line.
    losses = [math.nan if line["loss"] is None else line["loss"] for line in steps]
    numbers = [line["step"] for line in steps]
    axes.plot(numbers, losses, color=_LOSS_COLOUR, linewidth=1.6, zorder=3)
    validated = [line for line in steps if line.get("val_loss") is not None]
    if validated:
        axes.plot(
            [line["step"] for line in validated],
            [line["val_loss"] for line in validated],
            "o",
            color="#c77700",
            markersize=4,
            label="validation",
            zorder=4,
        )
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
    if validated or skipped:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=8)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(y=0.14)  # room for the generations' labels
    axes.spines[["top", "right"]].set_visible(False)
    if steps:
        last = max([steps[-1]["step"], *(recovery["step"] for recovery in recoveries)])
        axes.set_xlim(steps[0]["step"] - 0.5, last + 0.5)
    _draw_recoveries(axes, recoveries)
    figure.savefig(os.fspath(path), format="png")


def short_cause(cause: str) -> str:
    """`rank 3 died in backward +1` of `rank 3 died in backward of step 21 (killed by SIGKILL); rank ...`."""
    first, *others = cause.split("; ")
    text = re.sub(r" (of|in) step \d+", "", re.sub(r" \([^)]*\)?", "", first)).strip()
    if len(text) > 40:
        text = text[:37].rstrip() + "..."
    return f"{text} +{len(others)}" if others else text


def _draw_generations(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
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


def _draw_recoveries(axes: Axes, recoveries: Sequence[Mapping[str, Any]]) -> None:
    """A line before the step of each recovery; at most _MAX_LABELS labels, in staggered rows."""
    every = max(1, math.ceil(len(recoveries) / _MAX_LABELS))
    for index, recovery in enumerate(recoveries):
        at = recovery["step"] - 0.5
        axes.axvline(at, color=_RECOVERY_COLOUR, linewidth=1.0, linestyle=(0, (4, 2)), zorder=2.5)
        if index % every:
            continue
        near_the_end = at > axes.get_xlim()[0] + 0.85 * (axes.get_xlim()[1] - axes.get_xlim()[0])
        side = -1 if near_the_end else 1
        text = f"{short_cause(recovery['cause'])}\n{seconds(recovery['total_s'])} s"
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
