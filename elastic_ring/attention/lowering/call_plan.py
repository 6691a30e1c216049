"""What one rank does in one attention call, as data: kernel calls by stage, the order of sums, and the traffic.

`ring` runs such a plan; `rectangles`, `tiles` and `blocks` make it out of a schedule. The order in which partial
results are added decides the bits of a result, so it is part of the plan and of nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from elastic_ring.attention.comm.exchange import Frame, HopExchange, Pack
from elastic_ring.attention.kernels.kernel import Cover, Kernel
from elastic_ring.attention.layouts.layout import Range
from elastic_ring.attention.layouts.rows import Places, Rows
from elastic_ring.attention.lowering.keys import Keys
from elastic_ring.attention.plan.traffic import ExchangePlan


class Call(NamedTuple):
    """One kernel call."""

    rows: Rows
    keys: Keys
    cover: Cover


@dataclass(frozen=True, eq=False)
class StageCalls:
    """The calls on the keys of `hops`. `once`: backward's calls cover each key of the stage exactly once, so that what
    they find is written, not added."""

    hops: tuple[int, ...]
    forward: tuple[Call, ...]
    backward: tuple[Call, ...]
    once: bool


class OwnPart(NamedTuple):
    """Backward calls on some K/V heads of the own keys (None: all of them)."""

    kv_heads: Range | None
    calls: tuple[Call, ...]
    once: bool


class Op(NamedTuple):
    """One step of a backward pass, on own part or fetched stage `first`: `own`, `fetched`, `hold` (as `fetched`, its
    shares of dq to be added by the next `release`), and `add`: what came back of stages `first` to `last`."""

    kind: Literal["own", "fetched", "hold", "release", "add"]
    first: int
    last: int = 0


class Program(NamedTuple):
    """A backward pass. With `fetches` it fetches the keys again; else they were kept."""

    ops: tuple[Op, ...]
    own: tuple[OwnPart, ...]
    fetches: bool


class Returns(Protocol):
    """How partials that come back are added to own keys."""

    def add(self, total: torch.Tensor, exchange: HopExchange, first: int, last: int) -> None:
        """Take the partials of stages `first` to `last` and add them to `total`, dK and dV (2, B, S_local, Hkv, D)."""
        ...


class SumTypes(NamedTuple):
    """The types of the running sums. `by_rows`: out and dq are contiguous by row. `at_once`: shares of fetched keys are
    contiguous and few enough to be added in one pass over memory. `zeroed`: dK and dV begin as zeros, since something
    may be added before each own key has its share."""

    out: torch.dtype
    dq: torch.dtype
    dkv: torch.dtype
    by_rows: bool = False
    at_once: bool = False
    zeroed: bool = False


class HeadOrder(NamedTuple):
    """Index tensors between the model's order of heads and the plan's; None where they agree."""

    inner: torch.Tensor | None
    inner_kv: torch.Tensor | None
    outer: torch.Tensor | None
    outer_kv: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class CallPlan:
    """How calls with tensors of one shape, type and device run.

    `stages[0]` are the own keys. `backward` is the program where keys are fetched again, `backward_kept` where
    forward kept them, which it does with `keeps`. `every_row_sees`: each query sees a key. `pairs`: buffers hold K,
    then V (2, B, n, Hkv, D), and calls take both apart. `places`: of tokens in padded
    blocks. `alone`: the one call on all own tokens and heads, where nothing else is computed or sent.
    """

    kernel: Kernel
    stages: tuple[StageCalls, ...]
    backward: Program
    exchange: ExchangePlan
    frame: Frame
    pack: Pack | None
    partial_dtype: torch.dtype
    sums: SumTypes
    returns: Returns
    heads: HeadOrder | None = None
    backward_kept: Program | None = None
    keeps: bool = False
    every_row_sees: bool = False
    pairs: bool = False
    places: Places | None = None
    alone: Call | None = None


def one_late(num_stages: int, num_own: int) -> tuple[Op, ...]:
    """Own keys first; what comes back is added one stage late, which gives the ranks that use own keys the time of one
    stage to return it; the second half of the own heads, if there are two, hides the return of the last."""
    ops = [Op("own", 0)]
    for index in range(num_stages):
        ops.append(Op("fetched", index))
        if index:
            ops.append(Op("add", index - 1, index - 1))
    if num_own > 1:
        ops.append(Op("own", 1))
    if num_stages:
        ops.append(Op("add", num_stages - 1, num_stages - 1))
    return tuple(ops)
