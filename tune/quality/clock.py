"""Training the small model on the paths that really skip, for a time: who is faster gets more steps for it.

What counts is the time of training steps: drawing the batch, forward, backward and the optimizer, and whatever the
attention does in them, choosing by content included. Compiling, planning static patterns and evaluating do not. The
same lines run on CPUs and on GPUs; device, type and the clock differ. No files and no tables in here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_ring.attention.exchange import HopBuffers
from elastic_ring.attention.layers import Attention, PatternedAttention
from elastic_ring.attention.layout import contiguous
from elastic_ring.attention.pattern import Pattern
from elastic_ring.attention.ring import RingAttention
from elastic_ring.attention.rules import Dense
from elastic_ring.attention.schedule import plan
from tune.quality.families import Family
from tune.quality.model import SmallConfig, SmallModel
from tune.quality.text import Corpus, batch

Clock = Callable[[], float]
"""Seconds since some moment, of work that is done."""

WARM_STEPS = 4
"""Taken and taken back before the clock starts: kernels are compiled and patterns planned in them."""


@dataclass(frozen=True)
class ClockSettings:
    """How long, in seconds of the clock, and how large: `batch` sequences of `seq_len` tokens a step.

    `dtype` is what matrices are multiplied in and attention computes in, weights and their sums are fp32. `kernel`
    names the dense backend, on GPUs also that of its sparse form; None: the best for dense that passes its self-test.
    `sparse_kernel` has CPUs run what GPUs do. `compiled` has everything but attention compiled.
    """

    seconds: float = 60.0
    seq_len: int = 16384
    block: int = 128
    batch: int = 2
    width: int = 256
    num_layers: int = 8
    num_heads: int = 4
    peak_lr: float = 2e-3
    tail_share: float = 0.25
    dtype: str = "float32"
    kernel: str | None = None
    sparse_kernel: str | None = None
    compiled: bool = False


def clock_of(device: torch.device) -> Clock:
    """Seconds of this process's CPU; on a GPU of wall-clock, after all that it was given is done."""
    if device.type == "cpu":
        return time.process_time

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def train_for(
    family: Family, seed: int, settings: ClockSettings, corpus: Corpus, device: torch.device, *,
    steps: int | None = None, clock: Clock | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train one family for `settings.seconds`, or for `steps` if given, then evaluate it on the held-out sequences.

    A step that would begin at the end of the time or later is not begun, so the last one may end a step's length
    after it; "seconds" says when it did. "tail_loss" and "loss", nats a token, are of held-out text as in
    `train.train_text`, "train_loss" of the last tenth of the steps, "epochs" how often the text was gone through.
    "rest_ms" is what of "ms_per_step" a step takes whose attention only hands on its values, measured afterwards.
    Raises `ValueError` for what the device's kernels cannot run.
    """
    attentions = Attentions(family, settings, device)
    model = SmallModel(_config(settings, corpus), seed).to(device)
    if settings.compiled:
        _compile(model)
    _warm_up(model, attentions, settings, corpus)
    optimizer = _optimizer(model, settings)
    losses: list[Tensor] = []
    read = clock_of(device) if clock is None else clock
    start = read()
    used = 0.0
    while (used / settings.seconds if steps is None else len(losses) / steps) < 1:
        share = used / settings.seconds if steps is None else len(losses) / steps
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(share, settings.peak_lr)
        rows = torch.from_numpy(batch(corpus, seed, len(losses), settings.batch)).to(device)
        losses.append(train_step(model, optimizer, attentions, rows))
        used = read() - start
    held = held_losses(model, attentions, corpus, settings)
    rest_ms = 1000 * _rest_s(model, optimizer, attentions, rows, read, settings.num_layers)
    num_tokens = len(losses) * settings.batch * settings.seq_len
    return {
        "tail_loss": float(held[:, -int(settings.seq_len * settings.tail_share) :].mean()),
        "loss": float(held.mean()),
        "train_loss": float(torch.stack(losses[-max(1, len(losses) // 10) :]).mean()),
        "steps": len(losses),
        "tokens": num_tokens,
        "epochs": len(losses) * settings.batch / len(corpus.training),
        "seconds": used,
        "ms_per_step": 1000 * used / len(losses),
        "rest_ms": rest_ms,
        "density": family.density(settings.seq_len, settings.num_layers, settings.num_heads),
    }


def learning_rate(share: float, peak: float) -> float:
    """For the step that begins after this share of the time: up over the first twentieth, then a cosine to a twentieth
    of the peak at the end."""
    warm = 0.05
    if share < warm:
        return peak * max(share / warm, 0.05)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (share - warm) / (1 - warm)))))


class Attentions:
    """What the layers of a model call, on one device, each following its rules of `family` by a path that skips.

    Dense layers run on the dense backend. Where content chooses it does so for one sequence, and each head for itself:
    there the sequences of a batch are as many more heads of one. Raises `ValueError` for what GPUs cannot run.
    """

    def __init__(self, family: Family, settings: ClockSettings, device: torch.device) -> None:
        pattern = family.pattern()
        assert pattern is not None, family
        self._pattern, self._settings, self._device = pattern, settings, device
        self._layout = contiguous(settings.seq_len, 1)
        if device.type == "cuda":
            pattern.check_blocks(self._layout)
        rules = [rule for group in pattern.groups for rule in group.rules]
        self._by_content = any(rule.awaits_content for rule in rules)
        self._buffers = HopBuffers()
        self._dense = None
        if set(rules) == {Dense()}:
            self._dense = RingAttention(
                plan(Pattern(), self._layout), 0, None, backend=settings.kernel, deterministic=False
            )
        self.dtype = getattr(torch, settings.dtype)

    def of_step(self) -> list[Attention]:
        """One for each layer, to be called once each, in their order, and then dropped with the step's graph."""
        num_layers = self._settings.num_layers
        if self._dense is not None:
            return [self._called(self._dense)] * num_layers
        attention = PatternedAttention(
            self._pattern, self._layout, 0, None, backend=self._settings.kernel, deterministic=False,
            buffers=self._buffers, sparse_kernel=self._settings.sparse_kernel,
        )  # fmt: skip
        return [self._called(attention.layer(number)) for number in range(num_layers)]

    def mixed(self) -> torch.autocast:
        """Round a forward pass of the model: matrices in `dtype`, if that is not fp32."""
        return torch.autocast(self._device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _called(self, attend: Attention) -> Attention:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.autocast(self._device.type, enabled=False):  # sums inside are of the type that they say
                q, k, v = (x.to(self.dtype) for x in (q, k, v))
                if not self._by_content:
                    return attend(q, k, v)
                out = attend(*(x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (q, k, v)))
                return out.squeeze(0).unflatten(1, (len(q), -1)).transpose(0, 1)

        return call


def train_step(
    model: SmallModel, optimizer: torch.optim.Optimizer, attentions: Attentions, rows: Tensor,
    layers: list[Attention] | None = None,
) -> Tensor:  # fmt: skip
    """One step on rows (B, S + 1) of tokens; the loss before it, left on its device. `layers` stand for those of
    `attentions`."""
    model.train()
    with attentions.mixed():
        logits = model(rows[:, :-1], attentions.of_step() if layers is None else layers)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@torch.no_grad()
def held_losses(model: SmallModel, attentions: Attentions, corpus: Corpus, settings: ClockSettings) -> Tensor:
    """(num_held, S): nats of every token of the held-out sequences."""
    model.eval()
    found = []
    for rows in torch.from_numpy(corpus.held).split(settings.batch):
        rows = rows.to(model.head.weight.device)
        with attentions.mixed():
            logits = model(rows[:, :-1], attentions.of_step())
        found.append(F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none").cpu())
    return torch.cat(found).double()


def _config(settings: ClockSettings, corpus: Corpus) -> SmallConfig:
    return SmallConfig(
        corpus.vocab_size, settings.width, settings.num_layers, settings.num_heads, ffn_width=2 * settings.width
    )


def _optimizer(model: SmallModel, settings: ClockSettings) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=settings.peak_lr, betas=(0.9, 0.98), fused=True,
    )  # fmt: skip


def _warm_up(model: SmallModel, attentions: Attentions, settings: ClockSettings, corpus: Corpus) -> None:
    """Some steps whose effect is taken back. The model itself takes them: what is compiled is compiled for it."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = _optimizer(model, settings)
    for step in range(WARM_STEPS):
        rows = torch.from_numpy(batch(corpus, 0, step, settings.batch)).to(model.head.weight.device)
        train_step(model, optimizer, attentions, rows)
    model.load_state_dict(before)


def _rest_s(
    model: SmallModel, optimizer: torch.optim.Optimizer, attentions: Attentions, rows: Tensor, read: Clock,
    num_layers: int,
) -> float:  # fmt: skip
    """Seconds of a step without attention, the mean of a few; the model is of no use afterwards."""

    def values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.to(attentions.dtype)

    for number in range(2 * WARM_STEPS):
        if number == WARM_STEPS:
            start = read()
        train_step(model, optimizer, attentions, rows, [values] * num_layers)
    return (read() - start) / WARM_STEPS


def _compile(model: SmallModel) -> None:
    for layer in cast(Any, model.layers):
        layer.heads = torch.compile(layer.heads, dynamic=False)
        layer.rest = torch.compile(layer.rest, dynamic=False)
