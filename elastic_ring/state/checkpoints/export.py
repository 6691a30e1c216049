"""A checkpoint in the layouts of others: safetensors as Hugging Face reads them, and torch.distributed.checkpoint.

One tensor at a time is in memory. Every byte of the checkpoint is verified before anything is written.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from elastic_ring.errors import CheckpointDamaged
from elastic_ring.state.checkpoints.checkpoint import Reader, safetensors_chunks, wrong_files
from elastic_ring.state.checkpoints.manifest import DTYPES, OPTIMIZER, PARAMS, Manifest
from elastic_ring.state.checkpoints.weight_files import grouped, index_text
from elastic_ring.state.storage.folder import Storage

INDEX = "model.safetensors.index.json"


def verified_reader(storage: Storage, manifest: Manifest) -> Reader:
    """Raises CheckpointDamaged if a byte is wrong."""
    if wrong := list(wrong_files(storage, manifest)):
        raise CheckpointDamaged(f"{storage.at(manifest.folder)}: {'; '.join(wrong)}", path=manifest.folder)
    return Reader(storage, manifest, whole_files=False)


def export_safetensors(reader: Reader, target: Storage, shard_bytes: int) -> list[str]:
    """The parameters in files of about `shard_bytes`, and last the index that names them; returns the files."""
    manifest = reader.manifest
    names = [name for name in manifest.tensors if name.startswith(f"{PARAMS}/")]
    groups = list(grouped({name: num_bytes(manifest, name) for name in names}, shard_bytes))
    files = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    index: dict[str, str] = {}
    for file, names in zip(files, groups, strict=True):
        tensors = {name.removeprefix(f"{PARAMS}/"): reader.tensor(name, 0, 1) for name in names}
        target.write(file, safetensors_chunks(tensors, {"format": "pt"}))
        index |= dict.fromkeys(tensors, file)
    total = sum(num_bytes(manifest, name) for names in groups for name in names)
    target.replace(INDEX, index_text(index, {"total_size": total}))
    return [*files, INDEX]


def export_dcp(reader: Reader, folder: Path) -> None:
    """Parameters, optimizer and counters, keyed as `torch.distributed.checkpoint.state_dict` keys them."""
    writer = dcp.FileSystemWriter(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which no_dist asks for
        dcp.save(dcp_state(reader.manifest), storage_writer=writer, planner=_LazyPlanner(reader), no_dist=True)


def dcp_state(manifest: Manifest) -> dict[str, Any]:
    """The state as nested dictionaries, with empty tensors of the stored shapes on the meta device."""
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in manifest.meta["plain"].items()}
    for name, stored in manifest.tensors.items():
        empty = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")
        kind, param, *rest = name.split("/")
        if kind == PARAMS:
            model[param] = empty
        else:
            state.setdefault(param, {})["/".join(rest)] = empty
    return {
        "model": model,
        "optim": {"state": state, "param_groups": list(manifest.meta["groups"])},
        "counters": dict(manifest.meta["counters"]),
        "step": manifest.step,
    }


class _LazyPlanner(dcp.DefaultSavePlanner):
    """Reads a tensor when its turn to be written has come."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if not isinstance(found, torch.Tensor) or found.device.type != "meta":
            return found
        path = self.mappings[index.fqn]
        if path[0] == "model":
            return self._reader.tensor(f"{PARAMS}/{path[1]}", 0, 1)
        return self._reader.tensor("/".join([OPTIMIZER, *map(str, path[2:])]), 0, 1)


def num_bytes(manifest: Manifest, name: str) -> int:
    stored = manifest.tensors[name]
    return math.prod(stored.shape) * int(DTYPES[stored.dtype].itemsize)
