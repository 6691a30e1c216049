"""Tier 2: goodput loss by loss, a renewal simulation of many draws at once.

The chances of a walk are a `Luck`, which tier 1 takes too: both then have the same losses, of the same scopes, with the
same repairs, and what they differ by is not chance.
"""

from __future__ import annotations

import math

import numpy as np

from elastic_ring.forecast.goodput import (
    DAY,
    HOUR,
    Array,
    Failures,
    RunShape,
    Spot,
    cost_s,
    rate_per_s,
    rings_again,
    rings_left,
    share_hit,
)
from elastic_ring.forecast.sizing.machines import Number

MOST_LOSSES = 400
"""Losses that one draw goes through; a longer run is as good as its first part."""
REPAIRS = 20
"""A walk begins whole, so it lasts for so many mean repairs, but for twice `MOST_LOSSES` at most."""


class Luck:
    """Rows of numbers, one a loss, each with one of each draw: unit exponentials, two uniforms, a normal. They are
    drawn as they are asked for, by `rng`."""

    def __init__(self, rng: np.random.Generator, num_draws: int) -> None:
        self.rng, self._num = rng, num_draws
        self._rows: list[tuple[Array, Array, Array, Array]] = []

    def row(self, index: int) -> tuple[Array, Array, Array, Array]:
        while len(self._rows) <= index:
            rng, num = self.rng, self._num
            self._rows.append((rng.exponential(1.0, num), rng.random(num), rng.random(num), rng.standard_normal(num)))
        return self._rows[index]


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
) -> Array:
    """The goodput of each draw: one walk through its losses, all draws side by side. A draw is as long as
    `duration_s`, or until `MOST_LOSSES` on average have come. `steady`: spot hosts are away from the beginning, as many
    as at any later time; a walk through a large fleet ends before the first of them are back."""
    draws = len(gpu_hours)
    rates = rates_of(shape, failures, gpu_hours)
    each = np.stack([np.broadcast_to(np.asarray(one, dtype=float), (draws,)) for one in rates.values()])
    total = each.sum(0)
    until_scope = np.cumsum(each, axis=0) / total
    median_s, deviation, repair_s = _repairs(shape, failures, list(rates), draws, repair)
    most_s = MOST_LOSSES / total
    span = np.minimum(duration_s, np.clip(REPAIRS * repair_s.max(0), most_s, 2 * most_s))
    hosts = np.array([shape.hosts_of(scope) for scope in rates])
    is_reclaim = np.array([scope == "reclaim" for scope in rates])
    cost = _costs(shape, list(rates), draws, shape.dp, shape.dp)
    mean = float((each * repair_s).sum(0).max())
    slots = int(min(shape.num_hosts, mean + 6 * math.sqrt(mean) + 6))
    back_at, back_hosts = np.zeros((draws, slots)), np.zeros((draws, slots))
    now, kept, lost = np.zeros(draws), np.zeros(draws), np.zeros(draws)
    row, rings = np.arange(draws), np.full(draws, float(shape.dp))
    if steady and shape.spot is not None:
        back_at, back_hosts = _away_at_first(shape, shape.spot, draws, slots, luck.rng)
        rings = np.minimum(rings, rings_left(shape, back_hosts.sum(1)))
    regrow_s = shape.rebuild_s + shape.heal_s
    for index in range(1_000_000):
        gap, pick, whom, normal = luck.row(index)
        until = np.minimum(now + gap / total, span)
        away = np.where(back_at > now[:, None], back_hosts, 0.0)
        kept += (until - now) * rings / shape.dp
        added, rises, rings = _returns(shape, back_at, away, now, until, rings)
        kept += added
        lost += np.minimum(rises * regrow_s, until - now)
        live = until < span
        if not live.any():
            break
        before = np.where(back_at > until[:, None], back_hosts, 0.0).sum(1)
        scope = np.minimum((pick > until_scope).sum(0), len(rates) - 1)
        # A host that is away already is not taken back, and where none is left none is lost.
        is_away = np.where(is_reclaim[scope], whom * shape.full_hosts < before, before >= shape.num_hosts)
        live &= ~((hosts[scope] > 0) & is_away)
        fresh = live & (hosts[scope] > 0)
        oldest = back_at.argmin(1)
        away_s = median_s[scope, row] * np.exp(deviation[scope] * normal)
        back_at[row[fresh], oldest[fresh]] = (until + away_s)[fresh]
        back_hosts[row[fresh], oldest[fresh]] = hosts[scope][fresh]
        here = np.where(back_at > until[:, None], back_hosts, 0.0).sum(1)
        rest = np.minimum(rings, rings_left(shape, here))
        whole = (rings == shape.dp).all() and (rest > 0).all()
        now_cost = cost if whole else _costs(shape, list(rates), draws, rings, rest)
        hit = share_hit(shape, hosts[scope], rings, before)
        lost += np.where(live, np.minimum(hit * now_cost[scope, row], span - until), 0.0)
        now, rings = until, rest
    planned = failures.planned_per_day / DAY * span * (shape.rebuild_s + 0.5 * shape.step_s)
    share = (kept - lost - planned) / span / (1.0 + shape.wait_s / shape.interval_s)
    found: Array = np.clip(share, 0.02, 1.0)
    return found


def _away_at_first(
    shape: RunShape, spot: Spot, draws: int, slots: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """When what is away at any time comes back, and its hosts: single ones, and all of them in a draw whose capacity is
    gone. The time left of an absence that is found under way is a uniform share of one that is drawn by its length."""
    off_s = np.broadcast_to(np.asarray(spot.off_s, dtype=float), (draws,))[:, None]
    long_s = off_s * np.exp(spot.off_deviation**2 + spot.off_deviation * rng.standard_normal((draws, slots)))
    single = np.minimum(rng.binomial(round(shape.full_hosts), spot.share_off, draws), slots)
    is_dry = rng.random(draws) < spot.mean_off_s / (spot.dry_s + spot.mean_off_s)
    hosts = np.where(np.arange(slots) < np.where(is_dry, 1, single)[:, None], 1.0, 0.0)
    hosts[is_dry] *= shape.num_hosts
    return np.where(hosts > 0, long_s * rng.random((draws, slots)), 0.0), hosts


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


def _costs(shape: RunShape, scopes: list[str], draws: int, rings: Number, rest: Number) -> Array:
    """By scope and draw."""
    found = [np.asarray(cost_s(shape, scope, rings, rest), dtype=float) for scope in scopes]
    return np.stack([np.broadcast_to(one, (draws,)) for one in found])


def _returns(
    shape: RunShape, back_at: Array, away: Array, now: Array, until: Array, rings: Array
) -> tuple[Array, Array, Array]:
    """What hosts that come back before the next loss add, each of them by itself, the soonest first; how often rings
    were added, and how many there are then."""
    added, rises = np.zeros(len(now)), np.zeros(len(now))
    order = np.where((away > 0) & (back_at < until[:, None]), back_at, np.inf)
    some = np.flatnonzero(np.isfinite(order).any(1))
    order, left, rings = order[some], away[some].sum(1), rings.copy()
    while some.size:
        row = np.arange(some.size)
        soonest = order.argmin(1)
        at = order[row, soonest]
        left = left - away[some, soonest]
        grown = rings_again(shape, left, rings[some])
        added[some] += (until[some] - at) * (grown - rings[some]) / shape.dp
        rises[some] += grown > rings[some]
        rings[some] = grown
        order[row, soonest] = np.inf
        more = np.isfinite(order).any(1)
        some, order, left = some[more], order[more], left[more]
    return added, rises, rings
