"""Registers a generation's process groups in torch's global tables, and removes them again.

FSDP2 and DeviceMesh find groups in these tables only. `groups` builds and aborts them.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed import distributed_c10d as c10d


def register_group(
    full_name: str,
    store: PrefixStore,
    backend: Any,
    kind: str,
    device_type: str,
    ranks: Sequence[int],
    global_rank: int,
) -> dist.ProcessGroup:
    """Create and register a group of these global ranks over a connected `backend` of `kind` (gloo, nccl)."""
    group = dist.ProcessGroup(store, list(ranks).index(global_rank), len(ranks))
    backend_type = getattr(dist.ProcessGroup.BackendType, kind.upper())
    group._register_backend(torch.device(device_type), backend_type, backend)
    group._set_default_backend(backend_type)
    group._set_group_name(full_name)  # type: ignore[arg-type]
    world = c10d._world
    world.pg_map[group] = (kind, store)
    world.pg_names[group] = full_name  # type: ignore[assignment]
    world.pg_group_ranks[group] = {peer: i for i, peer in enumerate(ranks)}
    world.pg_backend_config[group] = f"{device_type}:{kind}"
    c10d._register_process_group(full_name, group)  # type: ignore[arg-type]
    return group


def make_default(group: dist.ProcessGroup) -> None:
    """Make it torch's default group."""
    c10d._update_default_pg(group)


def forget_groups() -> None:
    """Remove the old generation's groups from torch's tables; frees their threads and sockets.

    Drop the module first: FSDP2 modules are reference cycles, which keep shards and groups until they are collected.
    """
    # Asks whether these groups are NCCL's, not whether there is a GPU: a run on CPUs may be on a host with GPUs.
    if dist.is_initialized() and any(kind == "nccl" for kind, _ in c10d._world.pg_map.values()):
        _forget_tables()
    elif dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _forget_tables() -> None:
    """As `destroy_process_group`, but without waiting for NCCL's groups to shut down: they are aborted."""
    world = c10d._world
    c10d._update_default_pg(None)
    for table in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        table.clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0
