"""What plans are priced with: the few figures of a machine, guessed or measured, and the file that keeps them.

Plain numbers. Measuring them is `calibrate`'s, using them `choice`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

AGAIN = "measure it with jobs/calibrate.py --out FILE, or leave the file out for the figures of an H200"


@dataclass(frozen=True)
class Machine:
    """The defaults are an H200 with NVLink, flash-attn-4 and its sparse form; `call_s`, most of it the host's time for
    both passes, and `message_s` as calibrated on two of them.

    `kernel_flops` are FLOP/s that a sparse kernel reaches on what it computes, `dense_flops` a dense one,
    `link_bytes_per_s` goes one way out of a rank, `message_s` is what one message costs however short and `call_s`
    what one kernel call does. `overlap` is the share of the shorter that hides when kernels and messages run side by
    side: 1 where copying costs the kernels nothing. With `per_tile` a sparse kernel is called once a tile, as on
    CPUs; without, once for a rank's own keys and once for those it fetched, as on GPUs. Raises `ValueError` for what
    is no such figure.
    """

    kernel_flops: float = 590e12
    link_bytes_per_s: float = 300e9
    message_s: float = 38e-6
    call_s: float = 380e-6
    dense_flops: float = 640e12
    overlap: float = 1.0
    per_tile: bool = False

    def __post_init__(self) -> None:
        for name in ("kernel_flops", "link_bytes_per_s", "dense_flops"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "more than 0")
        for name in ("message_s", "call_s"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "0 seconds or more")
        _check("overlap", self.overlap, 0 <= self.overlap <= 1, "0 to 1")

    def moving_s(self, num_bytes: float, num_messages: float) -> float:
        return num_bytes / self.link_bytes_per_s + self.message_s * num_messages

    def together_s(self, kernels_s: float, moving_s: float) -> float:
        """Kernels and messages side by side."""
        return max(kernels_s, moving_s) + (1 - self.overlap) * min(kernels_s, moving_s)

    @classmethod
    def read(cls, path: str | Path) -> Machine:
        """The figures of a file that `write` made. Raises `ValueError` that names the file, what is wrong in it and a
        way out.
        """
        try:
            loaded: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"machine file {path}: cannot be read: {error}; {AGAIN}") from error
        except ValueError as error:
            raise ValueError(f"machine file {path}: is not JSON: {error}; {AGAIN}") from error
        figures = loaded.get("machine") if isinstance(loaded, dict) else None
        if not isinstance(figures, dict):
            raise ValueError(f'machine file {path}: has no object "machine" with the figures; {AGAIN}')
        try:
            return cls.of(figures)
        except ValueError as error:
            raise ValueError(f"machine file {path}: {error}; {AGAIN}") from error

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Machine:
        """From figures by name, all of them. Raises `ValueError` for a missing, an unknown or an impossible one."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(figures) - set(names))
        missing = [name for name in names if name not in figures]
        if unknown or missing:
            what = f"{unknown[0]!r} is unknown" if unknown else f"{missing[0]!r} is missing"
            raise ValueError(f"{what}; its figures are {', '.join(names)}")
        for name, value in figures.items():
            if isinstance(value, bool) != (name == "per_tile"):
                raise ValueError(f"{name}={value!r}: must be {'true or false' if name == 'per_tile' else 'a number'}")
            if not isinstance(value, int | float):
                raise ValueError(f"{name}={value!r}: must be a number")
        return cls(**figures)

    def write(
        self, path: str | Path, about: Mapping[str, Any] | None = None, checks: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Keep the figures as JSON, with what is known `about` them (device, versions, date) and the measurements that
        `checks` them. Raises `ValueError` where nothing can be written.
        """
        record = {"machine": asdict(self), "about": dict(about or {}), "checks": [dict(check) for check in checks]}
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"machine file {path}: cannot be written: {error}; name another file") from error


def _check(name: str, value: Any, good: bool, what: str) -> None:
    if not good or not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be {what}")
