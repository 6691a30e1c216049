"""The attention that a model's layers call: for one sequence, each layer on the ring of its pattern.

Kernels, hops and planning belong in the rings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.comm.messages import Group
from elastic_ring.attention.kernels.registry import sparse_form
from elastic_ring.attention.layouts.layout import Layout
from elastic_ring.attention.lowering.call_plan import PlanCache, RingPlans
from elastic_ring.attention.lowering.chosen_blocks import ChosenPlans, PastBlocks, past_blocks
from elastic_ring.attention.options import RingOptions, check_tensors
from elastic_ring.attention.patterns.content import chosen_without_host, top_ks_of
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.rules import Dense, Rule
from elastic_ring.attention.patterns.sparse import DEFAULT_BLOCK_TOKENS, Pattern, SparsePattern
from elastic_ring.attention.plan.schedule import Schedule, plan
from elastic_ring.attention.plan.sparse_schedule import plan_sparse
from elastic_ring.attention.recomputation import SavedResult, swapped
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.routing.router import Router

AttentionFn = Callable[..., torch.Tensor]
"""q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D); `sinks` (H,) as in `RingAttention`."""


WHICH_LAYER = (
    "the layers follow different patterns, and attention(q, k, v) does not say which layer calls: use"
    " attention.layer(i)(q, k, v), or `of_layer(attention, i)` where the attention may be a dense one"
)


class PatternedAttention:
    """Attention over a ring for a model whose layers follow `patterns`, for one sequence.

    `layer(i)` is the callable of layer i; if all layers follow the same rules, the object itself is callable. Dense
    layers run on the dense ring. `group` is a process group of exactly the ring's ranks in cp_rank order, or None for
    cp = 1; every rank makes the same calls in the same order. All rings get `options`; `observer` is called with the
    number of the call, counted over all layers. On a GPU the sparse layers use the sparse form of `backend`, if it has
    one; `kernel` overrides that choice and makes CPUs run the block-sparse path of GPUs.

    A layer whose rules await content (`content.TopK`) chooses its blocks in every call and needs B = 1; `observer` is
    also called for hop 0 before the choice. A recomputed call (`recomputation`) reuses its choice and sends nothing.

    `causal` False needs rules that say which later keys they keep; others are refused by name. `scale` multiplies the
    scores (None: 1/sqrt(D)), and `first_call_index` numbers the first call. `last_ring` is the ring of the last call.
    """

    def __init__(
        self,
        patterns: LayerPatterns,
        layout: Layout,
        cp_rank: int,
        group: Group | None,
        options: RingOptions | None = None,
        *,
        document_starts: Sequence[int] = (0,),
        causal: bool = True,
        scale: float | None = None,
        plans: PlanCache | None = None,
        first_call_index: int = 0,
    ) -> None:
        if not causal:
            for group_ in patterns.groups:
                SparsePattern(group_.rules, patterns.block, causal=False)
        self.patterns, self.layout, self.cp_rank, self.group = patterns, layout, cp_rank, group
        self.options = RingOptions() if options is None else options
        self.last_ring: RingAttention | None = None
        self._dense = Pattern(causal, tuple(int(start) for start in document_starts))
        self._scale, self._num_calls = scale, first_call_index
        self._plans = PlanCache() if plans is None else plans
        documents = Pattern(True, self._dense.document_starts).documents(layout.seq_len)
        self._router = Router(layout, cp_rank, group, documents, self.options, routes=self._plans.routes)
        self._rings: dict[tuple[tuple[Rule, ...], int, int, torch.device], RingAttention] = {}
        self._record: _SavedCalls | None = None
        self._offload = False
        self._replay: Iterator[tuple[RingAttention, list[SavedResult]]] | None = None

    @property
    def ledger(self) -> HopLedger:
        return self.options.ledger

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q (B, S_local, H, D), k and v (B, S_local, Hkv, D) to out (B, S_local, H, D).

        Raises `ValueError` if layers follow different patterns; call `layer(i)(q, k, v)` instead.
        """
        if not self.patterns.same_everywhere:
            raise ValueError(WHICH_LAYER)
        return self._attend(0, q, k, v, sinks)

    def layer(self, index: int) -> AttentionFn:
        """The callable of layer `index`. Raises `ValueError` if the pattern does not cover the layer."""
        self.patterns.of_layer(index)
        return _Layer(self, index)

    def documents(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As of a ring."""
        begin, length = self.layout.documents(self.cp_rank, self._dense.document_starts)
        return begin.to(positions.device).view_as(positions), length.to(positions.device).view_as(positions)

    def recomputation(
        self, *, offload: bool = False
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """As `RingAttention.recomputation`: the second context replays the calls recorded in the first, in order."""
        kept: _SavedCalls = []

        @contextmanager
        def recording() -> Iterator[None]:
            with swapped(self, "_record", kept), swapped(self, "_offload", offload):
                yield

        @contextmanager
        def replaying() -> Iterator[None]:
            with swapped(self, "_replay", iter(kept)):
                yield

        return recording(), replaying()

    def _attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        up: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._replay is not None:
            ring, results = next(self._replay)
            context: AbstractContextManager[None] = ring.replaying(results)
        else:
            check_tensors(q, k, v, latent=up is not None)  # before content routing sends messages
            ring, context = self.ring(layer, q, k, latent=up is not None), nullcontext()
            if self._record is not None:
                self._record.append((ring, []))
                context = ring.recording(self._record[-1][1], offload=self._offload)
        with context:
            return ring(q, k, v, scale=self._scale, sinks=sinks, up=up)

    def ring(self, layer: int, q: torch.Tensor, k: torch.Tensor, *, latent: bool = False) -> RingAttention:
        """The ring for this layer's rules: cached for static rules, new in each call for content-chosen ones."""
        rules = self.patterns.of_layer(layer).heads(q.size(2), (q if latent else k).size(2))
        block, sizes = self.patterns.block, (q.size(2), k.size(2))
        number = self._num_calls
        self._num_calls += 1
        if any(rule.awaits_content for rule in rules):
            if self.options.observer is not None:
                self.options.observer("forward", number, 0)
            # Blocks are chosen without the host if all `TopK` say so and kernels read tables.
            if (q.is_cuda or self.options.kernel is not None) and chosen_without_host(rules):
                plans: RingPlans = self._chosen(rules, q, k, number)
            else:
                units = [top_k.unit_tokens for rule in rules for top_k in top_ks_of(rule)]
                block = block if all(unit % block == 0 for unit in units) else min(units)
                plans = RingPlans(self._schedule(self._router(rules, q, k, number), block, sizes))
            ring = self._over(plans, q)
        else:
            key = (rules, *sizes, q.device)
            if key not in self._rings:
                if set(rules) == {Dense()}:
                    plans = self._plans.of(self._place, lambda: plan(self._dense, self.layout))
                else:
                    about = (*self._place, rules, block, *sizes)
                    plans = self._plans.of(about, lambda: self._schedule(rules, block, sizes))
                self._rings[key] = self._over(plans, q)
            ring = self._rings[key]
        ring.reset_calls(number)
        self.last_ring = ring
        return ring

    def _chosen(self, rules: tuple[Rule, ...], q: torch.Tensor, k: torch.Tensor, number: int) -> ChosenPlans:
        """The plans of a call whose blocks are chosen on the device, over a fetch of all past keys."""
        sizes = (q.size(2), k.size(2))
        key = (*self._place, "all", *sizes)
        everything = self._plans.of(key, lambda: self._schedule((Dense(),), DEFAULT_BLOCK_TOKENS, sizes))

        def static_part() -> PastBlocks:
            documents = everything.schedule.sparse.documents(self.layout.seq_len)
            always = self._router.without_choice(rules, q.size(2))
            return past_blocks(everything.schedule, self.cp_rank, always, documents, q.device)

        past = everything.tables.get((rules, q.device), static_part)
        choices = tuple(self._router.on_device(rules, q, k, number))
        return ChosenPlans(
            everything.schedule, everything.calls, everything.tables, everything.kernels, past=past, choices=choices
        )

    @property
    def _place(self) -> tuple[Any, ...]:
        return self.layout, self.cp_rank, self._dense, self.options.plan_key

    def _schedule(self, rules: tuple[Rule, ...], block: int, sizes: tuple[int, int]) -> Schedule:
        pattern = SparsePattern(rules, block, self._dense.document_starts, self._dense.causal)
        return plan_sparse(pattern, self.layout, *sizes)

    def _over(self, plans: RingPlans, q: torch.Tensor) -> RingAttention:
        options = self.options
        if not plans.schedule.is_dense and options.kernel is None and q.is_cuda:
            options = replace(options, kernel=sparse_form(options.backend))
        return RingAttention(plans.schedule, self.cp_rank, self.group, options, plans=plans)


_SavedCalls = list[tuple[RingAttention, list[SavedResult]]]


class _Layer:
    """The attention callable of one layer: passes the layer index on."""

    def __init__(self, attention: PatternedAttention, index: int) -> None:
        self._attention, self._index = attention, index
        self.recomputation = attention.recomputation

    @property
    def takes_latents(self) -> bool:
        """As a ring's; False if content chooses by keys, which are read before they are sent."""
        rules = self._attention.patterns.of_layer(self._index).rules
        return self._attention.layout.cp > 1 and not any(rule.awaits_content for rule in rules)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._attention._attend(self._index, q, k, v, sinks, up)


def of_layer(attention: Any, index: int) -> AttentionFn:
    """The callable of layer `index`; a dense attention is returned unchanged, since its layers are all alike."""
    chosen: AttentionFn = attention.layer(index) if isinstance(attention, PatternedAttention) else attention
    return chosen
