"""Calibration of the cost model by a short measurement on a ring's ranks; all ranks get equal figures.

Times messages over a given group and dense and sparse kernels, fits a fixed cost and a rate to each, and checks the
fit on held-out sizes. No processes or groups are started in this file; the timed cases are in `timed_cases`.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch

from elastic_ring.attention.autolayout import Sizes
from elastic_ring.costs import CostModel
from elastic_ring.errors import RunFailed
from elastic_ring.tuning.timed_cases import (
    LEAST_BYTES,
    Case,
    Hops,
    Ranks,
    TimingBudget,
    dense_cases,
    message_cases,
    sparse_cases,
)

NUM_WARM_UPS = 2
MOST_ROUNDS = 3
"""Of measuring cases whose times do not grow with their sizes, as beside another program."""


@dataclass(frozen=True)
class Check:
    """A timed case: the slowest rank's median time and the time that the fitted cost model predicts, in seconds."""

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


CalibrationOrigin = TypedDict(
    "CalibrationOrigin",
    {
        "device": str,
        "ranks": int,
        "threads": int,
        "dtype": str,
        "deterministic": bool,
        "num_heads": int,
        "num_kv_heads": int,
        "head_dim": int,
        "itemsize": int,
        "torch": str,
        "date": str,
        "effort": dict[str, float | tuple[int, int] | None],
        "cuda": str | None,
        "nccl": str,
        "not measured": list[str],
    },
    total=False,
)


@dataclass(frozen=True)
class Calibration:
    """A measured cost model, all measurements with their predictions, and their origin (device, versions, date)."""

    cost_model: CostModel
    checks: tuple[Check, ...]
    about: CalibrationOrigin

    def write(self, path: str | Path, rates: Mapping[str, object] | None = None) -> None:
        """As `CostModel.write`; `rates`: the fields of `MachineRates`, for a forecast."""
        checks = [{**asdict(check), "error": check.error} for check in self.checks]
        self.cost_model.write(path, self.about, checks, rates)


