"""This process's TCP sockets, from its open files: gloo's own sockets can be recognised by their ports only."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv4Address

log = logging.getLogger(__name__)

_ACCEPTS = 1
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_..._FILTER of Linux, which the socket module does not name
# Instructions of classic BPF: code, jumps if true and if false, operand.
_SOURCE = (0x20, 0, 0, 0xFFF00000 + 12)  # load the sender's address from the IPv4 header
_IS, _TAKE, _DROP = 0x15, (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0)  # return all or nothing of the packet


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


def let_in(address: str, port: int, *, anybody: bool) -> None:
    """Whether the socket that listens there takes new connections. If not, the kernel drops their packets, and those
    that there are go on. The filter belongs to the socket, whichever descriptor it is set through."""
    for sock in listeners():
        if sock.getsockname()[:2] == (address, port):  # the port alone may be another one's, on another address
            _filter(sock, [] if anybody else [_DROP])


def let_in_only(sock: socket.socket, addresses: Iterable[str]) -> None:
    """Have the kernel drop what others send to this listening socket; everybody is let in where one of the addresses
    is not known, or none of IPv4."""
    with suppress(ValueError):
        numbers = sorted({int(IPv4Address(address)) for address in addresses})
        _filter(sock, [_SOURCE, *(step for number in numbers for step in ((_IS, 0, 1, number), _TAKE)), _DROP])


def _filter(sock: socket.socket, program: Sequence[tuple[int, int, int, int]]) -> None:
    packed = b"".join(struct.pack("@HBBI", *step) for step in program)
    code = ctypes.create_string_buffer(packed, len(packed))
    how = (_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code))) if program else (_DETACH_FILTER, 0)
    try:
        sock.setsockopt(socket.SOL_SOCKET, *how)
    except OSError as error:  # a sandbox without socket filters, or too many addresses
        log.warning("strangers are not kept from port %d: no filter on its socket: %s", sock.getsockname()[1], error)
