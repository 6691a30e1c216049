"""One training run in a process of its own, so that it finds nothing of those before it: no compiled forms, no plans
and no memory. What is on disk, as the kernels that libraries have compiled, is shared. No files of results in here.
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

from tune.quality.clock import ClockSettings, train_for
from tune.quality.families import Family
from tune.quality.text import Corpus

END_S = 60.0
"""What a process may take to end once nothing more will come from it."""


class Train(Protocol):
    """What `train_for` is without a clock of the caller's."""

    def __call__(
        self, family: Family, seed: int, settings: ClockSettings, corpus: Corpus, device: torch.device, *,
        steps: int | None = None,
    ) -> dict[str, Any]: ...  # fmt: skip


def train_apart(
    family: Family, seed: int, settings: ClockSettings, corpus: Corpus, device: torch.device, *,
    steps: int | None = None, train: Train = train_for,
) -> dict[str, Any]:  # fmt: skip
    """`train` on one thread in a new process, which ends with it, or when this one does.

    Raises `ValueError` with what that process raised as one, else `RuntimeError` with its traceback, or with its exit
    code where it died without a word.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    call = partial(train, family, seed, settings, corpus, device, steps=steps)
    process = context.Process(target=_alone, args=(theirs, call, device), name=f"{family.name}, seed {seed}")
    process.start()
    theirs.close()  # else its end would not be heard
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
    """Nobody would hear of the result, and the device is wanted. Waits without taking time."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
