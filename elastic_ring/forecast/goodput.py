"""Tier 2: which share of time steps that stay committed get, by a renewal simulation over many draws at once.

Losses come as a Poisson process by scope (process, host, switch, power). An `Outcome` says what one costs; tier 1
(`tests/sim/simulator/tier1.py`) measures these under the control core. Hosts that broke are away until they are
repaired (log-normal); meanwhile spares serve, and without spares the mesh has fewer rings, as `placement.policy` cuts
it: whatever is left over of a broken ring serves too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from elastic_ring.forecast.sizing.machines import Number

Array = NDArray[np.float64]
HOUR, DAY = 3600.0, 86400.0
MOST_LOSSES = 400
"""Losses that one draw goes through; a longer run is as good as its first part."""
SWITCHES_AWAY = 5
"""Switches that are away at a time, in closed form."""
GRID = 1500
"""Points between which the mean share of rings is interpolated, evenly spaced in the log of hosts away."""
SHARES: Mapping[str, float] = {"process": 0.13, "gpu": 0.61, "host": 0.18, "switch": 0.08}
"""Each scope's share of all losses: Llama-3 405B's causes (software; GPU, HBM, SRAM, system processor; the rest;
network)."""


@dataclass(frozen=True)
class Failures:
    """`gpu_hours`: GPU-hours between unplanned losses, P10, P50, P90. `repair_hours`: median, and log's deviation.

    `process_s`: until a worker that died alone is warm again. `planned_per_day`: of the whole fleet, announced, so that
    only a rebuild is lost."""

    name: str = "published"
    gpu_hours: tuple[float, float, float] = (10_000.0, 40_000.0, 66_000.0)
    repair_hours: tuple[float, float] = (12.0, 1.0)
    shares: Mapping[str, float] = field(default_factory=lambda: dict(SHARES))
    process_s: float = 60.0
    planned_per_day: float = 0.87
    source: str = "seven published rates, 8,100 to 66,500 GPU-hours"


PRIORS: Mapping[str, Failures] = {
    "published": Failures(),
    "llama3": Failures("llama3", (45_000, 50_700, 57_000), source="Llama-3 405B: 419 in 54 days on 16,384 H100"),
    "bloom": Failures("bloom", (40_000, 64_500, 100_000), source="BLOOM: one a week on 384 A100"),
    "opt": Failures("opt", (8_000, 11_900, 17_000), source="OPT: two hosts a day of 124"),
    "rsc": Failures("rsc", (8_100, 15_000, 29_500), source="Meta RSC: 7.9 h at 1,024 A100, 1.8 h at 16,384"),
    "none": Failures("none", (1e12, 1e12, 1e12), planned_per_day=0.0, source="no failures"),
}


@dataclass(frozen=True)
class Outcome:
    """What a loss costs. `stop_s`: from the loss to the first new step, without what runs again. `steps`: committed
    steps that run again; the step that broke off is counted apart, half of it."""

    stop_s: Number
    steps: Number = 0.0


@dataclass(frozen=True)
class RunShape:
    """What goodput depends on. `copies_hold`: a copy on another host holds each shard; `copies_of_one_ring`: where
    one ring is left; `copy_steps` between them.
    `interval_s`: between checkpoints; `wait_s`: that training waits for one; `restore_s`: to read one."""

    dp: int
    cp: int
    spares: int
    gpus_per_host: int
    hosts_per_switch: int
    hosts_per_power: int
    step_s: Number
    heal_s: Number
    rebuild_s: Number
    detect_s: Number
    interval_s: Number
    wait_s: Number
    restore_s: Number
    copies_hold: bool = False
    copies_of_one_ring: bool = False
    copy_steps: int = 10
    process_detect_s: Number = 0.01
    """The time to detect a process's death, which its node's agent sees at once."""

    @property
    def num_gpus(self) -> int:
        return self.dp * self.cp + self.spares

    @property
    def num_hosts(self) -> int:
        return -(-self.num_gpus // self.gpus_per_host)

    def hosts_of(self, scope: str) -> int:
        """That a loss takes; of a frozen process, which is killed, none."""
        hosts = {"process": 0, "frozen": 0, "gpu": 1, "host": 1}
        return hosts[scope] if scope in hosts else min(self.hosts_per_switch, self.num_hosts)

    def detect_of(self, scope: str) -> Number:
        return self.process_detect_s if scope == "process" else self.detect_s

    def loses_all_holders(self, scope: str, rings: Number) -> Number:
        """Whether a loss takes each holder of some shard where so many rings are left. Rings follow each other on the
        hosts, so holders of one shard are cp ranks apart."""
        taken = 1 if scope in ("gpu", "process", "frozen") else self.hosts_of(scope) * self.gpus_per_host
        whole = taken >= self.cp * rings
        held = self.copies_hold | self.copies_of_one_ring & np.less(rings, 2)
        return whole | ~held & (np.less(rings, 2) | (taken > self.cp * (np.asarray(rings) - 1)))

    def outcome(self, scope: str, rings: Number) -> Outcome:
        """From a replica, else from a copy, else from a checkpoint."""
        rings = np.asarray(rings)
        build = self.detect_of(scope) + self.rebuild_s
        all_lost = self.loses_all_holders(scope, rings)
        stop_s = build + np.where(all_lost, self.restore_s, self.heal_s)
        of_copy = np.where(rings < 2, self.copy_steps / 2, 0.0)
        return Outcome(stop_s, np.where(all_lost, self.interval_s / 2 / self.step_s, of_copy))


def _cost_s(shape: RunShape, scope: str, rings: Number | None = None) -> Number:
    """Of a loss where so many rings are left, all of them if None; nothing where none runs."""
    rings = np.asarray(shape.dp if rings is None else rings)
    found = shape.outcome(scope, rings)
    broken_off = 0.5 * shape.step_s * shape.dp / np.maximum(rings, 1)
    return np.where(rings > 0, found.stop_s + found.steps * shape.step_s + broken_off, 0.0)


def rate_per_s(shape: RunShape, gpu_hours: Number) -> Number:
    """Unplanned losses of the run's GPUs."""
    return shape.num_gpus / (np.asarray(gpu_hours) * HOUR)


