"""What is asked of a forecast, as text: tokens, deadlines, budgets, failure priors. Each error is one line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

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
    if not 0 < value < math.inf:
        raise ValueError(f"{flag} {text}: must be a number above 0, such as 300B or 1T")
    return value


def deadline_s(text: str, today_days: Mapping[str, int]) -> float:
    """90d, 36h, 6w, or a date. `today_days`: days until each date, as the caller has the clock. Raises ValueError for
    one in the past."""
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
    given: dict[str, Any] = {
        "shares": dict(SHARES),
        "repair_hours": list(Failures().repair_hours),
        "planned_per_day": 0.0,
        **plain,
    }
    hours: Any = given.get("gpu_hours")
    repair, shares, planned = given["repair_hours"], given["shares"], given["planned_per_day"]
    checks = {
        "gpu_hours": (_numbers(hours, 3) and hours == sorted(hours), "three rising numbers above 0, P10, P50, P90"),
        "repair_hours": (_numbers(repair, 2), "two numbers above 0, the median and the deviation of its log"),
        "shares": (_is_shares(shares), f"a table of {', '.join(SHARES)}, each at least 0 and together 1"),
        "planned_per_day": (planned == 0 or _numbers([planned], 1), "a number of at least 0"),
    }
    for key, (is_right, must) in checks.items():
        if not is_right:
            raise ValueError(f"--failures {text}: {key}={given.get(key)}: must be {must}")
    source = str(plain.get("source", text))
    return Failures(text, tuple(hours), tuple(repair), shares, planned_per_day=float(planned), source=source)


def _numbers(value: Any, count: int) -> bool:
    """Whether it is a list of so many finite numbers above 0."""
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(one, int | float) and not isinstance(one, bool) and 0 < one < math.inf for one in value)
    )


def _is_shares(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= SHARES.keys():
        return False
    parts = [share for share in value.values() if share != 0]
    return _numbers(parts, len(parts)) and abs(sum(parts) - 1.0) <= 0.01
