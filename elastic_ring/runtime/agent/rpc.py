"""RPC between the coordinator and the node agents: JSON lines over one TCP connection per node.

Ray reports a dead node after seconds (its health check); a closed socket shows at once, and missing heartbeats show a
node that hangs. The coordinator answers each heartbeat from its deciding thread, so a coordinator that hangs shows as
well. Nothing about membership is decided here.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from elastic_ring.control.messages import to_json
from elastic_ring.files import plain_json
from elastic_ring.runtime.agent.messages import FromAgent, Hello, HungUp, ToAgent, message_of

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 << 20
"""The longest line of an authenticated peer. The longest messages carry a few lines of a worker's log."""
MAX_HELLO_BYTES = 4096
HELLO_S = 5.0
MAX_UNAUTHENTICATED = 64
ACCEPT_PAUSE_S = 1.0
"""The pause in accepting connections once descriptors or memory for sockets have run out; the kernel keeps them."""
REJECTIONS_S = 10.0
"""Further rejections within this time are only counted in the log."""
MAX_OPEN_FILES = 1 << 20
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
DEADLINE_LOOK_S = 0.1
"""Between two looks while a client owes its key or accepting pauses."""
_READ_BYTES = 1 << 16
_SEND_S = 5.0


class JsonConnection:
    """One connection: JSON objects, one per line; `send` may be called from any thread.

    A line longer than `max_line_bytes` ends the connection, and no more than that is ever buffered.
    """

    def __init__(self, sock: socket.socket, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.max_line_bytes = sock, max_line_bytes
        self._lock, self._buffer = threading.Lock(), bytearray()
        self.why_closed = ""

    def send(self, message: FromAgent | ToAgent) -> bool:
        """False when the other end is gone."""
        data = json.dumps(to_json(message)).encode() + b"\n"
        try:
            with self._lock:
                self.sock.sendall(data)
        except OSError:
            return False
        return True

    def fileno(self) -> int:
        """-1 once closed."""
        return self.sock.fileno()

    def receive(self) -> list[Any] | None:
        """The messages that have arrived, as JSON; None at the end of the connection or after a line that is too long.
        Call when the socket is readable. Raises ValueError (a line that is not JSON)."""
        room = self.max_line_bytes + 1 - len(self._buffer)  # one more for the newline
        try:
            data = self.sock.recv(min(_READ_BYTES, room))
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._buffer += data
        if b"\n" in data:
            *lines, self._buffer = self._buffer.split(b"\n")
            return [plain_json(bytes(line)) for line in lines if line]
        if len(self._buffer) <= self.max_line_bytes:
            return []
        self.why_closed = f"a line is longer than {self.max_line_bytes} bytes"
        return None

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def dial(host: str, port: int, timeout_s: float) -> JsonConnection:
    """Connect to the coordinator. Raises OSError."""
    return JsonConnection(socket.create_connection((host, port), timeout=timeout_s))


class _Client(JsonConnection):
    """A connection as the server sees it. `node` is empty until the client has sent the key."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        super().__init__(sock, MAX_HELLO_BYTES)
        self.address, self.node, self.key_due_at = address, "", time.monotonic() + HELLO_S


def raise_open_files() -> None:
    """Raise this process's limit on open files to the system's: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        log.info("this process may open %d files now; its limit was %d", allowed, soft)


class AgentServer:
    """The coordinator's end: accepts agents and passes each message to `deliver(node, message)`.

    The end of a node's connection is delivered as `HungUp`. A client must send `key` in its first line, within
    MAX_HELLO_BYTES and HELLO_S; until then at most MAX_UNAUTHENTICATED clients may be connected, and the oldest makes
    room for a new one. Once descriptors have run out it accepts no connection for ACCEPT_PAUSE_S, and serves its
    clients.
    """

    def __init__(self, key: str, deliver: Callable[[str, FromAgent], None]) -> None:
        self.key, self._deliver = key, deliver
        self._clients: dict[str, _Client] = {}
        self._unauthenticated: dict[_Client, None] = {}  # oldest first
        self._accepts_at = 0.0  # after a pause; 0 while there is none
        self._rejected_at, self._num_rejected = -REJECTIONS_S, 0
        self.host, self.port = "", 0

    def open(self, host: str) -> AgentServer:
        self.host = host
        self._server = socket.create_server((host, 0))
        self._server.setblocking(False)
        self.port = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        threading.Thread(target=self._serve, name="agent-server", daemon=True).start()
        return self

    def send(self, node: str, message: ToAgent) -> bool:
        """False when that node is not connected."""
        client = self._clients.get(node)
        return client is not None and client.send(message)

    def came_from(self, node: str) -> str:
        """The address of that node's end of its connection; empty when it is not connected."""
        client = self._clients.get(node)
        return client.address.rpartition(":")[0] if client is not None else ""

    def hang_up(self, node: str) -> None:
        """Close a node's connection; nothing is delivered."""
        client = self._clients.pop(node, None)
        if client is not None:
            with suppress(OSError):  # the serving thread sees the end and closes it
                client.sock.shutdown(socket.SHUT_RDWR)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._clients)

    # ------------------------------------------------------------ serving thread

    def _serve(self) -> None:
        while True:
            has_deadline = self._unauthenticated or self._accepts_at
            for key, _ in self._selector.select(DEADLINE_LOOK_S if has_deadline else None):
                client: _Client | None = key.data
                try:
                    if client is None:
                        self._accept()
                    elif client.fileno() >= 0:  # else it made room for one accepted in this round
                        self._read(client)
                except Exception as error:
                    # One bad client must not cut the coordinator off from all others.
                    if client is None or client.node:
                        log.exception("a connection is dropped")
                    if client is not None:
                        self._drop(client, f"{type(error).__name__}")
            now = time.monotonic()
            for client in [client for client in self._unauthenticated if now >= client.key_due_at]:
                self._drop(client, f"no key within {HELLO_S} s")
            if self._accepts_at and now >= self._accepts_at:
                self._accepts_at = 0.0
                self._selector.register(self._server, selectors.EVENT_READ, None)

    def _accept(self) -> None:
        try:
            sock, (host, port, *_) = self._server.accept()
        except OSError as error:  # for example a client that has gone before it was accepted
            if error.errno in _EXHAUSTED:
                log.error(
                    "nobody is accepted for %g s: %s; agents that are connected are served", ACCEPT_PAUSE_S, error
                )
                self._selector.unregister(self._server)
                self._accepts_at = time.monotonic() + ACCEPT_PAUSE_S
            return
        sock.settimeout(_SEND_S)
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            self._drop(next(iter(self._unauthenticated)), f"{MAX_UNAUTHENTICATED} newer ones wait")
        client = _Client(sock, f"{host}:{port}")
        self._unauthenticated[client] = None
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _read(self, client: _Client) -> None:
        try:
            messages, why = client.receive(), "it ended before its key, or its first line is too long"
        except ValueError:
            if client.node:
                raise
            messages, why = None, "its first line is not JSON"
        for message in messages or ():
            if not client.node:
                is_hello = isinstance(message, dict) and message.get("type") == Hello.__name__
                if not is_hello or not self._is_key(message.get("key")):
                    messages, why = None, "wrong key"
                    break
                client.node, client.max_line_bytes = str(message.get("node")), MAX_LINE_BYTES
                del self._unauthenticated[client]
                self._clients[client.node] = client
            self._deliver(client.node, message_of(message))
        if messages is None:
            self._drop(client, client.why_closed or why)

    def _is_key(self, text: object) -> bool:
        return hmac.compare_digest(str(text).encode(errors="surrogatepass"), self.key.encode())

    def _drop(self, client: _Client, why: str = "") -> None:
        """`why`: logged for a client without the key."""
        if client.why_closed and client.node:
            log.warning("closing the connection of node %s: %s", client.node, client.why_closed)
        if why and not client.node:
            now, self._num_rejected = time.monotonic(), self._num_rejected + 1
            if now >= self._rejected_at + REJECTIONS_S:  # a flood of this port must not fill the disk with lines
                more = f" (and {self._num_rejected - 1} before it)" if self._num_rejected > 1 else ""
                log.warning("rejected an unauthenticated connection from %s: %s%s", client.address, why, more)
                self._rejected_at, self._num_rejected = now, 0
        self._unauthenticated.pop(client, None)
        self._selector.unregister(client.sock)
        client.close()
        if self._clients.get(client.node) is client:
            del self._clients[client.node]
            self._deliver(client.node, HungUp())
