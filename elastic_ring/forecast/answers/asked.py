"""What is asked of a forecast, as text: tokens, deadlines, budgets, failure priors. Each error is one line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from elastic_ring.forecast.goodput import PRIORS, SHARES, Failures
from elastic_ring.forecast.sizing.machines import read_toml

SCALES: Mapping[str, float] = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
SECONDS: Mapping[str, float] = {"h": 3600.0, "d": 86400.0, "w": 604800.0}
_NUMBER = re.compile(r"^\$?([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([KMBT]?)$", re.IGNORECASE)
_DURATION = re.compile(r"^([0-9]*\.?[0-9]+)\s*([hdw])$")


def amount(text: str, flag: str) -> float:
    """1T, 12M, 300e9. Raises ValueError for what is no number above 0."""
    found = _NUMBER.match(text.strip().replace("_", ""))
    value = float(found[1]) * SCALES[found[2].upper()] if found else 0.0
    if value <= 0:
        raise ValueError(f"{flag} {text}: must be a number above 0, such as 300B or 1T")
    return value


def deadline_s(text: str, today_days: Mapping[str, int]) -> float:
    """90d, 36h, 6w, or a date. `today_days`: by date that was asked for, in how many days it is; the caller has a
    clock. Raises ValueError for one in the past."""
    found = _DURATION.match(text.strip())
    if found and float(found[1]) > 0:
        return float(found[1]) * SECONDS[found[2]]
    if text not in today_days:
        raise ValueError(f"--deadline {text}: must be a duration such as 90d, 36h, 6w, or a date such as 2027-03-01")
    if today_days[text] <= 0:
        raise ValueError(f"--deadline {text}: lies in the past")
    return today_days[text] * SECONDS["d"]


def failures_of(text: str) -> Failures:
    """A prior by name, or a TOML file with gpu_hours = [P10, P50, P90] and what else `Failures` has."""
    if text in PRIORS:
        return PRIORS[text]
    if not text.endswith(".toml"):
        raise ValueError(f"--failures {text}: is no prior; give one of {', '.join(PRIORS)}, or a TOML file")
    plain = read_toml(text, "--failures")
    known = {"gpu_hours", "repair_hours", "shares", "planned_per_day", "source"}
    unknown = sorted(plain.keys() - known)
    if unknown:
        raise ValueError(f"--failures {text}: {unknown[0]}: is not known; give {', '.join(sorted(known))}")
    hours = plain.get("gpu_hours")
    if not isinstance(hours, list) or len(hours) != 3 or not 0 < hours[0] <= hours[1] <= hours[2]:
        raise ValueError(f"--failures {text}: gpu_hours={hours}: must be three rising numbers above 0, P10, P50, P90")
    shares = plain.get("shares", dict(SHARES))
    odd = sorted(shares.keys() - SHARES.keys())
    if odd or abs(sum(shares.values()) - 1.0) > 0.01:
        raise ValueError(f"--failures {text}: shares={shares}: must be of {', '.join(SHARES)}, and together 1")
    low, middle, high = (float(hour) for hour in hours)
    median_h, deviation = plain.get("repair_hours", Failures().repair_hours)
    return Failures(
        text,
        (low, middle, high),
        (float(median_h), float(deviation)),
        shares,
        planned_per_day=float(plain.get("planned_per_day", 0.0)),
        source=plain.get("source", text),
    )
