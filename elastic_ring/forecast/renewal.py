"""Tier 2: goodput loss by loss, a renewal simulation of many draws at once.

The chances of a walk are a `Luck`, which tier 1 takes too: both then have the same losses, of the same scopes, with the
same repairs, and what they differ by is not chance.
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
    cost_of,
    rate_per_s,
    rings_again,
    rings_left,
    share_hit,
)
from elastic_ring.forecast.sizing.machines import Number

MOST_LOSSES = 400
"""Losses that one draw goes through; a longer run is as good as its first part."""
LOSSES_OF_A_POINT = 150
"""The same of many walks that begin as at any later time."""
REPAIRS = 20
"""A walk that begins whole lasts for so many mean repairs, but for twice its losses at most."""


class Luck:
    """Rows of numbers, one a loss, each with one of each draw: unit exponentials, two uniforms, a normal. They are
    drawn as they are asked for, by `rng`. `times`: draws are so many blocks, and all blocks have the same chances."""

    def __init__(self, rng: np.random.Generator, num_draws: int, times: int = 1) -> None:
        self._rng, self._num, self._times = rng, num_draws, times
        self._first = rng.spawn(4)
        self._rows: list[tuple[Array, Array, Array, Array]] = []

    def row(self, index: int) -> tuple[Array, Array, Array, Array]:
        while len(self._rows) <= index:
            rng, num = self._rng, self._num
            drawn = (rng.exponential(1.0, num), rng.random(num), rng.random(num), rng.standard_normal(num))
            tiled = [np.tile(one, self._times) for one in drawn]
            self._rows.append((tiled[0], tiled[1], tiled[2], tiled[3]))
        return self._rows[index]

    def at_first(self, hosts: int, slots: int) -> tuple[Array, Array, Array, Array]:
        """Of the beginning: a uniform of each draw, one of each host and of each slot, and a normal of each slot. More
        hosts or slots leave those of the first as they are."""
        dry, each, left, long = self._first
        rows = [dry.random((1, self._num)), *(one.random((n, self._num)) for one, n in ((each, hosts), (left, slots)))]
        rows.append(long.standard_normal((slots, self._num)))
        tiled = [np.tile(one.T, (self._times, 1)) for one in rows]
        return tiled[0][:, 0], tiled[1], tiled[2], tiled[3]


def rates_of(shape: RunShape, failures: Failures, gpu_hours: Number) -> dict[str, Number]:
    """Losses a second by scope, those of spot capacity too."""
    rate = rate_per_s(shape, gpu_hours)
    found = {scope: share * rate for scope, share in failures.shares.items() if share > 0}
    if shape.spot is not None:
        found |= {"reclaim": shape.full_hosts / shape.spot.on_s, "dry": 1.0 / shape.spot.dry_s}
    return found


def simulate_goodput(
    shape: RunShape,
    failures: Failures,
    gpu_hours: Array,
    duration_s: float,
    luck: Luck,
    repair: Number = 1.0,
    steady: bool = False,
    most_losses: int = MOST_LOSSES,
) -> Array:
    """The goodput of each draw: one walk through its losses, all draws side by side. A draw is as long as
    `duration_s`, or until `most_losses` on average have come. `steady`: spot hosts are away from the beginning, as many
    as at any later time; a walk through a large fleet ends before the first of them are back."""
    draws = len(gpu_hours)
    rates = rates_of(shape, failures, gpu_hours)
    each = np.stack([np.broadcast_to(np.asarray(one, dtype=float), (draws,)) for one in rates.values()])
    total = each.sum(0)
    until_scope = np.cumsum(each, axis=0) / total
    median_s, deviation, repair_s = _repairs(shape, failures, list(rates), draws, repair)
    most_s = most_losses / total
    span = np.minimum(duration_s, np.clip(REPAIRS * repair_s.max(0), most_s, 2 * most_s))
    by_draw = {
        name: np.stack([np.broadcast_to(np.asarray(of(scope), dtype=float), (draws,)) for scope in rates])
        for name, of in (("hosts", shape.hosts_of), ("taken", shape.taken_of), ("detect_s", shape.detect_of))
    }
    is_reclaim = np.array([scope == "reclaim" for scope in rates])
    num_hosts = np.broadcast_to(np.asarray(shape.num_hosts, dtype=float), (draws,))
    mean = float((each * repair_s).sum(0).max())
    away = Away(draws, int(min(num_hosts.max(), mean + 6 * math.sqrt(mean) + 6)))
    now, kept, lost = np.zeros(draws), np.zeros(draws), np.zeros(draws)
    row, rings = np.arange(draws), np.full(draws, float(shape.dp))
    if steady and shape.spot is not None:
        away.begin(*_away_at_first(shape, shape.spot, away.slots, luck))
        rings = np.minimum(rings, rings_left(shape, away.hosts))
    regrow_s = shape.rebuild_s + shape.heal_s
    for index in range(1_000_000):
        gap, pick, whom, normal = luck.row(index)
        until = np.minimum(now + gap / total, span)
        kept += (until - now) * rings / shape.dp
        added, rises, rings = _returns(shape, away, until, rings)
        kept += added
        lost += np.minimum(rises * regrow_s, until - now)
        live = until < span
        if not live.any():
            break
        scope = np.minimum((pick > until_scope).sum(0), len(rates) - 1)
        hosts, taken, detect_s = (one[scope, row] for one in by_draw.values())
        reclaimed = is_reclaim[scope]
        # Hosts that are away already are not lost again, and where none is left none is.
        among = np.where(reclaimed, shape.full_hosts, num_hosts)
        live &= ~((hosts > 0) & ((whom * among < away.hosts) | (away.hosts >= num_hosts)))
        hit = share_hit(shape, hosts, rings, away.hosts)
        fresh = np.flatnonzero(live & (hosts > 0))
        away_s = median_s[scope, row] * np.exp(deviation[scope] * normal)
        away.add(fresh, (until + away_s)[fresh], np.minimum(hosts, num_hosts - away.hosts)[fresh])
        rest = np.minimum(rings, rings_left(shape, away.hosts))
        cost = cost_of(shape, taken, detect_s, reclaimed, rings, rest)
        lost += np.where(live, np.minimum(hit * cost, span - until), 0.0)
        now, rings = until, rest
    planned = failures.planned_per_day / DAY * span * (shape.rebuild_s + 0.5 * shape.step_s)
    share = (kept - lost - planned) / span / (1.0 + shape.wait_s / shape.interval_s)
    found: Array = np.clip(share, 0.02, 1.0)
    return found


def mean_walked(
    shapes: Sequence[RunShape],
    failures: Failures,
    gpu_hours: Sequence[float],
    repairs: Sequence[float],
    duration_s: float,
    walks: int,
) -> list[float]:
    """The goodput of each shape, the mean of so many walks. All go through the same chances: they differ by nothing
    else than what is asked of them."""
    luck = Luck(np.random.default_rng(0), walks, len(shapes))
    hours, repair = (np.repeat(one, walks) for one in (gpu_hours, repairs))
    together = _together(shapes, walks)
    walked = simulate_goodput(together, failures, hours, duration_s, luck, repair, True, LOSSES_OF_A_POINT)
    return [float(one) for one in walked.reshape(len(shapes), walks).mean(1)]


def _together(shapes: Sequence[RunShape], walks: int) -> RunShape:
    """One shape, whose figures are arrays of so many walks of each."""

    def stacked(first: Any, several: Sequence[Any]) -> dict[str, Any]:
        values = {one.name: [getattr(each, one.name) for each in several] for one in fields(first)}
        return {name: np.repeat(each, walks) for name, each in values.items() if len(set(each)) > 1}

    spots = [shape.spot for shape in shapes if shape.spot is not None]
    spot = replace(spots[0], **stacked(spots[0], spots)) if spots else None
    alike = [replace(shape, spot=None) for shape in shapes]
    return replace(alike[0], **stacked(alike[0], alike), spot=spot)


def _away_at_first(shape: RunShape, spot: Spot, slots: int, luck: Luck) -> tuple[Array, Array]:
    """When what is away at any time comes back, and its hosts: single ones, and all of them in a draw whose capacity is
    gone. The time left of an absence that is found under way is a uniform share of one that is drawn by its length."""
    off_s, share_off, dry_s, full, whole = (
        np.asarray(one, dtype=float).reshape(-1, 1)
        for one in (spot.off_s, spot.share_off, spot.dry_s, shape.full_hosts, shape.num_hosts)
    )
    dry, each, left, normal = luck.at_first(round(float(full.max())), slots)
    long_s = off_s * np.exp(spot.off_deviation**2 + spot.off_deviation * normal)
    single = ((each < share_off) & (np.arange(each.shape[1]) < np.rint(full))).sum(1)[:, None]
    mean_off_s = np.asarray(spot.mean_off_s, dtype=float).reshape(-1, 1)
    is_dry = dry[:, None] < mean_off_s / (dry_s + mean_off_s)
    used = np.arange(slots) < np.where(is_dry, 1, np.minimum(single, slots))
    return np.where(used, long_s * left, np.inf), np.where(used, np.where(is_dry, whole, 1.0), 0.0)


def _repairs(
    shape: RunShape, failures: Failures, scopes: list[str], draws: int, repair: Number
) -> tuple[Array, Array, Array]:
    """Of each scope and draw the median in seconds and, of each scope, the deviation; and the mean in seconds."""
    median_h, deviation = failures.repair_hours
    medians, deviations = [], []
    for scope in scopes:
        is_spot = scope in ("reclaim", "dry") and shape.spot is not None
        median_s = shape.spot.off_s if is_spot and shape.spot is not None else median_h * repair * HOUR
        medians.append(np.broadcast_to(np.asarray(median_s, dtype=float), (draws,)))
        deviations.append(shape.spot.off_deviation if is_spot and shape.spot is not None else deviation)
    median, wide = np.stack(medians), np.array(deviations)
    return median, wide, median * np.exp(wide[:, None] ** 2 / 2)


def _returns(shape: RunShape, away: Away, until: Array, rings: Array) -> tuple[Array, Array, Array]:
    """What hosts that come back before the next loss add, each of them by itself, the soonest first; how often rings
    were added, and how many there are then."""
    added, rises = np.zeros(len(until)), np.zeros(len(until))
    some = np.flatnonzero(away.soonest_at < until)
    while some.size:
        at = away.soonest_at[some]
        away.take_back(some)
        # Others keep their rings.
        grown = rings_again(shape, away.hosts, rings)
        more = (grown - rings)[some]
        added[some] += (until[some] - at) * more / shape.dp
        rises[some] += more > 0
        rings = grown
        some = some[away.soonest_at[some] < until[some]]
    return added, rises, rings


class Away:
    """Hosts that are away, of each draw: when each loss is back, and how many hosts it took. The first `used` slots of
    a draw are in use."""

    def __init__(self, draws: int, slots: int) -> None:
        self.slots, self._used = slots, np.zeros(draws, dtype=int)
        self._at, self._hosts = np.full((draws, slots), np.inf), np.zeros((draws, slots))
        self.hosts = np.zeros(draws)
        self.soonest_at, self._soonest = np.full(draws, np.inf), np.zeros(draws, dtype=int)

    def begin(self, at: Array, hosts: Array) -> None:
        """Slots that are used come first."""
        self._at, self._hosts, self._used = at, hosts, (hosts > 0).sum(1)
        self.hosts = hosts.sum(1)
        self._find(np.arange(len(at)))

    def add(self, draws: NDArray[np.intp], at: Array, hosts: Array) -> None:
        """In place of the last one where no slot is free."""
        is_full = self._used[draws] == self.slots
        place = np.minimum(self._used[draws], self.slots - 1)
        self.hosts[draws] += hosts - self._hosts[draws, place]
        self._at[draws, place], self._hosts[draws, place] = at, hosts
        self._used[draws] = place + 1
        sooner = at < self.soonest_at[draws]
        self.soonest_at[draws[sooner]], self._soonest[draws[sooner]] = at[sooner], place[sooner]
        if is_full.any():  # the one that was replaced may have been the soonest
            self._find(draws[is_full])

    def take_back(self, draws: NDArray[np.intp]) -> None:
        """The soonest of each of these."""
        place, last = self._soonest[draws], self._used[draws] - 1
        self.hosts[draws] -= self._hosts[draws, place]
        for column in (self._at, self._hosts):
            column[draws, place] = column[draws, last]
        self._at[draws, last], self._hosts[draws, last] = np.inf, 0.0
        self._used[draws] = last
        self._find(draws)

    def _find(self, draws: NDArray[np.intp]) -> None:
        width = max(1, int(self._used[draws].max()))
        self._soonest[draws] = self._at[draws, :width].argmin(1)
        self.soonest_at[draws] = self._at[draws, self._soonest[draws]]
