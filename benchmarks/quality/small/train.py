"""Train the small model under one family and one seed, and evaluate it on text.

A function of (family, seed, settings): repeated runs agree on the same machine and thread count. No files and no
tables in here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality.small.families import Family
from benchmarks.quality.small.model import Masks, SmallConfig, SmallModel
from benchmarks.quality.small.text import Corpus, batch


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


def train_text(family: Family, seed: int, settings: Settings, corpus: Corpus) -> tuple[SmallModel, dict[str, Any]]:
    """The model, and {"tail_loss", "loss" in nats per token on held-out text, "train_s"}.

    The tail is the last `tail_share` of each sequence, whose tokens have the rest as context.
    """

    def draw(step: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(batch(corpus, seed, step, settings.batch))
        return rows[:, :-1], rows[:, 1:]

    model, masks, _, train_s = trained(family, seed, settings, corpus.vocab_size, draw)
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


def trained(
    family: Family, seed: int, settings: Settings, vocab_size: int, draw: Callable[[int], tuple[Tensor, Tensor]]
) -> tuple[SmallModel, Masks, float, float]:
    """(model, masks, mean loss of the last tenth of the steps, CPU seconds)."""
    config = SmallConfig(vocab_size, settings.width, num_layers=settings.num_layers, ffn_width=2 * settings.width)
    masks = family.masks(settings.seq_len, config.num_heads)
    model = SmallModel(config, seed).to(settings.device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=settings.peak_lr,
        betas=(0.9, 0.98),
        foreach=True,
    )
    losses: list[Tensor] = []
    start = time.process_time()
    model.train()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, settings)
        tokens, targets = (x.to(settings.device) for x in draw(step))
        loss = F.cross_entropy(model(tokens, masks).transpose(1, 2), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    last = [float(loss) for loss in losses[-max(1, settings.steps // 10) :]]
    return model, masks, statistics.fmean(last), time.process_time() - start


def _learning_rate(step: int, settings: Settings) -> float:
    warm = max(1, settings.steps // 20)
    if step < warm:
        return settings.peak_lr * (step + 1) / warm
    return settings.peak_lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / (settings.steps - warm))))
