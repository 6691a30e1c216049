"""Rows to the ranks of a ring that hold their experts, and results back (expert parallelism inside the ring).

Rank r holds the experts of rows [r * per, (r + 1) * per) of an expert parameter, the same rows that it holds where
experts are gathered. Counts cross first, all to all; then each rank sends every other the rows of its experts. Every
exchange is a node of autograd on every rank, without rows too: backward runs the same exchanges the other way.

Where some rank would get more rows than plans have room for, all ranks send theirs in parts (`experts.parts`), one
after the other. Of a part nothing is kept but what its rank sent: backward sends and computes it again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic_ring.attention.comm.all_to_all import AllToAll
from elastic_ring.attention.comm.exchange import Group
from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.costs import Placement, sends_tokens
from elastic_ring.experts.order import Order, inverse_of, permuted
from elastic_ring.experts.parts import all_parts, rows_of, sliced, spans_of

log = logging.getLogger(__name__)

Phase = Literal["dispatch", "combine"]
Products = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]
"""(weights of experts by name, rows sorted by expert, where each expert's end) -> a result for each row."""
_TAG = (1 << 30) + (1 << 20)
"""Larger than all tags of hops and of routing. Exchanges of one group follow each other, so one tag is enough."""


@dataclass(frozen=True)
class Routes:
    """How rows of one call travel: how many go to each rank and come from it, and how those that came are sorted by
    expert (`rows`, `back`, `ends` as in `Order`). `span`: the own experts that they are for, from one to before
    another."""

    outgoing: Sequence[int]
    incoming: Sequence[int]
    rows: Tensor
    back: Tensor
    ends: Tensor
    span: tuple[int, int]


class ExpertExchange:
    """The exchanges of one rank in one generation. `check` raises once the group is aborted: NCCL then ends exchanges
    without an error, and counts are garbage. `observe` is called with phase, step and number before each exchange of
    rows; numbers begin anew with `begin`. `waiting` surrounds waits of the host. No rank gets more than `most_rows`
    at a time. An error leaves no group behind.
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
        most_rows: int | None = None,
    ) -> None:
        self.cp, self.cp_rank = cp, cp_rank
        self.ledger = HopLedger()
        self.num_parted = 0
        """Passes of layers in the step so far whose rows came in parts."""
        self._most_rows, self._most_seen = most_rows, 0
        self._check, self._observe, self._waiting = check, observe, waiting
        self._all_to_all: AllToAll | None = AllToAll(cp, cp_rank, group, self.ledger, [])
        self._numbers, self._step = Counter[str](), 0

    def begin(self, step: int) -> None:
        """A step begins, or the validation before it."""
        self._numbers.clear()
        self._step, self.num_parted = step, 0

    def sent_bytes(self) -> int:
        """Bytes sent in all exchanges since the last look."""
        found = self.ledger.all_sent_bytes
        self.ledger.clear()
        return found

    def routes(self, load: Tensor) -> list[Routes]:
        """For this rank's `load` (E,), its rows for each expert: of one part after the other, as many on all ranks. The
        host waits for the counts of all ranks."""
        num_experts, per = load.numel(), -(-load.numel() // self.cp)
        counts = self._gathered(F.pad(load.long(), (0, self.cp * per - num_experts)))
        by_rank = counts.view(self.cp, self.cp, per)  # (source, rank, its expert)
        theirs = by_rank[:, self.cp_rank]
        with self._waiting():
            sums = by_rank[self.cp_rank].sum(1), theirs.sum(1), by_rank.sum((0, 2))
            outgoing, incoming, arriving = torch.stack(sums).tolist()
        self._check()
        num_own = max(0, min(per, num_experts - self.cp_rank * per))
        if self._most_rows is not None and max(arriving) > self._most_rows:
            return self._in_parts(counts.cpu(), max(arriving), self._most_rows, load.device)
        rows = _by_second(theirs, sum(incoming))
        ends = theirs.sum(0)[:num_own].cumsum(0).int()
        return [Routes(outgoing, incoming, rows, inverse_of(rows), ends, (0, num_own))]

    def _in_parts(self, counts: Tensor, arriving: int, most_rows: int, device: torch.device) -> list[Routes]:
        """`counts`: (source, expert), in host memory."""
        parts, found = all_parts(counts, self.cp, most_rows), []
        by_rank = counts.view(self.cp, self.cp, -1)
        for cuts in parts:
            outgoing = [int(rows_of(by_rank[:, rank], cuts[rank])[self.cp_rank].sum()) for rank in range(self.cp)]
            own, (first, stop) = cuts[self.cp_rank], spans_of(cuts[self.cp_rank])
            theirs = rows_of(by_rank[:, self.cp_rank], own)
            loads = torch.zeros(stop - first, dtype=torch.int64)
            loads[torch.tensor([cut.expert - first for cut in own], dtype=torch.int64)] = theirs.sum(0)
            rows, ends = _by_second(theirs, int(theirs.sum())).to(device), loads.cumsum(0).int().to(device)
            found.append(Routes(outgoing, theirs.sum(1).tolist(), rows, inverse_of(rows), ends, (first, stop)))
        self._tell(len(parts), arriving, most_rows)
        return found

    def _tell(self, num_parts: int, arriving: int, most_rows: int) -> None:
        self.num_parted += 1
        if arriving > self._most_seen:
            self._most_seen = arriving
            log.warning(
                "experts: %d rows would be on one rank at a time in step %d, plans have room for %d: they come in %d "
                "parts",
                *(arriving, self._step, most_rows, num_parts),
            )

    def _gathered(self, load: Tensor) -> Tensor:
        """The loads of all ranks, (source, expert)."""
        counts = load.new_empty(self.cp, load.numel())
        counts[self.cp_rank] = load
        self._swap([load] * self.cp, counts.unbind())
        return counts

    def swap(self, rows: Tensor, outgoing: Sequence[int], incoming: Sequence[int], phase: Phase) -> Tensor:
        """`outgoing[peer]` of the rows to each rank, in their order; what came from each, in rank order."""
        self._observe(phase, self._step, self._numbers[phase])
        self._numbers[phase] += 1
        return self._swapped(rows.contiguous(), outgoing, incoming)

    def _swapped(self, rows: Tensor, outgoing: Sequence[int], incoming: Sequence[int]) -> Tensor:
        arrived = rows.new_empty(sum(incoming), *rows.shape[1:])
        given, taken = rows.split(list(outgoing)), arrived.split(list(incoming))
        taken[self.cp_rank].copy_(given[self.cp_rank])
        self._swap(given, taken)
        return arrived

    def _swap(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        assert self._all_to_all is not None, "an exchange has failed before"
        try:
            with self._waiting():
                self._all_to_all.swap(given, taken, _TAG)
        except BaseException:
            self._all_to_all = None  # the traceback may live long, and with it the group's sockets
            raise


def _by_second(counts: Tensor, total: int) -> Tensor:
    """The order by the second index, those of one in the order of the first. `counts` (first, second): how many rows
    lie by the first index, then by the second; `total` of them."""
    seconds = torch.arange(counts.size(1), device=counts.device).repeat(counts.size(0))
    return torch.sort(seconds.repeat_interleave(counts.flatten(), output_size=total), stable=True).indices


def computed(layer: Any, order: Order, rows: Tensor, products: Products) -> Tensor:
    """The results of this rank's rows (N, width), sorted by expert; the rank that holds an expert computes its rows."""
    exchange: ExpertExchange | None = layer.exchange
    if layer.meter is not None:
        layer.meter.add(layer, order.load)
    weights = {name: _own_rows(param, rows.dtype) for name, param in layer.named_parameters(recurse=False)}
    if exchange is None:
        return products(weights, rows, order.ends)
    routes = exchange.routes(order.load)
    if len(routes) == 1:
        return _on_their_ranks(exchange, routes[0], products, list(weights), rows, *weights.values())
    pieces = rows.split([part.outgoing[rank] for rank in range(exchange.cp) for part in routes])
    spans = [part.span for part in routes]
    of_parts = zip(*(sliced(weight, spans) for weight in weights.values()), strict=True)
    results = []
    for index, (part, own) in enumerate(zip(routes, of_parts, strict=True)):
        compute = partial(_on_their_ranks, exchange, part, products, list(weights))
        given = torch.cat(pieces[index :: len(routes)])
        back = checkpoint(compute, given, *own, use_reentrant=False, preserve_rng_state=False)
        results.append(back.split(list(part.outgoing)))
    return torch.cat([back[rank] for rank in range(exchange.cp) for back in results])


def _on_their_ranks(
    exchange: ExpertExchange, part: Routes, products: Products, names: Sequence[str], rows: Tensor, *weights: Tensor
) -> Tensor:
    arrived: Tensor = _Sent.apply(rows, exchange, part.outgoing, part.incoming, "dispatch")
    own = dict(zip(names, weights, strict=True))
    results = products(own, permuted(arrived, part.rows, part.back), part.ends)
    by_source = permuted(results, part.back, part.rows)
    back: Tensor = _Sent.apply(by_source, exchange, part.incoming, part.outgoing, "combine")
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


def _own_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The experts of a weight that this rank computes with, in the type that it computes in."""
    if hasattr(weight, "to_local"):  # rows that `spread` has given
        from torch.distributed.tensor import Shard

        weight = weight.to_local(grad_placements=[Shard(0)])
    return weight.to(dtype)