def rings_left(shape: RunShape, hosts_away: Number, processes_away: Number = 0) -> Number:
    """Rings that the GPUs that are left make."""
    gpus = shape.num_gpus - np.asarray(hosts_away) * shape.gpus_per_host - np.asarray(processes_away)
    return np.clip(gpus // shape.cp, 0, shape.dp)


def mean_goodput(shape: RunShape, failures: Failures, gpu_hours: Number | None = None, repair: Number = 1.0) -> Number:
    """In closed form, for a search and for a tornado: losses are rare beside what they cost, and the number of hosts
    that are away is Poisson. `repair`: a factor of how long repairs take."""
    gpu_hours = failures.gpu_hours[1] if gpu_hours is None else gpu_hours
    rate = rate_per_s(shape, gpu_hours)
    median_h, deviation = failures.repair_hours
    away = rate * median_h * repair * HOUR * np.exp(deviation**2 / 2)
    one_ring = _over_away(shape, failures, away, lambda rings: rings == 1) if shape.dp > 1 else 0.0
    lost = sum(
        share * rate * (_cost_s(shape, scope) * (1.0 - one_ring) + _cost_s(shape, scope, 1) * one_ring)
        for scope, share in failures.shares.items()
    )
    lost = lost + failures.planned_per_day / DAY * (shape.rebuild_s + 0.5 * shape.step_s)
    stop = shape.wait_s / shape.interval_s
    share_of_rings = _over_away(shape, failures, away, lambda rings: rings / shape.dp)
    return (1.0 - np.minimum(0.95, lost)) / (1.0 + stop) * share_of_rings


def goodput_with(shape: RunShape, kept_s: float, losses: Mapping[str, int]) -> float:
    """The goodput of a run whose steps took `kept_s`, with these losses by scope and a spare for each."""
    lost = sum(number * _cost_s(shape, scope) for scope, number in losses.items())
    return float(kept_s / (kept_s + lost + kept_s / shape.interval_s * shape.wait_s))


def _over_away(shape: RunShape, failures: Failures, away: Number, value: Callable[[Number], Number]) -> Number:
    """The mean of what `value` gives for the rings that are left, where losses that are not repaired yet, `away` in the
    mean, are Poisson: those of one host, and those of a switch with all of its hosts. Of many draws it is interpolated,
    within 1e-4."""
    away = np.asarray(away, dtype=float)
    if away.size > 2 * GRID:
        grid = np.geomspace(max(away.min(), 1e-12), max(away.max(), 2e-12), GRID)
        return np.interp(away, grid, _over_away(shape, failures, grid, value))
    hosts = {scope: shape.hosts_of(scope) for scope in failures.shares}
    single = sum(failures.shares[scope] for scope, number in hosts.items() if number == 1)
    many, of_switch = sum(failures.shares[scope] for scope in hosts if hosts[scope] > 1), max(hosts.values())
    total = 0.0
    whole = 0.0
    for switches in range(SWITCHES_AWAY if many else 1):
        chance = _poisson(single * away) * _poisson(many * away, SWITCHES_AWAY)[..., switches, None]
        rings = rings_left(shape, np.arange(chance.shape[-1]) + switches * of_switch)
        total = total + (chance * value(rings)).sum(-1)
        whole = whole + chance.sum(-1)
    return total / whole


def _poisson(mean: Array, number: int = 0) -> Array:
    """The chances of 0, 1, ... for each mean, as many as matter."""
    k = np.arange(number or int(np.max(mean) + 8 * np.sqrt(np.max(mean) + 1) + 9))
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, len(k))))))
    chance: Array = np.exp(k * np.log(np.maximum(mean[..., None], 1e-300)) - mean[..., None] - log_factorial)
    return chance


