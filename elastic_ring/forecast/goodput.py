"""What a run's goodput, the share of its time in steps that stay committed, depends on; `renewal` simulates it.

Losses come as a Poisson process by scope (process, GPU, host, switch, power), and spot capacity goes with a notice.
`losses_cost_s` is the cost of one; tier 1 (`tests/sim/simulator/tier1.py`) measures it under the control core. Broken
hosts are away until they are repaired (log-normal); meanwhile spares serve, and without spares the mesh has fewer
rings, as `placement.policy` cuts it: the rest of a broken ring serves too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from elastic_ring.forecast.sizing.machines import Number, Positive, read_toml
from elastic_ring.validation import Must, from_plain, settings

Array = NDArray[np.float64]
HOUR, DAY = 3600.0, 86400.0
SHARES: Mapping[str, float] = {"process": 0.13, "gpu": 0.61, "host": 0.179, "switch": 0.08, "power": 0.001}
"""Each scope's share of all losses: Llama-3 405B's causes (software; GPU, HBM, SRAM, system processor; the rest;
network). Power is assumed: that of 128 hosts fails once in six years."""


@settings
class Failures:
    """`gpu_hours`: GPU-hours between unplanned losses, P10, P50, P90. `repair_hours`: median, and log's deviation.
    `shares`: each scope's share of all losses. `planned_per_day`: announced restarts of the whole fleet, which lose
    only a rebuild."""

    _prefix = ""

    name: str = "published"
    gpu_hours: Annotated[tuple[Positive, Positive, Positive], Must("three rising numbers above 0, P10, P50, P90")] = (
        10_000.0,
        40_000.0,
        66_000.0,
    )
    repair_hours: Annotated[
        tuple[Positive, Positive], Must("two numbers above 0, the median and the deviation of its log")
    ] = (12.0, 1.0)
    shares: Annotated[
        Mapping[str, Annotated[float, Field(ge=0)]],
        Must(f"a table of {', '.join(SHARES)}, each at least 0, together 1"),
    ] = field(default_factory=lambda: dict(SHARES))
    planned_per_day: Annotated[float, Field(ge=0, allow_inf_nan=False), Must("a number of at least 0")] = 0.87
    source: str = "seven published rates, 8,100 to 66,500 GPU-hours"

    def __post_init__(self) -> None:
        if list(self.gpu_hours) != sorted(self.gpu_hours):
            raise ValueError(f"gpu_hours={list(self.gpu_hours)}: must be three rising numbers above 0, P10, P50, P90")
        if not self.shares.keys() <= SHARES.keys() or not 0.99 <= sum(self.shares.values()) <= 1.01:
            raise ValueError(f"shares={self.shares}: must be a table of {', '.join(SHARES)}, together 1")


PRIORS: Mapping[str, Failures] = {
    "published": Failures(),
    "llama3": Failures("llama3", (45_000, 50_700, 57_000), source="Llama-3 405B: 419 in 54 days on 16,384 H100"),
    "bloom": Failures("bloom", (40_000, 64_500, 100_000), source="BLOOM: one a week on 384 A100"),
    "opt": Failures("opt", (8_000, 11_900, 17_000), source="OPT: two hosts a day of 124"),
    "rsc": Failures("rsc", (8_100, 15_000, 29_500), source="Meta RSC: 7.9 h at 1,024 A100, 1.8 h at 16,384"),
    "none": Failures("none", (1e12, 1e12, 1e12), planned_per_day=0.0, source="no failures"),
}


def read_failures(text: str) -> Failures:
    """A prior by name, or a TOML file with `gpu_hours` and other fields of `Failures`. Raises ValueError that names the
    file and what is wrong."""
    if text in PRIORS:
        return PRIORS[text]
    if not text.endswith(".toml"):
        raise ValueError(f"--failures {text}: is no prior; give one of {', '.join(PRIORS)}, or a TOML file")
    plain = read_toml(text, "--failures")
    if "gpu_hours" not in plain:
        raise ValueError(f"--failures {text}: gpu_hours: must be given, three rising numbers, P10, P50, P90")
    try:
        return from_plain(Failures, {"name": text, "source": text, "planned_per_day": 0.0, **plain})
    except ValueError as error:
        raise ValueError(f"--failures {text}: {error}") from error


@dataclass(frozen=True)
class Spot:
    """How spot capacity comes and goes. In seconds: `on_s` until a host is reclaimed, after a notice, and `dry_s` until
    all hosts are at once, means of exponential distributions; `off_s` until it comes back, the median of a log-normal
    one, whose log has `off_deviation`."""

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
        """Share of a host's time that it is away while there is capacity."""
        return self.mean_off_s / (self.on_s + self.mean_off_s)

    @property
    def share_paid(self) -> Number:
        """Share of all GPUs' time that is there, and so is paid."""
        return (1.0 - self.share_off) * self.dry_s / (self.dry_s + self.mean_off_s)


