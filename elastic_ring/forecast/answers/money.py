"""What a run costs: rented or owned, energy, dollars a committed token. Prices are dated rows with a source each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from elastic_ring.forecast.sizing.machines import Fleet, Positive, Range, read_toml
from elastic_ring.validation import Must, from_plain, settings

STALE_DAYS = 90
PRICES = Path(__file__).with_name("prices.toml")
Three = Annotated[
    list[Positive], Field(min_length=3, max_length=3), Must("three finite numbers above 0, P10, P50, P90")
]
Share = Annotated[float, Field(ge=0, le=1), Must("a share from 0 to 1")]
HOUR = 3600.0


@settings
class Price:
    """A row: dollars a GPU-hour (P10, P50, P90) of `gpu` by `kind`, with date and source."""

    _prefix = "price "

    gpu: str
    kind: Literal["on demand", "reserved", "spot", "owned"]
    usd_hour: Three
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$"), Must("a date, 2026-05-01")]
    source: Annotated[str, Field(min_length=1), Must("a source")]
    on_hours: Three = field(default_factory=lambda: [12.0, 48.0, 200.0])
    """Spot capacity: mean hours until a host is reclaimed."""
    off_hours: Three = field(default_factory=lambda: [0.3, 1.0, 6.0])
    """Median hours until a reclaimed host comes back."""
    dry_hours: Three = field(default_factory=lambda: [100.0, 400.0, 2000.0])
    """Mean hours until all hosts are reclaimed at once."""
    notice_s: Positive = 120.0

    def capacity(self) -> dict[str, Range]:
        """The uncertain inputs of spot capacity; none for other kinds."""
        hours = {"on_hours": self.on_hours, "off_hours": self.off_hours, "dry_hours": self.dry_hours}
        is_spot = self.kind == "spot"
        return {name: Range(low, mid, high, "h", "assumed") for name, (low, mid, high) in hours.items() if is_spot}

    def range(self) -> Range:
        low, middle, high = self.usd_hour
        return Range(low, middle, high, "USD a GPU-hour", "specified")


@settings
class Owned:
    """The costs of a fleet that is bought. Defaults are assumed; dollars of 2026."""

    usd_per_gpu: Positive = 33_000.0
    """Server's share included."""
    network_share: Share = 0.15
    """On top, for switches, cables and cards."""
    storage_usd_per_gpu: Positive = 1_000.0
    years: Positive = 4.0
    residual: Share = 0.15
    pue: Annotated[float, Field(ge=1), Must("a number of at least 1")] = 1.3
    usd_per_kwh: Positive = 0.08
    staff: float = 8.0
    usd_per_staff_year: Positive = 300_000.0
    upkeep_share: Share = 0.04
    """Repairs and space in a year, as a share of the price."""

    def usd_up_front(self, num_gpus: int) -> float:
        return num_gpus * (self.usd_per_gpu * (1 + self.network_share) + self.storage_usd_per_gpu)

    def usd_hour(self, fleet: Fleet, num_gpus: int) -> float:
        """Dollars an hour of all GPUs together: wear, upkeep, energy and staff."""
        bought = self.usd_up_front(num_gpus)
        a_year = bought * (1 - self.residual) / self.years + bought * self.upkeep_share
        a_year += self.staff * self.usd_per_staff_year
        return a_year / 8766 + energy_kw(fleet, num_gpus, self.pue) * self.usd_per_kwh


def energy_kw(fleet: Fleet, num_gpus: int, pue: float = 1.3) -> float:
    """Kilowatts from the grid."""
    return num_gpus * fleet.spec.host_watts / 1e3 * pue


@dataclass(frozen=True)
class PriceList:
    rows: Sequence[Price]
    owned: Owned
    path: str

    def find(self, gpu: str, kind: str) -> Price:
        """The newest row of this GPU and kind. Raises ValueError if there is none."""
        rows = [row for row in self.rows if row.gpu == gpu and row.kind == kind]
        if not rows:
            kinds = ", ".join(sorted({f"{row.gpu} {row.kind}" for row in self.rows}))
            raise ValueError(f"{self.path}: has no price of {gpu} {kind}; add a row, or take one of {kinds}")
        return max(rows, key=lambda row: row.date)

    def owned_price(self, fleet: Fleet, num_gpus: int) -> Price:
        """The cost of an hour of an own GPU, as a row."""
        usd = self.owned.usd_hour(fleet, num_gpus) / num_gpus
        hours, source = [0.8 * usd, usd, 1.3 * usd], "owned: wear, upkeep, energy, staff"
        return Price(gpu=fleet.gpu, kind="owned", usd_hour=hours, date="2026-05-01", source=source)

    def warnings(self, row: Price, age_days: int) -> list[str]:
        """Warnings about a price's age."""
        if 0 <= age_days <= STALE_DAYS:
            return []
        age = f"{age_days} days old" if age_days > 0 else "dated in the future"
        return [f"the price of {row.gpu} is {age} ({row.date}, {row.source}): look for a newer one with --prices"]


def read_prices(path: str | None) -> PriceList:
    """A TOML file of [[price]] rows and one [owned]. Raises ValueError that names file, row and what is wrong."""
    where = path or str(PRICES)
    plain = read_toml(where, "--prices")
    rows = plain.get("price")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"--prices {where}: has no [[price]] rows")
    prices, place = [], ""
    try:
        for index, row in enumerate(rows, 1):
            place = f"row {index}: "
            dated = {key: str(value) if key == "date" else value for key, value in row.items()}
            price = from_plain(Price, dated, "price.")
            price.range(), price.capacity()
            prices.append(price)
        place = ""
        owned = from_plain(Owned, plain.get("owned", {}), "owned.")
    except ValueError as error:
        raise ValueError(f"--prices {where}: {place}{error}") from error
    return PriceList(prices, owned, "prices" if path is None else where)
