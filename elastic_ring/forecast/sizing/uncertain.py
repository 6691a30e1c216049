"""Inputs as P10, P50 and P90, and draws from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_ring.forecast.sizing.machines import Origin

Z = 1.2815515655446004
"""The point of a normal distribution above which a tenth lies."""


@dataclass(frozen=True)
class Range:
    """Log-normal on both sides of the median, each with its own width. `origin` says where the figures are from."""

    p10: float
    p50: float
    p90: float
    unit: str = ""
    origin: Origin = "assumed"

    def __post_init__(self) -> None:
        if not 0 < self.p10 <= self.p50 <= self.p90:
            raise ValueError(f"P10, P50, P90 = {self.p10}, {self.p50}, {self.p90}: must be above 0 and rise")

    def draw(self, num: int, rng: np.random.Generator) -> NDArray[np.float64]:
        normal = rng.standard_normal(num)
        low, high = math.log(self.p50 / self.p10) / Z, math.log(self.p90 / self.p50) / Z
        width = np.where(normal < 0, low, high)
        return np.asarray(self.p50 * np.exp(normal * width))


def around(p50: float, spread: float, unit: str = "", origin: Origin = "assumed") -> Range:
    """A median with the standard deviation `spread` of its log."""
    wide = float(np.exp(Z * spread))
    return Range(p50 / wide, p50, p50 * wide, unit, origin)


def quantiles(draws: NDArray[np.float64]) -> tuple[float, float, float]:
    """P10, P50, P90. As `np.quantile`, which imports numpy.ma."""
    ordered = np.sort(draws)
    places = np.array([0.1, 0.5, 0.9]) * (len(ordered) - 1)
    low, middle, high = np.interp(places, np.arange(len(ordered)), ordered)
    return float(low), float(middle), float(high)
