"""This process's TCP sockets, from its open files: gloo's own sockets can be recognised by their ports only."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

_ACCEPTS = 1


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


def listening() -> list[tuple[int, str]]:
    """(port, address) of this process's listening sockets."""
    found = []
    for sock in tcp_sockets():
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == _ACCEPTS:
                address, port = sock.getsockname()[:2]
                found.append((port, address))
    return found
