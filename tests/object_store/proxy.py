"""A real HTTP server in front of an object store, which misbehaves on command: it answers some requests by itself, or
not at all, or changes what the store says."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GONE = b"<?xml version='1.0'?><Error><Code>NoSuchUpload</Code><Message>it has ended</Message></Error>"
REFUSED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>not now</Message></Error>"
DELAY_S = 1.0
BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>reduce your rate</Message></Error>"

OWN_ANSWERS = {"503": (503, BUSY), "403": (403, REFUSED), "gone": (404, GONE)}


class FaultyProxy:
    """`fault(method, path)` decides over each request. None: the store answers. "503"; "403"; "refuse": the connection
    is reset; "hang": nobody answers; "delay": the store answers DELAY_S later; "lose answer": it is carried out, and
    the connection ends; "cut": it ends in the middle of the answer, and before it where that has no body; "flip": a
    byte of an object is another; "hide": the newest entry of a listing is not in it; "gone": 404, the upload has ended;
    "ignore condition": a name that is taken is told to be written."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.delay_s: Callable[[int], float] = lambda num_bytes: 0.0
        """How long an answer of so many bytes is held back."""
        self.requests: list[tuple[str, str]] = []
        """(method, path) of each request, those with a fault too."""
        self.released = threading.Event()
        """Set at the end: lets the requests go that hang."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except (ConnectionError, TimeoutError):  # the client had enough
                    self.close_connection = True

            def _serve(self) -> None:
                proxy.serve(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests.append((request.command, request.path))
        fault = self.fault(request.command, request.path)
        if fault == "hang":
            self.released.wait(60)
            request.close_connection = True
            return
        if fault == "refuse":
            self.end(request, b"")
            return
        if fault in OWN_ANSWERS:
            status, body = OWN_ANSWERS[fault]
            self.answer(request, status, {"Content-Type": "application/xml"}, body)
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=30)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "expect"}
        upstream.request(request.command, request.path, body, headers)
        found = upstream.getresponse()
        status, answer = found.status, found.read()
        upstream.close()
        time.sleep(self.delay_s(len(answer)))
        if fault == "delay":
            self.released.wait(DELAY_S)
        if fault == "lose answer":
            request.close_connection = True
            return
        if fault == "cut":
            head = f"HTTP/1.1 {status} OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode()
            self.end(request, head + answer[: len(answer) // 2] if answer else b"")
            return
        if fault == "flip" and request.command == "GET" and answer and not answer.startswith(b"<?xml"):
            answer = answer[:-1] + bytes([answer[-1] ^ 1])
        if fault == "hide" and b"<ListBucketResult" in answer:
            answer = without_newest(answer)
        if fault == "ignore condition" and status == 412:
            status, answer = 200, b""
        self.answer(request, status, dict(found.getheaders()), answer)

    def end(self, request: BaseHTTPRequestHandler, rest: bytes) -> None:
        """Send what is left to send, and end the connection."""
        request.close_connection = True
        request.wfile.write(rest)

    def answer(self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
        request.send_response(status)
        length = headers.get("Content-Length", "0") if request.command == "HEAD" else str(len(body))
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                request.send_header(name, value)
        request.send_header("Content-Length", length)
        request.end_headers()
        request.wfile.write(b"" if request.command == "HEAD" else body)


def without_newest(listing: bytes) -> bytes:
    """A listing as a store gives it that has not caught up: without the entry that was changed last."""
    entries = re.findall(rb"<Contents>.*?</Contents>", listing, re.DOTALL)
    newest = max(entries, key=lambda entry: re.findall(rb"<LastModified>(.*?)<", entry), default=b"")
    return listing.replace(newest, b"", 1) if newest else listing


@contextmanager
def faulty_proxy(port: int) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(port)
    thread = threading.Thread(target=proxy.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.released.set()
        proxy.server.shutdown()
        thread.join()
        proxy.server.server_close()
