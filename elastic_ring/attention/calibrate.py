"""A machine's figures by a short measurement on the ranks that will plan with them, the same figures on all of them.

Times short and long messages over a given group, and a device's kernels, dense and sparse; fits a fixed cost and a
rate to each; and says how well the fit tells sizes that it was not made from. Starts no process and makes no group.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from elastic_ring.attention.choice import Sizes
from elastic_ring.attention.machine import Machine
from elastic_ring.attention.timed_cases import (
    LEAST_BYTES,
    Case,
    Effort,
    Hops,
    Ranks,
    dense_cases,
    message_cases,
    sparse_cases,
)
from elastic_ring.errors import RunFailed

NUM_WARM_UPS = 2


@dataclass(frozen=True)
class Check:
    """What was measured of a case, the slowest rank's median, and what the figures say of it."""

    name: str
    count: int
    amount: float
    measured_s: float
    predicted_s: float
    fitted: bool

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Calibration:
    """A machine's figures, every measurement beside what they say of it, and where and when they were taken."""

    machine: Machine
    checks: tuple[Check, ...]
    about: dict[str, Any]

    def write(self, path: str | Path) -> None:
        """As `Machine.write`."""
        self.machine.write(path, self.about, [{**asdict(check), "error": check.error} for check in self.checks])


