"""The cost model that prices plans: a machine's rates and latencies, default or measured, and their JSON file.

Plain numbers only. `calibrate` measures them, `choice` and `model_layout` use them.
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
class CostModel:
    """Rates and latencies of a machine.

    `kernel_flops` (FLOP/s): rate of a sparse kernel on the pairs it computes; `dense_flops`: of a dense kernel.
    `link_bytes_per_s`: one-way bandwidth out of a rank. `message_s`: fixed cost of a message, in seconds; `call_s`:
    of a kernel call. `overlap` (0 to 1): share of the shorter one that is hidden when kernels and messages run
    concurrently; 1 if copies do not slow kernels down. `per_tile`: a sparse kernel is called once per tile, as on
    CPUs; otherwise once for a rank's own keys and once for fetched keys, as on GPUs.

    The defaults are for an H200 with NVLink, flash-attn-4 and its block-sparse form. `message_s` and `call_s` were
    calibrated on two H200s; most of `call_s` is host time of both passes. Raises `ValueError` for a figure out of
    range.
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
        """The time of kernels and messages that run concurrently, in seconds."""
        return max(kernels_s, moving_s) + (1 - self.overlap) * min(kernels_s, moving_s)

    def hops_s(self, kernels_s: float, num_bytes: float, num_messages: int) -> float:
        """The time of one rank's pass. The first hop overlaps only with the kernels of the rank's own keys, a later hop
        with those of earlier hops."""
        together_s = self.together_s(kernels_s, self.moving_s(num_bytes, num_messages))
        return together_s + (self.message_s if num_messages else 0.0)

    @classmethod
    def read(cls, path: str | Path) -> CostModel:
        """Read a file that `write` made. Raises `ValueError` that names the file, the error in it and what to do."""
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
    def of(cls, figures: Mapping[str, Any]) -> CostModel:
        """From a mapping with all figures. Raises `ValueError` for a missing, unknown or invalid one."""
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
        """Write the figures as JSON with their origin `about` (device, versions, date) and the measurements `checks`.

        Raises `ValueError` if the file cannot be written.
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
