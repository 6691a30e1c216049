"""Train the small model under one family and one seed, on the tasks or on text, and evaluate it.

A function of (family, seed, settings): repeated runs agree on the same machine and thread count. No files and no
tables in here.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_ring.tuning.quality.families import Family
from elastic_ring.tuning.quality.model import Masks, SmallConfig, SmallModel
from elastic_ring.tuning.quality.tasks import IGNORED, TASKS, VOCAB_SIZE, example, mixture
from elastic_ring.tuning.quality.text import Corpus, batch

_EVALUATION_SEED = 1 << 20
"""Out of the range of training seeds."""


@dataclass(frozen=True)
class Settings:
    """Length and size of a training. Sequences per step: `per_task` of each task, `batch` of text."""

    steps: int = 300
    seq_len: int = 256
    block: int = 16
    per_task: int = 4
    batch: int = 4
    peak_lr: float = 4e-3
    tail_share: float = 0.25
    num_evaluated: int = 64
    width: int = 64
    num_layers: int = 2
    device: str = "cpu"


def train_tasks(family: Family, seed: int, settings: Settings) -> dict[str, Any]:
    """{"accuracy": by task, "needle": by quarter of the distance, "worst_phase": ..., "loss": ..., "train_s": ...}."""

    def draw(step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = mixture(settings.seq_len, settings.block, seed, step, settings.per_task)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    model, masks, loss, train_s = _trained(family, seed, settings, VOCAB_SIZE, draw)
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


def train_text(family: Family, seed: int, settings: Settings, corpus: Corpus) -> tuple[SmallModel, dict[str, Any]]:
    """The model, and {"tail_loss", "loss" in nats per token on held-out text, "train_s"}.

    The tail is the last `tail_share` of each sequence, whose tokens have the rest as context.
    """

    def draw(step: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(batch(corpus, seed, step, settings.batch))
        return rows[:, :-1], rows[:, 1:]

    model, masks, _, train_s = _trained(family, seed, settings, corpus.vocab_size, draw)
    losses = held_losses(model, masks, corpus, settings)
    tail = losses[:, -int(settings.seq_len * settings.tail_share) :]
    return model, {"tail_loss": float(tail.mean()), "loss": float(losses.mean()), "train_s": train_s}


@torch.no_grad()
def held_losses(model: SmallModel, masks: Masks, corpus: Corpus, settings: Settings) -> Tensor:
    """(num_held, S): the loss in nats of every token of the held-out sequences."""
    model.eval()
    found = []
    for rows in torch.from_numpy(corpus.held).split(settings.batch):
        rows = rows.to(settings.device)
        logits = model(rows[:, :-1], masks)
        found.append(F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").cpu())
    return torch.cat(found).double()


def masks_of(family: Family, settings: Settings, config: SmallConfig) -> Masks:
    return Masks(family.pattern(), settings.seq_len, config.num_heads, top_k=family.top_k, block=family.block,
                 window=family.window, first_query=family.first_query)  # fmt: skip


def _trained(
    family: Family, seed: int, settings: Settings, vocab_size: int, draw: Callable[[int], tuple[Tensor, Tensor]]
) -> tuple[SmallModel, Masks, float, float]:
    """(model, masks, mean loss of the last tenth of the steps, CPU seconds)."""
    config = SmallConfig(
        vocab_size, settings.width, num_layers=settings.num_layers, ffn_width=2 * settings.width
    )  # fmt: skip
    masks = masks_of(family, settings, config)
    model = SmallModel(config, seed, masks).to(settings.device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=settings.peak_lr, betas=(0.9, 0.98), foreach=True,
    )  # fmt: skip
    losses: list[Tensor] = []
    start = time.process_time()
    model.train()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, settings)
        tokens, targets = (x.to(settings.device) for x in draw(step))
        loss = F.cross_entropy(model(tokens, masks).transpose(1, 2), targets, ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    last = [float(loss) for loss in losses[-max(1, settings.steps // 10) :]]
    return model, masks, _mean(last), time.process_time() - start


def _learning_rate(step: int, settings: Settings) -> float:
    warm = max(1, settings.steps // 20)
    if step < warm:
        return settings.peak_lr * (step + 1) / warm
    return settings.peak_lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / (settings.steps - warm))))


@torch.no_grad()
def _said(model: SmallModel, masks: Masks, tokens: Any) -> Any:
    model.eval()
    device = model.head.weight.device
    parts = [model(rows.to(device), masks).argmax(-1).cpu() for rows in torch.from_numpy(tokens).split(16)]
    return torch.cat(parts).numpy()


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else math.nan