class Stopwatch:
    """Times a function on all ranks at once and returns the slowest rank's time, equal on all ranks.

    Repeats end once `limit_s` seconds have passed on any rank since the stopwatch was created.
    """

    def __init__(
        self,
        group: Ranks | None,
        device: torch.device,
        effort: TimingBudget,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._group, self._device, self._effort, self._clock = group, device, effort, clock
        self._begun = clock()

    def median_s(self, run: Callable[[], object]) -> float:
        """The median of the repeats of `run`, in seconds, after two warm-ups (connections, memory, compilation)."""
        times: list[float] = []
        for repeat in range(NUM_WARM_UPS + self._effort.repeats):
            elapsed_s, spent_s = self.once_s(run)
            if repeat >= NUM_WARM_UPS:
                times.append(elapsed_s)
                if spent_s > self._effort.limit_s:
                    break
        return statistics.median(times)

    def once_s(self, run: Callable[[], object]) -> tuple[float, float]:
        """(seconds that `run` took, seconds since the stopwatch was created), each the maximum over the ranks. Also a
        barrier of the ranks."""
        begin = self._clock()
        run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        end = self._clock()
        if self._group is None:
            return end - begin, end - self._begun
        own = torch.tensor((end - begin, end - self._begun), dtype=torch.float64, device=self._device)
        rows = [torch.empty_like(own) for _ in range(self._group.size())]
        self._group.allgather([rows], [own]).wait()
        elapsed_s, spent_s = torch.stack(rows).amax(0).tolist()
        return elapsed_s, spent_s


def fit(counts: Sequence[float], amounts: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Fit times_s = count * each + amount * per and return (each, per) in seconds; both are at least 0.

    Least squares of the relative errors, so that short and long times have equal weight. Raises `ValueError` for fewer
    than two cases, for proportional cases, and for a time that is not positive and finite.
    """
    if len(times_s) < 2 or not all(0 < time_s < math.inf for time_s in times_s):
        raise ValueError(f"times_s={list(times_s)}: give at least two positive times")
    a = [count / time_s for count, time_s in zip(counts, times_s, strict=True)]
    b = [amount / time_s for amount, time_s in zip(amounts, times_s, strict=True)]
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
    effort: TimingBudget = TimingBudget(),  # noqa: B008 (frozen)
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure `device` and the links of `group`. All ranks must call this together and get equal figures.

    `sizes` are the sizes of the attention calls; kernels run on all ranks at once, as in training. Without a group, or
    with a group of one, message figures keep their defaults and `about` lists them as not measured. Raises `RunFailed`
    if times do not grow with sizes (the machine is too noisy), and any error of the group or the kernels.
    """
    device = torch.device(device)
    group = None if group is None or group.size() == 1 else group
    stopwatch = Stopwatch(group, device, effort, clock)
    default, checks = CostModel(), list[Check]()
    link, message_s = default.link_bytes_per_s, default.message_s
    if group is not None:
        message_s, link = _fit_rate(stopwatch, "message", partial(message_cases, group, device, effort), checks)
    kernels = (device, sizes, dtype, deterministic, effort)
    _, dense_flops = _fit_rate(stopwatch, "dense", partial(dense_cases, *kernels), checks)
    call_s, kernel_flops = _fit_rate(stopwatch, "sparse", partial(sparse_cases, *kernels), checks)
    overlap, on_gpu = default.overlap, device.type == "cuda"
    if group is not None:  # the hidden share of the shorter of a kernel and a message of similar duration
        kernel = next(dense_cases(*kernels)).run
        kernel_s = stopwatch.median_s(kernel)
        num_bytes = round(min(effort.most_bytes, max(LEAST_BYTES, (kernel_s - message_s) * link)))
        hop = Hops(group, device, num_bytes, 1)
        moving_s = stopwatch.median_s(hop)
        both_s = stopwatch.median_s(lambda: hop(kernel))
        overlap = min(1.0, max(0.0, (kernel_s + moving_s - both_s) / min(kernel_s, moving_s)))
    cost_model = CostModel(kernel_flops, link, message_s, call_s, dense_flops, overlap, per_tile=device.type == "cpu")
    about: CalibrationOrigin = {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {os.cpu_count()} cores",
        "ranks": 1 if group is None else group.size(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "deterministic": deterministic,
        "num_heads": sizes.num_heads,
        "num_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "itemsize": sizes.itemsize,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "effort": asdict(effort),
    }
    if on_gpu:
        about |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    if group is None:
        about["not measured"] = ["link_bytes_per_s", "message_s", "overlap"]
    return Calibration(cost_model, tuple(checks), about)


def _fit_rate(
    stopwatch: Stopwatch, kind: str, cases: Callable[[], Iterable[Case]], checks: list[Check]
) -> tuple[float, float]:
    """(seconds each, amount per second) fitted to the cases; appends them to `checks`. Frees a case after timing it.
    Times that do not grow with sizes are measured again, and the least of each case is fitted."""
    timed = list[Check]()
    for _ in range(MOST_ROUNDS):
        again = [Check(c.name, c.count, c.amount, stopwatch.median_s(c.run), 0.0, c.fitted) for c in cases()]
        timed = [min(pair, key=lambda check: check.measured_s) for pair in zip(timed or again, again, strict=True)]
        chosen = [check for check in timed if check.fitted]
        each, per = fit([c.count for c in chosen], [c.amount for c in chosen], [c.measured_s for c in chosen])
        if per > 0:
            break
    else:
        raise RunFailed(
            f"the times of {kind} cases do not grow with their sizes"
            f" ({', '.join(f'{check.measured_s:.2e}' for check in timed)} s): nothing else should run here meanwhile;"
            " or give more repeats, longer sequences or longer messages"
        )
    checks += [replace(check, predicted_s=check.count * each + check.amount * per) for check in timed]
    return each, 1 / per
