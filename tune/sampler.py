"""Which point to train next, when two of three objectives are cheap and the third has a cheap proxy.

Bytes follow from the plan and step time from one measured call, so both are known for the whole space before
anything is trained; only the quality gap costs a training run. `ProxySampler` is an Optuna sampler that keeps a
small regression from what is cheap to the gap, and asks for the point whose predicted place adds most to the
hypervolume of what has been trained. No Ray and no training in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from tune.pareto import hypervolume
from tune.space import AXES, Candidate

MARGIN = 1.1
"""The reference point of hypervolumes lies this far out on axes that the whole space scales to 0 to 1."""


class Cheap:
    """What is known of every point without training: `features` to predict the gap, `costs` as objectives.

    Both are dicts by name of the point. Costs are scaled to 0 to 1 over the space.
    """

    def __init__(self, features: Mapping[str, Sequence[float]], costs: Mapping[str, Sequence[float]]) -> None:
        self.names = list(features)
        raw = np.array([features[name] for name in self.names], dtype=np.float64)
        spread = raw.std(0)
        self.features = (raw - raw.mean(0)) / np.where(spread > 0, spread, 1.0)
        self.costs = scaled(np.array([costs[name] for name in self.names], dtype=np.float64))


def scaled(values: np.ndarray) -> np.ndarray:
    """Each column to 0 to 1."""
    low, high = values.min(0), values.max(0)
    return (values - low) / np.where(high > low, high - low, 1.0)


class ProxySampler(BaseSampler):
    """Asks for points of `cheap` that were not asked for yet; the first objective is the gap, the others costs.

    The first `num_first` points spread over the predicted front by the features alone, then a ridge regression
    on the gaps told so far predicts the rest. A sample of its coefficients instead of their mean (Thompson 1933)
    explores, the more the fewer gaps are known. Equal seeds and answers ask for equal points.
    """

    def __init__(self, cheap: Cheap, seed: int, *, proxy: int = 0, num_first: int = 3) -> None:
        self._cheap, self._proxy, self._num_first = cheap, proxy, num_first
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        return {axis: CategoricalDistribution(values) for axis, values in AXES.items()}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        return asdict(_parsed(self.choose(*self._told(study, trial.number))))

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        raise ValueError(f"axis {param_name!r}: the space has {', '.join(AXES)}")

    def choose(self, asked: Sequence[str], gaps: Mapping[str, float]) -> str:
        """The next point, given those asked for and the gaps told so far."""
        cheap, open_ = self._cheap, [i for i, name in enumerate(self._cheap.names) if name not in set(asked)]
        if not open_:
            return cheap.names[int(self._rng.integers(len(cheap.names)))]
        predicted = self._predicted(gaps)
        known = [i for i, name in enumerate(cheap.names) if name in gaps]
        values = predicted.copy()
        values[known] = [gaps[cheap.names[i]] for i in known]
        # Points that were asked for and not told yet count as predicted, so that workers spread out.
        points = np.column_stack([scaled(values[:, None])[:, 0], cheap.costs])
        taken = [tuple(points[i]) for i, name in enumerate(cheap.names) if name in set(asked)]
        reference = [MARGIN] * points.shape[1]
        base = hypervolume(taken, reference)
        gains = [hypervolume([*taken, tuple(points[i])], reference) - base for i in open_]
        return cheap.names[open_[int(np.argmax(gains))]]

    def _predicted(self, gaps: Mapping[str, float]) -> np.ndarray:
        """The gap of every point: by the proxy alone while little is known, then by a drawn regression."""
        x = np.column_stack([np.ones(len(self._cheap.names)), self._cheap.features])
        if len(gaps) < self._num_first:
            noise = self._rng.normal(0.0, 0.05, len(x))
            return scaled((-self._cheap.features[:, self._proxy])[:, None])[:, 0] + noise
        known = [i for i, name in enumerate(self._cheap.names) if name in gaps]
        y = np.array([gaps[self._cheap.names[i]] for i in known])
        shift, spread = y.mean(), y.std() or 1.0
        precision = x[known].T @ x[known] + np.diag([1e-6, *[0.3] * (x.shape[1] - 1)])
        mean = np.linalg.solve(precision, x[known].T @ ((y - shift) / spread))
        residual = float(np.mean(((y - shift) / spread - x[known] @ mean) ** 2))
        drawn = self._rng.multivariate_normal(mean, (0.02 + residual) * 0.25 * np.linalg.inv(precision))
        found: np.ndarray = x @ drawn * spread + shift
        return found

    def _told(self, study: Study, number: int) -> tuple[list[str], dict[str, float]]:
        asked, gaps = [], {}
        for other in study.get_trials(deepcopy=False):
            if other.number == number or set(other.params) != set(AXES):
                continue
            name = Candidate.of(other.params).name
            asked.append(name)
            if other.state == TrialState.COMPLETE and other.values is not None:
                gaps[name] = float(other.values[0])
        return asked, gaps


def _parsed(name: str) -> Candidate:
    family, keep, num_blocks, mix = name.split("/")
    return Candidate(family, float(keep), int(num_blocks), mix)
