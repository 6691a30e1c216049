"""Rates that `elastic-ring calibrate` measured, in place of a class's and a data sheet's figures.

A kernel alone reaches more than a whole step's kernels do. So a class keeps its shares, scaled by the rate of this
machine's kernels over that of the fitted machine's (`ALONE`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from elastic_ring.costs import read_machine_file
from elastic_ring.forecast.sizing.machines import Efficiency, Fleet, Positive
from elastic_ring.gpus import GB
from elastic_ring.validation import Must, PositiveInt, from_plain, settings

ALONE: Mapping[str, float] = {"matmul": 0.72, "attention": 0.612}
"""Shares of an H200's peak: a wide product of bf16 (assumed until `calibrate` has run there), and both passes of
flash-attn-4 over 32 K tokens, 14 FLOP a pair and element (measured, 606 of 989 TFLOP/s)."""
LEAST_SPREAD = 0.001


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
    """`ranks_per_host`: ranks that measured at the same time, each with a card of its own. `storage_bytes_s`: of all
    ranks of the hosts together. `between_ranks`: "not measured" by one rank."""

    _prefix = ""
    ranks_per_host: PositiveInt
    to_host_bytes_s: Positive
    from_host_bytes_s: Positive
    between_ranks: Annotated[float, Field(ge=0), Must("a number of at least 0")] | Literal["not measured"]
    storage_bytes_s: Positive | None = None


@dataclass(frozen=True)
class Rates:
    """The rows of a calibration; all but `matmul` may be empty. `device`: the name of the GPU, if the file has it."""

    matmul: list[Product]
    attention: list[AttentionRate]
    collectives: list[Collective]
    groups: list[GroupBuild]
    host: HostFigures
    device: str | None = None

    def efficiency(self, eff: Efficiency, fleet: Fleet) -> Efficiency:
        """The class's shares, at this machine's speed."""
        spec, links = fleet.spec, self._rates("host")
        alone, half_width = self._products()
        wide = [row for row in self.attention if row.head_dim >= 128]
        narrow = {row.tokens: row.flops for row in self.attention if row.head_dim < 128}
        ratios = [narrow[row.tokens] / row.flops for row in wide if row.tokens in narrow]
        attention = max((row.flops for row in wide), default=0.0)
        jitter = self.host.between_ranks
        if not isinstance(jitter, str):
            eff = dataclasses.replace(eff, jitter=max(jitter, LEAST_SPREAD), jitter_origin="calibrated")
        return dataclasses.replace(
            eff,
            matmul=eff.matmul * alone / spec.peak_flops / ALONE["matmul"],
            half_width=half_width,
            attention=eff.attention * attention / spec.peak_flops / ALONE["attention"] if wide else eff.attention,
            narrow_heads=min(1.0, max(ratios)) if ratios else eff.narrow_heads,
            link=links / spec.nvlink_bytes_s if links else eff.link,
            origin="calibrated",
        )

    def fleet(self, fleet: Fleet) -> Fleet:
        """The fleet with the links that were measured. The cards' rate gives the measured one times the efficiency's
        `link`."""
        network, host = self._rates("network"), self._rates("host")
        share = host / fleet.spec.nvlink_bytes_s if host else 1.0
        links = dataclasses.replace(
            fleet.links, pcie_gb_s=min(self.host.to_host_bytes_s, self.host.from_host_bytes_s) / GB
        )
        if network:
            links = dataclasses.replace(links, nic_gb_s=network / self.host.ranks_per_host / share / GB)
        if self.host.storage_bytes_s is not None:
            links = dataclasses.replace(links, storage_gb_s=self.host.storage_bytes_s / GB)
        return dataclasses.replace(fleet, links=links)

    def doubled_s(self) -> float | None:
        """Seconds that each doubling of a group's ranks adds to its build; None with one size."""
        if len({row.ranks for row in self.groups}) < 2:
            return None
        doublings = np.log2([row.ranks for row in self.groups])
        slope = np.polyfit(doublings, [row.s for row in self.groups], 1)[0]
        return max(0.0, float(slope))

    def _products(self) -> tuple[float, float]:
        """(FLOP/s of wide layers, the width that reaches half of it): width / rate is linear in width."""
        widths = np.array([row.width for row in self.matmul], dtype=float)
        rates = np.array([row.flops for row in self.matmul])
        slope = start = 0.0
        if len(widths) >= 2:
            slope, start = np.polyfit(widths, widths / rates, 1, w=rates / widths)
        if slope <= 0 or start < 0:
            return float(rates.max()), 0.0
        return float(1.0 / slope), float(start / slope)

    def _rates(self, level: Literal["host", "network"]) -> float:
        """Bytes a second of the slower collective of the largest group, at its best; 0 if not measured."""
        rows = [row for row in self.collectives if row.level == level]
        most = max((row.ranks for row in rows), default=0)
        best: dict[str, float] = {}
        for row in rows:
            if row.ranks == most:
                best[row.kind] = max(best.get(row.kind, 0.0), row.bytes_s)
        return min(best.values(), default=0.0)


def read_rates(path: Path) -> Rates:
    """The rates in a file of `elastic-ring calibrate`. Raises ValueError that names the file and what is wrong, for one
    that it wrote without rates, too."""
    _, plain = read_machine_file(path)
    again = "measure it again with elastic-ring calibrate"
    if plain.get("rates") is None:
        raise ValueError(f"--machine {path}: has no rates for a forecast; {again}")
    rates = plain["rates"]
    try:
        host = {
            "ranks_per_host": rates["ranks_per_host"],
            **rates["host_copies"],
            "between_ranks": rates["stragglers"]["between_ranks"],
            **({"storage_bytes_s": rates["storage"]["write_bytes_s"]} if "storage" in rates else {}),
        }
        if not rates["matmul"]:
            raise ValueError("matmul: must have a row")
        return Rates(
            [from_plain(Product, row) for row in rates["matmul"]],
            [from_plain(AttentionRate, row) for row in rates["attention"]],
            [from_plain(Collective, row) for row in rates["collectives"]],
            [from_plain(GroupBuild, row) for row in rates["groups"]],
            from_plain(HostFigures, host),
            str(device) if (device := plain.get("about", {}).get("device")) else None,
        )
    except KeyError as error:
        raise ValueError(f"--machine {path}: rates: {error} is missing; {again}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"--machine {path}: rates: {error}; {again}") from error
