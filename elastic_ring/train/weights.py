"""The unsharded weights at the end: gathered parameter by parameter, digested, written as safetensors."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from elastic_ring.state.shard import raw_bytes
from elastic_ring.train.wrap import full_shapes, slice_rows


def gather_weights(state: Any, wires: Any, path: Path) -> str | None:
    """Write the whole model to `path` from the first ring; global rank 0 returns `weights_sha256`, others None.

    The digest is sha256 over the raw bytes of the unsharded fp32 parameters in name order. The whole model is
    held in memory on global rank 0. A collective of the ring: raises what its group raises, and GroupAborted once
    it has been aborted; then nothing is written.
    """
    shapes = full_shapes(state.model)
    total = hashlib.sha256()
    whole: dict[str, Tensor] = {}
    for name in sorted(shapes):
        tensor = _gather(state.shard.params[name], shapes[name], wires)
        if wires.global_rank == 0:
            whole[name] = tensor
            for chunk in raw_bytes([tensor]):
                total.update(chunk)
    if wires.global_rank != 0:
        return None
    wires.check()  # an abort on a device ends a gather and raises nothing: what came may be nonsense
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.touch()
    mode = partial.stat().st_mode  # as this process makes files; safetensors would keep it from all others
    save_file(whole, partial, metadata={"sha256": total.hexdigest()})
    partial.chmod(mode)
    os.replace(partial, path)
    return total.hexdigest()


def _gather(local: Tensor, shape: tuple[int, ...], wires: Any) -> Tensor:
    """All rows of one parameter from the ranks of the ring; slices are padded to one size on the wire."""
    cp = wires.mesh.cp
    rows = [slice_rows(shape, cp_rank, cp) for cp_rank in range(cp)]
    most = max(stop - start for start, stop in rows)
    padded = torch.zeros((most, *shape[1:]), dtype=local.dtype, device=local.device)
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in range(cp)]
    with wires.launching():
        work = wires.shard.allgather([parts], [padded])
    work.wait()
    kept = [part[: stop - start] for part, (start, stop) in zip(parts, rows, strict=True)]
    return torch.cat(kept).contiguous().cpu()
