"""This process's TCP sockets, from its open files: gloo's own sockets can be recognised by their ports only."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

log = logging.getLogger(__name__)

_ACCEPTS = 1
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_..._FILTER of Linux, which the socket module does not name
_DROP = struct.pack("@HBBI", 0x06, 0, 0, 0)  # one instruction of classic BPF: return 0 bytes of the packet


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
    """Duplicates of this process's listening sockets, open until the next is asked for."""
    for sock in tcp_sockets():
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == _ACCEPTS:
                yield sock


def listening() -> list[tuple[int, str]]:
    """(port, address) of this process's listening sockets."""
    return [(port, address) for address, port, *_ in (sock.getsockname() for sock in listeners())]


def let_in(port: int, *, anybody: bool) -> None:
    """Whether the socket that listens on `port` takes new connections. If not, the kernel drops their packets, and
    those that there are go on. The filter belongs to the socket, whichever descriptor it is set through."""
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    drop = struct.pack("@HP", 1, ctypes.addressof(program))
    for sock in listeners():
        if sock.getsockname()[1] == port:
            try:
                sock.setsockopt(socket.SOL_SOCKET, *((_DETACH_FILTER, 0) if anybody else (_ATTACH_FILTER, drop)))
            except OSError as error:  # a sandbox without socket filters
                log.warning("strangers are not kept from port %d: no filter on its socket: %s", port, error)
