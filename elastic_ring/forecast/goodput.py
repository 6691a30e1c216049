"""Which share of time steps that stay committed get, in closed form; `renewal` walks it loss by loss.

Losses come as a Poisson process by scope (process, GPU, host, switch, power), and spot capacity goes with a notice. An
`Outcome` says what one costs; tier 1 (`tests/sim/simulator/tier1.py`) measures these under the control core. Hosts that
broke are away until they are repaired (log-normal); meanwhile spares serve, and without spares the mesh has fewer
rings, as `placement.policy` cuts it: whatever is left over of a broken ring serves too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from elastic_ring.forecast.sizing.machines import Number

Array = NDArray[np.float64]
HOUR, DAY = 3600.0, 86400.0
GRID = 1000
"""Points between which the mean share of rings is interpolated, evenly spaced in the log of hosts away."""
LEAST_CHANCE = 1e-7
SHARES: Mapping[str, float] = {"process": 0.13, "gpu": 0.61, "host": 0.179, "switch": 0.08, "power": 0.001}
"""Each scope's share of all losses: Llama-3 405B's causes (software; GPU, HBM, SRAM, system processor; the rest;
network). Power is assumed: that of 128 hosts fails once in six years."""


@dataclass(frozen=True)
class Failures:
    """`gpu_hours`: GPU-hours between unplanned losses, P10, P50, P90. `repair_hours`: median, and log's deviation.

    `planned_per_day`: of the whole fleet, announced, so that only a rebuild is lost."""

    name: str = "published"
    gpu_hours: tuple[float, float, float] = (10_000.0, 40_000.0, 66_000.0)
    repair_hours: tuple[float, float] = (12.0, 1.0)
    shares: Mapping[str, float] = field(default_factory=lambda: dict(SHARES))
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
class Spot:
    """Capacity that is taken back. In seconds: `on_s` until a host goes, after a notice, and `dry_s` until all of it
    goes at once, means of exponential distributions; `off_s` until it comes back, the median of a log-normal one, whose
    log has `off_deviation`."""

    on_s: Number
    off_s: Number
    dry_s: Number
    notice_s: float = 120.0
    off_deviation: float = 1.0

    @property
    def mean_off_s(self) -> Number:
        return self.off_s * math.exp(self.off_deviation**2 / 2)

    @property
    def share_off(self) -> Number:
        """Of a host's time, while there is capacity."""
        return self.mean_off_s / (self.on_s + self.mean_off_s)

    @property
    def share_paid(self) -> Number:
        """Of all GPUs' time: what is not there is not paid."""
        return (1.0 - self.share_off) * self.dry_s / (self.dry_s + self.mean_off_s)


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
    spares: Number
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
    """The time to detect a process's death, which its node's agent sees at once; likewise of a stopped one."""
    frozen_detect_s: Number = 0.41
    spot: Spot | None = None

    @property
    def num_gpus(self) -> Number:
        return self.dp * self.cp + self.spares

    @property
    def num_hosts(self) -> Number:
        return -(-self.num_gpus // self.gpus_per_host)

    @property
    def full_hosts(self) -> Number:
        """Hosts as they count for what is taken back, one at least: the last one by its members, and not at all where
        it has spares alone and is not full."""
        full = self.num_gpus // self.gpus_per_host * self.gpus_per_host
        return np.maximum(1.0, np.maximum(full, self.dp * self.cp) / self.gpus_per_host)

    def hosts_of(self, scope: str) -> Number:
        """That a loss takes; of a frozen process, which is killed, none."""
        hosts = {"process": 0, "frozen": 0, "gpu": 1, "host": 1, "reclaim": 1, "dry": self.num_hosts}
        hosts |= {"switch": self.hosts_per_switch, "power": self.hosts_per_power}
        return np.minimum(hosts[scope], self.num_hosts)

    def detect_of(self, scope: str) -> Number:
        return {"process": self.process_detect_s, "frozen": self.frozen_detect_s}.get(scope, self.detect_s)

    def taken_of(self, scope: str) -> Number:
        """GPUs whose state a loss takes."""
        return 1 if scope in ("gpu", "process", "frozen") else self.hosts_of(scope) * self.gpus_per_host

    def loses_all_holders(self, taken: Number, rings: Number) -> Number:
        """Whether a loss of so many GPUs takes each holder of some shard where so many rings are left. Rings follow
        each other on the hosts, so holders of one shard are cp ranks apart."""
        whole = taken >= self.cp * rings
        held = self.copies_hold | self.copies_of_one_ring & np.less(rings, 2)
        return whole | ~held & (np.less(rings, 2) | (taken > self.cp * (np.asarray(rings) - 1)))

    def outcome(self, taken: Number, detect_s: Number, rings: Number) -> Outcome:
        """From a replica, else from a copy, else from a checkpoint."""
        rings = np.asarray(rings)
        all_lost = self.loses_all_holders(taken, rings)
        stop_s = detect_s + self.rebuild_s + np.where(all_lost, self.restore_s, self.heal_s)
        of_copy = np.where(rings < 2, self.copy_steps / 2, 0.0)
        return Outcome(stop_s, np.where(all_lost, self.interval_s / 2 / self.step_s, of_copy))


def cost_s(shape: RunShape, scope: str, rings: Number | None = None, rest: Number | None = None) -> Number:
    """Of a loss where so many rings are left, all of them if None, and `rest` of them after it; nothing where none
    runs. Members of a host that is taken back hand over at the end of a step, if it ends within the notice and a ring
    is left to go on."""
    rings = np.asarray(shape.dp if rings is None else rings)
    rest = np.where((rings > 1) | np.greater(shape.spares, 0), 1, 0) if rest is None else rest
    return cost_of(shape, shape.taken_of(scope), shape.detect_of(scope), scope == "reclaim", rings, rest)


def cost_of(
    shape: RunShape, taken: Number, detect_s: Number, is_reclaim: Number, rings: Number, rest: Number
) -> Number:
    """`cost_s` of losses that take so many GPUs each."""
    notice_s = 0.0 if shape.spot is None else shape.spot.notice_s
    broken_off = 0.5 * shape.step_s * shape.dp / np.maximum(rings, 1)
    found = shape.outcome(taken, np.where(is_reclaim, 0.0, detect_s), rings)
    hands_over = is_reclaim & np.greater(rest, 0) & (2.0 * broken_off <= notice_s)
    lost_s = np.where(
        hands_over, shape.rebuild_s + shape.heal_s, found.stop_s + found.steps * shape.step_s + broken_off
    )
    return np.where(np.greater(rings, 0), lost_s, 0.0)


def share_hit(shape: RunShape, hosts: Number, rings: Number, hosts_away: Number = 0) -> Number:
    """The chance that a loss of so many hosts, or of a process, takes a member and not only spares."""
    left = np.maximum(shape.num_gpus - np.asarray(hosts_away) * shape.gpus_per_host, 1)
    return np.where(np.asarray(hosts) > 1, 1.0, np.minimum(1.0, np.asarray(rings) * shape.cp / left))


def rate_per_s(shape: RunShape, gpu_hours: Number) -> Number:
    """Unplanned losses of the run's GPUs."""
    return shape.num_gpus / (np.asarray(gpu_hours) * HOUR)


def rings_left(shape: RunShape, hosts_away: Number, processes_away: Number = 0) -> Number:
    """Rings that the GPUs that are left make."""
    gpus = shape.num_gpus - np.asarray(hosts_away) * shape.gpus_per_host - np.asarray(processes_away)
    return np.clip(gpus // shape.cp, 0, shape.dp)


def mean_goodput(shape: RunShape, failures: Failures, gpu_hours: Number | None = None, repair: Number = 1.0) -> Number:
    """In closed form, for a search and for a tornado: losses are rare beside what they cost, and the number of hosts
    that are away is Poisson. `repair`: a factor of how long repairs take. That a ring comes back only once the spares
    are full (`rings_again`) is left out: with spot capacity, rings over several hosts and few spares up to 6 points are
    too many: what is told of spot capacity is walked (`scenario.totals_at`, and the front of a search)."""
    gpu_hours = failures.gpu_hours[1] if gpu_hours is None else gpu_hours
    rate, spot = rate_per_s(shape, gpu_hours), shape.spot
    median_h, deviation = failures.repair_hours
    away = rate * median_h * repair * HOUR * np.exp(deviation**2 / 2)
    # Hosts that are away already are not lost again, by themselves or with their switch.
    hosts_away = away * sum(share * shape.hosts_of(scope) for scope, share in failures.shares.items())
    there = 1.0 / (1.0 + hosts_away / shape.num_hosts)
    rate, away = rate * there, away * there
    reclaimed = 0.0 if spot is None else shape.full_hosts * spot.share_off
    share_of_rings, one_ring, fewer = _over_away(shape, failures, away, reclaimed)
    one_ring = one_ring if shape.dp > 1 else 0.0
    hit = {scope: share_hit(shape, shape.hosts_of(scope), shape.dp) for scope in (*failures.shares, "reclaim")}
    lost = sum(
        share * rate * hit[scope] * (cost_s(shape, scope) * (1.0 - one_ring) + cost_s(shape, scope, 1) * one_ring)
        for scope, share in failures.shares.items()
    )
    lost = lost + failures.planned_per_day / DAY * (shape.rebuild_s + 0.5 * shape.step_s)
    if spot is not None:
        # Where a ring is missing, its hosts' return is a change of its own.
        again = fewer * (shape.rebuild_s + shape.heal_s)
        of_reclaim = hit["reclaim"] * cost_s(shape, "reclaim") + again
        lost = lost + shape.full_hosts * (1.0 - spot.share_off) / spot.on_s * of_reclaim
        lost = lost + (cost_s(shape, "dry") + again) / spot.dry_s
        share_of_rings = share_of_rings * spot.dry_s / (spot.dry_s + spot.mean_off_s)
    stop = shape.wait_s / shape.interval_s
    return (1.0 - np.minimum(0.95, lost)) / (1.0 + stop) * share_of_rings


def goodput_with(shape: RunShape, kept_s: float, losses: Mapping[str, int]) -> float:
    """The goodput of a run whose steps took `kept_s`, with these losses by scope and a spare for each."""
    lost = sum(number * cost_s(shape, scope) for scope, number in losses.items())
    return float(kept_s / (kept_s + lost + kept_s / shape.interval_s * shape.wait_s))


def _over_away(
    shape: RunShape, failures: Failures, away: Number, reclaimed: Number = 0.0
) -> tuple[Number, Number, Number]:
    """The mean share of rings that are left, the chance that one is, and that any is missing. Losses that are not
    repaired yet, `away` in the mean, are Poisson: those of one host, with the `reclaimed` ones, and those of a switch
    or a power domain with all of their hosts. Of many draws it is interpolated, within 1e-4."""
    away = np.asarray(away, dtype=float)
    hosts = {scope: shape.hosts_of(scope) for scope in failures.shares}
    alone = sum(failures.shares[scope] for scope, number in hosts.items() if number == 1) * away + reclaimed
    several = {scope: failures.shares[scope] * away for scope, number in hosts.items() if number > 1}
    single, *means = (np.ravel(one) for one in np.broadcast_arrays(alone, *several.values()))
    dense = single if single.size <= 2 * GRID else np.geomspace(max(single.min(), 1e-12), single.max() + 2e-12, GRID)
    place = np.arange(single.size) if dense is single else np.interp(single, dense, np.arange(dense.size))
    lower = np.minimum(place.astype(int), max(0, dense.size - 2))
    between = (place - lower)[:, None]
    chance = _poisson(dense, shape.num_hosts)
    most = [min(_most(mean), shape.num_hosts // hosts[scope] + 1) for scope, mean in zip(several, means, strict=True)]
    chances = [[_chance_of(mean, n) for n in range(top)] for mean, top in zip(means, most, strict=True)]
    weights: list[Array] = []
    columns: list[Array] = []
    for counts in itertools.product(*map(range, most)):
        of_several = sum(number * hosts[scope] for scope, number in zip(several, counts, strict=True))
        weight = np.ones(single.size)
        for each, number in zip(chances, counts, strict=True):
            weight = weight * each[number]
        if of_several < shape.num_hosts and (float(weight.max()) > LEAST_CHANCE or not columns):
            rings = rings_left(shape, np.arange(chance.shape[-1]) + of_several)
            weights.append(weight)
            columns.append(np.stack([rings / shape.dp, rings == 1, rings < shape.dp, np.ones(len(rings))], axis=-1))
    of_all = (chance @ np.concatenate(columns, axis=1)).reshape(dense.size, len(columns), 4)
    total = np.zeros((single.size, 4))
    for index, weight in enumerate(weights):
        some = np.flatnonzero(weight > LEAST_CHANCE)
        here, part, found = lower[some], between[some], of_all[:, index]
        found = found[here] * (1.0 - part) + found[np.minimum(here + 1, dense.size - 1)] * part
        total[some] += weight[some, None] * found
    share, one_ring, fewer, whole = (column.reshape(np.shape(alone)) for column in total.T)
    # What is not counted has no ring left.
    return share, one_ring, fewer + np.maximum(0.0, 1.0 - whole)


def _most(mean: Array) -> int:
    """Beyond which counts do not matter."""
    largest = float(np.max(mean))
    return int(largest + 8 * math.sqrt(largest + 1) + 9)


def _chance_of(mean: Array, number: int) -> Array:
    found: Array = np.exp(number * np.log(np.maximum(mean, 1e-300)) - mean - math.lgamma(number + 1))
    return found


def _poisson(mean: Array, most: int) -> Array:
    """The chances of 0, 1, ... for each mean, as many as matter and `most` at most."""
    k = np.arange(min(_most(mean), most + 1))
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, len(k))))))
    chance: Array = np.exp(k * np.log(np.maximum(mean[..., None], 1e-300)) - mean[..., None] - log_factorial)
    return chance


def rings_again(shape: RunShape, hosts_away: Number, rings: Number) -> Number:
    """Rings once hosts came back: spares are filled first, then whole rings (`control.placement`); as many as there can
    be where none was left."""
    gpus = shape.num_gpus - np.asarray(hosts_away) * shape.gpus_per_host
    grown = np.clip((gpus - shape.spares) // shape.cp, 0, shape.dp)
    return np.where(np.asarray(rings) > 0, np.maximum(rings, grown), rings_left(shape, hosts_away))
