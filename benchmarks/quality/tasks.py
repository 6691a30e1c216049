"""Seeded tasks that need attention to distant tokens: what a pattern that drops keys may lose.

Every sequence is a function of (task, seed, number, sizes). Tokens below `FIRST_SYMBOL` are markers, then come keys
and, from `FIRST_VALUE`, values. A target of -100 is ignored; any other is the required prediction at its position.
`train_tasks` trains and evaluates the small model on them.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.quality.small.families import Family
from benchmarks.quality.small.model import Masks, SmallModel
from benchmarks.quality.small.train import Settings, trained

Tokens = NDArray[np.int64]

VOCAB_SIZE = 64
QUERY, COPY, ASSIGN, END = 1, 2, 3, 4
FIRST_TASK = 5
"""The marker of the first task; each task's sequences start with its own."""
FIRST_SYMBOL, FIRST_VALUE = 12, 38
NUM_KEYS, NUM_VALUES = FIRST_VALUE - FIRST_SYMBOL, VOCAB_SIZE - FIRST_VALUE
IGNORED = -100
_EVALUATION_SEED = 1 << 20
"""Out of the range of training seeds."""


@dataclass(frozen=True)
class Example:
    """tokens, targets (S,); `distance` (S,) from each answer to its source, `phase` (S,) the source's offset in its
    block; both -1 where there is no target.
    """

    tokens: Tokens
    targets: Tokens
    distance: Tokens
    phase: Tokens


class _Writer:
    """A sequence under construction, initially filled with random values as distractors."""

    def __init__(self, task: int, seq_len: int, block: int, rng: np.random.Generator) -> None:
        self.rng, self.block = rng, block
        self.tokens = rng.integers(FIRST_VALUE, VOCAB_SIZE, seq_len)
        self.tokens[0] = FIRST_TASK + task
        self.targets = np.full(seq_len, IGNORED, dtype=np.int64)
        self.distance = np.full(seq_len, -1, dtype=np.int64)
        self.phase = np.full(seq_len, -1, dtype=np.int64)

    def ask(self, at: int, answer: int, source: int) -> None:
        self.targets[at], self.distance[at], self.phase[at] = answer, at - source, source % self.block

    def places(self, first: int, stop: int, num: int, width: int) -> Tokens:
        """`num` starts of disjoint spans of `width` tokens in [first, stop), ascending."""
        cells = (stop - first) // width
        return first + np.sort(self.rng.permutation(cells)[:num]) * width

    def done(self) -> Example:
        return Example(self.tokens, self.targets, self.distance, self.phase)


def multi_query_recall(task: int, seq_len: int, block: int, rng: np.random.Generator) -> Example:
    """Key-value pairs anywhere in the first part, then all keys in another order (Arora et al. 2023,
    arXiv:2312.04927).
    """
    writer = _Writer(task, seq_len, block, rng)
    num_pairs = 8
    keys = FIRST_SYMBOL + rng.permutation(NUM_KEYS)[:num_pairs]
    values = rng.integers(FIRST_VALUE, VOCAB_SIZE, num_pairs)
    starts = writer.places(1, seq_len - 2 * num_pairs, num_pairs, 2)
    writer.tokens[starts], writer.tokens[starts + 1] = keys, values
    for slot, pair in enumerate(rng.permutation(num_pairs)):
        at = seq_len - 2 * num_pairs + 2 * slot
        writer.tokens[at], writer.tokens[at + 1] = keys[pair], values[pair]
        writer.ask(at, int(values[pair]), int(starts[pair]) + 1)
    return writer.done()


def needle(task: int, seq_len: int, block: int, rng: np.random.Generator) -> Example:
    """One marked value at any distance, queried at the end; keys around it are distractors."""
    writer = _Writer(task, seq_len, block, rng)
    at, value = int(rng.integers(1, seq_len - 3)), int(rng.integers(FIRST_VALUE, VOCAB_SIZE))
    writer.tokens[at], writer.tokens[at + 1] = QUERY, value
    writer.tokens[-1] = QUERY
    writer.ask(seq_len - 1, value, at + 1)
    return writer.done()


