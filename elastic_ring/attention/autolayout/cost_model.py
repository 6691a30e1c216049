"""The cost model that prices plans: a machine's rates and latencies, default or measured, and their JSON file.

Plain numbers only. `calibrate` measures them, `choice` and `model_layout` use them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from elastic_ring.files import plain_json, read_small
from elastic_ring.validation import Must, Seconds, from_plain, settings

AGAIN = "measure it with jobs/calibrate.py --out FILE, or leave the file out for the figures of an H200"
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), Must("more than 0")]


@settings
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

    kernel_flops: Rate = 590e12
    link_bytes_per_s: Rate = 300e9
    message_s: Seconds = 38e-6
    call_s: Seconds = 380e-6
    dense_flops: Rate = 640e12
    overlap: Annotated[float, Field(ge=0, le=1), Must("0 to 1")] = 1.0
    per_tile: bool = False

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
            loaded: Any = plain_json(read_small(path))
        except OSError as error:
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
        missing = [field.name for field in fields(cls) if field.name not in figures]
        if missing:
            raise ValueError(f"{missing[0]!r} is missing; give all figures")
        return from_plain(cls, figures)

    def write(
        self,
        path: str | Path,
        about: Mapping[str, Any] | None = None,
        checks: Sequence[Mapping[str, Any]] = (),
        rates: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the figures as JSON with their origin `about` (device, versions, date) and the measurements `checks`,
        and `rates` that only a forecast needs.

        Raises `ValueError` if the file cannot be written.
        """
        record = {"machine": asdict(self), "about": dict(about or {}), "checks": [dict(check) for check in checks]}
        record |= {"rates": dict(rates)} if rates else {}
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"machine file {path}: cannot be written: {error}; name another file") from error
