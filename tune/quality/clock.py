"""Training the small model on the paths that really skip, for a time: who is faster gets more steps for it.

What counts is the time of training steps: drawing the batch, forward, backward and the optimizer, and whatever the
attention does in them, choosing by content included. Compiling, planning static patterns and evaluating do not: a run
in whose time torch.compile makes a graph is an error, as is what it gives up compiling. What a library compiles for
sizes that it has not met before does count; it shows as a mean far above the median. The same lines run on CPUs and on
GPUs; device, type and the clock differ. No files and no tables in here.
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

from elastic_ring.attention.exchange import HopBuffers
from elastic_ring.attention.layers import Attention, PatternedAttention
from elastic_ring.attention.layout import contiguous
from tune.quality.families import Family
from tune.quality.model import AS_WRITTEN, Pieces, SmallConfig, SmallModel
from tune.quality.text import Corpus, Tokens, batch

Clock = Callable[[], float]
"""Seconds since some moment, of work that is done."""

WARM_STEPS = 4
"""Taken and taken back before the clock starts: kernels are compiled and patterns planned in them."""

LOOK_STEPS = 8
"""Steps between two looks at the clock, each of which has the host wait for the GPU: at every step that would cost
short steps, where the host is the slower one, the most."""

REST_LOOKS = 5
"""Looks' lengths over which a step without attention is measured."""

Look = tuple[int, float]
"""Steps done, and the clock then."""


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

    The clock is looked at as `_train` says. "seconds" says when the last step was done, "ms_per_step" is their mean,
    "median_ms" the median over the times between two looks. "tail_loss" and "loss", nats a token, are of held-out text
    as in `train.train_text`, "train_loss" of the last tenth of the steps, "epochs" how often the text was gone through.
    "rest_ms" is the median likewise of steps whose attention only hands on its values, measured afterwards.

    Raises `ValueError` for what the device's kernels cannot run, and `RuntimeError` or what Dynamo raises where
    something is compiled while the clock runs, or in more forms than are kept. One call in a process: what earlier ones
    left behind is not in the time, but what a library of kernels had met may be.
    """
    attentions = Attentions(family, settings, device)
    model = SmallModel(_config(settings, corpus), seed).to(device)
    read = clock_of(device) if clock is None else clock
    optimizer = _optimizer(model, settings)

    def step(number: int, layers: list[Attention] | None = None) -> Tensor:
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
    step: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, settings: ClockSettings, steps: int | None,
    read: Clock,
) -> tuple[list[Tensor], list[Look]]:  # fmt: skip
    """The losses, and the looks at the clock from the one before the first step to the one after the last.

    There is a look after each of the first `LOOK_STEPS` steps, then after every `LOOK_STEPS`-th. Between looks the
    share of the time that is used, which sets the learning rate, is that of the last look times the steps done now over
    those done then; where that comes to the whole there is a look too. A look at which the time is over ends the run,
    so steps as long as those before them end it within one of theirs. With `steps` given the share is of these.
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
    """Of the time, used after `done` steps, by the pace from the first look to the last; 0 before any step was seen."""
    at, then = looks[-1]
    return 0.0 if at == 0 else (then - looks[0][1]) / seconds * done / at


def median_ms(looks: Sequence[Look]) -> float:
    """Of a step, each time between two looks counting once."""
    return 1000 * median((then - before) / (now - at) for (at, before), (now, then) in pairwise(looks))


def learning_rate(share: float, peak: float) -> float:
    """For the step that begins after this share of the time: up over the first twentieth, then a cosine to a twentieth
    of the peak at the end."""
    warm = 0.05
    if share < warm:
        return peak * max(share / warm, 0.05)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (share - warm) / (1 - warm)))))


class Attentions:
    """What the layers of a model call, on one device, each following its rules of `family` by a path that skips.

    As in a training task, for every family alike: a new `PatternedAttention` in each step, which runs dense layers on
    the dense backend. Where content chooses it does so for one sequence, and each head for itself:
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
        self.dtype = getattr(torch, settings.dtype)

    def of_step(self) -> list[Attention]:
        """One for each layer, to be called once each, in their order, and then dropped with the step's graph."""
        attention = PatternedAttention(
            self._pattern, self._layout, 0, None, backend=self._settings.kernel, deterministic=False,
            buffers=self._buffers, sparse_kernel=self._settings.sparse_kernel,
        )  # fmt: skip
        return [self._called(attention.layer(number)) for number in range(self._settings.num_layers)]

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
        lr=settings.peak_lr, betas=(0.9, 0.98), fused=True,
    )  # fmt: skip


def _warm_up(model: SmallModel, attentions: Attentions, settings: ClockSettings, corpus: Corpus) -> None:
    """Some steps whose effect is taken back. The model itself takes them: what is compiled is compiled for it."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = _optimizer(model, settings)
    for step in range(WARM_STEPS):
        rows = _on(model.head.weight.device, batch(corpus, 0, step, settings.batch))
        train_step(model, optimizer, attentions, rows)
    model.load_state_dict(before)


def _rest_ms(
    step: Callable[[int, list[Attention]], Tensor], first: int, attentions: Attentions, settings: ClockSettings,
    read: Clock,
) -> float:  # fmt: skip
    """Of a step without attention, from step number `first` on, looked at every `LOOK_STEPS` as in training and after
    as many that warm up; the model is of no use afterwards."""

    def values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.to(attentions.dtype)

    layers: list[Attention] = [values] * settings.num_layers
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
    return rows.pin_memory().to(device, non_blocking=True)  # from other memory the host waits for the GPU


@contextmanager
def _undisturbed() -> Iterator[None]:
    """What was there before is not gone through by the collector within, which itself runs as ever. Raises
    `RuntimeError` at the end if torch.compile has made anything meanwhile."""
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
    """Graphs that torch.compile has made in this process, and pieces of code that it has looked at for them."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return 0
    counters = dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"] + counters["frames"]["total"])


@contextmanager
def _compiling(model: SmallModel, compiled: bool) -> Iterator[None]:
    """Within, all of `model` but its attention is compiled if `compiled`, and what cannot be is an error."""
    if not compiled:
        yield
        return
    import torch._dynamo  # takes a second, which is for those who compile

    for layer in cast(Any, model.layers):
        layer.pieces = compiled_pieces()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@lru_cache(maxsize=2)
def compiled_pieces(backend: str = "inductor") -> Pieces:
    """Made once for all layers and models: another wrapper of the same code would be compiled anew beside it. Inductor
    compiles in this process, so that no others are left running beside the clock."""
    options: dict[str, Any] | None = {"compile_threads": 1} if backend == "inductor" else None

    def made(piece: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(piece, fullgraph=True, dynamic=False, backend=backend, options=options)

    return Pieces(made(AS_WRITTEN.before), made(AS_WRITTEN.after))