@dataclass(frozen=True)
class RunShape:
    """Sizes and times of a run that goodput depends on. `copies_hold`: a copy on another host holds each shard;
    `copies_of_one_ring`: the same once one ring is left; `copy_steps`: steps between copies. `interval_s`: between
    checkpoints; `wait_s`: training waits for one; `restore_s`: to read one. The node's agent sees the death of a
    process after `process_detect_s`, a stopped one after `frozen_detect_s`."""

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
        """Hosts exposed to reclaim (>= 1): the last one counts by its members, and not at all if it has spares only and
        is not full."""
        full = self.num_gpus // self.gpus_per_host * self.gpus_per_host
        return np.maximum(1.0, np.maximum(full, self.dp * self.cp) / self.gpus_per_host)

    def hosts_of(self, scope: str) -> Number:
        """Hosts that a loss takes; none for a process, killed or frozen."""
        hosts = {"process": 0, "frozen": 0, "gpu": 1, "host": 1, "reclaim": 1, "dry": self.num_hosts}
        hosts |= {"switch": self.hosts_per_switch, "power": self.hosts_per_power}
        return np.minimum(hosts[scope], self.num_hosts)

    def detect_of(self, scope: str) -> Number:
        return {"process": self.process_detect_s, "frozen": self.frozen_detect_s}.get(scope, self.detect_s)

    def gpus_of(self, scope: str) -> Number:
        """GPUs whose state a loss takes."""
        return 1 if scope in ("gpu", "process", "frozen") else self.hosts_of(scope) * self.gpus_per_host


def losses_cost_s(
    shape: RunShape, gpus: Number, detect_s: Number, is_reclaim: Number, rings: Number, rest: Number
) -> Number:
    """Seconds that losses of so many GPUs each cost with `rings` before and `rest` after them; 0 without rings.

    State comes from a replica, else a copy, else a checkpoint; rings follow each other on the hosts, so the holders of
    one shard are cp ranks apart. Half of the step that broke off is lost, too. Members of a reclaimed host hand over at
    the end of a step instead, if it ends within the notice and a ring is left to go on."""
    rings = np.asarray(rings)
    is_held = shape.copies_hold | shape.copies_of_one_ring & np.less(rings, 2)
    restores = (gpus >= shape.cp * rings) | ~is_held & (np.less(rings, 2) | (gpus > shape.cp * (rings - 1)))
    stop_s = np.where(is_reclaim, 0.0, detect_s) + shape.rebuild_s + np.where(restores, shape.restore_s, shape.heal_s)
    steps_again = np.where(
        restores, shape.interval_s / 2 / shape.step_s, np.where(rings < 2, shape.copy_steps / 2, 0.0)
    )
    broken_off = 0.5 * shape.step_s * shape.dp / np.maximum(rings, 1)
    notice_s = 0.0 if shape.spot is None else shape.spot.notice_s
    hands_over = is_reclaim & np.greater(rest, 0) & (2.0 * broken_off <= notice_s)
    lost_s = np.where(hands_over, shape.rebuild_s + shape.heal_s, stop_s + steps_again * shape.step_s + broken_off)
    return np.where(np.greater(rings, 0), lost_s, 0.0)


def share_hit(shape: RunShape, hosts: Number, rings: Number, hosts_away: Number = 0) -> Number:
    """The chance that a loss of so many hosts, or of a process, takes a member and not only spares."""
    left = np.maximum(shape.num_gpus - np.asarray(hosts_away) * shape.gpus_per_host, 1)
    return np.where(np.asarray(hosts) > 1, 1.0, np.minimum(1.0, np.asarray(rings) * shape.cp / left))


def rings_left(shape: RunShape, hosts_away: Number) -> Number:
    """Rings that the remaining GPUs make."""
    return np.clip((shape.num_gpus - np.asarray(hosts_away) * shape.gpus_per_host) // shape.cp, 0, shape.dp)


def rings_again(shape: RunShape, hosts_away: Number, rings: Number) -> Number:
    """Rings once hosts came back: spares are filled first, then whole rings (`control.placement`); as many as possible
    if none was left."""
    gpus = shape.num_gpus - np.asarray(hosts_away) * shape.gpus_per_host
    grown = np.clip((gpus - shape.spares) // shape.cp, 0, shape.dp)
    return np.where(np.asarray(rings) > 0, np.maximum(rings, grown), rings_left(shape, hosts_away))


def goodput_with(shape: RunShape, kept_s: float, losses: Mapping[str, int]) -> float:
    """The goodput of a run whose steps took `kept_s`, with these losses by scope and a spare for each."""
    rest = int(shape.dp > 1 or shape.spares > 0)
    lost = sum(
        number * losses_cost_s(shape, shape.gpus_of(scope), shape.detect_of(scope), scope == "reclaim", shape.dp, rest)
        for scope, number in losses.items()
    )
    return float(kept_s / (kept_s + lost + kept_s / shape.interval_s * shape.wait_s))
