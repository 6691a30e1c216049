"""Replay of a search on a table in which every admitted point has been trained, to compare its front with the grid's.

The table is {"about", "base": from `fidelity.baseline`, "losses": name -> (after short, after long training)}. The
loop is that of `search_patterns`: same admission, sampler and early stopping, two concurrent trials, which here finish
in the order in which they started. No Ray and no training in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution

from elastic_ring.tuning.fidelity import REJECTED_GAP, Places, handiest, places
from elastic_ring.tuning.pareto import front, hypervolume, rank_correlation
from elastic_ring.tuning.sampler import LONG, MARGIN, SHORT, ProxySampler, cheap_of, scaled
from elastic_ring.tuning.space import AXES, Candidate, candidates
from elastic_ring.tuning.stopping import is_behind

SHARE = 8
"""One of this many admitted points is trained."""


class Grid:
    """The table as scaled objectives, with one entry per point and layout, and hypervolumes of sets of points."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.base = table["base"]
        admitted = [c for c in candidates() if not self.base["plans"][c.name]["rejected"]]
        self.candidates = {candidate.name: candidate for candidate in admitted}
        self.names = list(self.candidates)
        self.places: dict[str, Places] = {candidate.name: places(self.base, candidate) for candidate in admitted}
        self.short = {name: table["losses"][name][0] - self.base["short"] for name in self.names}
        self.long = {name: table["losses"][name][1] - self.base["long"] for name in self.names}
        values = [(self.long[name], *place) for name in self.names for place in self.places[name].values()]
        owners = [name for name in self.names for _ in self.places[name]]
        self.num_on_front = len({owners[i] for i in front(values)})
        boxes = scaled(np.array(values)).reshape(len(self.names), -1, len(values[0]))
        self._boxes = {name: list(map(tuple, box)) for name, box in zip(self.names, boxes.tolist(), strict=True)}
        self._reference = [MARGIN] * len(values[0])
        self._whole = self._volume(self.names)

    def share(self, names: Sequence[str]) -> float:
        """The share of the whole grid's hypervolume that these points dominate."""
        return self._volume(names) / self._whole

    def _volume(self, names: Sequence[str]) -> float:
        return hypervolume([box for name in names for box in self._boxes[name]], self._reference)


def searched(
    sampler: optuna.samplers.BaseSampler, grid: Grid, num: int, concurrent: int = 2
) -> tuple[list[str], list[str]]:
    """(the first `num` points that a sampler proposes, those that were trained to the end), answered from the table.

    A proposal that is rejected or repeated is answered but not counted; after ten in a row the sampler gets a random
    point.
    """
    study = optuna.create_study(directions=["minimize"] * 3, sampler=sampler)
    axes: dict[str, Any] = {axis: CategoricalDistribution(values) for axis, values in AXES.items()}
    asked: list[str] = []
    ended: list[str] = []
    running: list[optuna.trial.Trial] = []
    seen: dict[str, list[tuple[float, ...]]] = {}
    rng, num_vain = np.random.Generator(np.random.PCG64(0)), 0
    while len(asked) < num or running:
        while len(asked) < num and len(running) < concurrent:
            trial = study.ask(axes)
            name = Candidate.of(trial.params).name
            if name not in grid.places or name in asked:
                study.tell(trial, _values(grid, name))
                num_vain += 1
                if num_vain == 10:
                    others = [other for other in grid.names if other not in asked]
                    study.enqueue_trial(asdict(grid.candidates[others[int(rng.integers(len(others)))]]))
                continue
            num_vain = 0
            asked.append(name)
            running.append(trial)
        trial = running.pop(0)
        name = Candidate.of(trial.params).name
        place = grid.places[name]
        seen[name] = [(grid.short[name], *one) for one in place.values()]
        stopped = is_behind(name, seen)
        trial.set_user_attr(SHORT, grid.short[name])
        if not stopped:
            trial.set_user_attr(LONG, grid.long[name])
            ended.append(name)
        study.tell(trial, _values(grid, name, grid.short if stopped else grid.long))
    return asked, ended


def _values(grid: Grid, name: str, gaps: Mapping[str, float] | None = None) -> list[float]:
    """The objectives reported for a point; for a rejected one, the same as `trial.PatternTrial` reports."""
    if name not in grid.places:
        return [REJECTED_GAP, 1.0, 1.0]
    place = grid.places[name]
    return [(gaps or grid.long)[name], *place[handiest(place)]]


def replay(grid: Grid, seeds: Sequence[int]) -> dict[str, list[float]]:
    """{sampler: share of the grid's hypervolume for each seed}."""
    num = len(grid.names) // SHARE
    shares: dict[str, list[float]] = {"this search": [], "with one draw": [], "random": [], "TPE": []}
    for seed in seeds:
        samplers: tuple[optuna.samplers.BaseSampler, ...] = (
            ProxySampler(cheap_of(grid.base), seed),
            ProxySampler(cheap_of(grid.base), seed, num_draws=1),
            optuna.samplers.RandomSampler(seed=seed),
            optuna.samplers.TPESampler(seed=seed, n_startup_trials=3),
        )
        for name, sampler in zip(shares, samplers, strict=True):
            shares[name].append(grid.share(searched(sampler, grid, num)[1]))
    return shares


def best_alone(grid: Grid) -> tuple[str, float]:
    """The single point with the largest share of the grid's hypervolume, and that share: a large one means an easy
    grid.
    """
    return max(((name, grid.share([name])) for name in grid.names), key=lambda pair: pair[1])


def correlations(grid: Grid) -> dict[str, float]:
    """Rank correlation of each fidelity with the final gap over the whole grid, and of density with step time."""
    base = grid.base
    gaps = [grid.long[name] for name in grid.names]
    density = [base["plans"][name]["density"] for name in grid.names]
    step = [grid.places[name][handiest(grid.places[name])][0] for name in grid.names]
    return {
        "plan: density": rank_correlation([-value for value in density], gaps),
        "plan: attention mass of a dense model": rank_correlation(
            [-base["proxies"][name]["mass"] for name in grid.names], gaps
        ),
        "short training": rank_correlation([grid.short[name] for name in grid.names], gaps),
        "density with step time": rank_correlation(density, step),
    }
