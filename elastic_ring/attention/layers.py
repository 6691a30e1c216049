"""The pattern of each layer, and the attention that a model's layers call.

`LayerPatterns` is plain data without ring, length or documents, so it stays valid when the ring is resized.
`PatternedAttention` serves one sequence and calls, for each layer, the ring of its pattern. Text forms belong
in `parse`; kernels, hops and planning belong in the rings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_ring.attention.checks import check_tensors
from elastic_ring.attention.comm.exchange import Group, HopBuffers, HopLedger, Wire
from elastic_ring.attention.kernels.registry import sparse_form
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.lowering.chosen_blocks import ChosenPlans, PastBlocks, past_blocks
from elastic_ring.attention.patterns.content import chosen_without_host, top_ks_of
from elastic_ring.attention.patterns.families import longnet_text
from elastic_ring.attention.patterns.pattern import Pattern
from elastic_ring.attention.patterns.rules import Dense, Rule, Union
from elastic_ring.attention.patterns.sparse import DEFAULT_BLOCK_TOKENS, SparsePattern, rules_text
from elastic_ring.attention.plan.schedule import Schedule, plan
from elastic_ring.attention.plan.sparse_blocks import check_blocks
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.plan.two_level import Hosts
from elastic_ring.attention.recomputation import SavedResult
from elastic_ring.attention.ring import Observer, RingAttention
from elastic_ring.attention.ring_plans import PlanCache, RingPlans
from elastic_ring.attention.routing.router import Router

AttentionFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D)."""


