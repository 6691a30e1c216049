"""Train the small model for a fixed time with kernels that skip blocks: a faster family makes more steps.

Only training steps count: drawing the batch, forward, backward and optimizer, with the routing of content patterns.
Compiling, planning static patterns and evaluation do not: a run raises if torch.compile compiles, or gives up
compiling, while the clock runs. Kernels that a library compiles for new sizes do count; they show as a mean far above
the median. The code is the same on CPUs and GPUs; device, dtype and clock differ. No files and no tables in here.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality.small.families import Family
from benchmarks.quality.small.model import AS_WRITTEN, FusedOps, SmallConfig, SmallModel
from benchmarks.quality.small.text import Corpus, Tokens, batch
from elastic_ring.attention.comm.exchange import HopBuffers
from elastic_ring.attention.layers import AttentionFn, PatternedAttention
from elastic_ring.attention.layouts.layout import contiguous
from elastic_ring.attention.options import RingOptions
from elastic_ring.attention.plan.sparse_blocks import check_layer_blocks

Clock = Callable[[], float]
"""Seconds since some moment, with all work before it complete."""

WARM_STEPS = 4
"""Steps before the clock starts, whose updates are undone: they compile kernels and plan patterns."""

LOOK_STEPS = 8
"""Steps between two clock readings. A reading synchronises with the GPU, which would slow down short steps."""

REST_LOOKS = 5
"""Clock readings over which a step without attention is measured."""

Look = tuple[int, float]
"""(steps done, clock reading)."""


@dataclass(frozen=True)
class ClockSettings:
    """Duration in seconds of the clock, and sizes: `batch` sequences of `seq_len` tokens per step.

    `dtype` is that of matrix products and attention; weights and their sums are fp32. `kernel` names the dense
    backend, on GPUs also that of its sparse form; None: the best for dense that passes its self-test. `sparse_kernel`
    makes CPUs use that kernel, as GPUs do. `compiled` compiles everything but attention.
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
    """CPU seconds of this process; on a GPU wall-clock seconds, after a synchronisation."""
    if device.type == "cpu":
        return time.process_time

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def train_for(
    family: Family,
    seed: int,
    settings: ClockSettings,
    corpus: Corpus,
    device: torch.device,
    *,
    steps: int | None = None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Train one family for `settings.seconds`, or for `steps` if given, then evaluate it on the held-out sequences.

    Returns "seconds" (time of the last step's end), "ms_per_step" (mean), "median_ms" (over the intervals between
    clock readings), "tail_loss" and "loss" (nats per held-out token, as in `train.train_text`), "train_loss" (last
    tenth of the steps), "epochs" (passes over the text), "rest_ms" (median step with attention replaced by its values,
    measured afterwards).

    Raises: ValueError for what the device's kernels cannot run; RuntimeError, or Dynamo's error, where something is
    compiled while the clock runs or the variants exceed the limit. Call it once per process: kernels that an earlier
    call compiled would change the time.
    """
    attentions = Attentions(family, settings, device)
    model = SmallModel(_config(settings, corpus), seed).to(device)
    read = clock_of(device) if clock is None else clock
    optimizer = _optimizer(model, settings)

    def step(number: int, layers: list[AttentionFn] | None = None) -> Tensor:
        rows = _on(device, batch(corpus, seed, number, settings.batch))
        return train_step(model, optimizer, attentions, rows, layers)

    with _compiling(model, settings.compiled):
        _warm_up(model, attentions, settings, corpus)
        with _undisturbed():
            losses, looks = _train(step, optimizer, settings, steps, read)
        held = held_losses(model, attentions, corpus, settings)
        rest_ms = _rest_ms(step, len(losses), attentions, settings, read)
    used = looks[-1][1] - looks[0][1]
    return {
        "tail_loss": float(held[:, -int(settings.seq_len * settings.tail_share) :].mean()),
        "loss": float(held.mean()),
        "train_loss": float(torch.stack(losses[-max(1, len(losses) // 10) :]).mean()),
        "steps": len(losses),
        "tokens": len(losses) * settings.batch * settings.seq_len,
        "epochs": len(losses) * settings.batch / len(corpus.training),
        "seconds": used,
        "ms_per_step": 1000 * used / len(losses),
        "median_ms": median_ms(looks),
        "rest_ms": rest_ms,
        "density": family.density(settings.seq_len, settings.num_layers, settings.num_heads),
    }


def _train(
    step: Callable[[int], Tensor],
    optimizer: torch.optim.Optimizer,
    settings: ClockSettings,
    steps: int | None,
    read: Clock,
) -> tuple[list[Tensor], list[Look]]:
    """(losses, clock readings from before the first step to after the last).

    The clock is read after each of the first `LOOK_STEPS` steps, then every `LOOK_STEPS` steps. In between, the used
    share of the time, which sets the learning rate, is extrapolated from the last reading; where it reaches 1 the
    clock is read too. The run ends at the first reading past the limit. With `steps` given, the share is that of the
    steps.
    """
    losses: list[Tensor] = []
    looks: list[Look] = [(0, read())]
    share = 0.0
    while share < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(share, settings.peak_lr)
        losses.append(step(len(losses)))
        share = expected_share(looks, len(losses), settings.seconds) if steps is None else len(losses) / steps
        if len(losses) <= LOOK_STEPS or len(losses) % LOOK_STEPS == 0 or share >= 1:
            looks.append((len(losses), read()))
            if steps is None:
                share = expected_share(looks, len(losses), settings.seconds)
    return losses, looks


def expected_share(looks: Sequence[Look], done: int, seconds: float) -> float:
    """The share of the time used after `done` steps, at the mean pace so far; 0 before the first reading."""
    at, then = looks[-1]
    return 0.0 if at == 0 else (then - looks[0][1]) / seconds * done / at


def median_ms(looks: Sequence[Look]) -> float:
    """Median step time; each interval between readings counts once."""
    return 1000 * median((then - before) / (now - at) for (at, before), (now, then) in pairwise(looks))


def learning_rate(share: float, peak: float) -> float:
    """The rate at this share of the time: linear warm-up over the first 5 %, then cosine decay to 5 % of the peak."""
    warm = 0.05
    if share < warm:
        return peak * max(share / warm, 0.05)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (share - warm) / (1 - warm)))))


class Attentions:
    """The attention of every layer on one device, for `family`, by kernels that skip blocks.

    As in training: a new `PatternedAttention` per step, with dense layers on the dense backend. Content patterns route
    one sequence with independent heads, so a batch is folded into the heads. Raises: ValueError for what GPUs cannot
    run.
    """

    def __init__(self, family: Family, settings: ClockSettings, device: torch.device) -> None:
        pattern = family.pattern()
        assert pattern is not None, family
        self._pattern, self._settings, self._device = pattern, settings, device
        self._layout = contiguous(settings.seq_len, 1)
        if device.type == "cuda":
            check_layer_blocks(pattern, self._layout)
        rules = [rule for group in pattern.groups for rule in group.rules]
        self._by_content = any(rule.awaits_content for rule in rules)
        self._buffers = HopBuffers()
        self.dtype = getattr(torch, settings.dtype)

    def of_step(self) -> list[AttentionFn]:
        """One callable per layer, for one call each, in order; drop them with the step's graph."""
        attention = PatternedAttention(
            self._pattern,
            self._layout,
            0,
            None,
            RingOptions(
                backend=self._settings.kernel,
                deterministic=False,
                buffers=self._buffers,
                kernel=self._settings.sparse_kernel,
            ),
        )
        return [self._called(attention.layer(number)) for number in range(self._settings.num_layers)]

    def mixed(self) -> torch.autocast:
        """Autocast for a forward pass: matrix products in `dtype`, if that is not fp32."""
        return torch.autocast(self._device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _called(self, attend: AttentionFn) -> AttentionFn:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.autocast(self._device.type, enabled=False):  # attention sets its own accumulation dtypes
                q, k, v = (x.to(self.dtype) for x in (q, k, v))
                if not self._by_content:
                    return attend(q, k, v)
                out = attend(*(x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (q, k, v)))
                return out.squeeze(0).unflatten(1, (len(q), -1)).transpose(0, 1)

        return call


def train_step(
    model: SmallModel,
    optimizer: torch.optim.Optimizer,
    attentions: Attentions,
    rows: Tensor,
    layers: list[AttentionFn] | None = None,
) -> Tensor:
    """One step on rows (B, S + 1) of tokens; returns the loss on its device.

    `layers` replace those of `attentions`.
    """
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
    """(num_held, S): the loss in nats of every token of the held-out sequences."""
    model.eval()
    found = []
    for first in range(0, corpus.num_held, settings.batch):
        rows = _on(model.head.weight.device, corpus.held[first : first + settings.batch])
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
        lr=settings.peak_lr,
        betas=(0.9, 0.98),
        fused=True,
    )


def _warm_up(model: SmallModel, attentions: Attentions, settings: ClockSettings, corpus: Corpus) -> None:
    """Some steps whose updates are undone. Uses the model itself, for which the kernels are compiled."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = _optimizer(model, settings)
    for step in range(WARM_STEPS):
        rows = _on(model.head.weight.device, batch(corpus, 0, step, settings.batch))
        train_step(model, optimizer, attentions, rows)
    model.load_state_dict(before)


def _rest_ms(
    step: Callable[[int, list[AttentionFn]], Tensor],
    first: int,
    attentions: Attentions,
    settings: ClockSettings,
    read: Clock,
) -> float:
    """Median time of a step without attention, from step `first` on, after `LOOK_STEPS` of warm-up.

    Changes the weights: do not use the model afterwards.
    """

    def values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.to(attentions.dtype)

    layers: list[AttentionFn] = [values] * settings.num_layers
    for number in range(LOOK_STEPS):
        step(first + number, layers)
    first += LOOK_STEPS
    with _undisturbed():
        looks = [(0, read())]
        for number in range(LOOK_STEPS * REST_LOOKS):
            step(first + number, layers)
            if (number + 1) % LOOK_STEPS == 0:
                looks.append((number + 1, read()))
    return median_ms(looks)


def _on(device: torch.device, tokens: Tokens) -> Tensor:
    rows = torch.from_numpy(tokens)
    if device.type == "cpu":
        return rows
    return rows.pin_memory().to(device, non_blocking=True)  # from pageable memory the copy would synchronise


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Exclude existing objects from garbage collection within; collection itself goes on.

    Raises: RuntimeError at the end if torch.compile was active within.
    """
    gc.collect()
    gc.freeze()
    before = num_compiled()
    try:
        yield
    finally:
        gc.unfreeze()
    if num_compiled() != before:
        raise RuntimeError(
            f"torch.compile was called upon {num_compiled() - before} times while the clock ran, after {WARM_STEPS}"
            " steps of warm-up: the time is not of steps alone (TORCH_LOGS=recompiles names the reasons)"
        )


def num_compiled() -> int:
    """Graphs that torch.compile has built in this process, plus frames that it has traced."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return 0
    counters = dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"] + counters["frames"]["total"])


@contextmanager
def _compiling(model: SmallModel, compiled: bool) -> Iterator[None]:
    """Within, if `compiled`, compile all of `model` but its attention, and raise for what cannot be compiled."""
    if not compiled:
        yield
        return
    import torch._dynamo  # slow import, needed only here

    for layer in cast(Any, model.layers):
        layer.pieces = compiled_pieces()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@lru_cache(maxsize=2)
def compiled_pieces(backend: str = "inductor") -> FusedOps:
    """One compiled form for all layers and models; a second wrapper would compile again.

    Inductor compiles in this process, so that no compile workers run during the measurement.
    """
    options: dict[str, Any] | None = {"compile_threads": 1} if backend == "inductor" else None

    def made(piece: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(piece, fullgraph=True, dynamic=False, backend=backend, options=options)

    return FusedOps(made(AS_WRITTEN.before), made(AS_WRITTEN.after))
