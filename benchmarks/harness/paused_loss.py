"""Losses that wait: how a bench pauses or slows a run's steps without the run's knowledge."""

from __future__ import annotations

import os
import time
from typing import Any

from torch import Tensor

from elastic_ring import Batch
from elastic_ring.model.loss import language_model_loss

POLL_S = 0.02


class PausedLoss:
    """The usual language-model loss, computed once `path` does not exist."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, model: Any, batch: Batch) -> tuple[Tensor, int]:
        while os.path.exists(self._path):
            time.sleep(POLL_S)
        return language_model_loss(model, batch)


class SlowUntil:
    """`loss`, computed `wait_s` later for as long as `path` does not exist."""

    def __init__(self, loss: Any, path: str, wait_s: float) -> None:
        self._loss, self._path, self._wait_s = loss, path, wait_s

    def __call__(self, model: Any, batch: Batch) -> tuple[Tensor, int]:
        if not os.path.exists(self._path):
            time.sleep(self._wait_s)
        loss: tuple[Tensor, int] = self._loss(model, batch)
        return loss
