"""Routing over the ranks of a ring: sends key sums to the choosing ranks, and the choices to all ranks.

The rank that holds a block's first token chooses for the block, so that ranks cannot disagree. Sums and scores are
computed in fp64 and compared in fp32, so the cut of a sequence among ranks affects their rounding but not the choice.
The choice has no gradient; attention over the chosen blocks has. The result is a rule (`content.Chosen`): planning,
hops and attention kernels of the sparse ring must not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from elastic_ring.attention.comm.messages import AllToAll, Group
from elastic_ring.attention.layouts.layout import Layout, Range
from elastic_ring.attention.options import RingOptions, check_local_length, check_tensors
from elastic_ring.attention.patterns.caches import LRUCache
from elastic_ring.attention.patterns.content import ByDocument, Choices, Chosen, TopK, resolved, top_ks_of
from elastic_ring.attention.patterns.rules import Positions, Rule
from elastic_ring.attention.routing.plan import RoutingPlan, SentBlocks, plan_routing

NUM_ROUTES = 16
"""Number of cached routing plans and of their parts on a device."""

_NUM_TAGGED_CALLS = 1024
_NUM_SWAPS = 2
_FIRST_TAG = 1 << 30
"""Larger than all tags of hops, of any call."""

_STRIP_ELEMENTS = 1 << 24
"""Number of scores ranked at a time; each takes about 30 bytes of temporaries."""

_Turns = tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True, eq=False)
class Choice:
    """`blocks` (h, r, width) int32 of the sequence, for the heads `heads` (h,) and the own blocks `rows` (r,)."""

    heads: torch.Tensor
    rows: torch.Tensor
    blocks: torch.Tensor


class Router:
    """Chooses blocks for the layers of one sequence. `documents` are its (start, stop) ranges.

    Two exchanges precede the hops of a call: sums of keys (and of queries, where a block's mean query routes) to the
    choosing ranks, and the choices to all ranks. The host then reads the choices in order to plan, the only
    device-to-host synchronization of a call. After this read `options.check` is called: on a GPU an abort
    ends the exchange with garbage in its buffers. `routes` keeps plans between calls.

    `on_device` makes the first exchange only: each rank keeps the choices of its own blocks, and the host reads none.
    """

    def __init__(
        self,
        layout: Layout,
        cp_rank: int,
        group: Group | None,
        documents: tuple[Range, ...],
        options: RingOptions,
        *,
        routes: LRUCache | None = None,
    ) -> None:
        self._routes = LRUCache(NUM_ROUTES) if routes is None else routes
        self._layout, self._cp_rank, self._documents = layout, cp_rank, documents
        self._check = options.check
        self._all_to_all = AllToAll(
            layout.cp, cp_rank, group, options.ledger, options.abandoned, coalesced=options.coalesced
        )

    @torch.no_grad()
    def __call__(self, rules: tuple[Rule, ...], q: torch.Tensor, k: torch.Tensor, call_index: int) -> tuple[Rule, ...]:
        """`rules` resolved for q (1, S_local, H, D) and k (1, S_local, Hkv, D), one for each query head; equal on all
        ranks.

        `rules` has one entry for each query head, or one for all. Raises: `ValueError` if B is not 1.
        """
        heads = rules if len(rules) > 1 else rules * q.size(2)
        plans, requests = self._requests(heads, q, k)
        chosen = [{rule: plans[rule].few for rule in top_ks_of(own)} for own in heads]
        for request, table in zip(requests, self._choose(requests, call_index) if requests else (), strict=True):
            for head, own in zip(request.heads, table, strict=True):
                chosen[head][request.rule] = own
        return tuple(self._resolve(rule, choices, plans) for rule, choices in zip(heads, chosen, strict=True))

    @torch.no_grad()
    def on_device(self, rules: tuple[Rule, ...], q: torch.Tensor, k: torch.Tensor, call_index: int) -> list[Choice]:
        """The choices of this rank's blocks, which it holds whole, one for each `TopK` of `rules`. The host does not
        wait for them, and they are not sent to other ranks. Arguments and errors are those of a call."""
        _, requests = self._requests(rules if len(rules) > 1 else rules * q.size(2), q, k)
        choices = []
        for own, blocks in zip(requests, self._own_choices(requests, call_index) if requests else (), strict=True):
            key = ("index", own.heads, q.device)
            heads = self._routes.get(key, lambda own=own: torch.tensor(own.heads, device=q.device))  # type: ignore[misc]
            choices.append(Choice(heads, own.own_rows, blocks.int()))
        return choices

    def without_choice(self, rules: tuple[Rule, ...], num_heads: int) -> tuple[Rule, ...]:
        """`rules`, one for each head, with the blocks that are chosen for any queries and keys."""
        heads = rules if len(rules) > 1 else rules * num_heads
        plans = self._plans(heads)
        return tuple(self._resolve(own, {rule: plans[rule].few for rule in top_ks_of(own)}, plans) for own in heads)

    def _plans(self, heads: tuple[Rule, ...]) -> dict[TopK, RoutingPlan]:
        keys = {rule: (self._layout, self._documents, rule) for own in heads for rule in top_ks_of(own)}
        return {rule: self._routes.get(key, partial(plan_routing, *key)) for rule, key in keys.items()}

    def _requests(
        self, heads: tuple[Rule, ...], q: torch.Tensor, k: torch.Tensor
    ) -> tuple[dict[TopK, RoutingPlan], list[_RoutingRequest]]:
        """The plans of all `TopK`, and the requests of those with a choice."""
        check_tensors(q, k, k)
        check_local_length(q, self._layout, self._cp_rank)
        if q.size(0) != 1:
            raise ValueError(f"B={q.size(0)}: content chooses for one sequence at a time; call once for each")
        plans, requests = self._plans(heads), []
        for rule, plan in plans.items():
            if plan.any_chosen:
                key = (self._layout, self._documents, rule, self._cp_rank, q.device)
                placed = self._routes.get(key, partial(_on_device, plan, self._cp_rank, q.device))
                requests.append(_RoutingRequest(rule, plan, placed, heads, self._cp_rank, q, k))
        return plans, requests

    def _choose(self, requests: list[_RoutingRequest], call_index: int) -> list[Choices]:
        """For each of `requests` the choices of all blocks, (its heads, blocks, width)."""
        own = zip(requests, self._own_choices(requests, call_index), strict=True)
        flat = torch.cat([each.in_document(blocks).flatten() for each, blocks in own])
        ranks = range(self._layout.cp)
        sizes = [sum(each.num_choices(peer) for each in requests) for peer in ranks]
        choices = torch.cat(self._swap([flat for _ in ranks], sizes, _tag(call_index) + 1)).cpu().numpy()
        if self._check is not None:
            self._check()
        tables = [np.repeat(each.plan.few[None], len(each.heads), axis=0) for each in requests]
        begin = 0
        for peer in ranks:
            for each, table in zip(requests, tables, strict=True):
                rows, end = each.plan.rows[peer], begin + each.num_choices(peer)
                table[:, rows] = choices[begin:end].reshape(len(each.heads), len(rows), each.rule.width)
                begin = end
        assert begin == choices.size, (begin, choices.size)
        return tables

    def _own_choices(self, requests: list[_RoutingRequest], call_index: int) -> list[torch.Tensor]:
        """For each of `requests` the blocks chosen for this rank's rows, (its heads, rows, width) int64."""
        ranks = range(self._layout.cp)
        received = self._swap(
            [torch.cat([each.outgoing(peer) for each in requests]) for peer in ranks],
            [sum(each.num_incoming(peer) for each in requests) for peer in ranks],
            _tag(call_index),
        )
        choices, begins = [], [0] * len(ranks)
        for each in requests:
            ends = [begin + each.num_incoming(peer) for peer, begin in zip(ranks, begins, strict=True)]
            pieces = [message[begin:end] for message, begin, end in zip(received, begins, ends, strict=True)]
            choices.append(each.choose(pieces))
            begins = ends
        return choices

    def _swap(self, outbox: list[torch.Tensor], sizes: list[int], tag: int) -> list[torch.Tensor]:
        """Send `outbox[rank]` to each rank. Returns the received messages, flat, of `sizes[rank]` elements, which all
        ranks know."""
        own = outbox[self._cp_rank]
        inbox = [own if rank == self._cp_rank else own.new_empty(size) for rank, size in enumerate(sizes)]
        self._all_to_all.swap([message.contiguous() for message in outbox], inbox, tag)
        return inbox

    def _resolve(self, rule: Rule, choices: dict[TopK, Choices], plans: dict[TopK, RoutingPlan]) -> Rule:
        if not choices:
            return rule
        by_document = []
        for number, (start, stop) in enumerate(self._documents):
            chosen: dict[TopK, Rule] = {}
            for top_k, table in choices.items():
                first, num_units = plans[top_k].first_block[number], -(-(stop - start) // top_k.unit_tokens)
                own = table[first : first + num_units]
                chosen[top_k] = Chosen(num_units, own.tobytes(), top_k.unit_tokens)
            by_document.append(resolved(rule, chosen))
        return by_document[0] if len(by_document) == 1 else ByDocument(tuple(by_document))


def _tag(call_index: int) -> int:
    return _FIRST_TAG + call_index % _NUM_TAGGED_CALLS * _NUM_SWAPS


class _RoutingRequest:
    """One `TopK` of a layer, in one call on one rank: its heads, and the messages of its choice."""

    def __init__(
        self,
        rule: TopK,
        plan: RoutingPlan,
        at: _DevicePlan,
        heads: Sequence[Rule],
        cp_rank: int,
        q: torch.Tensor,
        k: torch.Tensor,
    ) -> None:
        self.rule, self.plan = rule, plan
        self.heads = tuple(head for head, own in enumerate(heads) if rule in top_ks_of(own))
        sharing = q.size(2) // k.size(2)
        kv_heads = tuple(dict.fromkeys(head // sharing for head in self.heads))
        self._kv_of = tuple(kv_heads.index(head // sharing) for head in self.heads)
        self._num_kv, self._head_dim = len(kv_heads), q.size(3)
        self._cp_rank = cp_rank
        self._at = at
        self._q, k_own = _of_heads(q[0], self.heads), _of_heads(k[0], kv_heads)
        spans = self.plan.local[cp_rank]
        self._key_sums = chunk_sums(k_own, spans)
        self._query_sums = self._key_sums[:0] if rule.causal else chunk_sums(self._q, spans)

    @property
    def own_rows(self) -> torch.Tensor:
        """(rows,) int64: which of the rank's blocks choose, where it holds each of its blocks whole."""
        return self._at.speakers // self.rule.unit_tokens

    def outgoing(self, peer: int) -> torch.Tensor:
        """The message to `peer`, flat: sums of keys, then of queries."""
        keys = self._key_sums[self._at.keys_out[peer]]
        if self.rule.causal:
            return keys.flatten()
        return torch.cat([keys.flatten(), self._query_sums[self._at.queries_out[peer]].flatten()])

    def num_incoming(self, peer: int) -> int:
        """Number of elements that `peer` sends to this rank."""
        num_query_chunks = len(self.plan.queries[self._cp_rank].chunks[peer])
        return self._num_key_elements(peer) + num_query_chunks * len(self.heads) * self._head_dim

    def num_choices(self, peer: int) -> int:
        """Number of elements of `peer`'s choices."""
        return len(self.heads) * len(self.plan.rows[peer]) * self.rule.width

    def choose(self, received: list[torch.Tensor]) -> torch.Tensor:
        """(heads, this rank's rows, width) int64: the chosen blocks of the sequence, ascending, from the messages of
        all ranks."""
        num_keys = [self._num_key_elements(peer) for peer in range(len(received))]
        keys = torch.cat([piece[:num] for piece, num in zip(received, num_keys, strict=True)])
        keys = self._assembled(keys.view(-1, self._num_kv, self._head_dim), self._at.key_turns)
        if self.rule.causal:
            speaking = self._q[self._at.speakers].double()
        else:
            queries = torch.cat([piece[num:] for piece, num in zip(received, num_keys, strict=True)])
            queries = queries.view(-1, len(self.heads), self._head_dim)
            speaking = self._assembled(queries, self._at.query_turns)[self._at.rows]
        keys = _of_heads(keys, self._kv_of)
        return best_blocks(speaking, keys, self._at.begins, self._at.rows, self.rule.width)

    def in_document(self, blocks: torch.Tensor) -> torch.Tensor:
        """`blocks`, as `choose` returns them, int32 and counted from the start of each row's document."""
        return (blocks - self._at.begins[:, None]).int()

    def _assembled(self, entries: torch.Tensor, turns: _Turns) -> torch.Tensor:
        """(blocks, heads, D): the sums of whole blocks. Parts of several ranks are added in the order of positions."""
        total = entries.new_zeros(self.plan.num_blocks, *entries.shape[1:])
        for chosen, blocks in turns:
            total[blocks] += entries[chosen]  # within a turn each block occurs at most once
        return total

    def _num_key_elements(self, peer: int) -> int:
        return len(self.plan.keys[self._cp_rank].chunks[peer]) * self._num_kv * self._head_dim


@dataclass(frozen=True, eq=False)
class _DevicePlan:
    """A rank's part of a `RoutingPlan`, as index tensors on a device."""

    keys_out: tuple[torch.Tensor, ...]
    queries_out: tuple[torch.Tensor, ...]
    key_turns: _Turns
    query_turns: _Turns
    rows: torch.Tensor
    begins: torch.Tensor
    speakers: torch.Tensor


def _on_device(plan: RoutingPlan, cp_rank: int, device: torch.device) -> _DevicePlan:
    def index(positions: Positions) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(positions)).to(device)

    def turns(received: SentBlocks) -> _Turns:
        return tuple((index(entries), index(blocks)) for entries, blocks in received.turns)

    return _DevicePlan(
        tuple(index(received.chunks[cp_rank]) for received in plan.keys),
        tuple(index(received.chunks[cp_rank]) for received in plan.queries),
        turns(plan.keys[cp_rank]),
        turns(plan.queries[cp_rank]),
        index(plan.rows[cp_rank]),
        index(plan.begins[cp_rank]),
        index(plan.speakers[cp_rank]),
    )


def chunk_sums(x: torch.Tensor, spans: Sequence[Range]) -> torch.Tensor:
    """(len(spans), H, D) fp64: sums of x (S, H, D) over consecutive spans that cover it.

    In fp64 sums of bf16, and most sums of fp32, are exact, so their order does not matter.
    """
    lengths = {stop - start for start, stop in spans}
    if len(lengths) == 1:
        return x.unflatten(0, (len(spans), lengths.pop())).sum(1, dtype=torch.float64)
    sums = [x[start:stop].sum(0, dtype=torch.float64) for start, stop in spans]
    return torch.stack(sums) if sums else x.new_empty(0, *x.shape[1:], dtype=torch.float64)


def best_blocks(
    speaking: torch.Tensor, keys: torch.Tensor, begins: torch.Tensor, rows: torch.Tensor, width: int
) -> torch.Tensor:
    """(H, R, width) int64, ascending: for row i the highest-scoring blocks from begins[i] to rows[i] - 1.

    `speaking` (R, H, D), the routing queries, and `keys` (N, H, D) are fp64; `begins` and `rows` are (R,). Ties in fp32
    go to the earlier block. Rows with fewer than `width` such blocks are filled up with other blocks.
    """
    num_blocks, num_heads = keys.size(0), keys.size(1)
    at = torch.arange(num_blocks, device=keys.device)
    by_head = keys.permute(1, 2, 0).contiguous()
    strip = max(1, _STRIP_ELEMENTS // max(1, num_blocks * num_heads))
    best = [keys.new_empty(num_heads, 0, width, dtype=torch.int64)]
    for some, begin, row in zip(speaking.split(strip), begins.split(strip), rows.split(strip), strict=True):
        # Map fp32 scores to integers of the same order, made distinct by block number: ties do not depend on topk.
        bits = torch.matmul(some.transpose(0, 1), by_head).float().view(torch.int32).long()
        order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits) * num_blocks - at
        past = (at >= begin[:, None]) & (at < row[:, None])
        order.masked_fill_(~past, torch.iinfo(torch.int64).min)
        best.append(order.topk(width, dim=-1).indices.sort(dim=-1).values)
    return torch.cat(best, dim=1)


def _of_heads(x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
    """x[:, heads] for x (n, H, D), without an index tensor that would have to be copied to the device."""
    return x if heads == tuple(range(x.size(1))) else torch.stack([x[:, head] for head in heads], dim=1)
