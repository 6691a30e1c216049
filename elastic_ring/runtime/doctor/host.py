"""What one host finds out of itself. No Ray and no judgement in here: `verdicts` has that."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from elastic_ring.attention.kernels.registry import select
from elastic_ring.data.source import SourceConfig, open_source
from elastic_ring.runtime.agent.gpu_health import Nvml
from elastic_ring.runtime.doctor.verdicts import HostReport
from elastic_ring.runtime.gpu.device import keep_caches_private, kernel_cache
from elastic_ring.runtime.worker.env_fingerprint import versions
from elastic_ring.state.storage.folder import Storage

CLAIM = "claim"


def report(device: str, ray_folder: str = "", ray_gpus: int = 0) -> HostReport:
    """Versions, limits, memory, disk, clock and GPUs; touches nothing. `ray_folder`: where Ray keeps its files."""
    packages, nvml = versions(device), Nvml()
    packages["elastic_ring"] = f"{packages.get('elastic_ring', '')} {_sources()}".strip()
    gpus: Any = [] if device != "cuda" else nvml.describe() if nvml.open() else None
    return {**limits(ray_folder), "versions": packages, "ray_gpus": ray_gpus, "gpus": gpus}


def limits(ray_folder: str) -> HostReport:
    """The part that takes no time: each worker of a run reports it as it starts."""
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {
        "open_files": 1 << 40 if open_files == resource.RLIM_INFINITY else open_files,
        "shm_free_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        "disk_free_bytes": shutil.disk_usage(ray_folder if os.path.isdir(ray_folder) else "/tmp").free,
        "unix_s": time.time(),
    }


def write_and_claim(uri: str, host: str, timeout_s: float) -> dict[str, bool]:
    """Write a file, read it back, and try to make the one that only one host may make. Raises StorageFailed, ValueError
    for other bytes than were written."""
    storage = Storage(uri, timeout_s=timeout_s).open()
    storage.replace(_file_of(host), host.encode())
    if (content := storage.read(_file_of(host))) != host.encode():
        raise ValueError(f"{storage.at(_file_of(host))}: {len(content)} other bytes came back than were written")
    return {"won": storage.create(CLAIM, host.encode()), "excludes": storage.excludes}


def unseen(uri: str, hosts: list[str], timeout_s: float) -> list[str]:
    """Those of `hosts` whose file is not there."""
    storage = Storage(uri, timeout_s=timeout_s).open(write=False)
    return [host for host in hosts if not storage.exists(_file_of(host))]


def remove(uri: str, timeout_s: float) -> None:
    Storage(uri, timeout_s=timeout_s).open(write=False).remove_folder("")


def read_data(config: SourceConfig, folders: list[str]) -> int:
    """How many sequences the data has; reads the first and the last. Raises what the reader raises."""
    for folder in folders:
        if not Path(folder).expanduser().is_dir():
            raise ValueError(f"{folder}: there is no such folder")
    source = open_source(config)
    for sample_id in (0, source.num_sequences - 1):
        source.read(sample_id)
    return source.num_sequences


def test_kernels(device: str, dtype: str, head_dim: int, head_ratio: int) -> str:
    """The name of the kernel that a run would take here, once it has passed its self-test. Raises RunFailed."""
    keep_caches_private()
    cache = kernel_cache() if device == "cuda" else None
    return select(device, getattr(torch, dtype), head_dim, True, head_ratio=head_ratio, cache_dir=cache).name


def _file_of(host: str) -> str:
    return f"host-{host.replace('/', '-')}"


@lru_cache(maxsize=1)
def _sources() -> str:
    """A digest of this package's sources: a checkout may differ under the same version."""
    total = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        total.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return total.hexdigest()[:12]
