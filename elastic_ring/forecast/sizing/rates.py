"""What `elastic-ring calibrate` measured on the machine, in place of a class's and a data sheet's figures.

A kernel alone reaches more than a whole step's kernels do. So a class keeps its shares, and they are scaled by what the
machine's kernels reach over what those of the fitted machine do (`ALONE`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from elastic_ring.files import plain_json, read_small
from elastic_ring.forecast.sizing.machines import Efficiency, Fleet, Links, Number, Positive
from elastic_ring.gpus import GB
from elastic_ring.validation import Must, PositiveInt, from_plain, settings

ALONE: Mapping[str, float] = {"matmul": 0.72, "attention": 0.612}
"""Shares of an H200's peak: a wide product of bf16 (assumed until `calibrate` has run there), and both passes of
flash-attn-4 over 32 K tokens, 14 FLOP a pair and element (measured, 606 of 989 TFLOP/s)."""
LEAST_SPREAD = 0.001
AGAIN = "measure it again with elastic-ring calibrate"


@settings
class Product:
    _prefix = "matmul "
    width: PositiveInt
    tokens: PositiveInt
    flops: Positive


@settings
class AttentionRate:
    _prefix = "attention "
    head_dim: PositiveInt
    tokens: PositiveInt
    flops: Positive


@settings
class Collective:
    _prefix = "collectives "
    kind: Literal["all-gather", "reduce-scatter"]
    ranks: PositiveInt
    level: Literal["host", "network"]
    bytes: PositiveInt
    bytes_s: Positive


@settings
class GroupBuild:
    _prefix = "groups "
    ranks: PositiveInt
    s: Positive


@settings
class HostFigures:
    """`ranks_per_host`: that measured at the same time, each with a card of its own. `storage_bytes_s`: of all ranks
    of the hosts together. `between_ranks`: "not measured" by one rank."""

    _prefix = ""
    ranks_per_host: PositiveInt
    to_host_bytes_s: Positive
    from_host_bytes_s: Positive
    between_ranks: Annotated[float, Field(ge=0), Must("a number of at least 0")] | Literal["not measured"]
    storage_bytes_s: Positive | None = None


@dataclass(frozen=True)
class Rates:
    """The rows of a calibration, which may be none but for `matmul`."""

    matmul: list[Product]
    attention: list[AttentionRate]
    collectives: list[Collective]
    groups: list[GroupBuild]
    host: HostFigures

    def efficiency(self, eff: Efficiency, fleet: Fleet) -> Efficiency:
        """The class's shares, at this machine's speed."""
        spec = fleet.spec
        alone, half_width = self._products()
        wide = [row.flops for row in self.attention if row.head_dim >= 128]
        of_narrow = {row.tokens: row.flops for row in self.attention if row.head_dim < 128}
        alike = [of_narrow[r.tokens] / r.flops for r in self.attention if r.head_dim >= 128 and r.tokens in of_narrow]
        links, apart = self._rates("host"), self.host.between_ranks
        if not isinstance(apart, str):
            eff = dataclasses.replace(eff, jitter=max(apart, LEAST_SPREAD), jitter_origin="calibrated")
        return dataclasses.replace(
            eff,
            matmul=eff.matmul * alone / spec.peak_flops / ALONE["matmul"],
            half_width=half_width,
            attention=eff.attention * max(wide) / spec.peak_flops / ALONE["attention"] if wide else eff.attention,
            narrow_heads=min(1.0, max(alike)) if alike else eff.narrow_heads,
            link=max(links) / spec.nvlink_bytes_s if links else eff.link,
            origin="calibrated",
        )

    def fleet(self, fleet: Fleet) -> Fleet:
        """With the links that were measured. Cards' rate is that of which `Efficiency.link` gives the measured one."""
        links, network = fleet.links, self._rates("network")
        host = self._rates("host")
        share = max(host) / fleet.spec.nvlink_bytes_s if host else 1.0
        found: dict[str, Number] = {"pcie_gb_s": min(self.host.to_host_bytes_s, self.host.from_host_bytes_s) / GB}
        if network:
            found["nic_gb_s"] = max(network) / self.host.ranks_per_host / share / GB
        if self.host.storage_bytes_s is not None:
            found["storage_gb_s"] = self.host.storage_bytes_s / GB
        return dataclasses.replace(fleet, links=Links(**{**vars(links), **found}))

    def doubled_s(self) -> float | None:
        """What each doubling of a group's ranks adds to the time of its build; None with one size."""
        if len({row.ranks for row in self.groups}) < 2:
            return None
        doublings = np.log2([row.ranks for row in self.groups])
        slope = np.polyfit(doublings, [row.s for row in self.groups], 1)[0]
        return max(0.0, float(slope))

    def _products(self) -> tuple[float, float]:
        """(FLOP/s of wide layers, the width that reaches half of it): width / rate is linear in width."""
        widths = np.array([row.width for row in self.matmul], dtype=float)
        rates = np.array([row.flops for row in self.matmul])
        if len(widths) < 2:
            return float(rates.max()), 0.0
        slope, start = np.polyfit(widths, widths / rates, 1, w=rates / widths)
        if slope <= 0 or start < 0:
            return float(rates.max()), 0.0
        return float(1.0 / slope), float(start / slope)

    def _rates(self, level: str) -> list[float]:
        """Of both collectives of the largest group, the slower one at its longest."""
        rows = [row for row in self.collectives if row.level == level]
        most = max((row.ranks for row in rows), default=0)
        best: dict[str, float] = {}
        for row in rows:
            if row.ranks == most:
                best[row.kind] = max(best.get(row.kind, 0.0), row.bytes_s)
        return [min(best.values())] if best else []


def read_rates(path: Path) -> Rates | None:
    """The rates in a file of `elastic-ring calibrate`; None in an older one. Raises ValueError that names the file and
    what is wrong."""
    plain: Any = plain_json(read_small(path))
    rates = plain.get("rates")
    if rates is None:
        return None
    try:
        host = {
            "ranks_per_host": rates["ranks_per_host"],
            **rates["host_copies"],
            "between_ranks": rates["stragglers"]["between_ranks"],
            **({"storage_bytes_s": rates["storage"]["write_bytes_s"]} if "storage" in rates else {}),
        }
        found = Rates(
            [from_plain(Product, row) for row in rates["matmul"]],
            [from_plain(AttentionRate, row) for row in rates["attention"]],
            [from_plain(Collective, row) for row in rates["collectives"]],
            [from_plain(GroupBuild, row) for row in rates["groups"]],
            from_plain(HostFigures, host),
        )
        if not found.matmul:
            raise ValueError("matmul: must have a row")
    except KeyError as error:
        raise ValueError(f"--machine {path}: rates: {error} is missing; {AGAIN}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"--machine {path}: rates: {error}; {AGAIN}") from error
    return found
