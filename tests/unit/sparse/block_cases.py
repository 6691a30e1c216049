"""Patterns of whole blocks for rings of GPUs, and what they mean token by token, read off the rules themselves."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from elastic_ring.attention.comm.ledger import HopLedger
from elastic_ring.attention.layouts.layout import Layout, contiguous, residue_class, striped, zigzag
from elastic_ring.attention.patterns.families import BigBird, Dilated, Hierarchical
from elastic_ring.attention.patterns.rules import Dense, Rule, Sinks, Strided, Window
from experiments.block_function import BlockFunction
from experiments.head_rules import longnet, mixed
from tests.unit.attention.attention_rings import relative_error
from tests.unit.sparse.pattern_cases import SparseCase

NEAR = BigBird(2, 0, 0)
FAMILIES: dict[str, tuple[Rule, ...]] = {
    "window": (BigBird(3, 0, 0),),
    "bigbird": (BigBird(2, 1, 2),),
    "strided": (Strided(3, 1, 128),),
    "hierarchical": (Hierarchical(2),),
    "longnet with rows that see nothing": longnet(4, (512, 2048), (1, 4), unit_tokens=128),
    "one dilation, most rows see nothing": (Dilated((1024,), (4,), 2, 128),),
    "segments, nothing beyond": (Dilated((256,), (1,), 0, 128),),
    "local and dense heads": mixed((2, NEAR), (2, Dense())),
    "heads in turn": (NEAR, Dense(), NEAR, Dense()),
}
_EVEN = BlockFunction(lambda i, j: (i + j) % 2 == 0)
AHEAD: dict[str, tuple[Rule, ...]] = {
    "dense": (Dense(),),
    "dilated": (Dilated((512, 2048), (1, 4), 1, 128),),
    "sinks and even blocks": (Sinks(128) | _EVEN,),
    "dense and even heads": mixed((2, Dense()), (2, _EVEN)),
}
_WIDE, _STRIDED = BigBird(3, 1, 1), Strided(3, 1, 128)
_SHIFTED = tuple(rule | NEAR for rule in longnet(8, (256, 2048), (1, 8), unit_tokens=128))
GROUPED: dict[str, tuple[int, tuple[Rule, ...]]] = {
    "longnet, 4 heads": (4, longnet(4, (512, 2048), (1, 4), unit_tokens=128)),
    "longnet and a window, 8 heads": (8, _SHIFTED),
    "longnet, 2 heads for a key": (4, longnet(8, (512, 2048), (1, 4), heads_per_offset=2, unit_tokens=128)),
    "two rules for a key": (3, (NEAR, Dense(), NEAR, NEAR, _WIDE, NEAR)),
    "groups of 1, 2, 1 and 2": (6, (NEAR, Dense(), _WIDE, Dense(), _STRIDED, _STRIDED)),
    "groups of 2, 1, 1, 1 and 2": (7, (_WIDE, *_SHIFTED[:3], Dense(), _WIDE, Dense())),
    "groups of 1 and 3, 2 heads for a key": (4, (Dense(),) * 2 + (_STRIDED,) * 6),
}
"""(K/V heads, a rule for each query head): patterns of several head groups."""
CUT: dict[str, tuple[tuple[Rule, ...], tuple[int, ...]]] = {
    "a length that is no multiple": (FAMILIES["bigbird"], (0,)),
    "documents of any length": (FAMILIES["window"], (0, 130, 777)),
    "a window of tokens": ((Window(200),), (0,)),
    "sinks and a window": ((Sinks(5) | Window(150),), (0, 130, 777)),
    "windows and dense heads": (mixed((2, Window(300)), (2, Dense())), (0, 500)),
    "heads in turn": ((Window(130), Dense(), Window(130), Dense()), (0, 130, 777)),
    "dilated tokens": ((Dilated((512,), (3,), 1, 1),), (0,)),
    "longnet with rows that see nothing": (FAMILIES["longnet with rows that see nothing"], (0, 500)),
}
"""What cuts blocks of 128 tokens: rules and the starts of documents."""
CUT_AHEAD: dict[str, tuple[tuple[Rule, ...], tuple[int, ...]]] = {
    "a window on both sides": ((Sinks(3) | Window(200, 70),), (0, 130, 777)),
    "dense documents": ((Dense(),), (0, 500)),
}
NUM_BLOCKS = {1: 6, 2: 8, 3: 12, 4: 16, 8: 16}


@dataclass(frozen=True)
class BlockCase(SparseCase):
    """A case of one sequence whose mask comes from the rules, not from a second spelling."""

    batch: int = 1

    def tensors(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads)
        shapes = [(self.batch, self.layout.seq_len, num, self.head_dim) for num in heads]
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]

    def mask(self) -> torch.Tensor:
        """(H, S, S), from each rule's own word on every pair."""
        starts = np.array(self.document_starts, dtype=np.int64)
        document = np.searchsorted(starts, np.arange(self.layout.seq_len), side="right") - 1
        at = np.arange(self.layout.seq_len, dtype=np.int64) - starts[document]
        same = document[:, None] == document[None, :]
        same = np.tril(same) if self.causal else same
        of_rule = {rule: torch.from_numpy(rule.sees(at[:, None], at[None, :]) & same) for rule in self.rules}
        rules = self.rules if len(self.rules) > 1 else self.rules * self.num_heads
        return torch.stack([of_rule[rule] for rule in rules])


