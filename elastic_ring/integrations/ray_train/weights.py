"""The whole weights of a ZeRO-3 engine, as the elastic ring writes them: the same files, names and digest."""

from __future__ import annotations

import hashlib
import math
import secrets

from torch import Tensor

from elastic_ring.integrations.ray_train.engine import Zero3Engine
from elastic_ring.state.checkpoints.checkpoint import safetensors_chunks
from elastic_ring.state.checkpoints.weight_files import (
    MAX_FILE_BYTES,
    WEIGHTS,
    WEIGHTS_INDEX,
    file_names,
    grouped,
    index_text,
    remove_others,
)
from elastic_ring.state.shard import raw_bytes
from elastic_ring.state.storage.folder import Storage

FP32_BYTES = 4


def write_weights(engine: Zero3Engine, storage: Storage | None, max_file_bytes: int = MAX_FILE_BYTES) -> str:
    """Write them from the rank that is given the `storage`, and return `weights_sha256`. Collective.

    That rank holds the tensors of one file at a time. Raises StorageFailed.
    """
    sizes = {name: math.prod(shape) * FP32_BYTES for name, shape in engine.shapes.items()}
    groups = list(grouped(sizes, max_file_bytes))
    files = dict(zip(file_names(secrets.token_hex(8), len(groups)), groups, strict=True))
    total, tensors = hashlib.sha256(), engine.whole_weights()
    for file, names in files.items():
        kept: dict[str, Tensor] = {}
        for _ in names:
            name, tensor = next(tensors)
            if storage is not None:
                kept[name] = tensor
                for chunk in raw_bytes([tensor]):
                    total.update(chunk)
        if storage is not None:
            told = {"sha256": total.hexdigest()} if file == WEIGHTS else {}
            storage.replace_bulk(file, safetensors_chunks(kept, {"format": "pt", **told}))
    if storage is not None:
        if WEIGHTS not in files:
            placed = {name: file for file, names in files.items() for name in names}
            metadata = {"total_size": sum(sizes.values()), "sha256": total.hexdigest()}
            storage.replace(WEIGHTS_INDEX, index_text(placed, metadata))
        remove_others(storage, [WEIGHTS] if WEIGHTS in files else [WEIGHTS_INDEX, *files])
    return total.hexdigest()
