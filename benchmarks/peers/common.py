"""What every measured system shares: the model, its batches, the record of steps, and the kills.

The systems differ in how they recover, so nothing here knows Ray, process groups or elastic_ring. Workers
append one line to a shared file whenever something happens; `time.monotonic` is one clock for all processes.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_WORKERS = 4
VICTIM = 3
VOCAB = 256
CONTEXT_TOKENS = 96
WIDTH = 128
NUM_HEADS = 4
NUM_LAYERS = 2
SEQUENCES_PER_WORKER = 1
LEARNING_RATE = 1e-3
STEPS_BETWEEN_KILLS = 10
WAIT_S = 180.0

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention inside one process, (B, S, H, D) in and out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) -> (B, S, width)."""
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, NUM_HEADS, WIDTH // NUM_HEADS)
        mixed = self.attention(*qkv.unbind(2)).reshape(batch, length, WIDTH)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class ByteModel(nn.Module):
    """A byte-level decoder small enough that four of them step in well under 0.1 s on two cores."""

    def __init__(self, attention: Attention = causal_attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(CONTEXT_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """tokens (B, S), positions (S,) or (B, S), by default 0 to S-1 -> logits (B, S, VOCAB)."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(seed: int = 0, attention: Attention = causal_attention) -> ByteModel:
    torch.manual_seed(seed)
    return ByteModel(attention)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def batch(step: int, worker: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random bytes that depend on (seed, step, worker) alone: inputs and targets, each (B, S)."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * NUM_WORKERS + worker)
    shape = (SEQUENCES_PER_WORKER, CONTEXT_TOKENS + 1)
    text = torch.randint(VOCAB, shape, generator=generator)
    return text[:, :-1], text[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Event:
    """One line of the record. `step` counts the committed steps at that moment; -1 where none applies."""

    kind: str  # enter, ready, step (committed), skip (not committed), error
    worker: int
    pid: int
    step: int
    num_members: int  # whose samples are in a committed step
    at_s: float


@dataclass(frozen=True)
class Kill:
    pid: int
    at_s: float


class Record:
    """The events of a run, in a folder that all its processes share, and the step after which they stop."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "events"
        self.stop_path = folder / "stop"

    def add(self, kind: str, worker: int, step: int = -1, num_members: int = NUM_WORKERS) -> None:
        # One write in append mode, so that lines of several processes never mix.
        line = f"{kind} {worker} {os.getpid()} {step} {num_members} {time.monotonic():.6f}\n".encode()
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def events(self) -> list[Event]:
        if not self.path.exists():
            return []
        rows = (line.split() for line in self.path.read_text().splitlines())
        return [Event(kind, int(w), int(p), int(s), int(n), float(at_s)) for kind, w, p, s, n, at_s in rows]

    def stop_after(self, step: int) -> None:
        """Let every worker stop before the same step, so that none waits for another."""
        partial = self.stop_path.with_suffix(".partial")
        partial.write_text(str(step))
        partial.rename(self.stop_path)

    def must_stop(self, step: int) -> bool:
        return self.stop_path.exists() and step >= int(self.stop_path.read_text())


def all_stepping(events: list[Event], since_s: float, victim_pid: int | None) -> bool:
    """Whether all workers, the victim's successor among them, have committed enough steps after `since_s`."""
    steps: dict[int, int] = {}
    for event in events:
        if event.kind == "step" and event.at_s > since_s and event.pid != victim_pid:
            steps[event.worker] = steps.get(event.worker, 0) + 1
    return len(steps) == NUM_WORKERS and min(steps.values()) >= STEPS_BETWEEN_KILLS


def _wait_until_stepping(record: Record, since_s: float, victim_pid: int | None) -> list[Event]:
    deadline_s = time.monotonic() + WAIT_S
    while not all_stepping(events := record.events(), since_s, victim_pid):
        if record.stop_path.exists():
            raise RuntimeError("the run ended before all kills were done")
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not all {NUM_WORKERS} workers were stepping within {WAIT_S} s")
        time.sleep(0.1)
    return events


def kill_repeatedly(record: Record, num_kills: int, seed: int = 0) -> list[Kill]:
    """SIGKILLs the victim `num_kills` times, each once everyone is stepping again; then ends the run.

    The moment is spread over 2 s, the interval at which Ray Train's controller looks at its workers.
    """
    moments = random.Random(seed)
    kills: list[Kill] = []
    events = _wait_until_stepping(record, 0.0, None)
    for _ in range(num_kills):
        time.sleep(moments.uniform(0.0, 2.0))
        pid = [event.pid for event in record.events() if event.kind == "enter" and event.worker == VICTIM][-1]
        os.kill(pid, signal.SIGKILL)
        kills.append(Kill(pid, time.monotonic()))
        events = _wait_until_stepping(record, kills[-1].at_s, pid)
    record.stop_after(max(event.step for event in events) + 40)
    return kills


@contextmanager
def killing(record: Record, num_kills: int, kills: list[Kill]) -> Iterator[None]:
    """Kills from a thread while the caller trains; raises here what the thread raised."""
    problems: list[BaseException] = []

    def work() -> None:
        try:
            kills.extend(kill_repeatedly(record, num_kills))
        except BaseException as problem:
            problems.append(problem)
            record.stop_after(0)

    thread = threading.Thread(target=work, name="killer")
    thread.start()
    try:
        yield
    finally:
        if not record.stop_path.exists():
            record.stop_after(0)
        thread.join()
    if problems:
        raise problems[0]


def phases(events: list[Event], kill: Kill, until_s: float = float("inf")) -> dict[str, float]:
    """What happened after a SIGKILL and before the next, in seconds from it; absent where it did not happen.

    noticed_s     the first survivor that saw its step fail
    entered_s     every worker that had to start anew has begun its training function
    ready_s       those have model and group
    first_step_s  the first step committed after the failure was seen, even if it had been done before
    next_step_s   the first committed step beyond all those before the kill
    complete_s    the first such step with all workers' samples in it
    steps_rerun   committed steps that ran again
    num_started   training functions begun: more than the system must start anew means failed attempts
    """
    after = [event for event in events if kill.at_s < event.at_s < until_s]
    before = [event for event in events if event.at_s <= kill.at_s]
    old = {event.pid for event in before} - {kill.pid}
    fresh = [event for event in after if event.pid not in old]
    failed = [event.at_s for event in after if event.kind in ("error", "skip")]
    fewer = [event.at_s for event in after if event.kind == "step" and event.num_members < NUM_WORKERS]
    failed_s = min([*failed, *fewer, *(event.at_s for event in fresh)])
    # A step under way may still commit where the victim had given its share: it belongs to the time before.
    last_step = max(event.step for event in [*before, *after] if event.kind == "step" and event.at_s < failed_s)
    steps = [event for event in after if event.kind == "step" and event.at_s >= failed_s]
    times = {
        "noticed_s": min(failed, default=None),
        "entered_s": max((event.at_s for event in fresh if event.kind == "enter"), default=None),
        "ready_s": max((event.at_s for event in fresh if event.kind == "ready"), default=None),
        "first_step_s": min(event.at_s for event in steps),
        "next_step_s": min(event.at_s for event in steps if event.step > last_step),
        "complete_s": min(e.at_s for e in steps if e.step > last_step and e.num_members == NUM_WORKERS),
    }
    result = {name: round(at - kill.at_s, 4) for name, at in times.items() if at is not None}
    result["steps_rerun"] = max(0, last_step + 1 - min(event.step for event in steps))
    result["num_started"] = sum(event.kind == "enter" for event in fresh)
    return result


def timings(record: Record, kills: list[Kill]) -> list[dict[str, float]]:
    """The phases of each kill and, beside them, the median time of an undisturbed step."""
    events = record.events()
    ends_s = [kill.at_s for kill in kills[1:]] + [float("inf")]
    return [
        {"kill": number, **phases(events, kill, end_s), "step_s": round(step_time_s(events, kill.at_s), 4)}
        for number, (kill, end_s) in enumerate(zip(kills, ends_s, strict=True))
    ]


def step_time_s(events: list[Event], before_s: float) -> float:
    """Median time between the steps of worker 0 before a moment."""
    ends_s = [e.at_s for e in events if e.kind == "step" and e.worker == 0 and e.at_s < before_s]
    return median(end_s - start_s for start_s, end_s in pairwise(ends_s[-STEPS_BETWEEN_KILLS - 1 :]))


def report(system: str, rows: list[dict[str, float]]) -> dict[str, Any]:
    """What the peers print: every kill, and the median of each phase over the kills that had it."""
    names = dict.fromkeys(name for row in rows for name in row if name != "kill")
    medians = {name: round(median(row[name] for row in rows if name in row), 4) for name in names}
    return {"system": system, "kills": rows, "medians": medians}
