"""A checkpoint in the layouts of others: safetensors by name, and torch.distributed.checkpoint.

One tensor at a time is in memory. Every byte of the checkpoint is verified before anything is written.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from elastic_ring.errors import CheckpointDamaged
from elastic_ring.state.checkpoints.checkpoint import Reader, wrong_files
from elastic_ring.state.checkpoints.manifest import Manifest
from elastic_ring.state.checkpoints.weight_files import grouped, index_text
from elastic_ring.state.header import OPTIMIZER, PARAMS
from elastic_ring.state.safetensors import DTYPES, safetensors_chunks
from elastic_ring.state.storage.folder import Storage

INDEX = "model.safetensors.index.json"


def verified_reader(storage: Storage, manifest: Manifest) -> Reader:
    """Raises CheckpointDamaged if a byte is wrong."""
    if wrong := list(wrong_files(storage, manifest)):
        raise CheckpointDamaged(f"{storage.at(manifest.folder)}: {'; '.join(wrong)}", path=manifest.folder)
    return Reader(storage, manifest, whole_files=False)


def export_safetensors(reader: Reader, target: Storage, shard_bytes: int) -> list[str]:
    """Write the parameters in files of about `shard_bytes`, and last the index that names them; returns the files."""
    tensors, prefix = reader.manifest.tensors, f"{PARAMS}/"
    sizes = {name: tensor.num_bytes for name, tensor in tensors.items() if name.startswith(prefix)}
    groups = list(grouped(sizes, shard_bytes))
    files = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    index: dict[str, str] = {}
    for file, names in zip(files, groups, strict=True):
        whole = {name.removeprefix(prefix): reader.tensor(name, 0, 1) for name in names}
        target.write(file, safetensors_chunks(whole, {"format": "pt"}))
        index |= dict.fromkeys(whole, file)
    target.replace(INDEX, index_text(index, {"total_size": sum(sizes.values())}))
    return [*files, INDEX]


def export_dcp(reader: Reader, folder: Path) -> None:
    """Write parameters, optimizer and counters, keyed as `torch.distributed.checkpoint.state_dict` keys them."""
    manifest = reader.manifest
    model: dict[str, Tensor] = {}
    state: dict[str, dict[str, object]] = {name: dict(values) for name, values in manifest.meta.plain.items()}
    for key, stored in manifest.tensors.items():
        empty = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")
        kind, _, name = key.partition("/")
        if kind == PARAMS:
            model[name] = empty
        else:
            param, _, entry = name.rpartition("/")
            state.setdefault(param, {})[entry] = empty
    contents: dict[str, object] = {
        "model": model,
        "optim": {"state": state, "param_groups": list(manifest.meta.groups)},
        "counters": asdict(manifest.meta.counters),
        "step": manifest.step,
    }
    writer = dcp.FileSystemWriter(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which no_dist asks for
        dcp.save(contents, storage_writer=writer, planner=_LazyPlanner(reader), no_dist=True)


class _LazyPlanner(dcp.DefaultSavePlanner):
    """Reads a tensor when its turn to be written has come; until then it is on the meta device."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        if not isinstance(value, Tensor) or value.device.type != "meta":
            return value
        path = self.mappings[index.fqn]
        if path[0] == "model":
            return self._reader.tensor(f"{PARAMS}/{path[1]}", 0, 1)
        return self._reader.tensor("/".join([OPTIMIZER, *map(str, path[2:])]), 0, 1)
