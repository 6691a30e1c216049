"""Chooses the next pattern to train: bytes and density are known for the whole space, only quality needs training.

`ProxySampler` is an Optuna sampler that fits a small regression from cheap features to the loss, and proposes the
pattern with the largest expected gain of hypervolume. No Ray and no training in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from elastic_ring.tuning.report import front, hypervolume
from elastic_ring.tuning.space import DENSE, PatternCost

MARGIN = 1.1
"""The reference point of hypervolumes, on axes that are scaled to [0, 1] over the space."""
NUM_FIRST = 3
"""Patterns that follow the predicted front of the density alone, before there is a regression."""
NUM_DRAWS = 8
"""Draws of the regression's coefficients over which a point's gain is averaged."""
PATTERN, SEED, LOSSES = "pattern", "seed", "losses"
"""The axes of a study, and the attribute of a trial with its losses at each report."""


def search_axes(names: Sequence[str], seed: int) -> dict[str, BaseDistribution]:
    """Dense and the patterns `names`, under a seed and the next one."""
    return {PATTERN: CategoricalDistribution([DENSE, *names]), SEED: CategoricalDistribution([seed, seed + 1])}


def _scale(values: np.ndarray) -> np.ndarray:
    """Each column scaled to [0, 1]."""
    low, high = values.min(0), values.max(0)
    return (values - low) / np.where(high > low, high - low, 1.0)


class ProxySampler(BaseSampler):
    """Proposes new patterns of `costs`; the first objective is the loss, the others are density and bytes.

    The first `NUM_FIRST` follow the predicted front of the density, where more is better; then a ridge regression on
    the measured losses predicts the rest. A point's value is its hypervolume gain averaged over draws of the
    coefficients (expected hypervolume improvement, Emmerich et al. 2006), so that uncertain points count as well.
    Deterministic for equal seeds and results.
    """

    def __init__(self, costs: Mapping[str, PatternCost], seed: int) -> None:
        self._names, self._seed = list(costs), seed
        raw = np.array([cost.features for cost in costs.values()], dtype=np.float64)
        deviation = raw.std(0)
        self._features = (raw - raw.mean(0)) / np.where(deviation > 0, deviation, 1.0)
        self._costs = _scale(np.array([(cost.density, cost.bytes) for cost in costs.values()], dtype=np.float64))
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return search_axes(self._names, self._seed)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, str | int]:
        return {PATTERN: self.choose(*read_study(study, trial.number)), SEED: self._seed}

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        raise ValueError(f"axis {param_name!r}: the space has {PATTERN}")

    def choose(self, proposed: Sequence[str], losses: Mapping[str, float]) -> str:
        """The next pattern, after the `proposed` patterns and the `losses` measured so far."""
        before = set(proposed)
        remaining = [i for i, name in enumerate(self._names) if name not in before]
        if not remaining:
            return self._names[int(self._rng.integers(len(self._names)))]
        # Patterns still in training count with their predicted loss, so that concurrent trials spread out.
        reference = [MARGIN] * (1 + np.size(self._costs, -1))
        gains = np.zeros(len(remaining))
        for _ in range(NUM_DRAWS):
            heights = _scale(self._predict(losses))
            points = [(height, *cost) for height, cost in zip(heights.tolist(), self._costs.tolist(), strict=True)]
            evaluated = [point for name, point in zip(self._names, points, strict=True) if name in before]
            evaluated = [evaluated[i] for i in front(evaluated)]
            base = hypervolume(evaluated, reference)
            gains += [hypervolume([*evaluated, points[i]], reference) - base for i in remaining]
        return self._names[remaining[int(np.argmax(gains))]]

    def _predict(self, losses: Mapping[str, float]) -> np.ndarray:
        """The loss of every pattern: measured, or predicted by a drawn regression; with fewer than `NUM_FIRST`
        measurements the scaled density instead."""
        if len(losses) < NUM_FIRST:
            alone: np.ndarray = _scale(-self._features[:, 0])
            return alone + self._rng.normal(0.0, 0.05, len(alone))
        x = np.column_stack([np.ones(len(self._names)), self._features])
        measured = [i for i, name in enumerate(self._names) if name in losses]
        y = np.array([losses[self._names[i]] for i in measured])
        shift, deviation = y.mean(), y.std() or 1.0
        precision = x[measured].T @ x[measured] + np.diag([1e-6, *[0.3] * (x.shape[1] - 1)])
        mean = np.linalg.solve(precision, x[measured].T @ ((y - shift) / deviation))
        residual = float(np.mean(((y - shift) / deviation - x[measured] @ mean) ** 2))
        drawn = self._rng.multivariate_normal(mean, (0.02 + residual) * 0.25 * np.linalg.inv(precision))
        predicted: np.ndarray = x @ drawn * deviation + shift
        predicted[measured] = y
        return predicted


def read_study(study: Study, number: int) -> tuple[list[str], dict[str, float]]:
    """(patterns proposed, their losses after the whole training), without trial `number`.

    A stopped trial gets its last loss plus the mean gain of the whole trials from there on.
    """
    proposed, curves = [], dict[str, list[float]]()
    for trial in study.get_trials(deepcopy=False):
        if trial.number == number or PATTERN not in trial.params:
            continue
        proposed.append(trial.params[PATTERN])
        if trial.state == TrialState.COMPLETE and trial.user_attrs.get(LOSSES):
            curves[proposed[-1]] = [float(loss) for loss in trial.user_attrs[LOSSES]]
    most = max(map(len, curves.values()), default=0)
    whole = [curve for curve in curves.values() if len(curve) == most]
    gained = [sum(curve[-1] - curve[at] for curve in whole) / len(whole) for at in range(most)]
    return proposed, {name: curve[-1] + gained[len(curve) - 1] for name, curve in curves.items()}
