"""Fit the efficiency classes on their half of the cases, and print them as `forecast/classes.py` has them.

python benchmarks/forecast/fit.py
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from benchmarks.forecast.cases import Case, all_cases
from elastic_ring.forecast.sizing.machines import Efficiency
from elastic_ring.forecast.sizing.step_time import step_time
from elastic_ring.gpus import GPUS

FREE = (
    *("matmul", "half_width", "attention", "narrow_heads", "elementwise", "overlap"),
    *("host_s", "ring_host_s", "experts_host_s"),
)
BOUNDS = {
    "matmul": (0.3, 0.95),
    "half_width": (10.0, 2000.0),
    "attention": (0.1, 0.9),
    "narrow_heads": (0.5, 1.0),
    "elementwise": (0.3, 4.0),
    "overlap": (0.3, 1.0),
    "host_s": (2e-4, 1e-2),
    "ring_host_s": (2e-4, 0.05),
    "experts_host_s": (2e-4, 0.1),
}
PULL = 0.3
"""Standard deviation of log of a figure around its assumed value: what few cases do not tell stays there."""


def assumed(name: str) -> Efficiency:
    """Where a fit begins: a ring's layer takes Python tens of milliseconds."""
    return Efficiency(name, ring_host_s=0.02, experts_host_s=0.03) if "elastic" in name else Efficiency(name)


def errors(cases: list[Case], eff: Efficiency) -> list[float]:
    return [math.log(float(step_time(case.job, GPUS[case.gpu], eff).total_s) / case.seen_s) for case in cases]


def fit(cases: list[Case], start: Efficiency, begin: Efficiency | None = None, rounds: int = 60) -> Efficiency:
    """Gauss-Newton on the logs from `begin` on, with a pull to `start`."""
    theta0 = np.log([float(getattr(start, name)) for name in FREE])
    theta = np.log([float(getattr(begin or start, name)) for name in FREE])

    def made(values: np.ndarray) -> Efficiency:
        figures: dict[str, Any] = {n: float(np.clip(np.exp(v), *BOUNDS[n])) for n, v in zip(FREE, values, strict=True)}
        return dataclasses.replace(start, **figures)

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.concatenate([np.array(errors(cases, made(values))) / 0.05, (values - theta0) / PULL])

    damp = 1.0
    for _ in range(rounds):
        r = residuals(theta)
        jac = np.stack([(residuals(theta + 1e-3 * unit) - r) / 1e-3 for unit in np.eye(len(FREE))], axis=1)
        move = np.linalg.solve(jac.T @ jac + damp * np.eye(len(FREE)), -jac.T @ r)
        if float((residuals(theta + move) ** 2).sum()) < float((r**2).sum()):
            theta, damp = theta + move, damp / 3
        else:
            damp *= 4
    return made(theta)


def main() -> None:
    cases = all_cases()
    for software, arch in (("fsdp-fa2", "hopper"), ("fsdp-fa2", "ampere"), ("elastic-ring", "hopper")):
        known = [case for case in cases if case.software == software and case.gpu in GPUS]
        mine = [case for case in known if GPUS[case.gpu].arch == arch]
        half = [case for case in mine if case.fitted]
        found = fit(half, assumed(f"{software}/{arch}"))
        print(found)
        for label, some in (("fitted", half), ("reported", [case for case in mine if not case.fitted])):
            off = np.exp(errors(some, found)) - 1
            size = np.abs(off)
            print(
                f"  {label}: {len(some)} cases, mean {np.mean(size):.1%}, median {np.median(size):.1%}, "
                f"worst {np.max(size):.1%}"
            )
            for case, one in zip(some, off, strict=True):
                print(f"    {one:+.1%} {case.name}")


if __name__ == "__main__":
    main()
