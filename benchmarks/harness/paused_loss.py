"""A loss that waits: how a bench pauses a run's steps without the run's knowledge."""

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

    def __call__(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        while os.path.exists(self._path):
            time.sleep(POLL_S)
        return language_model_loss(model, batch)
