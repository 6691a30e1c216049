"""What connects ranks below their groups: this process's TCP sockets, the rendezvous store, and errors of an exchange.

gloo's and NCCL's sockets are found among the process's open files, by their ports.

The store of one generation is a TCPStore that listens on one address, with keys that only members know: torch's store
has no authentication. So its socket is bound here, to the coordinator's own address (torch binds to all interfaces), or
to loopback if all nodes share a host, on a free port. All keys lie under a random prefix that only the coordinator's
commands carry. The kernel drops packets from hosts without a member. That keeps out other runs, port scanners and
stragglers, but not a client on a host of the run while a generation is built: torch 2.13 lists keys to any client, and
accepts its values. The store is closed as soon as all members have come.

The store and NCCL raise exception types of their own. Gloo raises plain RuntimeErrors that begin with a place in its
source. A user's error may have the same words, but gloo raises in native code: the innermost frame of the traceback
stands at a call, not at a `raise` statement.
"""

from __future__ import annotations

import ctypes
import dis
import logging
import os
import secrets
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from elastic_ring.errors import GroupAborted, PeerFailed

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

_ERRORS = (PeerFailed, GroupAborted, dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError)
_NATIVE_MARKS = ("gloo/", "Gloo connect", "NCCL error", "NCCL communicator")
_ACCEPTS = 1
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_..._FILTER of Linux, which the socket module does not name
# Instructions of classic BPF: code, jumps if true and if false, operand.
_SOURCE = (0x20, 0, 0, 0xFFF00000 + 12)  # load the sender's address from the IPv4 header
_IS, _TAKE, _DROP = 0x15, (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0)  # return all or nothing of the packet


def is_transport_error(error: BaseException | None) -> bool:
    """Whether gloo, NCCL, the store or a socket of theirs failed somewhere in this chain of exceptions."""
    while error is not None:
        if isinstance(error, _ERRORS) or _is_native_error(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _is_native_error(error: BaseException) -> bool:
    """Whether native code of gloo or NCCL raised it: of this very type, with these words, and at no `raise`."""
    trace = error.__traceback__
    if type(error) is not RuntimeError or trace is None or not any(mark in str(error) for mark in _NATIVE_MARKS):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_code
    is_at_raise = 0 <= trace.tb_lasti < len(code) and dis.opname[code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")
    return not is_at_raise


@contextmanager
def translated(connector: Any) -> Iterator[None]:
    """Turns torch's transport errors into GroupAborted or PeerFailed; leaves all others alone. `connector`: the
    `groups.Connector` that may have been aborted."""
    try:
        yield
    except GroupAborted:
        raise
    except BaseException as error:
        if not is_transport_error(error):
            raise
        if connector.aborted:
            raise GroupAborted(f"generation {connector.where.prefix} was aborted") from error
        raise PeerFailed(f"{type(error).__name__}: {error}") from error


def tcp_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets; the caller closes them."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))
            try:
                sock = socket.socket(fileno=copy)
            except OSError:  # the descriptor was reused between the two calls
                os.close(copy)
                continue
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock
            else:
                sock.close()


def listeners() -> Iterator[socket.socket]:
    """Duplicates of this process's listening sockets, each open until the next one."""
    for sock in tcp_sockets():
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == _ACCEPTS:
                yield sock


def listening() -> list[tuple[int, str]]:
    """(port, address) of this process's listening sockets."""
    return [(port, address) for address, port, *_ in (sock.getsockname() for sock in listeners())]


def let_in(address: str, port: int, hosts: Collection[str] | None) -> None:
    """As `keep_out`, for the socket of this process that listens there, whichever descriptor it has."""
    for sock in listeners():
        if sock.getsockname()[:2] == (address, port):  # the same port may be open on another address
            keep_out(sock, hosts)


class NewListeners:
    """The listening sockets that this process opens at `address` from now on: NCCL's, which serves one connection after
    another, waits for each, and stops after some hundreds. `hosts`: those of the peers; any if empty."""

    def __init__(self, address: str, hosts: Collection[str]) -> None:
        self._address, self._hosts = address, hosts
        self._older = set(listening()) if hosts else set()

    def keep_out_strangers(self) -> None:
        """Filter the sockets that are open now. Those of another address belong to another network, where peers have
        other addresses, too: they stay as they are."""
        for sock in listeners() if self._hosts else ():
            address, port, *_ = sock.getsockname()
            if address == self._address and (port, address) not in self._older:
                self._older.add((port, address))
                keep_out(sock, self._hosts)


def keep_out(sock: socket.socket, hosts: Collection[str] | None) -> None:
    """Have the kernel drop packets to this listening socket from anywhere but `hosts` and this host's loopback; None:
    all packets. Open connections go on. Nothing is dropped if `hosts` is empty or has an address that is not IPv4's."""
    program: list[tuple[int, int, int, int]] = []
    if hosts is None:
        program = [_DROP]
    elif hosts:
        with suppress(ValueError):
            numbers = sorted({int(IPv4Address(host)) for host in (LOOPBACK, *hosts)})
            program = [_SOURCE, *(step for number in numbers for step in ((_IS, 0, 1, number), _TAKE)), _DROP]
    packed = b"".join(struct.pack("@HBBI", *step) for step in program)
    code = ctypes.create_string_buffer(packed, len(packed))
    how = (_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code))) if program else (_DETACH_FILTER, 0)
    try:
        sock.setsockopt(socket.SOL_SOCKET, *how)
    except OSError as error:  # a sandbox without socket filters, or too many addresses
        log.warning("port %d is open to strangers: no filter on its socket: %s", sock.getsockname()[1], error)


BACKLOG = 2048  # as torch's own


@dataclass(frozen=True)
class StoreAddress:
    """Where the ranks of one generation meet. `secret`: as in `RendezvousStore`. `hosts`: where all of the ranks are;
    empty if some are unknown."""

    host: str
    port: int
    secret: str
    hosts: tuple[str, ...] = ()


class RendezvousStore:
    """Listens on `host` and on a port of its own for as long as it lives. `secret` is the prefix of all keys. `hosts`:
    as in `keep_out`."""

    def __init__(self, host: str, hosts: Collection[str] = ()) -> None:
        with socket.create_server((host, 0), backlog=BACKLOG) as listener:
            if hosts:
                keep_out(listener, hosts)
            self.host, self.port, self.secret = host, listener.getsockname()[1], secrets.token_hex(16)
            self.server = TCPStore(
                host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )

    @property
    def keys(self) -> Store:
        """The store, as a client with the secret sees it."""
        return with_secret(self.server, self.secret)


def with_secret(store: TCPStore, secret: str) -> Store:
    """The keys under `secret`; all keys if it is empty."""
    return PrefixStore(secret, store) if secret else store


def common_host(own: str, nodes: Iterable[str]) -> str:
    """The address by which `nodes` reach the node at `own`: loopback if they are all the same host."""
    return LOOPBACK if all(address == own for address in nodes) else own
