"""The public door: attention over a ring for any training loop, without a trainer or Ray."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from elastic_ring.attention.comm.messages import Group
from elastic_ring.attention.kernels.kernel import Kernel
from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import Layout, make_layout
from elastic_ring.attention.lowering.call_plan import PlanCache
from elastic_ring.attention.options import RingOptions, check_options, check_tensors
from elastic_ring.attention.patterns.layers import LayerGroup, LayerPatterns
from elastic_ring.attention.patterns.parse import read_pattern
from elastic_ring.attention.patterns.rules import Rule
from elastic_ring.attention.patterns.sparse import Pattern
from elastic_ring.attention.plan.schedule import plan
from elastic_ring.attention.ring import RingAttention

PatternLike = str | Rule | Sequence[Rule] | LayerPatterns
"""A short form or file, a rule for all heads, a rule for each query head, or a pattern of layers that are alike."""


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | Group | None,
    seq_len: int | None = None,
    causal: bool = True,
    layout: str | Layout = "zigzag",
    document_starts: Sequence[int] = (0,),
    scale: float | None = None,
    backend: Kernel | str | None = None,
    deterministic: bool = True,
    pattern: PatternLike | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries over the whole sequence that the ranks of `group` share.

    q (B, S_local, H, D), k and v (B, S_local, Hkv, D), H a multiple of Hkv; returns (B, S_local, H, D) and
    is differentiable. Every rank holds what `layout` gives it (`make_layout(layout, seq_len, cp).scatter`);
    queries, keys and any position encoding must follow that order. `group` None is torch.distributed's
    default group. `seq_len` in tokens may be left out when all ranks hold equally many.
    `document_starts` are the positions where packed documents begin; the same for all sequences of a batch.
    `deterministic` False lets a GPU's kernels add up in any order, which is faster. `pattern` keeps some pairs only: a
    short form, a rule, or one for each query head (docs/patterns.md); without `causal` its rules must look ahead.

    Every rank must make the same calls on a group, failed ones included: calls are numbered, so that a retry takes no
    message of the call before. Raises `ValueError` for arguments that do not fit, and the group's
    own error when a peer is lost. What only a comparison between ranks could find, such as different
    `seq_len`s, is not checked: it would cost a collective in every call.
    """
    ring_group = _resolve_group(group)
    with _CALLS_LOCK:
        calls = _CALLS.setdefault(ring_group, _GroupCalls())
    call_index = calls.num_calls
    calls.num_calls += 1  # before any check, so that a call that one rank refuses counts on all ranks
    check_tensors(q, k, v)
    check_options(causal, seq_len, scale)
    cp = ring_group.size()
    layout = _layout_of(layout, seq_len, q.size(1), cp)
    starts = tuple(int(start) for start in document_starts)
    if pattern is not None and isinstance(backend, Kernel):
        backend = backend.name
    options = RingOptions(backend=backend, deterministic=deterministic, abandoned=calls.abandoned)
    if pattern is not None:
        return PatternedAttention(
            _patterns_of(pattern),
            layout,
            ring_group.rank(),
            ring_group,
            options,
            document_starts=starts,
            causal=bool(causal),
            scale=scale,
            plans=calls.plans,
            first_call_index=call_index,
        )(q, k, v)
    dense = Pattern(causal, starts)
    plans = calls.plans.of((dense, layout, options.plan_key), lambda: plan(dense, layout))
    ring = RingAttention(
        plans.schedule, ring_group.rank(), ring_group, options, plans=plans, first_call_index=call_index
    )
    return ring(q, k, v, scale=scale)


def _layout_of(layout: str | Layout, seq_len: int | None, num_local: int, cp: int) -> Layout:
    """The call's layout. Raises `ValueError` if it does not fit the group or the length."""
    if isinstance(layout, Layout):
        if layout.cp != cp:
            raise ValueError(f"layout is for cp={layout.cp}, but the group has {cp} ranks; make another")
        if seq_len is not None and seq_len != layout.seq_len:
            raise ValueError(f"seq_len={seq_len}, but layout has {layout.seq_len} tokens; leave seq_len out")
        seq_len = layout.seq_len
    seq_len = num_local * cp if seq_len is None else seq_len
    if seq_len < cp:
        raise ValueError(f"seq_len={seq_len} is shorter than cp={cp}: every rank needs at least one token")
    return make_layout(layout, seq_len, cp) if isinstance(layout, str) else layout


def _patterns_of(pattern: PatternLike) -> LayerPatterns:
    """The pattern of all layers. Raises `ValueError` for an invalid pattern, and if layers differ."""
    if isinstance(pattern, str):
        pattern = read_pattern(pattern)
    if not isinstance(pattern, LayerPatterns):
        rules = tuple(pattern) if isinstance(pattern, Iterable) else (pattern,)
        if not all(isinstance(rule, Rule) for rule in rules):
            raise ValueError(f"pattern={pattern!r}: give a short form such as sinks:64+window:512, or rules")
        pattern = LayerPatterns((LayerGroup(rules),))
    if not pattern.same_everywhere:
        raise ValueError(f"pattern={pattern}: names layers, and one call is of one layer; give the rules of one group")
    return pattern


@dataclass(eq=False)
class _GroupCalls:
    """State that the calls of `ring_attention` over one group share. Must not hold the group: it is the key."""

    num_calls: int = 0
    plans: PlanCache = field(default_factory=PlanCache)
    abandoned: list[torch.Tensor] = field(default_factory=list)  # the group may still write to them


_CALLS: WeakKeyDictionary[Any, _GroupCalls] = WeakKeyDictionary()
_CALLS_LOCK = Lock()


def _resolve_group(group: Any) -> Any:
    if group is None:
        if not dist.is_initialized():
            raise ValueError("group=None: there is no default group; call init_process_group or pass a group")
        return dist.group.WORLD
    if not all(hasattr(group, name) for name in ("send", "recv", "rank", "size")):
        raise ValueError(f"group={group!r}: not a process group that this rank is a member of")
    return group
