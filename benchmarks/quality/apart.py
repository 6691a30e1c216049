"""One training run per process, so that it finds no compiled graphs, plans or memory of earlier runs.

Caches on disk are shared, such as kernels that libraries have compiled. No result files in here.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from benchmarks.quality.clock import ClockSettings, train_for
from benchmarks.quality.small.families import Family
from benchmarks.quality.small.text import Corpus

END_S = 60.0
"""Limit for a process to exit after its last message."""


class Train(Protocol):
    """The signature of `train_for` without its `clock`."""

    def __call__(
        self,
        family: Family,
        seed: int,
        settings: ClockSettings,
        corpus: Corpus,
        device: torch.device,
        *,
        steps: int | None = None,
    ) -> dict[str, Any]: ...


def train_apart(
    family: Family,
    seed: int,
    settings: ClockSettings,
    corpus: Corpus,
    device: torch.device,
    *,
    steps: int | None = None,
    train: Train = train_for,
) -> dict[str, Any]:
    """Call `train` on one thread in a new process, which exits with it, or when this process dies.

    Raises: ValueError where that process raised one, else RuntimeError with its traceback or exit code.
    """
    # Fork from a server that has only imported torch: as clean as spawn, and faster.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])
    ours, theirs = context.Pipe(duplex=False)
    call = partial(train, family, seed, settings, corpus, device, steps=steps)
    process = context.Process(target=_alone, args=(theirs, call, device), name=f"{family.name}, seed {seed}")
    process.start()
    theirs.close()  # else recv would not see EOF
    try:
        kind, found = ours.recv()
        process.join(END_S)
    except EOFError:
        process.join(END_S)
        raise RuntimeError(f"{process.name}: its process died with exit code {process.exitcode}") from None
    finally:
        ours.close()
        process.kill()
    if kind == "refused":
        raise ValueError(found)
    if kind == "failed":
        raise RuntimeError(f"{process.name}: {found}")
    value: dict[str, Any] = found
    return value


def _alone(answer: Connection, call: Any, device: torch.device) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        torch.set_num_threads(1)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # kernels compile for the current one
        found = ("value", call())
    except ValueError as error:
        found = ("refused", str(error))
    except Exception:
        found = ("failed", traceback.format_exc())  # as text: not every error comes back whole from a pickle
    answer.send(found)


def _end_with_the_parent() -> None:
    """Exit when the parent dies: nothing would read the result, and the device is needed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
