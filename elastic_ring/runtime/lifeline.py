"""The line between coordinator and node agents: JSON lines over one TCP connection per node.

Ray tells of a dead node after seconds (its health check); a socket tells at once, and beats tell of a node
that fell silent. The coordinator answers each beat from its deciding thread, so that a silent coordinator
shows as well. Nothing about membership is decided here.
"""

from __future__ import annotations

import json
import logging
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)

Message = dict[str, Any]


class Line:
    """One connection: whole JSON objects, one per line; `send` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        self._rest = b""

    def send(self, message: Message) -> bool:
        """False when the other end is gone."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self.sock.sendall(data)
        except OSError:
            return False
        return True

    def fileno(self) -> int:
        """-1 once closed."""
        return self.sock.fileno()

    def receive(self) -> list[Message] | None:
        """What has arrived whole; None at the end of the connection. Call when the socket is readable."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def dial(host: str, port: int, timeout_s: float) -> Line:
    """Connect to the coordinator. Raises OSError."""
    sock = socket.create_connection((host, port), timeout=timeout_s)
    sock.settimeout(timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Line(sock)


class Switchboard:
    """The coordinator's end: accepts agents, hands every message and every hang-up to `deliver(node, message)`.

    A hang-up is delivered as {"kind": "hung-up"}. `key` keeps strangers out.
    """

    def __init__(self, key: str, deliver: Callable[[str, Message], None]) -> None:
        self._key, self._deliver = key, deliver
        self._lines: dict[str, Line] = {}
        self.port = 0

    def open(self, host: str) -> Switchboard:
        self._server = socket.create_server((host, 0))
        self.port = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        threading.Thread(target=self._serve, name="switchboard", daemon=True).start()
        return self

    def send(self, node: str, message: Message) -> bool:
        """False when there is no line to that node."""
        line = self._lines.get(node)
        return line is not None and line.send(message)

    def hang_up(self, node: str) -> None:
        """Forget a node's line, without telling anyone."""
        line = self._lines.pop(node, None)
        if line is not None:
            with suppress(OSError):  # the serving thread sees the end and closes it
                line.sock.shutdown(socket.SHUT_RDWR)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                try:
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
                except Exception:
                    # One bad caller must not blind the coordinator to all others.
                    log.exception("a connection is dropped")
                    if key.data is not None:
                        self._drop(*key.data)

    def _accept(self) -> None:
        sock, _ = self._server.accept()
        sock.settimeout(5.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(sock, selectors.EVENT_READ, [Line(sock), ""])

    def _read(self, entry: list[Any]) -> None:
        line, node = entry
        messages = line.receive()
        if messages is None:
            self._drop(line, node)
            return
        for message in messages:
            if node:
                self._deliver(node, message)
            elif message.get("kind") == "hello" and message.get("key") == self._key:
                entry[1] = node = str(message["node"])
                self._lines[node] = line
                self._deliver(node, message)
            else:
                log.warning("a stranger called: %s", line.sock.getpeername())
                self._drop(line, "")
                return

    def _drop(self, line: Line, node: str) -> None:
        self._selector.unregister(line.sock)
        line.close()
        if node and self._lines.get(node) is line:
            del self._lines[node]
            self._deliver(node, {"kind": "hung-up"})
