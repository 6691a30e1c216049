"""Goodput, loss by loss: a renewal simulation of many draws at once (tier 2).

Tier 1 takes the same `CommonRandomNumbers`: both then have the same losses, of the same scopes, with the same repairs,
and do not differ by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_ring.forecast.goodput import (
    DAY,
    HOUR,
    Array,
    Failures,
    RunShape,
    Spot,
    losses_cost_s,
    rings_again,
    rings_left,
    share_hit,
)
from elastic_ring.forecast.sizing.machines import Number

MOST_LOSSES = 400
"""Losses that one draw goes through on average; a longer run has the goodput of its first part."""
LOSSES_OF_A_POINT, WALKS_OF_A_POINT = 150, 64
"""The same in `mean_goodput`, and the walks over which it averages: standard errors up to 0.2 points on rented
machines, 0.6 on spot capacity."""
REPAIRS = 20
"""Mean repairs that a walk lasts at least, up to twice its number of losses, because it begins with all hosts."""


class CommonRandomNumbers:
    """Rows of random numbers, one row a loss and one number a draw: unit exponentials, two uniforms, a normal; drawn on
    demand by `rng`. `times`: the numbers of `num_draws` draws are repeated so often."""

    def __init__(self, rng: np.random.Generator, num_draws: int, times: int = 1) -> None:
        self._rng, self._num, self._times = rng, num_draws, times
        self._first = rng.spawn(4)
        self._rows: list[tuple[Array, ...]] = []

    def row(self, index: int) -> tuple[Array, ...]:
        while len(self._rows) <= index:
            rng, num = self._rng, self._num
            drawn = (rng.exponential(1.0, num), rng.random(num), rng.random(num), rng.standard_normal(num))
            self._rows.append(tuple(np.tile(column, self._times) for column in drawn))
        return self._rows[index]

    def at_first(self, hosts: int, slots: int) -> tuple[Array, ...]:
        """Numbers for the beginning: a uniform of each draw, one of each host and of each slot, and a normal of each
        slot. Those of the first hosts and slots do not depend on how many there are."""
        dry, each, left, long = self._first
        rows = [dry.random((1, self._num)), each.random((hosts, self._num)), left.random((slots, self._num))]
        rows.append(long.standard_normal((slots, self._num)))
        tiled = [np.tile(row.T, (self._times, 1)) for row in rows]
        return tiled[0][:, 0], *tiled[1:]


def rates_of(shape: RunShape, failures: Failures, gpu_hours: Number) -> dict[str, Number]:
    """Losses a second by scope, with those of spot capacity."""
    rate = shape.num_gpus / (np.asarray(gpu_hours) * HOUR)
    rates = {scope: share * rate for scope, share in failures.shares.items() if share > 0}
    if shape.spot is not None:
        rates |= {"reclaim": shape.full_hosts / shape.spot.on_s, "dry": 1.0 / shape.spot.dry_s}
    return rates


def simulate_goodput(
    shape: RunShape,
    failures: Failures,
    gpu_hours: Array,
    duration_s: Number,
    numbers: CommonRandomNumbers,
    repair: Number = 1.0,
    steady: bool = False,
    most_losses: int = MOST_LOSSES,
) -> Array:
    """The goodput of each draw: one walk through its losses, all draws side by side. A draw lasts `duration_s`, or
    until `most_losses` on average have come. `steady`: spot hosts are away from the beginning, as many as at any later
    time; a walk through a large fleet ends before the first of them are back."""
    draws = len(gpu_hours)

    def by_draw(values: Sequence[Number]) -> Array:
        return np.stack([np.broadcast_to(np.asarray(value, dtype=float), (draws,)) for value in values])

    rates = rates_of(shape, failures, gpu_hours)
    each = by_draw(list(rates.values()))
    total = each.sum(0)
    until_scope = np.cumsum(each, axis=0) / total
    (median_h, wide), spot = failures.repair_hours, shape.spot
    is_spot = [spot is not None and scope in ("reclaim", "dry") for scope in rates]
    median_s = by_draw([spot.off_s if spot and away else median_h * repair * HOUR for away in is_spot])
    deviation = np.array([spot.off_deviation if spot and away else wide for away in is_spot])
    repair_s = median_s * np.exp(deviation[:, None] ** 2 / 2)
    most_s = most_losses / total
    span = np.minimum(duration_s, np.clip(REPAIRS * repair_s.max(0), most_s, 2 * most_s))
    sizes = [by_draw([of(scope) for scope in rates]) for of in (shape.hosts_of, shape.gpus_of, shape.detect_of)]
    is_reclaim = np.array([scope == "reclaim" for scope in rates])
    num_hosts = np.broadcast_to(np.asarray(shape.num_hosts, dtype=float), (draws,))
    mean = float((each * repair_s).sum(0).max())
    away = HostsAway(draws, int(min(num_hosts.max(), mean + 6 * math.sqrt(mean) + 6)))
    now, kept, lost = np.zeros(draws), np.zeros(draws), np.zeros(draws)
    row, rings = np.arange(draws), np.full(draws, float(shape.dp))
    if steady and shape.spot is not None:
        away.begin(*_away_at_first(shape, shape.spot, away.slots, numbers))
        rings = np.minimum(rings, rings_left(shape, away.hosts))
    regrow_s = shape.rebuild_s + shape.heal_s
    for index in range(1_000_000):
        gap, pick, whom, normal = numbers.row(index)
        until = np.minimum(now + gap / total, span)
        kept += (until - now) * rings / shape.dp
        added, rises, rings = _hosts_return(shape, away, until, rings)
        kept += added
        lost += np.minimum(rises * regrow_s, until - now)
        live = until < span
        if not live.any():
            break
        scope = np.minimum((pick > until_scope).sum(0), len(rates) - 1)
        hosts, gpus, detect_s = (size[scope, row] for size in sizes)
        reclaimed = is_reclaim[scope]
        # Hosts that are away already are not lost again, and where none is left none is.
        among = np.where(reclaimed, shape.full_hosts, num_hosts)
        live &= ~((hosts > 0) & ((whom * among < away.hosts) | (away.hosts >= num_hosts)))
        hit = share_hit(shape, hosts, rings, away.hosts)
        fresh = np.flatnonzero(live & (hosts > 0))
        away_s = median_s[scope, row] * np.exp(deviation[scope] * normal)
        away.add(fresh, (until + away_s)[fresh], np.minimum(hosts, num_hosts - away.hosts)[fresh])
        rest = np.minimum(rings, rings_left(shape, away.hosts))
        cost = losses_cost_s(shape, gpus, detect_s, reclaimed, rings, rest)
        lost += np.where(live, np.minimum(hit * cost, span - until), 0.0)
        now, rings = until, rest
    planned = failures.planned_per_day / DAY * span * (shape.rebuild_s + 0.5 * shape.step_s)
    share = (kept - lost - planned) / span / (1.0 + shape.wait_s / shape.interval_s)
    return np.asarray(np.clip(share, 0.02, 1.0))


def mean_goodput(
    shapes: Sequence[RunShape],
    failures: Failures,
    gpu_hours: Sequence[float],
    repairs: Sequence[float],
    walks: int = WALKS_OF_A_POINT,
) -> list[float]:
    """The goodput of each shape over a long time, averaged over so many walks. All have the same random numbers: they
    differ by nothing but their arguments."""
    numbers = CommonRandomNumbers(np.random.default_rng(0), walks, len(shapes))
    hours, repair = (np.repeat(values, walks) for values in (gpu_hours, repairs))

    def differing(several: Sequence[RunShape] | Sequence[Spot]) -> Any:
        """The fields that are not the same in all, as arrays of so many walks of each."""
        columns = {each.name: [getattr(shape, each.name) for shape in several] for each in fields(several[0])}
        return {name: np.repeat(values, walks) for name, values in columns.items() if len(set(values)) > 1}

    spots = [shape.spot for shape in shapes if shape.spot is not None]
    plain = [replace(shape, spot=None) for shape in shapes]
    spot = replace(spots[0], **differing(spots)) if spots else None
    joined = replace(plain[0], **differing(plain), spot=spot)
    walked = simulate_goodput(joined, failures, hours, math.inf, numbers, repair, True, LOSSES_OF_A_POINT)
    return [float(mean) for mean in walked.reshape(len(shapes), walks).mean(1)]


def _away_at_first(shape: RunShape, spot: Spot, slots: int, numbers: CommonRandomNumbers) -> tuple[Array, Array]:
    """When hosts that are away at any time come back, and how many: single ones, and all in a draw whose capacity is
    gone. The time left of an absence under way is a uniform share of one that is drawn by its length."""
    off_s, share_off, dry_s, full, whole, mean_off_s = (
        np.asarray(value, dtype=float).reshape(-1, 1)
        for value in (spot.off_s, spot.share_off, spot.dry_s, shape.full_hosts, shape.num_hosts, spot.mean_off_s)
    )
    dry, each, left, normal = numbers.at_first(round(float(full.max())), slots)
    long_s = off_s * np.exp(spot.off_deviation**2 + spot.off_deviation * normal)
    single = ((each < share_off) & (np.arange(each.shape[1]) < np.rint(full))).sum(1)[:, None]
    is_dry = dry[:, None] < mean_off_s / (dry_s + mean_off_s)
    used = np.arange(slots) < np.where(is_dry, 1, np.minimum(single, slots))
    return np.where(used, long_s * left, np.inf), np.where(used, np.where(is_dry, whole, 1.0), 0.0)


def _hosts_return(shape: RunShape, away: HostsAway, until: Array, rings: Array) -> tuple[Array, Array, Array]:
    """Share-seconds that hosts add which come back before the next loss, each by itself, the soonest first; how often
    rings were added; and the rings then."""
    added, rises = np.zeros(len(until)), np.zeros(len(until))
    some = np.flatnonzero(away.soonest_at < until)
    while some.size:
        at = away.soonest_at[some]
        away.take_back(some)
        grown = rings_again(shape, away.hosts, rings)
        more = (grown - rings)[some]
        added[some] += (until[some] - at) * more / shape.dp
        rises[some] += more > 0
        rings = grown
        some = some[away.soonest_at[some] < until[some]]
    return added, rises, rings


class HostsAway:
    """Hosts that are away in each draw: a slot for each loss has the time of their return and their number. The first
    `_used` slots of a draw are in use."""

    def __init__(self, draws: int, slots: int) -> None:
        self.slots, self._used = slots, np.zeros(draws, dtype=int)
        self._at, self._hosts = np.full((draws, slots), np.inf), np.zeros((draws, slots))
        self.hosts = np.zeros(draws)
        self.soonest_at, self._soonest = np.full(draws, np.inf), np.zeros(draws, dtype=int)

    def begin(self, at: Array, hosts: Array) -> None:
        """Set all slots; used slots come first."""
        self._at, self._hosts, self._used = at, hosts, (hosts > 0).sum(1)
        self.hosts = hosts.sum(1)
        self._find_soonest(np.arange(len(at)))

    def add(self, draws: NDArray[np.intp], at: Array, hosts: Array) -> None:
        """Add a loss to each of these draws, in place of the last one if no slot is free."""
        is_full = self._used[draws] == self.slots
        place = np.minimum(self._used[draws], self.slots - 1)
        self.hosts[draws] += hosts - self._hosts[draws, place]
        self._at[draws, place], self._hosts[draws, place] = at, hosts
        self._used[draws] = place + 1
        sooner = at < self.soonest_at[draws]
        self.soonest_at[draws[sooner]], self._soonest[draws[sooner]] = at[sooner], place[sooner]
        if is_full.any():  # the one that was replaced may have been the soonest
            self._find_soonest(draws[is_full])

    def take_back(self, draws: NDArray[np.intp]) -> None:
        """Remove the soonest loss of each of these draws."""
        place, last = self._soonest[draws], self._used[draws] - 1
        self.hosts[draws] -= self._hosts[draws, place]
        for column in (self._at, self._hosts):
            column[draws, place] = column[draws, last]
        self._at[draws, last], self._hosts[draws, last] = np.inf, 0.0
        self._used[draws] = last
        self._find_soonest(draws)

    def _find_soonest(self, draws: NDArray[np.intp]) -> None:
        width = max(1, int(self._used[draws].max()))
        self._soonest[draws] = self._at[draws, :width].argmin(1)
        self.soonest_at[draws] = self._at[draws, self._soonest[draws]]