def simulate_goodput(
    shape: RunShape,
    failures: Failures,
    gpu_hours: Array,
    duration_s: float,
    rng: np.random.Generator,
    repair: Number = 1.0,
) -> Array:
    """The goodput of each draw: one walk through its losses, all draws side by side. A draw is as long as
    `duration_s`, or until `MOST_LOSSES` on average have come."""
    rate = rate_per_s(shape, gpu_hours)
    span = np.minimum(duration_s, MOST_LOSSES / rate)
    draws = len(gpu_hours)
    scopes = list(failures.shares)
    weights = np.cumsum([failures.shares[scope] for scope in scopes])
    weights /= weights[-1]
    cost = _costs(shape, scopes, draws)
    hosts = np.array([shape.hosts_of(scope) for scope in scopes])
    slots = _slots(failures, rate * repair)
    back_at = np.zeros((draws, slots))
    back_hosts = np.zeros((draws, slots))
    now, kept, lost = np.zeros(draws), np.zeros(draws), np.zeros(draws)
    row = np.arange(draws)
    rings = np.full(draws, float(shape.dp))
    while True:
        gap = rng.exponential(1.0, draws) / rate
        until = np.minimum(now + gap, span)
        away = np.where(back_at > now[:, None], back_hosts, 0.0)
        kept += (until - now) * rings / shape.dp
        added, rings = _returns(shape, back_at, away, now, until, rings)
        kept += added
        live = until < span
        if not live.any():
            break
        scope = np.searchsorted(weights, rng.random(draws))
        now_cost = cost if (rings == shape.dp).all() else _costs(shape, scopes, draws, rings)
        lost += np.where(live, np.minimum(now_cost[scope, row], span - until), 0.0)
        median_h, deviation = failures.repair_hours
        away_s = median_h * repair * HOUR * np.exp(deviation * rng.standard_normal(draws))
        oldest = back_at.argmin(1)
        fresh = live & (hosts[scope] > 0)
        back_at[row[fresh], oldest[fresh]] = (until + away_s)[fresh]
        back_hosts[row[fresh], oldest[fresh]] = hosts[scope][fresh]
        here = np.where(back_at > until[:, None], back_hosts, 0.0).sum(1)
        rings = np.minimum(rings, rings_left(shape, here))
        now = until
    planned = failures.planned_per_day / DAY * span * (shape.rebuild_s + 0.5 * shape.step_s)
    share = (kept - lost - planned) / span / (1.0 + shape.wait_s / shape.interval_s)
    found: Array = np.clip(share, 0.02, 1.0)
    return found


def _costs(shape: RunShape, scopes: Sequence[str], draws: int, rings: Number | None = None) -> Array:
    """By scope and draw."""
    found = [np.asarray(_cost_s(shape, scope, rings), dtype=float) for scope in scopes]
    return np.stack([np.broadcast_to(one, (draws,)) for one in found])


def _slots(failures: Failures, rate: Array) -> int:
    median_h, deviation = failures.repair_hours
    mean = float(np.max(rate)) * median_h * HOUR * np.exp(deviation**2 / 2)
    return int(min(64, mean + 6 * np.sqrt(mean) + 6))


def rings_again(shape: RunShape, hosts_away: Number, rings: Number) -> Number:
    """Rings once hosts came back: spares are filled first, then whole rings (`control.placement`)."""
    gpus = shape.num_gpus - np.asarray(hosts_away) * shape.gpus_per_host
    grown = np.clip((gpus - shape.spares) // shape.cp, np.minimum(1, gpus // shape.cp), shape.dp)
    return np.maximum(rings, grown)


def _returns(
    shape: RunShape, back_at: Array, away: Array, now: Array, until: Array, rings: Array
) -> tuple[Array, Array]:
    """What hosts that come back before the next loss add, each of them by itself, the soonest first; the rings then."""
    added = np.zeros(len(now))
    total = away.sum(1)
    order = np.where((away > 0) & (back_at < until[:, None]), back_at, np.inf)
    row = np.arange(len(now))
    for _ in range(order.shape[1]):
        soonest = order.argmin(1)
        at = order[row, soonest]
        ready = np.isfinite(at)
        if not ready.any():
            break
        less = total - away[row, soonest]
        grown = np.where(ready, rings_again(shape, less, rings), rings)
        added += np.where(ready, (until - np.where(ready, at, until)) * (grown - rings) / shape.dp, 0.0)
        rings, total = grown, np.where(ready, less, total)
        order[row, soonest] = np.inf
    return added, rings
