"""Callbacks that control a run: early stopping, and the checkpoint of the best validation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from elastic_ring.monitor.callbacks import Callback


class _Best(Callback):
    """Follows the least value of a metric of the validations; `state` has it, so that another driver goes on."""

    controls = True

    def __init__(self, metric: str = "val_loss") -> None:
        self.metric = metric

    @property
    def name(self) -> str:
        return f"{type(self).__qualname__}({self.metric})"

    def check_metrics(self, metrics: Collection[str]) -> None:
        if self.metric not in metrics:
            raise ValueError(f"metric={self.metric!r}: the validation has {', '.join(metrics)}")

    def is_better(self, step: int, metrics: Mapping[str, float], least_gain: float = 0.0) -> bool:
        """Whether the metric is less than ever before by more than `least_gain`; then it is the best."""
        value, best = metrics[self.metric], self.state.get("best", math.inf)
        if not value < best - least_gain:
            return False
        self.state.update(best=value, step=step)
        return True


class EarlyStopping(_Best):
    """Stops the run when `metric` has not become less by more than `min_delta` in `patience` validations (Prechelt
    1998, "Early Stopping - But When?"). Raises ValueError for a patience below 1."""

    def __init__(self, metric: str = "val_loss", patience: int = 3, min_delta: float = 0.0) -> None:
        super().__init__(metric)
        if patience < 1:
            raise ValueError(f"patience={patience}: give at least 1 validation")
        self.patience, self.min_delta = patience, min_delta

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.is_better(step, metrics, self.min_delta):
            self.state["waited"] = 0
            return
        self.state["waited"] = self.state.get("waited", 0) + 1
        if self.state["waited"] >= self.patience:
            best = (
                f"{self.state['best']:.4f} after step {self.state['step']}" if "best" in self.state else "never finite"
            )
            self.control.stop(f"{self.metric} has not improved in {self.patience} validations; its best was {best}")


class KeepBest(_Best):
    """Has a checkpoint taken where `metric` is the least so far, which retention keeps until there is a better one."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.is_better(step, metrics):
            self.control.checkpoint(keep=True)
