"""The price list of computing and sending: rates of a machine and what layouts, experts and forecasts decide by them.

Rates are defaults for an H200 or a file of `elastic-ring calibrate`. Plain numbers: no torch, no dollars.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field

from elastic_ring.files import plain_json, read_small
from elastic_ring.validation import Must, Seconds, from_plain, settings

AGAIN = "measure it with jobs/calibrate.py --out FILE, or leave the file out for the figures of an H200"
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), Must("more than 0")]
Placement = Literal["auto", "gather", "send"]

LINK_BYTES_PER_S = 300e9
"""One-way NCCL bandwidth between two H200s for a stage's messages."""
SPARSE_BACKWARD_FLOPS = 4e14
"""FLOP/s of a block-sparse backward kernel on an H200 at a density of a few percent."""
HALVING_S = 2e-4
"""Seconds that the own keys' gradients in two halves cost: one more round of launches and two kernel tails."""
HALVED_FLOPS = 1e12
"""Where the own dense tile has fewer (two milliseconds of an H100), one launch more costs more than it hides."""
SPARSE_COST, SPARSE_KEYS = 1.02, 384
"""Costs of a kernel over block tables: seconds for each pair over a dense kernel's, and each query's fixed cost, as so
many keys more. From 32 K tokens on an H200 (79 % of the ideal at a density of 9.5 %, 53 % at 2.7 %); at
64 K and 2.9 % they say 70 %, measured were 72.8 % (benchmarks/results/gpu_runs, second and third run)."""

REDUCED_BYTES = 4
"""Bytes of a gradient that the ring sums in fp32."""
MOST_SHARES = 2.0
"""A rank gets at most so many times its fair share of rows at a time; plans have room for them."""
GATHERS, TRIPS = 2, 6
"""Weights are gathered in forward and in backward; rows go there and back in forward, recomputation and backward."""


class MachineFile(TypedDict, total=False):
    """What `calibrate` writes: the figures of a `CostModel`, their origin, the measurements, and a forecast's rates."""

    machine: Mapping[str, float | bool]
    about: Mapping[str, object]
    checks: Sequence[Mapping[str, object]]
    rates: Any


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
    link_bytes_per_s: Rate = LINK_BYTES_PER_S
    message_s: Seconds = 38e-6
    call_s: Seconds = 380e-6
    dense_flops: Rate = 640e12
    overlap: Annotated[float, Field(ge=0, le=1), Must("0 to 1")] = 1.0
    per_tile: bool = False

    def moving_s(self, num_bytes: float, num_messages: float) -> float:
        return num_bytes / self.link_bytes_per_s + self.message_s * num_messages

    def together_s(self, kernels_s: float, moving_s: float) -> float:
        """Seconds of kernels and messages that run concurrently."""
        return max(kernels_s, moving_s) + (1 - self.overlap) * min(kernels_s, moving_s)

    def hops_s(self, kernels_s: float, num_bytes: float, num_messages: int) -> float:
        """Seconds of one rank's pass. The first hop overlaps only with the kernels of the rank's own keys, a later hop
        with those of earlier hops."""
        together_s = self.together_s(kernels_s, self.moving_s(num_bytes, num_messages))
        return together_s + (self.message_s if num_messages else 0.0)

    @classmethod
    def read(cls, path: str | Path) -> CostModel:
        """Read a file that `write` made. Raises `ValueError` that names the file, the error in it and what to do."""
        return read_machine_file(path)[0]

    def write(
        self,
        path: str | Path,
        about: Mapping[str, object] | None = None,
        checks: Sequence[Mapping[str, object]] = (),
        rates: Mapping[str, object] | None = None,
    ) -> None:
        """Write the figures as JSON with their origin `about` (device, versions, date), the measurements `checks`, and
        `rates` that only a forecast needs. Raises `ValueError` if the file cannot be written."""
        record: MachineFile = {"machine": asdict(self), "about": dict(about or {}), "checks": list(checks)}
        if rates:
            record["rates"] = dict(rates)
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"machine file {path}: cannot be written: {error}; name another file") from error


def read_machine_file(path: str | Path) -> tuple[CostModel, MachineFile]:
    """The cost model in a file of `CostModel.write`, and the whole file. Raises `ValueError` that names the file, the
    error in it and what to do."""
    try:
        loaded = plain_json(read_small(path))
    except OSError as error:
        raise ValueError(f"machine file {path}: cannot be read: {error}; {AGAIN}") from error
    except ValueError as error:
        raise ValueError(f"machine file {path}: is not JSON: {error}; {AGAIN}") from error
    figures = loaded.get("machine") if isinstance(loaded, dict) else None
    if not isinstance(figures, dict):
        raise ValueError(f'machine file {path}: has no object "machine" with the figures; {AGAIN}')
    missing = [field.name for field in fields(CostModel) if field.name not in figures]
    if missing:
        raise ValueError(f"machine file {path}: {missing[0]!r} is missing; give all figures; {AGAIN}")
    try:
        return from_plain(CostModel, figures), loaded
    except ValueError as error:
        raise ValueError(f"machine file {path}: {error}; {AGAIN}") from error


def sends_tokens(
    placement: Placement,
    cp: int,
    num_parameters: int,
    tokens: int,
    experts_per_token: int,
    width: int,
    element_bytes: int,
) -> bool:
    """Whether the tokens of a rank travel to a layer's experts, which have `num_parameters` in all, instead of their
    weights to the rank: by bytes, the same on all ranks and in plans."""
    if cp == 1 or placement != "auto":
        return cp > 1 and placement == "send"
    gathered = (GATHERS * element_bytes + REDUCED_BYTES) * num_parameters
    return gathered > TRIPS * element_bytes * tokens * experts_per_token * width
