"""Which pattern to train next, when two of three objectives are cheap and the third has a cheap proxy.

Bytes follow from the plan, and step time from one measured call, so both are known for the whole space and every
layout before training; only the quality gap needs a training run, which serves all layouts. `ProxySampler` is an
Optuna sampler that fits a small regression from cheap features to the gap, and proposes the pattern with the largest
expected gain of hypervolume. No Ray and no training in here.
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

from elastic_ring.tuning.fidelity import REJECTED_GAP, places
from elastic_ring.tuning.pareto import front, hypervolume
from elastic_ring.tuning.space import AXES, Candidate, candidates

MARGIN = 1.1
"""The reference point of hypervolumes, on axes that are scaled to [0, 1] over the space."""

NUM_DRAWS = 8
"""Draws of the regression's coefficients over which a point's gain is averaged."""

SHORT, LONG = "short_gap", "long_gap"
"""The names of a trial's gaps after short and long training."""


class Cheap:
    """What is known of every point without training: `features` to predict the gap, and `costs` as objectives.

    Both are keyed by point name; `costs` has all objectives but the gap in every layout, scaled to [0, 1] over the
    space.
    """

    def __init__(self, features: Mapping[str, Sequence[float]], costs: Mapping[str, Sequence[Sequence[float]]]) -> None:
        self.names = list(features)
        raw = np.array([features[name] for name in self.names], dtype=np.float64)
        spread = raw.std(0)
        self.features = (raw - raw.mean(0)) / np.where(spread > 0, spread, 1.0)
        stacked = np.array([costs[name] for name in self.names], dtype=np.float64)
        self.costs = scaled(stacked.reshape(-1, stacked.shape[-1])).reshape(stacked.shape)


def cheap_of(base: Mapping[str, Any], asked: Sequence[Candidate] | None = None) -> Cheap:
    """The `Cheap` of the admitted points, or of those of `asked`."""
    features, costs = {}, {}
    for candidate in candidates() if asked is None else asked:
        plan, proxy = base["plans"][candidate.name], base["proxies"][candidate.name]
        if plan["rejected"]:
            continue
        mixed = (float(candidate.mix == "last dense"), float(candidate.mix == "near first"))
        features[candidate.name] = (proxy["mass"], -proxy["error"], plan["density"], plan["reach"], *mixed)
        costs[candidate.name] = list(places(dict(base), candidate).values())
    return Cheap(features, costs)


def scaled(values: np.ndarray) -> np.ndarray:
    """Scale each column to [0, 1]."""
    low, high = values.min(0), values.max(0)
    return (values - low) / np.where(high > low, high - low, 1.0)


class ProxySampler(BaseSampler):
    """Proposes new points of `cheap`; the first objective is the gap, the others are costs.

    The first `num_first` points follow the predicted front of the proxy feature; then a ridge regression on the
    measured gaps predicts the rest. A point's value is its hypervolume gain averaged over draws of the coefficients
    (expected hypervolume improvement, Emmerich et al. 2006), so that uncertain points count as well. Deterministic for
    equal seeds and results.
    """

    def __init__(
        self, cheap: Cheap, seed: int, *, proxy: int = 0, num_first: int = 3, num_draws: int = NUM_DRAWS
    ) -> None:
        self._cheap, self._proxy, self._num_first, self._num_draws = cheap, proxy, num_first, num_draws
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        return {axis: CategoricalDistribution(values) for axis, values in AXES.items()}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        return asdict(_parsed(self.choose(*told(study, trial.number))))

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any) -> Any:
        raise ValueError(f"axis {param_name!r}: the space has {', '.join(AXES)}")

    def choose(self, asked: Sequence[str], gaps: Mapping[str, float]) -> str:
        """The next point, given the points proposed and the gaps measured so far."""
        cheap, before = self._cheap, set(asked)
        open_ = [i for i, name in enumerate(cheap.names) if name not in before]
        if not open_:
            return cheap.names[int(self._rng.integers(len(cheap.names)))]
        diverged = {name for name, gap in gaps.items() if gap >= REJECTED_GAP}
        # Points still in training count with their predicted gap, so that concurrent trials spread out.
        usable = {name: gap for name, gap in gaps.items() if name not in diverged}
        reference = [MARGIN] * (1 + np.size(cheap.costs, -1))
        gains = np.zeros(len(open_))
        for _ in range(self._num_draws):
            heights = scaled(self._predicted(usable))
            points = [[(heights[i], *place) for place in cheap.costs[i].tolist()] for i in range(len(heights))]
            owned = [points[i] for i, name in enumerate(cheap.names) if name in before - diverged]
            taken = [place for places_ in owned for place in places_]
            taken = [taken[i] for i in front(taken)]
            base = hypervolume(taken, reference)
            gains += [hypervolume([*taken, *points[i]], reference) - base for i in open_]
        return cheap.names[open_[int(np.argmax(gains))]]

    def _predicted(self, gaps: Mapping[str, float]) -> np.ndarray:
        """The gap of every point: measured, or predicted by a drawn regression.

        With fewer than `num_first` measurements, the scaled proxy feature instead.
        """
        if len(gaps) < self._num_first:
            alone: np.ndarray = scaled(-self._cheap.features[:, self._proxy])
            return alone + self._rng.normal(0.0, 0.05, len(alone))
        x = np.column_stack([np.ones(len(self._cheap.names)), self._cheap.features])
        known = [i for i, name in enumerate(self._cheap.names) if name in gaps]
        y = np.array([gaps[self._cheap.names[i]] for i in known])
        shift, spread = y.mean(), y.std() or 1.0
        precision = x[known].T @ x[known] + np.diag([1e-6, *[0.3] * (x.shape[1] - 1)])
        mean = np.linalg.solve(precision, x[known].T @ ((y - shift) / spread))
        residual = float(np.mean(((y - shift) / spread - x[known] @ mean) ** 2))
        drawn = self._rng.multivariate_normal(mean, (0.02 + residual) * 0.25 * np.linalg.inv(precision))
        found: np.ndarray = x @ drawn * spread + shift
        found[known] = y
        return found


def told(study: Study, number: int) -> tuple[list[str], dict[str, float]]:
    """(points proposed, gaps reported), without trial `number`.

    A trial that was stopped after short training has no comparable gap; `corrected` estimates it.
    """
    asked, short, long, other = [], dict[str, float](), dict[str, float](), dict[str, float]()
    for trial in study.get_trials(deepcopy=False):
        if trial.number == number or set(trial.params) != set(AXES):
            continue
        name = Candidate.of(trial.params).name
        asked.append(name)
        if trial.state != TrialState.COMPLETE or trial.values is None:
            continue
        if trial.user_attrs.get(LONG) is not None:
            long[name] = float(trial.user_attrs[LONG])
        if trial.user_attrs.get(SHORT) is not None:
            short[name] = float(trial.user_attrs[SHORT])
        if name not in long and name not in short:
            other[name] = float(trial.values[0])
    return asked, {**other, **corrected(short, long)}


def corrected(short: Mapping[str, float], long: Mapping[str, float]) -> dict[str, float]:
    """The long gap of each point; for one with a short gap only, that plus the mean of long - short elsewhere.

    Where no point has both, points with only a short gap are left out.
    """
    both = [long[name] - short[name] for name in short if name in long]
    shift = sum(both) / len(both) if both else None
    guessed = {name: gap + shift for name, gap in short.items() if name not in long} if shift is not None else {}
    return {**guessed, **long}


def _parsed(name: str) -> Candidate:
    family, keep, num_blocks, mix = name.split("/")
    return Candidate(family, float(keep), int(num_blocks), mix)
