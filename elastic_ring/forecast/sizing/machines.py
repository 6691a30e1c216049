"""Fleets (GPUs, links) as TOML files or by name, efficiency classes of their software, and ranges of uncertain inputs.

Efficiencies are fitted (`benchmarks/forecast/fit.py` says on which cases), and each has its spread. Rates in bytes a
second are one way, of one GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from elastic_ring.files import MAX_TOML_BYTES, plain_toml, read_small
from elastic_ring.gpus import GB, GPUS, Gpu
from elastic_ring.validation import Must, NonNegativeInt, PositiveInt, from_plain, settings

Number = Any
"""A float, or an array of draws: all arithmetic here is numpy's."""
Origin = Literal["measured", "calibrated", "specified", "assumed"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), Must("a number above 0")]


@dataclass(frozen=True)
class Efficiency:
    """The efficiency of a class of software on a kind of GPU, as shares of the spec sheet.

    `matmul`: of wide layers; a layer of `half_width` reaches half of it. `attention`: of heads of 128, counted as 2 for
    the forward and 5 for the backward pass; `narrow_heads`: share of it for heads of 64. `elementwise`: memory traffic
    outside of matrix products, over one read or write of each activation. `overlap`: hidden share of the shorter of
    kernels and messages. `host_s`: host time of a layer in both passes, which bounds small ones; `ring_host_s`: in a
    ring of several; `experts_host_s`: of a layer with experts. `spread`: the standard deviation of log(seen /
    forecast). `seen`: the largest case of the fit, (GPUs, parameters).
    """

    name: str
    matmul: Number = 0.72
    half_width: Number = 300.0
    attention: Number = 0.55
    narrow_heads: Number = 0.80
    elementwise: Number = 1.0
    overlap: Number = 0.7
    link: Number = 0.8
    host_s: Number = 2.0e-3
    ring_host_s: Number = 2.0e-3
    experts_host_s: Number = 2.0e-3
    jitter: Number = 0.004
    jitter_origin: Origin = "assumed"
    spread: float = 0.06
    origin: Origin = "assumed"
    seen: tuple[int, float] = (4, 8.0e9)


CLASSES: Mapping[str, Efficiency] = {
    efficiency.name: efficiency
    for efficiency in (
        Efficiency(
            "elastic-ring/hopper",
            *(0.531, 314.0, 0.606, 0.873, 1.05, 0.673),
            host_s=0.0061,
            ring_host_s=0.0253,
            experts_host_s=0.0348,
            spread=0.048,
            origin="calibrated",
        ),
        Efficiency(
            "fsdp-fa2/hopper",
            *(0.657, 304.0, 0.186, 0.80, 1.01, 0.41),
            spread=0.062,
            origin="calibrated",
            seen=(512, 6.5e10),
        ),
        Efficiency(
            "fsdp-fa2/ampere",
            *(0.788, 294.0, 0.325, 0.98, 0.97, 0.64),
            spread=0.076,
            origin="calibrated",
            seen=(64, 6.5e10),
        ),
        Efficiency("vendor/hopper", spread=0.10),
    )
}
"""By name. `vendor`: a textbook's figures for tuned kernels, not fitted; the others by `benchmarks/forecast/fit.py`. A
spread is the 80th percentile of the fitted half's errors over 1.28, at least what two hosts differ by (3.5 %); of
elastic-ring, whose fitted half is 13 cases for 11 figures, of the other half's. Its `host_s` is measured where the host
never waits: 85 ms for the 14 layers of `8b-keep` (benchmarks/results/steps/2026-11-28-all-parts-2xH200.md)."""


@settings
class Links:
    """Rates of one GPU in one direction, in GB/s."""

    nvlink_gb_s: Positive
    nic_gb_s: Positive
    pcie_gb_s: Positive = 55.0
    storage_gb_s: Positive = 1.0
    """Rate at which all checkpoints together are written."""