def layouts(seq_len: int, cp: int) -> dict[str, Layout]:
    return {
        "contiguous": contiguous(seq_len, cp),
        "zigzag": zigzag(seq_len, cp),
        "striped": striped(seq_len, cp, unit_tokens=128),
        "by residue": residue_class(seq_len, cp, 4, unit_tokens=128),
    }


def block_case(family: str, cp: int, layout: str, documents: tuple[int, ...] = (0,), **more: Any) -> BlockCase:
    """`documents` are the blocks at which they begin."""
    starts = tuple(128 * block for block in documents)
    seq_len = 128 * NUM_BLOCKS[cp]
    return BlockCase(
        (FAMILIES | AHEAD)[family], (), layouts(seq_len, cp)[layout], document_starts=starts, block=128, **more
    )


def cut_case(name: str, cp: int, layout: str, seq_len: int = 1111, **more: Any) -> BlockCase:
    """Layouts cut blocks too: pieces have any length, those of "striped" 100 tokens."""
    rules, starts = (CUT | CUT_AHEAD)[name]
    made = {"contiguous": contiguous, "zigzag": zigzag, "striped": partial(striped, unit_tokens=100)}[layout]
    causal = name in CUT
    return BlockCase(rules, (), made(seq_len, cp), document_starts=starts, block=128, causal=causal, **more)


def grouped_case(name: str, cp: int, layout: str, **more: Any) -> BlockCase:
    num_kv_heads, rules = GROUPED[name]
    heads = {"num_heads": len(rules), "num_kv_heads": num_kv_heads}
    return BlockCase(rules, (), layouts(128 * NUM_BLOCKS[cp], cp)[layout], block=128, **heads, **more)


def masked_reference(case: SparseCase, device: str = "cpu") -> list[torch.Tensor]:
    """out, dq, dk, dv of one masked fp64 softmax, head by head; rows that see nothing are 0."""
    q, k, v, dout = (tensor.double().to(device) for tensor in case.tensors())
    sharing, mask = case.num_heads // case.num_kv_heads, case.mask().to(device)
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    for head in range(case.num_heads):
        kv = head // sharing
        scores = torch.einsum("bqd,bkd->bqk", q[:, :, head], k[:, :, kv]) / math.sqrt(case.head_dim)
        empty = ~mask[head].any(-1, keepdim=True)
        weights = scores.masked_fill(~(mask[head] | empty), -math.inf).softmax(-1).masked_fill(empty, 0.0)
        out[:, :, head] = weights @ v[:, :, kv]
        shares = dout[:, :, head] @ v[:, :, kv].transpose(1, 2)
        sums = (dout[:, :, head] * out[:, :, head]).sum(-1, keepdim=True)
        dscores = weights * (shares - sums) / math.sqrt(case.head_dim)
        dq[:, :, head] = dscores @ k[:, :, kv]
        dk[:, :, kv] += dscores.transpose(1, 2) @ q[:, :, head]
        dv[:, :, kv] += weights.transpose(1, 2) @ dout[:, :, head]
    return [out, dq, dk, dv]


def check_bytes(
    case: BlockCase, ledgers: list[HopLedger], partial_itemsize: int | None = None, keys_kept: bool | None = None
) -> None:
    """What each rank counted is the plan's, hop by hop and both ways, and what some query needs, to the byte."""
    itemsize = case.dtype.itemsize
    keys_kept = fetches_little(case) if keys_kept is None else keys_kept
    for cp_rank, ledger in enumerate(ledgers):
        for side, counted in (("received", ledger.received_bytes), ("sent", ledger.sent_bytes)):
            planned: dict[Any, int] = defaultdict(int)
            for direction, hop in itertools.product(("forward", "backward"), range(case.layout.cp)):
                planned[direction, hop] = case.schedule.hop_bytes(
                    cp_rank,
                    hop,
                    case.head_dim,
                    itemsize,
                    direction,
                    batch=case.batch,
                    side=side,
                    partial_itemsize=partial_itemsize,
                    keys_kept=keys_kept,
                )
            assert dict(counted) == {key: num for key, num in planned.items() if num}, (cp_rank, side)
        received = sum(num for (direction, _), num in ledger.received_bytes.items() if direction == "forward")
        assert received == 2 * case.batch * case.head_dim * itemsize * num_needed(case, cp_rank)


def fetches_little(case: BlockCase) -> bool:
    """Whether no rank needs more of others than a quarter of what each holds: then keys wait for backward."""
    own = min(case.layout.num_tokens(rank) for rank in range(case.layout.cp)) * case.num_kv_heads
    return case.layout.cp > 1 and 4 * max(num_needed(case, rank) for rank in range(case.layout.cp)) <= own


def num_needed(case: BlockCase, cp_rank: int) -> int:
    """(token, K/V head) pairs of other ranks that some query of this one sees."""
    own = case.layout.positions(cp_rank)
    seen = case.mask()[:, own].any(1)
    seen[:, own] = False
    return int(seen.unflatten(0, (case.num_kv_heads, -1)).any(1).sum())


@lru_cache(maxsize=8)
def reference(case: BlockCase) -> list[torch.Tensor]:
    return masked_reference(case)


def check_exact(case: BlockCase, found: list[torch.Tensor]) -> None:
    """Forward and backward are the masked softmax's, in fp64 to rounding."""
    for name, got, want in zip(("out", "dq", "dk", "dv"), found, reference(case), strict=True):
        assert relative_error(got, want) <= 1e-12, (case, name)
