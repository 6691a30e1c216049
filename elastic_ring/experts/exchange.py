"""Rows to the ranks of a ring that hold their experts, and results back (expert parallelism inside the ring).

Rank r holds the experts of rows [r * per, (r + 1) * per) of an expert parameter, the same rows that it holds where
experts are gathered. Counts cross first; then each rank sends every other the rows of its experts. Every exchange is a
node of autograd on every rank, without rows too: backward runs the same exchanges the other way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_ring.attention.comm.all_to_all import AllToAll
from elastic_ring.attention.comm.exchange import Group
from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.experts.order import Order, inverse_of, permuted
from elastic_ring.experts.price import Placement, sends_tokens

Phase = Literal["dispatch", "combine"]
Products = Callable[[Tensor, Tensor], Tensor]
"""(rows sorted by expert, where each expert's end) -> a result for each row."""
_TAG = (1 << 30) + (1 << 20)
"""Larger than all tags of hops and of routing. Exchanges of one group follow each other, so one tag is enough."""


@dataclass(frozen=True)
class Routes:
    """How rows of one call travel: how many go to each rank and come from it, and how those that came are sorted by
    expert (`rows`, `back`, `ends` as in `Order`)."""

    outgoing: Sequence[int]
    incoming: Sequence[int]
    rows: Tensor
    back: Tensor
    ends: Tensor


class ExpertExchange:
    """The exchanges of one rank in one generation. `check` raises once the group is aborted: NCCL then ends exchanges
    without an error, and counts are garbage. `observe` is called with phase, step and number before each exchange of
    rows; numbers begin anew with `begin`. `waiting` surrounds waits of the host. An error leaves no group behind.
    """

    def __init__(
        self,
        group: Group,
        cp: int,
        cp_rank: int,
        *,
        check: Callable[[], None] = lambda: None,
        observe: Callable[[Phase, int, int], None] = lambda phase, step, number: None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.cp, self.cp_rank = cp, cp_rank
        self.ledger = HopLedger()
        self._check, self._observe, self._waiting = check, observe, waiting
        self._all_to_all: AllToAll | None = AllToAll(cp, cp_rank, group, self.ledger, [])
        self._numbers, self._step = Counter[str](), 0

    def begin(self, step: int) -> None:
        """A step begins, or the validation before it."""
        self._numbers.clear()
        self._step = step

    def sent_bytes(self) -> int:
        """Bytes sent in all exchanges since the last look."""
        found = self.ledger.all_sent_bytes
        self.ledger.clear()
        return found

    def routes(self, load: Tensor) -> Routes:
        """For this rank's `load` (E,), its rows for each expert. The host waits for the counts of all ranks."""
        num_experts, per = load.numel(), -(-load.numel() // self.cp)
        ours = F.pad(load.long(), (0, self.cp * per - num_experts)).view(self.cp, per)
        theirs = self._swapped(ours, [1] * self.cp, [1] * self.cp)  # (source, own expert)
        with self._waiting():
            outgoing, incoming = torch.stack([ours.sum(1), theirs.sum(1)]).tolist()
        self._check()
        num_own = max(0, min(per, num_experts - self.cp_rank * per))
        experts = torch.arange(per, device=load.device).repeat(self.cp)
        by_source = experts.repeat_interleave(theirs.flatten(), output_size=sum(incoming))
        rows = torch.sort(by_source, stable=True).indices
        return Routes(outgoing, incoming, rows, inverse_of(rows), theirs.sum(0)[:num_own].cumsum(0).int())

    def swap(self, rows: Tensor, outgoing: Sequence[int], incoming: Sequence[int], phase: Phase) -> Tensor:
        """`outgoing[peer]` of the rows to each rank, in their order; what came from each, in rank order."""
        self._observe(phase, self._step, self._numbers[phase])
        self._numbers[phase] += 1
        return self._swapped(rows.contiguous(), outgoing, incoming)

    def _swapped(self, rows: Tensor, outgoing: Sequence[int], incoming: Sequence[int]) -> Tensor:
        arrived = rows.new_empty(sum(incoming), *rows.shape[1:])
        given, taken = rows.split(list(outgoing)), arrived.split(list(incoming))
        taken[self.cp_rank].copy_(given[self.cp_rank])
        assert self._all_to_all is not None, "an exchange has failed before"
        try:
            with self._waiting():
                self._all_to_all.swap(given, taken, _TAG)
        except BaseException:
            self._all_to_all = None  # the traceback may live long, and with it the group's sockets
            raise
        return arrived


def computed(layer: Any, order: Order, rows: Tensor, products: Products) -> Tensor:
    """The results of this rank's rows (N, width), sorted by expert; the rank that holds an expert computes its rows."""
    exchange: ExpertExchange | None = layer.exchange
    if layer.meter is not None:
        layer.meter.add(layer, order.load)
    if exchange is None:
        return products(rows, order.ends)
    routes = exchange.routes(order.load)
    arrived: Tensor = _Sent.apply(rows, exchange, routes.outgoing, routes.incoming, "dispatch")
    results = products(permuted(arrived, routes.rows, routes.back), routes.ends)
    by_source = permuted(results, routes.back, routes.rows)
    back: Tensor = _Sent.apply(by_source, exchange, routes.incoming, routes.outgoing, "combine")
    return back


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        exchange: ExpertExchange,
        outgoing: Sequence[int],
        incoming: Sequence[int],
        phase: Phase,
    ) -> Tensor:
        ctx.way = exchange, incoming, outgoing, phase
        return exchange.swap(rows, outgoing, incoming, phase)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange, outgoing, incoming, phase = ctx.way
        return exchange.swap(grads[0], outgoing, incoming, phase), None, None, None, None


def ring_sum(values: Tensor, group: Group | None) -> Tensor:
    """The sum over the ring of a short tensor, in rank order; no gradient passes. None: a ring of one."""
    if group is None:
        return values
    cp, own = group.size(), group.rank()
    rows = [values if rank == own else torch.empty_like(values) for rank in range(cp)]
    AllToAll(cp, own, group, HopLedger(), []).swap([values] * cp, rows, _TAG)
    return torch.stack(rows).sum(0)


# ------------------------------------------------------------ layers and their weights


def expert_layers(model: nn.Module) -> Iterator[Any]:
    """The modules whose own parameters have an expert in each row. They have `experts_per_token`, the `width` of a row
    that travels, `exchange`, which is None while their weights are gathered, and `meter`, None where nobody counts."""
    return (
        module for module in model.modules() if hasattr(module, "experts_per_token") and hasattr(module, "exchange")
    )


def sends(asked: Placement, layer: Any, cp: int, tokens: int, element_bytes: int) -> bool:
    """Whether rows of a rank's `tokens` travel to this layer's experts, and not their weights."""
    num_parameters = sum(param.numel() for param in layer.parameters(recurse=False))
    return sends_tokens(asked, cp, num_parameters, tokens, layer.experts_per_token, layer.width, element_bytes)


def spread(layers: Sequence[Any], ring: Any) -> set[nn.Parameter]:
    """Give each rank of the ring's mesh the rows of its experts, where FSDP2 would put them; the new parameters, which
    FSDP2 is to leave alone. Parameters must have no values yet."""
    from torch.distributed.tensor import Shard, distribute_tensor

    made = set()
    for layer in layers:
        for name, param in list(layer.named_parameters(recurse=False)):
            rows = nn.Parameter(
                distribute_tensor(param.detach(), ring, [Shard(0)], src_data_rank=None),
                requires_grad=param.requires_grad,
            )
            setattr(layer, name, rows)
            made.add(rows)
    return made


def own_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The experts of a weight that this rank computes with, in the type that it computes in."""
    if hasattr(weight, "to_local"):  # rows that `spread` has given
        from torch.distributed.tensor import Shard

        weight = weight.to_local(grad_placements=[Shard(0)])
    return weight.to(dtype)