@dataclass(frozen=True)
class LayerGroup:
    """The rules of the layers `layers` (None: all layers that no other group names).

    One rule applies to all heads; several are one per query head. With `dealt`, K/V head i and its query heads follow
    `rules[i % len(rules)]`.
    """

    rules: tuple[Rule, ...]
    layers: tuple[int, ...] | None = None
    dealt: bool = False

    def __str__(self) -> str:
        shifted = longnet_text(self.rules) if self.dealt else None
        return shifted or rules_text(self.rules)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Rule, ...]:
        """One rule per query head, or one for all. Raises `ValueError` if the number of rules does not fit."""
        if len(set(self.rules)) == 1:
            return self.rules[:1]
        if self.dealt:
            sharing = num_heads // num_kv_heads
            return tuple(self.rules[head // sharing % len(self.rules)] for head in range(num_heads))
        return SparsePattern(self.rules).rules(num_heads)


WHICH_LAYER = (
    "the layers follow different patterns, and attention(q, k, v) does not say which layer calls: use"
    " attention.layer(i)(q, k, v), or `of_layer(attention, i)` where the attention may be a dense one"
)


@dataclass(frozen=True)
class LayerPatterns:
    """The pattern of every layer. Raises `ValueError` if a layer is named twice or two groups have no layers."""

    groups: tuple[LayerGroup, ...]
    block: int = DEFAULT_BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups=(): a pattern needs rules for at least one group of layers")
        if sum(group.layers is None for group in self.groups) > 1:
            raise ValueError("two groups of rules for all other layers: name the layers of all groups but one")
        named = [layer for group in self.groups for layer in group.layers or ()]
        for layer in named:
            if layer < 0 or named.count(layer) > 1:
                raise ValueError(f"layer {layer}: name each layer once, counted from 0")
        for group in self.groups:
            SparsePattern(group.rules, self.block)

    @property
    def same_everywhere(self) -> bool:
        """Whether all layers follow the same rules, so that calls need no layer index."""
        return len(self.groups) == 1 and self.groups[0].layers is None

    @property
    def any_dense(self) -> bool:
        """Whether some layer runs on the dense ring."""
        return any(set(group.rules) == {Dense()} for group in self.groups)

    @property
    def any_sparse(self) -> bool:
        return any(set(group.rules) != {Dense()} for group in self.groups)

    def check_blocks(self, layout: Layout) -> None:
        """Raises `ValueError`, with a way out, if a sparse layer or `layout` cuts blocks of 128 tokens."""
        for group in self.groups:
            if set(group.rules) != {Dense()}:
                check_blocks(SparsePattern(group.rules, self.block), layout)

    def of_layer(self, layer: int) -> LayerGroup:
        """The group of `layer`. Raises `ValueError` if no group covers it."""
        rest = None
        for group in self.groups:
            if group.layers is None:
                rest = group
            elif layer in group.layers:
                return group
        if rest is None:
            raise ValueError(f"layer {layer}: the pattern has no rules for it; add a group without layers for the rest")
        return rest

    def check(self, num_layers: int, num_heads: int, num_kv_heads: int) -> None:
        """Raises `ValueError` unless the pattern fits a causal model of this size."""
        ahead = next((rule for group in self.groups for rule in group.rules if rule.num_ahead), None)
        if ahead is not None:
            raise ValueError(
                f"{ahead}: training is causal, and no query sees {ahead.num_ahead} later keys; leave ahead out"
            )
        beyond = [layer for group in self.groups for layer in group.layers or () if layer >= num_layers]
        if beyond:
            raise ValueError(f"layer {beyond[0]}: the model has layers 0 to {num_layers - 1}; name one of these")
        for layer in range(num_layers):
            self.of_layer(layer).heads(num_heads, num_kv_heads)

    def density(self, seq_len: int, num_layers: int, num_heads: int, num_kv_heads: int) -> float:
        """The kept share (0 to 1) of the causal pairs of one document of `seq_len` tokens, averaged over layers; an
        upper bound if `density_is_bound`."""
        heads = [self.of_layer(layer).heads(num_heads, num_kv_heads) for layer in range(num_layers)]
        return sum(SparsePattern(rules, self.block).density(seq_len) for rules in heads) / num_layers

    @property
    def density_is_bound(self) -> bool:
        """Whether a static rule and a content-chosen one are joined: their keys may overlap."""
        rules = [rule for group in self.groups for rule in group.rules]
        return any(rule.awaits_content for rule in rules if isinstance(rule, Union))

    @property
    def identity(self) -> str:
        """A text key that is equal in every process for equal patterns; functions count by their qualified name."""
        return _identity(self)

    def __str__(self) -> str:
        """The short form that `parse.parse_pattern` reads, as far as the short form can express the pattern."""
        parts = [f"{group}{'' if group.layers is None else '@' + _layers_text(group.layers)}" for group in self.groups]
        return ";".join(parts) + (f" in blocks of {self.block}" if self.block != DEFAULT_BLOCK_TOKENS else "")


class PatternedAttention:
    """Attention over a ring for a model whose layers follow `patterns`, for one sequence.

    `layer(i)` is the callable of layer i; if all layers follow the same rules, the object itself is callable. Dense
    layers run on the dense ring. `group` is a process group of exactly the ring's ranks in cp_rank order, or None for
    cp = 1; every rank makes the same calls in the same order. `observer` is called for every hop with the number of
    the call, counted over all layers. `backend`, `deterministic`, `cache_dir` and `buffers` are as for
    `RingAttention`; on a GPU the sparse layers use the sparse form of `backend`, if it has one. `sparse_kernel`
    overrides that choice and makes CPUs run the block-sparse path of GPUs.

    A layer whose rules await content (`content.TopK`) chooses its blocks in every call and needs B = 1; `observer` is
    also called for hop 0 before the choice. `check` is called after the choices were read; it must raise if the
    group has been aborted, which a GPU does not report otherwise. A recomputed call (`recomputation`) reuses its
    choice and sends nothing.

    `causal` False needs rules that say which later keys they keep; others are refused by name. `scale` multiplies the
    scores (None: 1/sqrt(D)), `first_call_index` numbers the first call, and `abandoned` holds the buffers that the
    group may still write to after a call that raised. `hosts` is as for `RingAttention`.
    """

    def __init__(
        self,
        patterns: LayerPatterns,
        layout: Layout,
        cp_rank: int,
        group: Group | None,
        *,
        document_starts: Sequence[int] = (0,),
        observer: Observer | None = None,
        ledger: HopLedger | None = None,
        backend: str | None = None,
        deterministic: bool = True,
        cache_dir: Path | None = None,
        buffers: HopBuffers | None = None,
        sparse_kernel: str | None = None,
        check: Callable[[], None] | None = None,
        plans: PlanCache | None = None,
        causal: bool = True,
        scale: float | None = None,
        first_call_index: int = 0,
        abandoned: list[torch.Tensor] | None = None,
        kv_wire: Wire = "native",
        hosts: Hosts | None = None,
    ) -> None:
        if not causal:
            for group_ in patterns.groups:
                SparsePattern(group_.rules, patterns.block, causal=False)
        self._causal, self._scale, self._abandoned = causal, scale, abandoned
        self._kv_wire, self._hosts = kv_wire, hosts
        self.patterns, self.layout, self.cp_rank = patterns, layout, cp_rank
        self.ledger = HopLedger() if ledger is None else ledger
        self._group = group
        self._document_starts = tuple(int(start) for start in document_starts)
        self._observer = observer
        self._backend, self._deterministic, self._cache_dir = backend, deterministic, cache_dir
        self._sparse_kernel = sparse_kernel
        self._buffers = HopBuffers() if buffers is None else buffers
        documents = Pattern(True, self._document_starts).documents(layout.seq_len)
        self._plans = PlanCache() if plans is None else plans
        self._router = Router(layout, cp_rank, group, documents, self.ledger, check=check, routes=self._plans.routes)
        self._num_calls = first_call_index
        # Keep every ring, because a call that raised leaves buffers in its ring.
        self._rings: dict[tuple[tuple[Rule, ...], int, int, torch.device], RingAttention] = {}
        self._one_call_rings: list[RingAttention] = []
        self._record: _SavedCalls | None = None
        self._offload = False
        self._replay: Iterator[tuple[RingAttention, list[SavedResult]]] | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D).

        Raises `ValueError` if layers follow different patterns; call `layer(i)(q, k, v)` instead.
        """
        if not self.patterns.same_everywhere:
            raise ValueError(WHICH_LAYER)
        return self._attend(0, q, k, v)

    def layer(self, index: int) -> AttentionFn:
        """The callable of layer `index`. Raises `ValueError` if the pattern does not cover the layer."""
        self.patterns.of_layer(index)
        return _Layer(self, index)

    def recomputation(
        self, *, offload: bool = False
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """As `RingAttention.recomputation`: the second context replays the calls recorded in the first, in order."""
        kept: _SavedCalls = []
        return self._recording(kept, offload), self._replaying(kept)

    @contextmanager
    def _recording(self, kept: _SavedCalls, offload: bool) -> Iterator[None]:
        outer, self._record, self._offload = self._record, kept, offload
        try:
            yield
        finally:
            self._record = outer

    @contextmanager
    def _replaying(self, kept: _SavedCalls) -> Iterator[None]:
        outer, self._replay = self._replay, iter(kept)
        try:
            yield
        finally:
            self._replay = outer

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._replay is not None:
            ring, results = next(self._replay)
            with ring.replaying(results):
                return ring(q, k, v, scale=self._scale)
        check_tensors(q, k, v)  # before content routing sends messages
        ring = self._ring(layer, q, k)
        if self._record is None:
            return ring(q, k, v, scale=self._scale)
        self._record.append((ring, []))
        with ring.recording(self._record[-1][1], offload=self._offload):
            return ring(q, k, v, scale=self._scale)

    def _ring(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> RingAttention:
        """The ring for this layer's rules: cached for static rules, new in each call for content-chosen ones."""
        rules = self.patterns.of_layer(layer).heads(q.size(2), k.size(2))
        number = self._num_calls
        self._num_calls += 1
        if any(rule.awaits_content for rule in rules):
            if self._observer is not None:
                self._observer("forward", number, 0)
            plans: RingPlans
            if self._fetches_all(rules, q):
                plans = self._chosen(rules, q, k, number)
            else:
                block = _list_block(rules, self.patterns.block)
                plans = RingPlans(self._schedule(self._router(rules, q, k, number), block, q, k))
            self._one_call_rings.append(self._sparse(plans, q))
            ring = self._one_call_rings[-1]
        else:
            key = (rules, q.size(2), k.size(2), q.device)
            if key not in self._rings:
                self._rings[key] = self._make_ring(rules, q, k)
            ring = self._rings[key]
        ring.reset_calls(number)
        if self._abandoned is not None:
            ring._abandoned = self._abandoned
        return ring

    def _fetches_all(self, rules: tuple[Rule, ...], q: torch.Tensor) -> bool:
        """Whether a layer's blocks are chosen without the host: all of its `TopK` say so, and kernels read tables."""
        in_blocks = q.is_cuda or self._sparse_kernel is not None
        return in_blocks and chosen_without_host(rules)

    def _chosen(self, rules: tuple[Rule, ...], q: torch.Tensor, k: torch.Tensor, number: int) -> ChosenPlans:
        key = (*self._place, self._sparse_kernel, "all", q.size(2), k.size(2))
        everything = self._plans.of(key, lambda: self._schedule((Dense(),), DEFAULT_BLOCK_TOKENS, q, k))

        def known() -> PastBlocks:
            documents = everything.schedule.sparse.documents(self.layout.seq_len)
            always = self._router.without_choice(rules, q.size(2))
            return past_blocks(everything.schedule, self.cp_rank, always, documents, q.device)

        past = everything.tables.get((rules, q.device), known)
        choices = tuple(self._router.on_device(rules, q, k, number))
        return ChosenPlans(
            everything.schedule, everything.calls, everything.tables, everything.kernels, past=past, choices=choices
        )

    @property
    def _place(self) -> tuple[Any, ...]:
        return (
            self.layout,
            self.cp_rank,
            self._document_starts,
            self._causal,
            self._kv_wire,
            self._hosts,
            self._backend,
            self._deterministic,
        )

    def _make_ring(self, rules: tuple[Rule, ...], q: torch.Tensor, k: torch.Tensor) -> RingAttention:
        place = self._place
        if set(rules) == {Dense()}:
            pattern = Pattern(self._causal, self._document_starts)
            plans = self._plans.of(place, lambda: plan(pattern, self.layout))
            return RingAttention(
                plans.schedule,
                self.cp_rank,
                self._group,
                ledger=self.ledger,
                buffers=self._buffers,
                backend=self._backend,
                deterministic=self._deterministic,
                cache_dir=self._cache_dir,
                observer=self._observer,
                plans=plans,
                kv_wire=self._kv_wire,
                hosts=self._hosts,
            )
        block = self.patterns.block
        key = (*place, self._sparse_kernel, rules, block, q.size(2), k.size(2))
        return self._sparse(self._plans.of(key, lambda: self._schedule(rules, block, q, k)), q)

    def _schedule(self, rules: tuple[Rule, ...], block: int, q: torch.Tensor, k: torch.Tensor) -> Schedule:
        pattern = SparsePattern(rules, block, self._document_starts, self._causal)
        return plan_sparse(pattern, self.layout, q.size(2), k.size(2))

    def _sparse(self, plans: RingPlans, q: torch.Tensor) -> RingAttention:
        kernel = self._sparse_kernel
        if kernel is None and q.is_cuda:
            kernel = sparse_form(self._backend)
        return RingAttention(
            plans.schedule,
            self.cp_rank,
            self._group,
            ledger=self.ledger,
            observer=self._observer,
            kernel=kernel,
            deterministic=self._deterministic,
            buffers=self._buffers,
            plans=plans,
            cache_dir=self._cache_dir,
            kv_wire=self._kv_wire,
            hosts=self._hosts,
        )


def _list_block(rules: tuple[Rule, ...], block: int) -> int:
    """The block size in tokens of a content-chosen call: `block` if it divides every unit, else the smallest unit."""
    units = [top_k.unit_tokens for rule in rules for top_k in top_ks_of(rule)]
    return block if all(unit % block == 0 for unit in units) else min(units)


_SavedCalls = list[tuple[RingAttention, list[SavedResult]]]


class _Layer:
    """The attention callable of one layer: passes the layer index on."""

    def __init__(self, attention: PatternedAttention, index: int) -> None:
        self._attention, self._index = attention, index
        self.recomputation = attention.recomputation

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._attention._attend(self._index, q, k, v)


def of_layer(attention: Any, index: int) -> AttentionFn:
    """The callable of layer `index`; a dense attention is returned unchanged, since its layers are all alike."""
    chosen: AttentionFn = attention.layer(index) if isinstance(attention, PatternedAttention) else attention
    return chosen


def _identity(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_identity, value)) + ")"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ", ".join(f"{f.name}={_identity(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__qualname__}({fields})"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)


def _layers_text(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))
