"""elastic_ring: elastic, fault-tolerant training of long-context transformers on Ray.

`ElasticRingTrainer` is the door; `ring_attention` works alone in anyone's own training loop. Names are
loaded when first used, so that the pure rooms can be imported without torch or Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_ring.attention.api import ring_attention
    from elastic_ring.config import CheckpointConfig, OptimConfig, RunConfig, ScalingConfig, StepConfig, Timeouts
    from elastic_ring.data.sampling.validation import ValidationSet
    from elastic_ring.integrations.trackers import EarlyStopping, KeepBest
    from elastic_ring.monitor.callbacks import Callback
    from elastic_ring.monitor.result import Checkpoint, Result
    from elastic_ring.train.task import Batch
    from elastic_ring.train.weights import load_weights
    from elastic_ring.trainer import ElasticRingTrainer

__all__ = [
    "Batch",
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "EarlyStopping",
    "ElasticRingTrainer",
    "KeepBest",
    "OptimConfig",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "StepConfig",
    "Timeouts",
    "ValidationSet",
    "load_weights",
    "ring_attention",
]


def __getattr__(name: str) -> Any:
    homes = {
        "Batch": "elastic_ring.train.task",
        "Callback": "elastic_ring.monitor.callbacks",
        "Checkpoint": "elastic_ring.monitor.result",
        "CheckpointConfig": "elastic_ring.config",
        "EarlyStopping": "elastic_ring.integrations.trackers",
        "ElasticRingTrainer": "elastic_ring.trainer",
        "KeepBest": "elastic_ring.integrations.trackers",
        "OptimConfig": "elastic_ring.config",
        "Result": "elastic_ring.monitor.result",
        "RunConfig": "elastic_ring.config",
        "ScalingConfig": "elastic_ring.config",
        "StepConfig": "elastic_ring.config",
        "Timeouts": "elastic_ring.config",
        "ValidationSet": "elastic_ring.data.sampling.validation",
        "load_weights": "elastic_ring.train.weights",
        "ring_attention": "elastic_ring.attention.api",
    }
    if name not in homes:
        raise AttributeError(f"module 'elastic_ring' has no attribute {name!r}")
    return getattr(importlib.import_module(homes[name]), name)
