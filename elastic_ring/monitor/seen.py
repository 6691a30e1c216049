"""What a run that has ended took: of the figures that a forecast has, what was seen."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_ring.monitor.metrics import METRICS_NAME, read_metrics

WARM_STEPS = 3
"""First steps of a run that compile and pin memory; no forecast is of them."""
NEVER_FORECAST = ("startup", "waiting", "validation", "other")
"""Parts of a run's time (`goodput.time_by_part`) that a forecast's goodput does not count as lost."""


def seen_of(folder: Path, summary: Mapping[str, Any]) -> dict[str, float]:
    """`step_s`: the median of the steps after the first; `gpu_bytes`: the peak of a rank's tensors; `goodput`: steps'
    share of the time from the first one to the last, held-out sequences aside. What is not on record is left out."""
    found: dict[str, float] = {}
    steps = [float(line["step_s"]) for line in read_metrics(folder)] if (folder / METRICS_NAME).exists() else []
    if steps:
        found["step_s"] = statistics.median(steps[WARM_STEPS:] or steps)
    if peak := summary.get("peak_gpu_bytes"):
        found["gpu_bytes"] = float(peak)
    parts = {name: s for name, s in (summary.get("time_s") or {}).items() if name not in NEVER_FORECAST}
    if parts.get("steps"):
        found["goodput"] = parts["steps"] / math.fsum(parts.values())
    return found