def induction(task: int, seq_len: int, block: int, rng: np.random.Generator) -> Example:
    """A random string, filler, and the string again: each token of the second follows from the first."""
    writer = _Writer(task, seq_len, block, rng)
    length = min(NUM_KEYS, seq_len // 6)
    text = FIRST_SYMBOL + rng.permutation(NUM_KEYS)[:length]
    first = int(rng.integers(1, seq_len - 2 * length))
    second = int(rng.integers(first + length, seq_len - length + 1))
    writer.tokens[first : first + length] = writer.tokens[second : second + length] = text
    for i in range(1, length - 1):
        writer.ask(second + i, int(text[i + 1]), first + i + 1)
    return writer.done()


def selective_copy(task: int, seq_len: int, block: int, rng: np.random.Generator) -> Example:
    """Keys scattered in filler, to be repeated in order (Gu & Dao 2023, arXiv:2312.00752)."""
    writer = _Writer(task, seq_len, block, rng)
    num = 6
    starts = writer.places(1, seq_len - num - 1, num, 1)
    keys = FIRST_SYMBOL + rng.permutation(NUM_KEYS)[:num]
    writer.tokens[starts] = keys
    out = seq_len - num - 1
    writer.tokens[out] = COPY
    writer.tokens[out + 1 :] = keys
    for i in range(num):
        writer.ask(out + i, int(keys[i]), int(starts[i]))
    return writer.done()


def boundary_copy(task: int, seq_len: int, block: int, rng: np.random.Generator) -> Example:
    """Pairs queried at most two blocks later, sources at every offset in a block: reveals gaps at block edges."""
    writer = _Writer(task, seq_len, block, rng)
    keys, at = FIRST_SYMBOL + rng.permutation(NUM_KEYS), 1 + int(rng.integers(block))
    for key in keys:
        back = int(rng.integers(2, 2 * block))
        if at + back + 2 > seq_len:
            break
        value = int(rng.integers(FIRST_VALUE, VOCAB_SIZE))
        writer.tokens[at], writer.tokens[at + 1] = key, value
        writer.tokens[at + back], writer.tokens[at + back + 1] = key, value
        writer.ask(at + back, value, at + 1)
        at += back + 2 + int(rng.integers(block))
    return writer.done()


def variable_tracking(task: int, seq_len: int, block: int, rng: np.random.Generator) -> Example:
    """`a = 5`, `b = a`, then the value of `b`: two lookups in sequence (after RULER, Hsieh et al. 2024,
    arXiv:2404.06654).

    Three such chains, interleaved at random with each chain's order kept.
    """
    writer = _Writer(task, seq_len, block, rng)
    num = 3
    names = FIRST_SYMBOL + rng.permutation(NUM_KEYS)[: 2 * num]
    values = rng.integers(FIRST_VALUE, VOCAB_SIZE, num)
    starts = writer.places(1, seq_len - 2 * num, 2 * num, 3)
    order = rng.permutation(np.repeat(np.arange(num), 2))
    sources = np.zeros(num, dtype=np.int64)
    seen: set[int] = set()
    for start, chain in zip(starts, order, strict=True):
        first = int(chain) not in seen
        seen.add(int(chain))
        said = values[chain] if first else names[2 * chain]
        writer.tokens[start : start + 3] = [names[2 * chain + (not first)], ASSIGN, said]
        if first:
            sources[chain] = start + 2
    for slot, chain in enumerate(rng.permutation(num)):
        at = seq_len - 2 * num + 2 * slot
        writer.tokens[at], writer.tokens[at + 1] = names[2 * chain + 1], values[chain]
        writer.ask(at, int(values[chain]), int(sources[chain]))
    return writer.done()


Generator = Callable[[int, int, int, np.random.Generator], Example]
TASKS: dict[str, Generator] = {
    "recall": multi_query_recall,
    "needle": needle,
    "induction": induction,
    "selective copy": selective_copy,
    "boundary copy": boundary_copy,
    "variables": variable_tracking,
}
CHANCE = {name: 1 / (NUM_KEYS if name in ("induction", "selective copy") else NUM_VALUES) for name in TASKS}
"""Accuracy of random guessing among tokens of the right kind."""


def example(name: str, seq_len: int, block: int, seed: int, number: int) -> Example:
    """One sequence, the same on any machine for equal arguments. Raises: ValueError below 64 tokens."""
    if seq_len < 64:
        raise ValueError(f"seq_len={seq_len}: the tasks need at least 64 tokens")
    key = hashlib.sha256(f"{name}/{seq_len}/{block}/{seed}/{number}".encode()).digest()
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(key[:8], "little")))
    return TASKS[name](list(TASKS).index(name), seq_len, block, rng)


def mixture(seq_len: int, block: int, seed: int, step: int, per_task: int) -> tuple[Tokens, Tokens]:
    """tokens, targets (B, S) of one training step: `per_task` sequences of each task."""
    found = [example(name, seq_len, block, seed, step * per_task + i) for name in TASKS for i in range(per_task)]
    return np.stack([e.tokens for e in found]), np.stack([e.targets for e in found])


# ------------------------------------------------------------ training on them


def train_tasks(family: Family, seed: int, settings: Settings) -> dict[str, Any]:
    """{"accuracy": by task, "needle": by quarter of the distance, "worst_phase": ..., "loss": ..., "train_s": ...}."""

    def draw(step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = mixture(settings.seq_len, settings.block, seed, step, settings.per_task)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    model, masks, loss, train_s = trained(family, seed, settings, VOCAB_SIZE, draw)
    right: dict[str, list[bool]] = {name: [] for name in TASKS}
    by_quarter: dict[int, list[bool]] = defaultdict(list)
    by_phase: dict[int, list[bool]] = defaultdict(list)
    for name in TASKS:
        found = [
            example(name, settings.seq_len, settings.block, _EVALUATION_SEED, i) for i in range(settings.num_evaluated)
        ]
        said = _said(model, masks, np.stack([e.tokens for e in found]))
        for number, one in enumerate(found):
            for at in np.flatnonzero(one.targets != IGNORED):
                good = bool(said[number, at] == one.targets[at])
                right[name].append(good)
                if name == "needle":
                    by_quarter[min(3, int(4 * one.distance[at] / settings.seq_len))].append(good)
                if name == "boundary copy":
                    by_phase[int(one.phase[at])].append(good)
    return {
        "accuracy": {name: _mean(hits) for name, hits in right.items()},
        "needle": {str(quarter): _mean(by_quarter[quarter]) for quarter in sorted(by_quarter)},
        "worst_phase": min((_mean(hits) for hits in by_phase.values()), default=math.nan),
        "loss": loss,
        "train_s": train_s,
    }


@torch.no_grad()
def _said(model: SmallModel, masks: Masks, tokens: Any) -> Any:
    model.eval()
    device = model.head.weight.device
    parts = [model(rows.to(device), masks).argmax(-1).cpu() for rows in torch.from_numpy(tokens).split(16)]
    return torch.cat(parts).numpy()


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else math.nan