@settings
class Fleet:
    """GPUs that are rented or owned together. Raises ValueError for an unknown type."""

    _prefix = "fleet "

    gpu: str
    """Type: A100-40, A100-80, H100-80, H200, B200."""
    links: Links
    name: str = "own"
    gpus_per_host: PositiveInt = 8
    hosts_per_switch: PositiveInt = 32
    hosts_per_power_domain: PositiveInt = 128
    num_gpus: NonNegativeInt = 0
    """GPUs of the fleet, spares included; 0: as many as the settings take."""
    gpu_gib: Positive | None = None
    """Memory that CUDA shows; the type's if left out."""
    host_watts: Positive | None = None
    """A GPU's share of a host's power; the type's if left out."""

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise ValueError(f"fleet gpu={self.gpu!r}: must be one of {', '.join(GPUS)}")

    @property
    def spec(self) -> Gpu:
        """The spec sheet, with this fleet's links."""
        links = self.links
        return replace(
            GPUS[self.gpu],
            nvlink_bytes_s=links.nvlink_gb_s * GB,
            nic_bytes_s=links.nic_gb_s * GB,
            pcie_bytes_s=links.pcie_gb_s * GB,
            host_watts=self.host_watts or GPUS[self.gpu].host_watts,
        )

    @property
    def memory_gib(self) -> float:
        return self.gpu_gib or GPUS[self.gpu].gib


def named_fleet(name: str) -> Fleet:
    """A fleet of hosts of eight as the vendor sells them, by the GPU's name in any case."""
    gpu = next((gpu for gpu in GPUS.values() if gpu.name.lower() == name.lower()), None)
    if gpu is None:
        raise ValueError(f"--fleet {name}: is no file and no GPU type; give one of {', '.join(GPUS)}, or a TOML file")
    links = Links(gpu.nvlink_bytes_s / GB, gpu.nic_bytes_s / GB, gpu.pcie_bytes_s / GB, storage_gb_s=25.0)
    return Fleet(gpu=gpu.name, links=links, name=gpu.name)


def read_fleet(text: str) -> Fleet:
    """From a TOML file, or by name. Raises ValueError that names what is wrong."""
    if not text.endswith(".toml") and not Path(text).exists():
        return named_fleet(text)
    plain = read_toml(text, "--fleet")
    if "links" not in plain:
        raise ValueError(f"--fleet {text}: links: must be given, a table [links] with nvlink_gb_s and nic_gb_s")
    try:
        return from_plain(Fleet, plain, "fleet.")
    except ValueError as error:
        raise ValueError(f"--fleet {text}: {error}") from error


def read_toml(path: str, flag: str) -> dict[str, object]:
    try:
        return plain_toml(read_small(path, MAX_TOML_BYTES, is_asked=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} {path}: cannot be read as TOML ({error})") from error


def efficiency_of(arch: str) -> Efficiency:
    """Our class for a kind of GPU; Hopper's, marked assumed, if none was fitted."""
    key, nearest = f"elastic-ring/{arch}", CLASSES["elastic-ring/hopper"]
    assumed = replace(nearest, name=key, origin="assumed", spread=max(0.15, nearest.spread))
    return CLASSES.get(key, assumed)


Z = 1.2815515655446004
"""The point of a normal distribution above which a tenth lies."""


@dataclass(frozen=True)
class Range:
    """An uncertain input, log-normal on both sides of its median, each with its own width."""

    p10: float
    p50: float
    p90: float
    unit: str = ""
    origin: Origin = "assumed"

    def __post_init__(self) -> None:
        if not 0 < self.p10 <= self.p50 <= self.p90:
            raise ValueError(f"P10, P50, P90 = {self.p10}, {self.p50}, {self.p90}: must be above 0 and rise")

    def draw(self, num: int, rng: np.random.Generator) -> NDArray[np.float64]:
        normal = rng.standard_normal(num)
        low, high = math.log(self.p50 / self.p10) / Z, math.log(self.p90 / self.p50) / Z
        return np.asarray(self.p50 * np.exp(normal * np.where(normal < 0, low, high)))


def around(p50: float, spread: float, unit: str = "", origin: Origin = "assumed") -> Range:
    """A median with the standard deviation `spread` of its log."""
    wide = float(np.exp(Z * spread))
    return Range(p50 / wide, p50, p50 * wide, unit, origin)


def quantiles(draws: NDArray[np.float64]) -> tuple[float, float, float]:
    """P10, P50, P90. As `np.quantile`, which imports numpy.ma."""
    ordered = np.sort(draws)
    places = np.array([0.1, 0.5, 0.9]) * (len(ordered) - 1)
    low, middle, high = np.interp(places, np.arange(len(ordered)), ordered)
    return float(low), float(middle), float(high)
