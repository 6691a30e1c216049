"""Sends rows to the ranks of a ring that hold their experts, and results back (expert parallelism inside the ring);
measures and balances the experts' loads. Sorting and products must not enter.

Rank r holds the experts of rows [r * per, (r + 1) * per) of an expert parameter, as where experts are gathered. Counts
cross first, all to all; then each rank sends every other the rows of its experts. Every exchange is a node of autograd
on every rank, without rows too: backward runs the same exchanges the other way.

Where some rank would get more rows than plans have room for, all ranks send theirs in parts, one after the other. Of a
part only the rows that its rank sent are kept: backward sends and computes it again. The cut follows from the loads
alone, so all ranks cut alike and a repeated step has the same bits. A part has whole experts where these fit into it,
so their products and gradients have the bits of a pass in one part, where the kernel is the same: on GPUs torch chooses
it by the rows an expert has on average. An expert with more rows than a part is cut after so many rows: its gradient is
a sum over its cuts, in their order.

Loads are balanced by a bias on each expert's score, which counts for the choice only (Wang et al. 2024,
arXiv:2408.15664), or by a loss (Fedus et al. 2021, arXiv:2101.03961). The bias is a parameter; its gradient is the
number of tokens beyond its expert's equal share. So it is summed over slices and rings, voted on, applied, healed and
saved as every gradient and parameter is, and recomputation does not count twice. An optimizer takes the sign of that
gradient (`train.optim`): a bias falls or rises by the same small step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.comm.messages import AllToAll, Group
from elastic_ring.costs import Placement, sends_tokens
from elastic_ring.experts.compute import Order, inverse_of, permute

log = logging.getLogger(__name__)

Phase = Literal["dispatch", "combine"]
Products = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]
"""(weights of experts by name, rows sorted by expert, where each expert's end) -> a result for each row."""
BIAS = "balance_bias"
"""The end of the names of balancing biases."""
_TAG = (1 << 30) + (1 << 20)
"""Larger than all tags of hops and of routing. Exchanges of one group follow each other, so one tag is enough."""


@dataclass(frozen=True)
class Routes:
    """The routes of one call's rows: how many go to each rank and come from it, and how the received rows are sorted by
    expert (`rows`, `back`, `ends` as in `Order`). `span`: the range [first, stop) of own experts that they are for."""

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
        """Bytes sent in all exchanges since the last call."""
        num_bytes = self.ledger.all_sent_bytes
        self.ledger.clear()
        return num_bytes

    def routes(self, load: Tensor) -> list[Routes]:
        """The routes for this rank's `load` (E,), its rows for each expert: one for each part, as many on all ranks.
        The host waits for the counts of all ranks."""
        num_experts, per = load.numel(), -(-load.numel() // self.cp)
        padded = F.pad(load.long(), (0, self.cp * per - num_experts))
        counts = padded.new_empty(self.cp, padded.numel())
        counts[self.cp_rank] = padded
        self._swap([padded] * self.cp, counts.unbind())
        by_rank = counts.view(self.cp, self.cp, per)  # (source, rank, its expert)
        theirs = by_rank[:, self.cp_rank]
        with self._waiting():
            sums = by_rank[self.cp_rank].sum(1), theirs.sum(1), by_rank.sum((0, 2))
            outgoing, incoming, arriving = torch.stack(sums).tolist()
        self._check()
        num_own = max(0, min(per, num_experts - self.cp_rank * per))
        if self._most_rows is not None and max(arriving) > self._most_rows:
            return self._routes_in_parts(counts.cpu(), max(arriving), self._most_rows, load.device)
        rows = _by_second(theirs, sum(incoming))
        ends = theirs.sum(0)[:num_own].cumsum(0).int()
        return [Routes(outgoing, incoming, rows, inverse_of(rows), ends, (0, num_own))]

    def _routes_in_parts(self, counts: Tensor, arriving: int, most_rows: int, device: torch.device) -> list[Routes]:
        """`counts`: (source, expert), in host memory."""
        parts, routes = all_parts(counts, self.cp, most_rows), []
        by_rank = counts.view(self.cp, self.cp, -1)
        for cuts in parts:
            outgoing = [int(cut_counts(by_rank[:, rank], cuts[rank])[self.cp_rank].sum()) for rank in range(self.cp)]
            own = cuts[self.cp_rank]
            first, stop = (own[0].expert, own[-1].expert + 1) if own else (0, 0)
            theirs = cut_counts(by_rank[:, self.cp_rank], own)
            loads = torch.zeros(stop - first, dtype=torch.int64)
            loads[torch.tensor([cut.expert - first for cut in own], dtype=torch.int64)] = theirs.sum(0)
            rows, ends = _by_second(theirs, int(theirs.sum())).to(device), loads.cumsum(0).int().to(device)
            routes.append(Routes(outgoing, theirs.sum(1).tolist(), rows, inverse_of(rows), ends, (first, stop)))
        self.num_parted += 1
        if arriving > self._most_seen:
            self._most_seen = arriving
            log.warning(
                "experts: %d rows would be on one rank at a time in step %d, plans have room for %d: they come in %d "
                "parts",
                *(arriving, self._step, most_rows, len(parts)),
            )
        return routes

    def swap(self, rows: Tensor, outgoing: Sequence[int], incoming: Sequence[int], phase: Phase) -> Tensor:
        """Send `outgoing[peer]` of the rows to each rank, in their order; returns the received rows, in rank order."""
        self._observe(phase, self._step, self._numbers[phase])
        self._numbers[phase] += 1
        rows = rows.contiguous()
        arrived = rows.new_empty(sum(incoming), *rows.shape[1:])
        outbox, inbox = rows.split(list(outgoing)), arrived.split(list(incoming))
        inbox[self.cp_rank].copy_(outbox[self.cp_rank])
        self._swap(outbox, inbox)
        return arrived

    def _swap(self, outbox: Sequence[Tensor], inbox: Sequence[Tensor]) -> None:
        assert self._all_to_all is not None, "an exchange has failed before"
        try:
            with self._waiting():
                self._all_to_all.swap(outbox, inbox, _TAG)
        except BaseException:
            self._all_to_all = None  # the traceback may live long, and with it the group's sockets
            raise


# ------------------------------------------------------------ parts


class Cut(NamedTuple):
    """Rows [start, stop) of an expert, in the order of their sources."""

    expert: int
    start: int
    stop: int


def all_parts(counts: Tensor, cp: int, most_rows: int) -> list[list[list[Cut]]]:
    """By part and rank, the cuts of its own experts, at most `most_rows` of them in each. `counts`: int64 (source,
    expert), with as many experts a rank. All ranks have as many parts, some of them empty."""
    by_rank: list[list[list[Cut]]] = []
    for loads in counts.sum(0).view(cp, -1).tolist():
        parts, room = [list[Cut]()], most_rows
        for expert, load in enumerate(loads):
            for start in range(0, load, most_rows):
                cut = Cut(expert, start, min(load, start + most_rows))
                if cut.stop - cut.start > room:
                    parts.append([])
                    room = most_rows
                parts[-1].append(cut)
                room -= cut.stop - cut.start
        by_rank.append(parts)
    number = max(map(len, by_rank))
    filled = [parts + [[]] * (number - len(parts)) for parts in by_rank]
    return [[parts[index] for parts in filled] for index in range(number)]


def cut_counts(counts: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """int64 (source, cut): how many rows of each cut a source has. `counts` (source, expert)."""
    experts = torch.tensor([cut.expert for cut in cuts], dtype=torch.int64)
    start, stop = (torch.tensor([cut[end] for cut in cuts], dtype=torch.int64) for end in (1, 2))
    last = counts.cumsum(0)[:, experts]
    first = last - counts[:, experts]
    return (last.minimum(stop) - first.maximum(start)).clamp_min(0)


class SliceExperts(torch.autograd.Function):
    """The experts [first, stop) of each span. The gradient of an expert in several spans is summed in their order."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, spans: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.spans, ctx.shape = spans, weight.shape
        return tuple(weight[first:stop] for first, stop in spans)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, done = grads[0].new_zeros(ctx.shape), 0
        for (first, stop), grad in zip(ctx.spans, grads, strict=True):
            again = max(0, min(done, stop) - first)
            total[first : first + again] += grad[:again]
            total[first + again : stop] = grad[again:]
            done = max(done, stop)
        return total, None


# ------------------------------------------------------------ autograd


def _by_second(counts: Tensor, total: int) -> Tensor:
    """The order of rows sorted by the second index, then by the first. `counts` (first, second): the numbers of rows,
    which lie by the first index, then by the second; `total` in all."""
    seconds = torch.arange(counts.size(1), device=counts.device).repeat(counts.size(0))
    return torch.sort(seconds.repeat_interleave(counts.flatten(), output_size=total), stable=True).indices


def run_experts(layer: Any, order: Order, rows: Tensor, products: Products) -> Tensor:
    """The results of this rank's rows (N, width), sorted by expert, each computed by the rank that holds its expert."""
    exchange: ExpertExchange | None = layer.exchange
    if layer.meter is not None:
        layer.meter.add(layer, order.load)
    adapters: Mapping[str, Callable[[Tensor, int], Tensor]] = getattr(layer, "adapters", {})
    first = 0 if exchange is None else exchange.cp_rank * -(-order.load.numel() // exchange.cp)
    weights: dict[str, Tensor] = {}  # of this rank's experts, or of all, in the type of the computation
    for name, param in layer.named_parameters(recurse=False):
        if hasattr(param, "to_local"):  # after `spread`
            from torch.distributed.tensor import Shard

            param = param.to_local(grad_placements=[Shard(0)])
        weights[name] = param.to(rows.dtype)
        if name in adapters:
            weights[name] = adapters[name](weights[name], first)
    if exchange is None:
        return products(weights, rows, order.ends)
    routes = exchange.routes(order.load)
    if len(routes) == 1:
        return _run_on_holders(exchange, routes[0], products, list(weights), rows, *weights.values())
    pieces = rows.split([part.outgoing[rank] for rank in range(exchange.cp) for part in routes])
    spans = [part.span for part in routes]
    of_parts = zip(*(SliceExperts.apply(weight, spans) for weight in weights.values()), strict=True)
    results = []
    for index, (part, own) in enumerate(zip(routes, of_parts, strict=True)):
        compute = partial(_run_on_holders, exchange, part, products, list(weights))
        outgoing = torch.cat(pieces[index :: len(routes)])
        back = checkpoint(compute, outgoing, *own, use_reentrant=False, preserve_rng_state=False)
        results.append(back.split(list(part.outgoing)))
    return torch.cat([back[rank] for rank in range(exchange.cp) for back in results])


def _run_on_holders(
    exchange: ExpertExchange, part: Routes, products: Products, names: Sequence[str], rows: Tensor, *weights: Tensor
) -> Tensor:
    arrived: Tensor = _SwapRows.apply(rows, exchange, part.outgoing, part.incoming, "dispatch")
    own = dict(zip(names, weights, strict=True))
    results = products(own, permute(arrived, part.rows, part.back), part.ends)
    by_source = permute(results, part.back, part.rows)
    back: Tensor = _SwapRows.apply(by_source, exchange, part.incoming, part.outgoing, "combine")
    return back


class _SwapRows(torch.autograd.Function):
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
    """The sum over the ring of a short tensor, in rank order, without a gradient. None: a ring of one."""
    if group is None:
        return values
    cp, own = group.size(), group.rank()
    rows = [values if rank == own else torch.empty_like(values) for rank in range(cp)]
    AllToAll(cp, own, group, HopLedger(), []).swap([values] * cp, rows, _TAG)
    return torch.stack(rows).sum(0)


# ------------------------------------------------------------ layers and their weights


def expert_layers(model: nn.Module) -> Iterator[Any]:
    """The modules whose own parameters have an expert in each row. They have `experts_per_token`, the `width` of a
    sent row, `exchange`, None while their weights are gathered, and `meter`, None where loads are not counted. In
    `adapters` may be functions that add adapters to weights, (those of experts from the index on, the index)."""
    return (
        module for module in model.modules() if hasattr(module, "experts_per_token") and hasattr(module, "exchange")
    )


def sends(placement: Placement, layer: Any, cp: int, tokens: int, element_bytes: int) -> bool:
    """Whether rows of a rank's `tokens` travel to this layer's experts, and not their weights."""
    num_parameters = sum(param.numel() for param in layer.parameters(recurse=False))
    return sends_tokens(placement, cp, num_parameters, tokens, layer.experts_per_token, layer.width, element_bytes)


def spread(layers: Sequence[Any], ring: Any) -> set[nn.Parameter]:
    """Give each rank of the ring's mesh the rows of its experts, where FSDP2 would put them. Parameters must have no
    values yet. Returns the new parameters, which FSDP2 must leave alone."""
    from torch.distributed.tensor import Shard, distribute_tensor

    spread_params = set()
    for layer in layers:
        for name, param in list(layer.named_parameters(recurse=False)):
            rows = nn.Parameter(
                distribute_tensor(param.detach(), ring, [Shard(0)], src_data_rank=None),
                requires_grad=param.requires_grad,
            )
            setattr(layer, name, rows)
            spread_params.add(rows)
    return spread_params


# ------------------------------------------------------------ balance


class LoadMeter:
    """Measures how unevenly the tokens of a ring fall on experts in a step. `layers`: of `expert_layers`. A layer that
    is recomputed in backward adds all its loads once more, which changes no share."""

    def __init__(self, layers: Sequence[Any], group: Group | None, device: torch.device) -> None:
        nums = [next(layer.parameters(recurse=False)).shape[0] for layer in layers]
        self._nums = torch.tensor(nums, device=device)
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._loads = torch.zeros(len(layers), max(nums), dtype=torch.int64, device=device)
        self._group = group
        for layer in layers:
            layer.meter = self

    def leave(self) -> None:
        """Drop the group: layers may live as long as an error's traceback, and with the group its sockets."""
        self._group = None

    def begin(self) -> None:
        """Begin a step."""
        self._loads.zero_()

    def add(self, layer: Any, load: Tensor) -> None:
        """Add this rank's tokens for each expert, (E,), of one pass."""
        self._loads[self._rows[layer], : load.size(0)].add_(load)

    def largest(self) -> Tensor:
        """The largest load of an expert divided by its fair share, over all layers; 0 without tokens. A scalar on the
        device, after an exchange in the ring."""
        loads = ring_sum(self._loads, self._group)
        return (loads.amax(1) * self._nums / loads.sum(1).clamp_min(1)).amax().double()


def balancing_loss(logits: Sequence[Tensor], top_k: int, group: Group | None, num_targets: Tensor) -> Tensor:
    """A rank's part of E sum_e f_e P_e, times the targets of the whole sequence: it adds up as sums of losses do.

    `logits`: of each layer's router, (T, E) for this rank's tokens. f_e: the share of all choices that fell on expert
    e, P_e: the mean probability of e, both over all layers and all tokens of the ring's sequence, as in transformers.
    Choices are counted over the ring in forward; no gradient passes through them.
    """
    num_experts = logits[0].size(-1)
    experts = torch.arange(num_experts, device=logits[0].device)
    counts, shares = torch.zeros_like(experts), torch.zeros(num_experts, device=experts.device)
    for layer in logits:
        likely = layer.float().softmax(-1)
        chosen = likely.detach().topk(top_k, dim=-1).indices
        for choice in chosen.unbind(1):
            counts = counts + (choice[:, None] == experts).sum(0)
        shares = shares + likely.sum(0)
    num_rows = counts.new_tensor([len(logits) * logits[0].size(0)])
    whole = ring_sum(torch.cat([counts, num_rows, num_targets.reshape(1).to(counts.dtype)]), group).float()
    rows, targets = whole[num_experts], whole[num_experts + 1]
    return num_experts * (whole[:num_experts] / rows * (shares / rows)).sum() * targets


class Excess(torch.autograd.Function):
    """(weights, bias (E,), load (E,)) to the weights, unchanged; in backward the gradient of the bias is the excess of
    the load over an equal share."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, bias: Tensor, load: Tensor) -> Tensor:
        ctx.save_for_backward(load)
        ctx.dtype = bias.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (load,) = ctx.saved_tensors
        counts = load.to(torch.float32)
        return grads[0], (counts - counts.mean()).to(ctx.dtype), None
