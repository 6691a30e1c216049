"""Which pattern to train next, when bytes and density are known for the whole space and only quality needs training.

`ProxySampler` is an Optuna sampler that fits a small regression from cheap features to the loss, and proposes the
pattern with the largest expected gain of hypervolume. No Ray and no training in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from elastic_ring.tuning.pareto import front, hypervolume
from elastic_ring.tuning.space import DENSE

MARGIN = 1.1
"""The reference point of hypervolumes, on axes that are scaled to [0, 1] over the space."""

NUM_DRAWS = 8
"""Draws of the regression's coefficients over which a point's gain is averaged."""

PATTERN, SEED, LOSSES = "pattern", "seed", "losses"
"""The axes of a study, and the attribute of a trial with its losses at each report."""


def axes(names: Sequence[str], seed: int) -> dict[str, Any]:
    """Dense and the patterns `names`, under a seed and the next one."""
    return {PATTERN: CategoricalDistribution([DENSE, *names]), SEED: CategoricalDistribution([seed, seed + 1])}


class Cheap:
    """What is known of every pattern without training: `features` to predict the loss, the first of them alone at the
    beginning (more is better), and `costs` as objectives, scaled to [0, 1] over the space. Both are keyed by pattern.
    """

    def __init__(self, features: Mapping[str, Sequence[float]], costs: Mapping[str, Sequence[float]]) -> None:
        self.names = list(features)
        raw = np.array([features[name] for name in self.names], dtype=np.float64)
        spread = raw.std(0)
        self.features = (raw - raw.mean(0)) / np.where(spread > 0, spread, 1.0)
        self.costs = scaled(np.array([costs[name] for name in self.names], dtype=np.float64))


def scaled(values: np.ndarray) -> np.ndarray:
    """Scale each column to [0, 1]."""
    low, high = values.min(0), values.max(0)
    return (values - low) / np.where(high > low, high - low, 1.0)


class ProxySampler(BaseSampler):
    """Proposes new patterns of `cheap`; the first objective is the loss, the others are costs.

    The first `num_first` follow the predicted front of the first feature; then a ridge regression on the measured
    losses predicts the rest. A point's value is its hypervolume gain averaged over draws of the coefficients
    (expected hypervolume improvement, Emmerich et al. 2006), so that uncertain points count as well. Deterministic for
    equal seeds and results.
    """

    def __init__(self, cheap: Cheap, seed: int, *, num_first: int = 3, num_draws: int = NUM_DRAWS) -> None:
        self._cheap, self._seed, self._num_first, self._num_draws = cheap, seed, num_first, num_draws
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        return axes(self._cheap.names, self._seed)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        return {PATTERN: self.choose(*told(study, trial.number)), SEED: self._seed}

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        raise ValueError(f"axis {param_name!r}: the space has {PATTERN}")

    def choose(self, asked: Sequence[str], losses: Mapping[str, float]) -> str:
        """The next pattern, given those proposed and the losses measured so far."""
        cheap, before = self._cheap, set(asked)
        open_ = [i for i, name in enumerate(cheap.names) if name not in before]
        if not open_:
            return cheap.names[int(self._rng.integers(len(cheap.names)))]
        # Patterns still in training count with their predicted loss, so that concurrent trials spread out.
        reference = [MARGIN] * (1 + np.size(cheap.costs, -1))
        gains = np.zeros(len(open_))
        for _ in range(self._num_draws):
            heights = scaled(self._predicted(losses))
            points = [(height, *cost) for height, cost in zip(heights.tolist(), cheap.costs.tolist(), strict=True)]
            taken = [point for name, point in zip(cheap.names, points, strict=True) if name in before]
            taken = [taken[i] for i in front(taken)]
            base = hypervolume(taken, reference)
            gains += [hypervolume([*taken, points[i]], reference) - base for i in open_]
        return cheap.names[open_[int(np.argmax(gains))]]

    def _predicted(self, losses: Mapping[str, float]) -> np.ndarray:
        """The loss of every pattern: measured, or predicted by a drawn regression.

        With fewer than `num_first` measurements, the scaled first feature instead.
        """
        if len(losses) < self._num_first:
            alone: np.ndarray = scaled(-self._cheap.features[:, 0])
            return alone + self._rng.normal(0.0, 0.05, len(alone))
        x = np.column_stack([np.ones(len(self._cheap.names)), self._cheap.features])
        known = [i for i, name in enumerate(self._cheap.names) if name in losses]
        y = np.array([losses[self._cheap.names[i]] for i in known])
        shift, spread = y.mean(), y.std() or 1.0
        precision = x[known].T @ x[known] + np.diag([1e-6, *[0.3] * (x.shape[1] - 1)])
        mean = np.linalg.solve(precision, x[known].T @ ((y - shift) / spread))
        residual = float(np.mean(((y - shift) / spread - x[known] @ mean) ** 2))
        drawn = self._rng.multivariate_normal(mean, (0.02 + residual) * 0.25 * np.linalg.inv(precision))
        found: np.ndarray = x @ drawn * spread + shift
        found[known] = y
        return found


def told(study: Study, number: int) -> tuple[list[str], dict[str, float]]:
    """(patterns proposed, their losses after the whole training), without trial `number`.

    One that was stopped earlier gets its last loss plus what the others have gained on average from there on.
    """
    asked, curves = [], dict[str, list[float]]()
    for trial in study.get_trials(deepcopy=False):
        if trial.number == number or PATTERN not in trial.params:
            continue
        asked.append(trial.params[PATTERN])
        if trial.state == TrialState.COMPLETE and trial.user_attrs.get(LOSSES):
            curves[asked[-1]] = [float(loss) for loss in trial.user_attrs[LOSSES]]
    return asked, completed(curves)


def completed(curves: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The last loss of each curve; of shorter ones as `told` says, without those that nothing compares with."""
    most = max(map(len, curves.values()), default=0)
    whole = [curve for curve in curves.values() if len(curve) == most]
    gained = [sum(curve[-1] - curve[at] for curve in whole) / len(whole) for at in range(most)]
    return {name: curve[-1] + gained[len(curve) - 1] for name, curve in curves.items()}
