"""One host's part of the doctor: reports of itself, and measurements of ports and links with other hosts.

`examine` makes an actor of `Probe`, without CPUs, whose errors go back as they are. No Ray and no judgement in here:
`verdicts` has that.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from elastic_ring.attention.kernels.registry import select
from elastic_ring.data.source import SourceConfig, open_source
from elastic_ring.runtime.agent.health import Nvml
from elastic_ring.runtime.doctor.verdicts import IDLE_GPU_BYTES, HostReport
from elastic_ring.runtime.gpu.device import keep_caches_private, kernel_cache
from elastic_ring.runtime.groups import nccl
from elastic_ring.runtime.groups.transport import RendezvousStore, StoreAddress
from elastic_ring.runtime.worker.env_fingerprint import versions
from elastic_ring.state.storage.folder import Storage
from elastic_ring.state.storage.local_files import has_locks

CLAIM = "claim"
NUM_THREADS = 32
NUM_EXCHANGES, NUM_MESSAGES = 3, 20
MANY_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}


def report(device: str, ray_folder: str = "", ray_gpus: int = 0) -> HostReport:
    """Versions, limits, memory, disk, clock and GPUs; touches nothing. `ray_folder`: where Ray keeps its files."""
    packages, nvml = versions(device), Nvml()
    sources, root = hashlib.sha256(), Path(__file__).parents[2]  # a checkout may differ under the same version
    for path in sorted(root.rglob("*.py")):
        sources.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    packages["elastic_ring"] = f"{packages.get('elastic_ring', '')} {sources.hexdigest()[:12]}".strip()
    gpus: Any = [] if device != "cuda" else nvml.describe() if nvml.open() else None
    return {**limits(ray_folder), "versions": packages, "ray_gpus": ray_gpus, "gpus": gpus}


def limits(ray_folder: str) -> HostReport:
    """The part of `report` that takes no time: each worker of a run reports it as it starts."""
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {
        "open_files": 1 << 40 if open_files == resource.RLIM_INFINITY else open_files,
        "shm_free_bytes": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        "disk_free_bytes": shutil.disk_usage(ray_folder if os.path.isdir(ray_folder) else "/tmp").free,
        "unix_s": time.time(),
    }


def write_and_claim(uri: str, host: str, timeout_s: float) -> dict[str, bool]:
    """Write a file, read it back, and try to make the file that only one host may make. Raises StorageFailed,
    ValueError for other bytes than were written."""
    storage = Storage(uri, timeout_s=timeout_s).open()
    storage.replace(_file_of(host), host.encode())
    if (content := storage.read(_file_of(host))) != host.encode():
        raise ValueError(f"{storage.at(_file_of(host))}: {len(content)} other bytes came back than were written")
    answer = {"won": storage.create(CLAIM, host.encode()), "excludes": storage.excludes, "locks": True}
    if storage.is_local:  # as drivers lock their callbacks
        with open(storage.at(_file_of(host))) as file:
            answer["locks"] = has_locks(file.fileno())
    return answer


def unseen(uri: str, hosts: list[str], timeout_s: float) -> list[str]:
    """The `hosts` whose file is not there."""
    storage = Storage(uri, timeout_s=timeout_s).open(write=False)
    return [host for host in hosts if not storage.exists(_file_of(host))]


def remove(uri: str, timeout_s: float) -> None:
    Storage(uri, timeout_s=timeout_s).open(write=False).remove_folder("")


def read_data(config: SourceConfig, folders: list[str]) -> int:
    """The number of sequences; reads the first and the last. Raises the reader's errors."""
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


class Probe:
    """`address`: this node's; `timeout_s`: the limit of each wait in here."""

    def __init__(self, address: str, device: str, timeout_s: float) -> None:
        self._address, self._device, self._timeout_s = address, device, timeout_s
        self._store: RendezvousStore | None = None

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function here."""
        return function(*arguments)

    def listen(self) -> StoreAddress:
        """Open this host's store for exchanges, whose port the other hosts try to reach."""
        self._store = RendezvousStore(self._address)
        return StoreAddress(self._store.host, self._store.port, self._store.secret)

    def reach(self, stores: Mapping[str, StoreAddress]) -> dict[str, str]:
        """For each host the reason why it cannot be connected to, empty if it can."""

        def connect(store: StoreAddress) -> str:
            try:
                socket.create_connection((store.host, store.port), timeout=self._timeout_s).close()
            except OSError as error:
                return f"{store.host}: {error.strerror or error}"
            return ""

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return dict(zip(stores, pool.map(connect, stores.values()), strict=True))

    def exchange(self, tag: str, at: StoreAddress, rank: int, size: int) -> tuple[float, float]:
        """(seconds of a message of one byte, bytes a second) from the previous rank of a ring of `size`, while all
        send to the next. Meets the others at the store of rank 0."""
        own = self._store.server if rank == 0 and self._store is not None else None
        wait = timedelta(seconds=self._timeout_s)
        store = own or TCPStore(at.host, at.port, is_master=False, wait_for_workers=False, timeout=wait)
        prefixed, device = PrefixStore(f"{at.secret}/{tag}", store), torch.device("cpu")
        if self._device == "cuda":  # the first unused GPU; this process's own context is in its memory
            memory = map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))
            unused = (index for index, (free, total) in enumerate(memory) if total - free < 2 * IDLE_GPU_BYTES)
            if (index := next(unused, None)) is None:
                raise RuntimeError("no GPU is free")
            device = torch.device("cuda", index)
            group: Any = nccl.create_backend(prefixed, rank, size, device, self._timeout_s)
            nccl.connect_now(group, device, lambda: False)
        else:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
            options._timeout = wait
            group = ProcessGroupGloo(prefixed, rank, size, options)
        try:
            small, large = (self._seconds_of(group, rank, size, device, num) for num in (1, MANY_BYTES[device.type]))
        finally:
            if device.type == "cuda":
                nccl.end(group)
        return small, MANY_BYTES[device.type] / large

    def _seconds_of(self, group: Any, rank: int, size: int, device: torch.device, num_bytes: int) -> float:
        """The least of several exchanges; the first ones connect."""
        sent = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        received = torch.zeros_like(sent)
        times = []
        for _ in range(1 + (NUM_MESSAGES if num_bytes == 1 else NUM_EXCHANGES)):
            begun = time.perf_counter()
            if device.type == "cuda":
                group._start_coalescing()
                group.send([sent], (rank + 1) % size, 0)
                group.recv([received], (rank - 1) % size, 0)
                group._end_coalescing().wait()
                torch.cuda.synchronize(device)
            else:
                works = [group.send([sent], (rank + 1) % size, 0), group.recv([received], (rank - 1) % size, 0)]
                for work in works:
                    work.wait()
            times.append(time.perf_counter() - begun)
        if not bool(received.all()):
            raise RuntimeError("other bytes arrived than were sent")
        return min(times[1:])
