"""Hugging Face decoders on rings: `ring_model` makes a factory that `ElasticRingTrainer` takes in place of a model.

Any decoder that attends through transformers' `AttentionInterface` will do. Only this package imports `transformers`,
and only once a model is built: a worker that unpickles a factory imports nothing of it.
"""

from elastic_ring.integrations.transformers.export import Exported, export
from elastic_ring.integrations.transformers.model import RingModel, ring_model

__all__ = ["Exported", "RingModel", "export", "ring_model"]
