"""ZeRO-3 in Ray Train: `Zero3Trainer` runs Ray Train's TorchTrainer, DeepSpeed shards over dp x cp, rings attend.

DeepSpeed is imported only here, and only by a worker or a check that needs it.
"""

from elastic_ring.integrations.ray_train.settings import Zero3Config
from elastic_ring.integrations.ray_train.trainer import Zero3Trainer
from elastic_ring.integrations.ray_train.worker import Zero3Worker, train

__all__ = ["Zero3Config", "Zero3Trainer", "Zero3Worker", "train"]
