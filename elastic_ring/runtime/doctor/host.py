"""What one host finds out of itself, and its part in measurements of ports and links: `examine` makes an actor of
`Probe`, without CPUs, whose errors go back as they are. No Ray and no judgement in here: `verdicts` has that.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from elastic_ring.attention.kernels.registry import select
from elastic_ring.data.source import SourceConfig, open_source
from elastic_ring.runtime.agent.gpu_health import Nvml
from elastic_ring.runtime.doctor.verdicts import IDLE_GPU_BYTES, HostReport
from elastic_ring.runtime.gpu.device import keep_caches_private, kernel_cache
from elastic_ring.runtime.groups import nccl
from elastic_ring.runtime.groups.sockets import RendezvousStore
from elastic_ring.runtime.worker.env_fingerprint import versions
from elastic_ring.state.storage.folder import Storage

Place = tuple[str, int]

CLAIM = "claim"
NUM_THREADS = 32
ACCEPT_PAUSE_S = 0.2
NUM_EXCHANGES, NUM_MESSAGES = 3, 20
MANY_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}


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


class Probe:
    """`address`: this node's; `timeout_s`: what each wait in here is bounded by."""

    def __init__(self, address: str, device: str, timeout_s: float) -> None:
        self._address, self._device, self._timeout_s = address, device, timeout_s
        self._store: RendezvousStore | None = None
        self._listener: socket.socket | None = None

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of this module here."""
        return function(*arguments)

    def clock(self) -> float:
        return time.time()

    # ------------------------------------------------------------ ports

    def listen(self) -> tuple[Place, Place, str]:
        """Where this host answers, where its store for exchanges is, and the store's secret."""
        self._listener = socket.create_server((self._address, 0), backlog=2048)
        threading.Thread(target=self._answer, args=(self._listener,), name="answer", daemon=True).start()
        self._store = RendezvousStore(self._address)
        place = self._listener.getsockname()[:2]
        return (str(place[0]), int(place[1])), (self._store.host, self._store.port), self._store.secret

    def _answer(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0:  # closed
                    return
                time.sleep(ACCEPT_PAUSE_S)  # whoever waits stays ready while descriptors have run out
                continue
            with sock:
                sock.settimeout(self._timeout_s)
                try:
                    sock.sendall(sock.recv(1))
                except OSError:  # whoever connected has gone; a port scanner, say
                    continue

    def reach(self, places: Mapping[str, Place]) -> dict[str, float | str]:
        """For each host the seconds to connect and hear an answer, or why there was none."""
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return dict(zip(places, pool.map(self._reach, places.values()), strict=True))

    def _reach(self, place: Place) -> float | str:
        begun = time.perf_counter()
        try:
            with socket.create_connection(place, timeout=self._timeout_s) as sock:
                sock.sendall(b"?")
                answer = sock.recv(1)
        except OSError as error:
            return f"{place[0]}: {error.strerror or error}"
        return time.perf_counter() - begun if answer == b"?" else f"{place[0]}: closed without an answer"

    # ------------------------------------------------------------ links

    def exchange(self, tag: str, at: Place, secret: str, rank: int, size: int) -> tuple[float, float]:
        """(seconds of a message of one byte, bytes a second) from the previous rank of a ring of `size`, while all
        send to the next. Meets the others at the store of rank 0."""
        own = self._store.server if rank == 0 and self._store is not None else None
        wait = timedelta(seconds=self._timeout_s)
        store = own or TCPStore(*at, is_master=False, wait_for_workers=False, timeout=wait)
        device = self._free_device()
        group = self._group(PrefixStore(f"{secret}/{tag}", store), rank, size, device)
        try:
            small, large = (self._seconds_of(group, rank, size, device, num) for num in (1, MANY_BYTES[device.type]))
        finally:
            if device.type == "cuda":
                nccl.end(group)
        return small, MANY_BYTES[device.type] / large

    def _free_device(self) -> torch.device:
        """The first GPU that nobody uses."""
        if self._device == "cpu":
            return torch.device("cpu")
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            if total - free < 2 * IDLE_GPU_BYTES:  # this process's own context is in it
                return torch.device("cuda", index)
        raise RuntimeError("no GPU is free")

    def _group(self, store: PrefixStore, rank: int, size: int, device: torch.device) -> Any:
        if device.type == "cuda":
            backend = nccl.create_backend(store, rank, size, device, self._timeout_s)
            nccl.connect_now(backend, device, lambda: False)
            return backend
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=self._timeout_s)
        return ProcessGroupGloo(store, rank, size, options)

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
