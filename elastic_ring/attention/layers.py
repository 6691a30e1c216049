"""Which layer follows which pattern, and the attention that a model's layers call over one ring.

`LayerPatterns` is plain data: it knows nothing of rings, lengths or documents, so a resized ring keeps its
meaning. `PatternedAttention` serves one sequence: it gives each layer the ring of its pattern. Text forms of
patterns belong in `spec`; kernels, hops and planning are the rings' own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_ring.attention.block_kernels import sparse_form
from elastic_ring.attention.checks import check_tensors
from elastic_ring.attention.content import top_ks_of
from elastic_ring.attention.exchange import Group, HopBuffers, HopLedger
from elastic_ring.attention.families import spelled_longnet
from elastic_ring.attention.layout import Layout
from elastic_ring.attention.pattern import Pattern
from elastic_ring.attention.recomputation import Kept
from elastic_ring.attention.ring import Observer, RingAttention
from elastic_ring.attention.routing import Router
from elastic_ring.attention.rules import Dense, Rule, Union
from elastic_ring.attention.schedule import plan
from elastic_ring.attention.sparse import DEFAULT_BLOCK_TOKENS, SparsePattern, rules_told
from elastic_ring.attention.sparse_blocks import check_blocks
from elastic_ring.attention.sparse_ring import SparseRingAttention
from elastic_ring.attention.sparse_schedule import plan_sparse

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerGroup:
    """The layers `layers` (None: all that no other group names) and the rules of their heads.

    One rule serves all heads; otherwise there is one for each query head, or, `dealt`, K/V head i and its
    query heads follow `rules[i % len(rules)]`.
    """

    rules: tuple[Rule, ...]
    layers: tuple[int, ...] | None = None
    dealt: bool = False

    def __str__(self) -> str:
        shifted = spelled_longnet(self.rules) if self.dealt else None
        return shifted or rules_told(self.rules)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Rule, ...]:
        """The rule of each query head, or one for all. Raises `ValueError` when their number does not fit."""
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
    """The pattern of every layer. Raises `ValueError` for a layer named twice, or two groups for the rest."""

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
        """Whether all layers follow the same rules, so that nobody need say which layer calls."""
        return len(self.groups) == 1 and self.groups[0].layers is None

    @property
    def any_dense(self) -> bool:
        """Whether some layers attend densely, by the dense ring."""
        return any(set(group.rules) == {Dense()} for group in self.groups)

    @property
    def any_sparse(self) -> bool:
        return any(set(group.rules) != {Dense()} for group in self.groups)

    def check_blocks(self, layout: Layout) -> None:
        """Raises `ValueError` for what GPUs cannot run of it on `layout`: they take whole blocks of 128 tokens."""
        for group in self.groups:
            if set(group.rules) != {Dense()}:
                check_blocks(SparsePattern(group.rules, self.block), layout)

    def of_layer(self, layer: int) -> LayerGroup:
        """Raises `ValueError` for a layer that no group covers."""
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
        """Raises `ValueError` unless the pattern fits a model of these numbers."""
        beyond = [layer for group in self.groups for layer in group.layers or () if layer >= num_layers]
        if beyond:
            raise ValueError(f"layer {beyond[0]}: the model has layers 0 to {num_layers - 1}; name one of these")
        for layer in range(num_layers):
            self.of_layer(layer).heads(num_heads, num_kv_heads)

    def density(self, seq_len: int, num_layers: int, num_heads: int, num_kv_heads: int) -> float:
        """The kept share of the causal triangle of one document of `seq_len` tokens, the mean over layers; no more
        than an upper bound where `density_is_bound`."""
        heads = [self.of_layer(layer).heads(num_heads, num_kv_heads) for layer in range(num_layers)]
        return sum(SparsePattern(rules, self.block).density(seq_len) for rules in heads) / num_layers

    @property
    def density_is_bound(self) -> bool:
        """Whether content chooses beside a static rule somewhere: what it chooses may be kept already."""
        rules = [rule for group in self.groups for rule in group.rules]
        return any(rule.awaits_content for rule in rules if isinstance(rule, Union))

    @property
    def identity(self) -> str:
        """What it keeps, as text: equal in every process for equal patterns, functions by their name in the code."""
        return _identity(self)

    def __str__(self) -> str:
        """As `spec.parse_pattern` reads it, where the short form has words for all of it."""
        parts = [f"{group}{'' if group.layers is None else '@' + _spelled(group.layers)}" for group in self.groups]
        return ";".join(parts) + (f" in blocks of {self.block}" if self.block != DEFAULT_BLOCK_TOKENS else "")


class PatternedAttention:
    """Causal attention of a model whose layers follow `patterns`, over the ranks of a ring, for one sequence.

    `layer(i)` is layer i's callable; where all layers follow the same rules the object itself will do. Layers
    without a sparse rule run on the dense ring and its kernels. `group` is a process group of exactly the
    ring's ranks in cp_rank order, or None for cp = 1; every rank makes the same calls in the same order.
    `observer` sees every hop with the number of its call, counted over all layers. `backend`, `deterministic`,
    `cache_dir` and `buffers` are as for `RingAttention`; on a GPU a backend that has a sparse form also names that of
    the sparse layers. `sparse_kernel` names it apart, and has CPUs run what GPUs do.

    Where a layer's rules await content (`content.TopK`), its blocks are chosen anew in every call, for one sequence
    (B = 1), and the call then runs as any sparse one; `observer` hears of hop 0 before that too. `check` is called
    once the choices were read, and raises when the group has been aborted meanwhile, which on a GPU nothing else says.
    A call that is given again in backward (`recomputation`) keeps its choice and sends nothing.
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
    ) -> None:
        self.patterns, self.layout, self.cp_rank = patterns, layout, cp_rank
        self.ledger = HopLedger() if ledger is None else ledger
        self._group = group
        self._document_starts = tuple(int(start) for start in document_starts)
        self._observer = observer
        self._backend, self._deterministic, self._cache_dir = backend, deterministic, cache_dir
        self._sparse_kernel = sparse_kernel
        self._buffers = HopBuffers() if buffers is None else buffers
        documents = Pattern(True, self._document_starts).documents(layout.seq_len)
        self._router = Router(layout, cp_rank, group, documents, self.ledger, check=check)
        self._num_calls = 0
        self._rings: list[object] = []  # a call that raised leaves buffers with its ring
        self._record: _Kept | None = None
        self._offload = False
        self._replay: Iterator[tuple[_Ring, list[Kept]]] | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D).

        Raises `ValueError` where layers differ: it cannot know which one calls.
        """
        if not self.patterns.same_everywhere:
            raise ValueError(WHICH_LAYER)
        return self._attend(0, q, k, v)

    def layer(self, index: int) -> Attention:
        """What layer `index` calls. Raises `ValueError` for one that the pattern does not cover."""
        self.patterns.of_layer(index)
        return _Layer(self, index)

    def recomputation(
        self, *, offload: bool = False
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """As `RingAttention.recomputation`: each call in the first context is given again by its ring in the second."""
        kept: _Kept = []
        return self._recording(kept, offload), self._replaying(kept)

    @contextmanager
    def _recording(self, kept: _Kept, offload: bool) -> Iterator[None]:
        outer, self._record, self._offload = self._record, kept, offload
        try:
            yield
        finally:
            self._record = outer

    @contextmanager
    def _replaying(self, kept: _Kept) -> Iterator[None]:
        outer, self._replay = self._replay, iter(kept)
        try:
            yield
        finally:
            self._replay = outer

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._replay is not None:
            ring, results = next(self._replay)
            with ring.replaying(results):
                return ring(q, k, v)
        check_tensors(q, k, v)  # before content chooses, which sends
        ring = self._ring(layer, q, k)
        self._rings.append(ring)
        if self._record is None:
            return ring(q, k, v)
        self._record.append((ring, []))
        with ring.recording(self._record[-1][1], offload=self._offload):
            return ring(q, k, v)

    def _ring(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> _Ring:
        rules = self.patterns.of_layer(layer).heads(q.size(2), k.size(2))
        number = self._num_calls
        self._num_calls += 1
        if set(rules) == {Dense()}:
            dense = plan(Pattern(True, self._document_starts), self.layout)
            return RingAttention(
                dense, self.cp_rank, self._group, ledger=self.ledger, buffers=self._buffers, backend=self._backend,
                deterministic=self._deterministic, cache_dir=self._cache_dir,
                observer=_numbered(self._observer, number),
            )  # fmt: skip
        block = self.patterns.block
        if any(rule.awaits_content for rule in rules):
            if self._observer is not None:
                self._observer("forward", number, 0)
            block = _list_block(rules, block)
            rules = self._router(rules, q, k, number)
        pattern = SparsePattern(rules, block, self._document_starts)
        kernel = self._sparse_kernel
        if kernel is None and q.is_cuda:
            kernel = sparse_form(self._backend)
        return SparseRingAttention(
            plan_sparse(pattern, self.layout, q.size(2), k.size(2)), self.cp_rank, self._group, ledger=self.ledger,
            first_call_index=number, observer=self._observer, kernel=kernel, deterministic=self._deterministic,
            buffers=self._buffers,
        )  # fmt: skip


def _list_block(rules: tuple[Rule, ...], block: int) -> int:
    """How finely lists are made where content chooses: no coarser than its units, which then are whole blocks."""
    units = [top_k.unit_tokens for rule in rules for top_k in top_ks_of(rule)]
    return block if all(unit % block == 0 for unit in units) else min(units)


_Ring = RingAttention | SparseRingAttention
_Kept = list[tuple[_Ring, list[Kept]]]


class _Layer:
    """One layer's attention; what it calls knows which layer called."""

    def __init__(self, attention: PatternedAttention, index: int) -> None:
        self._attention, self._index = attention, index
        self.recomputation = attention.recomputation

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._attention._attend(self._index, q, k, v)


def of_layer(attention: Any, index: int) -> Attention:
    """What layer `index` of a model calls: for a dense attention itself, since there all layers are alike."""
    chosen: Attention = attention.layer(index) if isinstance(attention, PatternedAttention) else attention
    return chosen


def _numbered(observer: Observer | None, number: int) -> Observer | None:
    """The ring of one call counts from 0; its observer hears the call's number in the sequence."""
    if observer is None:
        return None
    return lambda direction, call_index, hop: observer(direction, number, hop)


def _identity(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_identity, value)) + ")"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ", ".join(f"{f.name}={_identity(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{type(value).__qualname__}({fields})"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)


def _spelled(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))
