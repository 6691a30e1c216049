"""Gloo for one generation: its listening device, its backends, and an abort, which gloo itself lacks.

A gloo operation blocks until its timeout. But gloo's pairs are TCP sockets of this process, so the control thread calls
`shutdown(2)` on them, and every blocked operation on both ends raises within milliseconds. The sockets are recognised
by their ports: one listening device serves all groups of a generation, and the ranks exchange their devices' ports
before they connect.

Gloo does not authenticate connections, and keeps the descriptors of silent ones. So the device takes connections only
while groups are built, and then from its peers' hosts.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import PrefixStore, ProcessGroupGloo

from elastic_ring.errors import PeerFailed
from elastic_ring.runtime.groups.transport import let_in, listening, tcp_sockets

_UNBLOCK_S = 1.0
_listen_lock = threading.Lock()


class Sockets:
    """The sockets of one generation at `address`. `check` raises once the generation is aborted. `hosts`: those of the
    peers; any if empty."""

    def __init__(self, address: str, check: Callable[[], None], hosts: Collection[str] = ()) -> None:
        self._address, self._check, self._hosts = address, check, hosts
        self._device: ProcessGroupGloo.Device | None = None
        self._own_port = 0
        self._num_building = 0
        self._ports: set[tuple[str, int]] = set()  # of the peers' devices, and of the store
        self._num_pairs = 0
        self._connecting = False
        self._kept_open: dict[tuple[object, object], socket.socket] = {}
        self._lock = threading.Lock()

    # ------------------------------------------------------------ training thread

    def add_peer(self, host: str, port: int) -> None:
        """Connections to this address belong to this generation. Raises GroupAborted if an abort came before."""
        with self._lock:
            self._ports.add((host, port))
        self._check()

    @contextmanager
    def admitting(self) -> Iterator[None]:
        """Inside, peers can connect to this device: from before they learn its port until all have come."""

        def count(change: int) -> None:
            with self._lock:
                self._num_building += change
                if self._own_port and self._num_building == max(0, change):  # the first begins, or the last has ended
                    let_in(self._address, self._own_port, self._hosts if change > 0 else None)

        count(1)
        try:
            yield
        finally:
            count(-1)

    def listen(self) -> ProcessGroupGloo.Device:
        """The device that peers connect to, opened once."""
        if self._device is not None:
            return self._device
        with _listen_lock:
            before = {port for port, _ in listening()}
            device = ProcessGroupGloo.create_device(hostname=self._address, lazy_init=False)
            opened = [port for port, address in listening() if port not in before and address == self._address]
        if len(opened) != 1:
            raise PeerFailed(f"this node's address {self._address} gave {len(opened)} listening sockets, not one")
        self._own_port, self._device = opened[0], device
        if self._hosts:
            let_in(self._address, self._own_port, self._hosts)
        return device

    def exchange_ports(self, store: PrefixStore, index: int, everyone: Sequence[int]) -> None:
        """Publish the port of this device and read those of `everyone`."""
        store.set(f"port/{index}", f"{self._address}:{self._own_port}")
        for answer in store.multi_get([f"port/{peer}" for peer in everyone]):
            host, _, port = answer.decode().rpartition(":")
            with self._lock:
                self._ports.add((host, int(port)))
        self._check()

    def connect(
        self, store: PrefixStore, rank: int, size: int, timeout_s: float, collective_s: float
    ) -> ProcessGroupGloo:
        """A connected backend; blocks until all ranks have come, for `timeout_s` at most."""
        self._check()
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self.listen()]
        options._timeout = timedelta(seconds=timeout_s)
        with self._lock:
            self._num_pairs += size
            self._connecting = True
        try:
            backend = ProcessGroupGloo(store, rank, size, options)
        finally:
            self._connecting = False
        self._check()
        backend._set_default_timeout(timedelta(seconds=collective_s))
        return backend

    # ------------------------------------------------------------ control thread

    def shut_down(self) -> None:
        """Fail every operation over these sockets, blocked or later; the peers see it once `close` is called.

        Only the reading side is shut down, and the connections stay open until `close`: gloo drops a message that it is
        writing when the other end closes, and its receiver would then wait until the timeout.
        """
        with self._lock:
            ports = set(self._ports)
            waiting = range(self._num_pairs) if self._connecting else range(0)
        for sock in tcp_sockets():
            with sock, suppress(OSError):
                near, (host, port) = sock.getsockname()[:2], sock.getpeername()[:2]
                if near[1] == self._own_port or (host.removeprefix("::ffff:"), port) in ports:
                    sock.shutdown(socket.SHUT_RD)
                    if (near, (host, port)) not in self._kept_open:
                        self._kept_open[near, (host, port)] = sock.dup()
        for pair in waiting:
            if not self._connecting:  # the first raised in the constructor, and the port is shut: each would wait
                break
            # A pair that still waits for its peer has no socket to shut down. So connect to this process's own device
            # as that peer would, which names the pair by its number on the device, and close.
            device = (self._address, self._own_port)
            with suppress(OSError), socket.create_connection(device, timeout=_UNBLOCK_S) as peer:
                peer.sendall(pair.to_bytes(8, sys.byteorder))

    def close(self) -> None:
        """Close the connections that were shut down. Call once no operation waits for them any more."""
        while self._kept_open:
            self._kept_open.popitem()[1].close()
