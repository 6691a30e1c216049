"""What a finished run returns, named as in Ray Train. Reads the run's folder; needs no Ray."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elastic_ring.monitor.metrics import METRICS_NAME, read_metrics
from elastic_ring.monitor.metrics_log import StepTable
from elastic_ring.state.checkpoints.weight_files import WEIGHTS, WEIGHTS_INDEX


@dataclass(frozen=True)
class Checkpoint:
    """A durable checkpoint: the state after `step` steps, at `path` (`elastic-ring checkpoints verify PATH`)."""

    path: str
    step: int


@dataclass(frozen=True)
class Result:
    """The result of `ElasticRingTrainer.fit`: `summary` as in summary.json, and `path`, the run's folder.

    `error` is always None: a run that fails raises instead.
    """

    summary: dict[str, Any]
    path: Path
    error: Exception | None = None
    storage_uri: str = ""
    """The run's place in an object store; empty where that is `path`."""

    def __repr__(self) -> str:
        steps, losses = self.summary.get("steps"), self.summary.get("losses") or [None]
        loss = losses[-1] and f"{float.fromhex(losses[-1]):.4g}"
        return f"Result(steps={steps}, loss={loss}, path={str(self.storage_uri or self.path)!r}, summary={{...}})"

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The run's last durable checkpoint, if it wrote one. The final weights are in `weights`."""
        written = self.summary.get("checkpoints") or self.summary.get("resumed_from")
        return Checkpoint(written[-1]["path"], int(written[-1]["step"])) if written else None

    @property
    def weights(self) -> Path | str:
        """The final weights: a safetensors file, or the index of several; in an object store the run's URI, which
        `elastic_ring.load_weights` takes as well."""
        if self.storage_uri:
            return self.storage_uri
        index = self.path / WEIGHTS_INDEX
        return index if index.exists() else self.path / WEIGHTS

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The last step's line of metrics.jsonl; only its loss where that file is gone."""
        with StepTable.load(self.path / METRICS_NAME) as table:
            newest = table.newest(1)
        return {**newest[-1]} if newest else {"loss": float.fromhex(self.summary["losses"][-1])}

    @cached_property
    def metrics_dataframe(self) -> Any:
        """One row a step, as a pandas DataFrame. Raises ValueError where pandas is not installed."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ValueError(
                "metrics_dataframe needs pandas, which is not installed: pip install pandas, or read the lines with "
                "elastic_ring.monitor.metrics.read_metrics(result.path)"
            ) from error
        return pandas.DataFrame(read_metrics(self.path))
