"""Blocks chosen by content, with the choice spelled out once more, score by score, and a ring that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from elastic_ring.attention.layers import PatternedAttention
from elastic_ring.attention.layouts.layout import Layout, contiguous, striped, zigzag
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.patterns.content import Chosen, TopK, top_ks_of
from elastic_ring.attention.patterns.layers import LayerPatterns
from elastic_ring.attention.patterns.parse import parse_pattern
from elastic_ring.attention.patterns.rules import Rule, Union
from elastic_ring.attention.plan.schedule import Schedule
from tests.unit.attention.attention_rings import in_threads
from tests.unit.sparse.pattern_cases import SparseCase, masked_attention

LAYOUTS: dict[str, Any] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": lambda s, c: striped(s, c, unit_tokens=3),
}


@dataclass(frozen=True)
class ContentCase(SparseCase):
    """One sequence under a pattern in short form; its mask is what the definition gives for its q and k."""

    rules: tuple[Rule, ...] = ()
    sees: tuple[Any, ...] = field(default=(), repr=False)
    layout: Layout = field(default_factory=lambda: contiguous(67, 1))
    text: str = "topk:3,unit=4"

    @property
    def pattern(self) -> LayerPatterns:
        return replace(parse_pattern(self.text), block=self.block)

    @property
    def heads(self) -> tuple[Rule, ...]:
        rules = self.pattern.of_layer(0).heads(self.num_heads, self.num_kv_heads)
        return rules if len(rules) > 1 else rules * self.num_heads

    @property
    def documents(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.document_starts, (*self.document_starts[1:], self.layout.seq_len), strict=True))

    def tensors(self) -> list[torch.Tensor]:
        return [tensor[:1] for tensor in super().tensors()]

    def choice(self, rule: TopK, head: int, document: int) -> list[list[int]]:
        """The past units that each unit of a document keeps."""
        q, k, *_ = (tensor[0].double() for tensor in self.tensors())
        kv_head = head // (self.num_heads // self.num_kv_heads)
        start, stop = self.documents[document]
        units = [range(at, min(at + rule.unit_tokens, stop)) for at in range(start, stop, rule.unit_tokens)]
        found = []
        for i, rows in enumerate(units):
            speaks = q[rows[0], head] if rule.causal else q[list(rows), head].sum(0)
            scores = [float(np.float32(float(speaks @ k[list(own), kv_head].sum(0)))) for own in units[:i]]
            best = sorted(range(i), key=lambda j: (-scores[j], j))[: rule.blocks - 1]
            found.append(sorted(best))
        return found

    def mask(self) -> torch.Tensor:
        """(H, S, S) pair by pair."""
        seq_len = self.layout.seq_len
        mask = torch.zeros(self.num_heads, seq_len, seq_len, dtype=torch.bool)
        for head, rule in enumerate(self.heads):
            for number, (start, stop) in enumerate(self.documents):
                for part in rule.rules if isinstance(rule, Union) else (rule,):
                    mask[head, start:stop, start:stop] |= self._part(part, head, number, stop - start)
        return mask.tril()

    def _part(self, rule: Rule, head: int, document: int, length: int) -> torch.Tensor:
        at = np.arange(length, dtype=np.int64)
        if not isinstance(rule, TopK):
            return torch.from_numpy(np.broadcast_to(rule.sees(at[:, None], at[None, :]), (length, length)).copy())
        seen = torch.zeros(length, length, dtype=torch.bool)
        unit = rule.unit_tokens
        for i, past in enumerate(self.choice(rule, head, document)):
            for j in (*past, i):
                seen[i * unit : (i + 1) * unit, j * unit : (j + 1) * unit] = True
        return seen


def routed(counts: Mapping[tuple[str, int], int]) -> dict[int, int]:
    """Of a ledger's bytes, those of messages about choices, by hop."""
    return {hop: num for (way, hop), num in counts.items() if way == "routing"}


def make_case(name: str, cp: int, seq_len: int = 67, **more: Any) -> ContentCase:
    return ContentCase(layout=LAYOUTS[name](seq_len, cp), **more)


@cache
def wanted(case: ContentCase) -> list[torch.Tensor]:
    """out, dq, dk, dv by a masked fp64 softmax; the same for all layouts, so `case` is of one rank."""
    assert case.layout.cp == 1
    return masked_attention(case)


def alone(case: ContentCase) -> ContentCase:
    return replace(case, layout=contiguous(case.layout.seq_len, 1))


def run_content(
    case: ContentCase, groups: list[Any], **options: Any
) -> tuple[list[torch.Tensor], list[PatternedAttention]]:
    """out, dq, dk, dv over the whole sequence, and each rank's attention, on a thread for each rank."""
    layout = case.layout

    def work(cp_rank: int) -> tuple[list[torch.Tensor], PatternedAttention]:
        q, k, v, dout = (layout.scatter(tensor, cp_rank, 1) for tensor in case.tensors())
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        attention = PatternedAttention(
            case.pattern, layout, cp_rank, groups[cp_rank], RingOptions(**options), document_starts=case.document_starts
        )
        out = attention(*leaves)
        out.backward(dout)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)], attention

    results = in_threads(layout.cp, work)
    gathered = [layout.gather([found[i] for found, _ in results], 1) for i in range(4)]
    return gathered, [attention for _, attention in results]


def schedule_of(attention: PatternedAttention) -> Schedule:
    """That of its last call."""
    assert attention.last_ring is not None
    return attention.last_ring.schedule


def chosen_in(rule: Rule, document: int) -> list[Chosen]:
    """What content chose for a head in a document, in the order of the rule's parts."""
    own = rule.of_document(document)
    return [part for part in (own.rules if isinstance(own, Union) else (own,)) if isinstance(part, Chosen)]


def check_choice(case: ContentCase, schedule: Schedule) -> None:
    """What was chosen is the definition's, unit by unit."""
    for head, (asked, rule) in enumerate(zip(case.heads, schedule.pattern.rules(case.num_heads), strict=True)):
        for document in range(len(case.documents)):
            for top_k, chosen in zip(top_ks_of(asked), chosen_in(rule, document), strict=True):
                found = [[j for j in row if j >= 0] for row in chosen.past.tolist()]
                assert found == case.choice(top_k, head, document), (case, head, document)
