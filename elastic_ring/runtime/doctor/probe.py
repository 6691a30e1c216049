"""One host's part in `elastic-ring doctor`: an actor without CPUs, whose errors go back as they are."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from elastic_ring.runtime.doctor.verdicts import IDLE_GPU_BYTES
from elastic_ring.runtime.groups import nccl
from elastic_ring.runtime.groups.sockets import RendezvousStore

Place = tuple[str, int]

NUM_THREADS = 32
ACCEPT_PAUSE_S = 0.2
NUM_EXCHANGES, NUM_MESSAGES = 3, 20
MANY_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}


class Probe:
    """`address`: this node's; `timeout_s`: what each wait in here is bounded by."""

    def __init__(self, address: str, device: str, timeout_s: float) -> None:
        self._address, self._device, self._timeout_s = address, device, timeout_s
        self._store: RendezvousStore | None = None
        self._listener: socket.socket | None = None

    def do(self, what: Callable[..., Any], *given: Any) -> Any:
        """Call a function of `host` here."""
        return what(*given)

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
