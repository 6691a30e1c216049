"""Gloo for one generation: its listening device, its backends, and the abort that gloo itself has not.

An operation that waits for a peer stays blocked until its timeout. But gloo's pairs are TCP sockets of this process,
so the control thread shuts those down (`shutdown(2)`): every blocked operation on both ends raises within milliseconds,
whatever it was. The sockets are told apart from all others by their ports: one listening device serves all groups of
a generation, and the ranks exchange their devices' ports before they connect.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, ProcessGroupGloo

from elastic_ring.errors import PeerFailed
from elastic_ring.runtime.sockets import listening, tcp_sockets

_KNOCK_S = 1.0
_listen_lock = threading.Lock()


class Sockets:
    """The sockets of one generation at `address`. `check` raises once the generation has been given up."""

    def __init__(self, address: str, check: Callable[[], None]) -> None:
        self._address, self._check = address, check
        self._device: ProcessGroupGloo.Device | None = None
        self._own_port = 0
        self._ports: set[tuple[str, int]] = set()  # of the peers' devices, and of the store
        self._num_pairs = 0
        self._connecting = False
        self._kept_open: dict[tuple[object, object], socket.socket] = {}
        self._lock = threading.Lock()

    # ------------------------------------------------------------ training thread

    def know(self, host: str, port: int) -> None:
        """What is connected to there belongs to this generation. Raises GroupAborted, by an abort that did not know
        of such a socket yet."""
        with self._lock:
            self._ports.add((host, port))
        self._check()

    def listen(self) -> ProcessGroupGloo.Device:
        """The device that peers connect to, opened once."""
        if self._device is not None:
            return self._device
        with _listen_lock:
            before = {port for port, _ in listening()}
            device = ProcessGroupGloo.create_device(hostname=self._address)
            opened = [port for port, address in listening() if port not in before and address == self._address]
        if len(opened) != 1:
            raise PeerFailed(f"this node's address {self._address} gave {len(opened)} listening sockets, not one")
        self._own_port, self._device = opened[0], device
        return device

    def exchange_ports(self, store: PrefixStore, index: int, everyone: Sequence[int]) -> None:
        """Tell the port of this device, and hear those of `everyone`."""
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
        """Fail every operation over these sockets, blocked or to come; the peers see it once `close` is called.

        Only reading is shut down, and the connections stay open until `close`: gloo forgets a message that it
        is writing when the other end goes away, and whoever waits for that one would wait until its timeout.
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
            self._knock(pair)

    def _knock(self, pair: int) -> None:
        """Connect to this process's own device as the peer of `pair` would, and hang up.

        A pair that waits for its peer to call has no socket yet which could be shut down. A caller names the
        pair by its number on the device.
        """
        with suppress(OSError), socket.create_connection((self._address, self._own_port), timeout=_KNOCK_S) as caller:
            caller.sendall(pair.to_bytes(8, sys.byteorder))

    def close(self) -> None:
        """Let go of the connections that were shut down, once nobody waits for them any more."""
        while self._kept_open:
            self._kept_open.popitem()[1].close()
