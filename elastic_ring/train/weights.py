"""Writes the unsharded weights at the end: gathers each parameter, digests all, writes safetensors."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from elastic_ring.state.shard import raw_bytes
from elastic_ring.train.wrap import full_shapes, slice_rows


def gather_weights(state: Any, groups: Any, path: Path) -> str | None:
    """Write the whole model to `path` from the first ring; global rank 0 returns `weights_sha256`, others None.

    The digest is sha256 over the raw bytes of the unsharded fp32 parameters in name order. The whole model is
    held in memory on global rank 0. A collective of the ring: raises what its group raises, and GroupAborted once
    it has been aborted; then nothing is written.
    """
    shapes = full_shapes(state.model)
    total = hashlib.sha256()
    whole: dict[str, Tensor] = {}
    for name in sorted(shapes):
        tensor = _gather(state.shard.params[name], shapes[name], groups)
        if groups.global_rank == 0:
            whole[name] = tensor
            for chunk in raw_bytes([tensor]):
                total.update(chunk)
    if groups.global_rank != 0:
        return None
    groups.check()  # an abort ends NCCL's gathers without an error: the rows may be garbage
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.touch()
    mode = partial.stat().st_mode  # by this process's umask; safetensors writes files that only their owner can read
    save_file(whole, partial, metadata={"sha256": total.hexdigest()})
    partial.chmod(mode)
    os.replace(partial, path)
    return total.hexdigest()


def load_weights(module: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads a run's weights.safetensors into `module`, strictly, on the module's device and in its types.

    Tied parameters (one tensor under several names) are stored once, under the first name. Raises ValueError for a file
    that cannot be read, and for names or shapes that differ from the module's.
    """
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors ({error})") from error
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        stored = next((name for name in tied if name in found), None)
        if stored is not None:
            found.update({name: found[stored] for name in tied if name not in found})
    try:
        module.load_state_dict(found, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{path}: holds other parameters than a {type(module).__name__}: {error}") from error


def _gather(local: Tensor, shape: tuple[int, ...], groups: Any) -> Tensor:
    """All rows of one parameter from the ranks of the ring; slices are padded to one size for the all-gather."""
    cp = groups.mesh.cp
    rows = [slice_rows(shape, cp_rank, cp) for cp_rank in range(cp)]
    most = max(stop - start for start, stop in rows)
    padded = torch.zeros((most, *shape[1:]), dtype=local.dtype, device=local.device)
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in range(cp)]
    with groups.launching():
        work = groups.shard.allgather([parts], [padded])
    work.wait()
    kept = [part[: stop - start] for part, (start, stop) in zip(parts, rows, strict=True)]
    return torch.cat(kept).contiguous().cpu()