class Stopwatch:
    """Times the same thing on all ranks at once. Every time it gives is the slowest rank's, equal on all of them.

    Once `limit_s` seconds have passed since it was made (on any rank), what is timed is no longer repeated.
    """

    def __init__(
        self, group: Ranks | None, device: torch.device, effort: Effort,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._group, self._device, self._effort, self._clock = group, device, effort, clock
        self._begun = clock()

    def median_s(self, run: Callable[[], None]) -> float:
        """The median of the repeats of `run`, after two that are thrown away: connections, memory and compilers."""
        times: list[float] = []
        for repeat in range(NUM_WARM_UPS + self._effort.repeats):
            taken, spent = self.once_s(run)
            if repeat >= NUM_WARM_UPS:
                times.append(taken)
                if spent > self._effort.limit_s:
                    break
        return statistics.median(times)

    def once_s(self, run: Callable[[], None]) -> tuple[float, float]:
        """(seconds that `run` took, seconds since the watch was made)."""
        begin = self._clock()
        run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        end = self._clock()
        taken, spent = self._most(end - begin, end - self._begun)
        return taken, spent

    def _most(self, *values: float) -> list[float]:
        """The most of each over the ranks. Also where they wait for one another before the next repeat."""
        if self._group is None:
            return list(values)
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        rows = [torch.empty_like(own) for _ in range(self._group.size())]
        self._group.allgather([rows], [own]).wait()
        most: list[float] = torch.stack(rows).amax(0).tolist()
        return most


def fit(counts: Sequence[float], amounts: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """(seconds each, seconds per amount) that tell times_s = count * each + amount * per best: by least squares of the
    relative errors, so that short times weigh as much as long ones. Neither is negative.

    Raises `ValueError` where two such figures do not follow: fewer than two cases, all of one proportion, or a time
    that is not positive.
    """
    if len(times_s) < 2 or not all(0 < taken < math.inf for taken in times_s):
        raise ValueError(f"times_s={list(times_s)}: give at least two positive times")
    a = [count / taken for count, taken in zip(counts, times_s, strict=True)]
    b = [amount / taken for amount, taken in zip(amounts, times_s, strict=True)]
    aa, bb, ab = (sum(x * y for x, y in zip(u, v, strict=True)) for u, v in ((a, a), (b, b), (a, b)))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        raise ValueError(f"amounts={list(amounts)} for counts={list(counts)}: all of one proportion; vary the sizes")
    each = (sum(a) * bb - sum(b) * ab) / determinant
    per = (sum(b) * aa - sum(a) * ab) / determinant
    if each < 0:
        return 0.0, sum(b) / bb
    return (sum(a) / aa, 0.0) if per < 0 else (each, per)


def calibrate(
    group: Ranks | None,
    device: torch.device | str,
    sizes: Sizes,
    *,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = True,
    effort: Effort = Effort(),  # noqa: B008 (frozen)
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure `device` and the links of `group`; every rank of it calls this alike and gets equal figures.

    `sizes` are those of the attention calls; kernels run on all ranks at once, as in training. Without a group, or
    alone in it, messages are not measured: their figures stay the defaults and `about` says so. Raises `RunFailed`
    where times do not grow with sizes, which is a machine too noisy for the effort, and what group and kernels raise.
    """
    device = torch.device(device)
    group = None if group is None or group.size() == 1 else group
    stopwatch = Stopwatch(group, device, effort, clock)
    default, checks = Machine(), list[Check]()
    link, message_s = default.link_bytes_per_s, default.message_s
    if group is not None:
        message_s, link = _rate(stopwatch, "message", message_cases(group, device, effort), checks)
    _, dense_flops = _rate(stopwatch, "dense", dense_cases(device, sizes, dtype, deterministic, effort), checks)
    call_s, kernel_flops = _rate(stopwatch, "sparse", sparse_cases(device, sizes, dtype, deterministic, effort), checks)
    overlap, per_tile = default.overlap, device.type == "cpu"
    if group is not None:
        kernel = next(dense_cases(device, sizes, dtype, deterministic, effort)).run
        overlap = _overlap(stopwatch, group, device, kernel, message_s, link, effort)
    machine = Machine(kernel_flops, link, message_s, call_s, dense_flops, overlap, per_tile)
    return Calibration(machine, tuple(checks), _about(group, device, sizes, dtype, deterministic, effort))


def _rate(stopwatch: Stopwatch, what: str, cases: Iterable[Case], checks: list[Check]) -> tuple[float, float]:
    """(seconds each, amount per second) of `cases`, each let go of once it was timed; adds them to `checks`."""
    timed = [Check(c.name, c.count, c.amount, stopwatch.median_s(c.run), 0.0, c.fitted) for c in cases]
    chosen = [check for check in timed if check.fitted]
    each, per = fit([c.count for c in chosen], [c.amount for c in chosen], [c.measured_s for c in chosen])
    if per == 0:
        raise RunFailed(
            f"the times of {what} cases do not grow with their sizes"
            f" ({', '.join(f'{check.measured_s:.2e}' for check in timed)} s): nothing else should run here meanwhile;"
            " or give more repeats, longer sequences or longer messages"
        )
    checks += [replace(check, predicted_s=check.count * each + check.amount * per) for check in timed]
    return each, 1 / per


def _overlap(
    stopwatch: Stopwatch, group: Ranks, device: torch.device, kernel: Callable[[], None], message_s: float,
    link_bytes_per_s: float, effort: Effort,
) -> float:  # fmt: skip
    """The share of the shorter that hides when `kernel` runs beside a message that takes about as long."""
    kernel_s = stopwatch.median_s(kernel)
    num_bytes = round(min(effort.most_bytes, max(LEAST_BYTES, (kernel_s - message_s) * link_bytes_per_s)))
    hop = Hops(group, device, num_bytes, 1)
    moving_s = stopwatch.median_s(hop)
    both_s = stopwatch.median_s(lambda: hop(kernel))
    return min(1.0, max(0.0, (kernel_s + moving_s - both_s) / min(kernel_s, moving_s)))


def _about(
    group: Ranks | None, device: torch.device, sizes: Sizes, dtype: torch.dtype, deterministic: bool, effort: Effort
) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {os.cpu_count()} cores",
        "ranks": 1 if group is None else group.size(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "deterministic": deterministic,
        **asdict(sizes),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "effort": asdict(effort),
    }
    if on_gpu:
        about |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    if group is None:
        about["not measured"] = ["link_bytes_per_s", "message_s", "overlap"]
    return about
