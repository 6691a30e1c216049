"""GPU-hours of published runs (G4, G8): what they tell of themselves, and two figures that are fitted to half of them.

A run's hours are its FLOP at the shares of a class of software, times what its software, restarts and all else that is
counted take beside that; and a time for each token and layer, as launches and messages of a layer take theirs whatever
its width: cards do not tell how many tokens a GPU had in a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastic_ring.forecast.sizing.machines import CLASSES, Efficiency
from elastic_ring.gpus import GPUS

CLASS_OF = {"A100-80": "fsdp-fa2/ampere", "H100-80": "vendor/hopper"}
LONG = (0.8e12, 65_536)
"""Tokens of Llama-3.1's stages from 8 K to 128 K, which come after those that its card names, and their mean length."""


@dataclass(frozen=True)
class Run:
    """`stages`: (tokens, length of their sequences)."""

    name: str
    parameters: float
    layers: int
    width: int
    gpu: str
    hours: float
    stages: tuple[tuple[float, int], ...]

    @property
    def tokens(self) -> float:
        return sum(tokens for tokens, _ in self.stages)

    @property
    def flops(self) -> float:
        return sum((6 * self.parameters + 6.0 * seq * self.width * self.layers) * tokens for tokens, seq in self.stages)

    def ideal_hours(self) -> float:
        """At the shares of its class."""
        eff: Efficiency = CLASSES[CLASS_OF[self.gpu]]
        matmul = eff.matmul / (1 + eff.half_width / self.width)
        seconds = 0.0
        for tokens, seq in self.stages:
            seconds += (6 * self.parameters / matmul + 7.0 * seq * self.width * self.layers / eff.attention) * tokens
        return seconds / GPUS[self.gpu].peak_flops / 3600


def _llama(name: str, parameters: float, layers: int, width: int, hours: float, *stages: tuple[float, int]) -> Run:
    return Run(name, parameters, layers, width, "A100-80" if stages[0][1] < 8192 else "H100-80", hours, stages)


# The 1st, 3rd, ... of each kind of GPU is fitted.
RUNS = [
    _llama("G4 Llama 7B", 6.7e9, 32, 4096, 82_432, (1.0e12, 2048)),
    _llama("G4 Llama 13B", 13.0e9, 40, 5120, 135_168, (1.0e12, 2048)),
    _llama("G4 Llama 33B", 32.5e9, 60, 6656, 530_432, (1.4e12, 2048)),
    _llama("G4 Llama 65B", 65.2e9, 80, 8192, 1_022_362, (1.4e12, 2048)),
    _llama("Llama-2 7B", 6.7e9, 32, 4096, 184_320, (2.0e12, 4096)),
    _llama("Llama-2 13B", 13.0e9, 40, 5120, 368_640, (2.0e12, 4096)),
    _llama("Llama-2 70B", 69.0e9, 80, 8192, 1_720_320, (2.0e12, 4096)),
    _llama("Llama-3 8B", 8.03e9, 32, 4096, 1.3e6, (15e12, 8192)),
    _llama("Llama-3 70B", 70.6e9, 80, 8192, 6.4e6, (15e12, 8192)),
    _llama("G8 Llama-3.1 8B", 8.03e9, 32, 4096, 1.46e6, (15e12, 8192), LONG),
    _llama("G8 Llama-3.1 70B", 70.6e9, 80, 8192, 7.0e6, (15e12, 8192), LONG),
    _llama("G8 Llama-3.1 405B", 405.9e9, 126, 16_384, 30.84e6, (15.6e12, 8192), LONG),
]
DISTILLED = [
    _llama("Llama-3.2 1B", 1.23e9, 16, 2048, 370_000, (9e12, 8192)),
    _llama("Llama-3.2 3B", 3.21e9, 28, 3072, 460_000, (9e12, 8192)),
]
"""Pruned from 8B and trained on logits of larger models, on up to 9 T tokens: another kind of work, never fitted."""


@dataclass(frozen=True)
class Beside:
    """`share`: all that is counted over the ideal hours. `layer_s`: of a token and layer."""

    share: float
    layer_s: float

    def hours(self, run: Run) -> float:
        return self.share * run.ideal_hours() + self.layer_s * run.layers * run.tokens / 3600


def fit(runs: Sequence[Run]) -> Beside:
    """The least squares of log(forecast / seen)."""
    ideal = np.array([run.ideal_hours() for run in runs])
    layered = np.array([run.layers * run.tokens / 3600 for run in runs])
    seen = np.log([run.hours for run in runs])
    best = (np.inf, 1.0, 0.0)
    for ratio in np.linspace(0.0, 1e-5, 501):  # of layer_s to share, for which the share is known
        off = seen - np.log(ideal + ratio * layered)
        best = min(best, (float(off.var()), float(np.exp(off.mean())), float(ratio)))
    return Beside(best[1], best[1] * best[2])


def fitted_half(gpu: str) -> list[Run]:
    return [run for run in RUNS if run.gpu == gpu][::2]


def left_out(runs: Sequence[Run]) -> dict[str, float]:
    """log(forecast / seen) of each run, fitted to all others on its kind of GPU."""
    found = {}
    for run in runs:
        others = [other for other in runs if other.gpu == run.gpu and other is not run]
        found[run.name] = float(np.log(fit(others).hours(run) / run.hours))
    return found
