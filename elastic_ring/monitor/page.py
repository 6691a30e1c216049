"""The live page of a run: one HTML file and its data as JSON, served over HTTP from the run's records.

Reads files and answers GET requests. Nothing is fetched from elsewhere, so the page works on a cluster without a way
out. Calls to a coordinator must not enter this module: the page must work without one.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from ipaddress import ip_address
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from elastic_ring.errors import ElasticRingError, RecordDamaged
from elastic_ring.monitor.callbacks import FAILED, STOPPED, STOPPED_BY_USER
from elastic_ring.monitor.metrics import MetricsLine, Recovery
from elastic_ring.monitor.plot import loss_names, values_of
from elastic_ring.monitor.report import Records, duration, left_s, newest_rate, recovery_line

log = logging.getLogger(__name__)

LOCAL = "127.0.0.1"
MAX_POINTS = 800
MAX_LINES = 4000
"""Of metrics.jsonl, from which the points come."""
MAX_CONNECTIONS = 64
ACCEPT_PAUSE_S = 0.2
WARN_S = 10.0
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?")
FRESH_S = 0.5
"""Requests within this time get the last answer: reading a long run's records takes time."""


class Page:
    """Serves the page on `host`:`port`. `look` returns the folder of the run's records as they are now.

    The constructor binds nothing; entering the context does. Raises ValueError for a port that cannot be had.
    """

    def __init__(self, look: Callable[[], Path], host: str = LOCAL, port: int = 0) -> None:
        self._look, self._host, self._port = look, host, port
        self._server: ThreadingHTTPServer | None = None
        self._lock = threading.Lock()
        self._last: tuple[float, bytes] | None = None
        self._warns_at = 0.0
        self._news: tuple[Any, float] = None, 0.0  # the status as it was last seen to change, and when: by this clock

    def __enter__(self) -> Page:
        try:
            self._server = _Server((self._host, self._port), _handler(self))
        except OSError as error:
            why = error.strerror or error
            raise ValueError(f"--serve {self._port} on {self._host}: {why}; give another port, or 0") from error
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.server_close()

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = str(self._server.server_address[0]), self._server.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def serve(self) -> None:
        """Answer requests until another thread calls `stop`, or Ctrl-C."""
        assert self._server is not None
        self._server.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        assert self._server is not None
        self._server.shutdown()

    def answers_to(self, host: str) -> bool:
        """True if a request's `Host` is an address or a name of this machine. Guards against DNS rebinding: another
        site's page, whose name resolves to this address, would read the run through its reader's browser."""
        if not host:
            return True  # every browser sends one
        name = (urlsplit(f"//{host}").hostname or "") if _HOST.fullmatch(host) else ""
        with suppress(ValueError):
            return bool(ip_address(name))
        name = name.removesuffix(".")
        return name in ("localhost", self._host.lower()) or name in _own_names()

    def data(self) -> bytes:
        """The page's data as JSON, at most `FRESH_S` old."""
        with self._lock:
            if self._last is None or time.monotonic() - self._last[0] > FRESH_S:
                data, now = page_data(self._look()), time.monotonic()
                if data["updated_unix_s"] != self._news[0]:
                    self._news = data["updated_unix_s"], now
                data["news_s"] = now - self._news[1] if data["is_live"] else None
                self._last = (now, json.dumps(data, allow_nan=False).encode())
            return self._last[1]

    def warn(self, text: str) -> None:
        """Log it, unless there was a line within WARN_S: whoever asks for the page decides how often."""
        with self._lock:
            if time.monotonic() >= self._warns_at:
                self._warns_at = time.monotonic() + WARN_S
                log.warning("%s", text)


@cache
def _own_names() -> frozenset[str]:
    """This machine's names, with and without its domain."""
    whole = {name.lower().removesuffix(".") for name in (socket.gethostname(), socket.getfqdn())}
    return frozenset(whole | {name.partition(".")[0] for name in whole})


class _Server(ThreadingHTTPServer):
    """Serves at most MAX_CONNECTIONS at a time. A closed connection or a request that is no HTTP is no error."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError as error:
            log.debug("no connection is taken: %s", error)
            time.sleep(ACCEPT_PAUSE_S)  # descriptors have run out: the connection stays in the backlog
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request from %s is dropped", client_address, exc_info=True)


def _handler(page: Page) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 30.0  # of a silent connection

        def do_GET(self) -> None:
            if not page.answers_to(self.headers.get("Host", "")):
                text = b"this page answers to its address and to the name of its machine, and to no other name\n"
                self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain; charset=utf-8", text)
                return
            path = self.path.partition("?")[0]
            if path == "/":
                html = resources.files("elastic_ring.monitor").joinpath("page.html").read_bytes()
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", html)
            elif path == "/data.json":
                status = HTTPStatus.OK
                try:
                    data = page.data()
                except (ElasticRingError, ValueError, OSError) as error:  # the page shows it, and asks again
                    page.warn(f"the run's records cannot be read: {error}")
                    status = HTTPStatus.SERVICE_UNAVAILABLE
                    data = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
                self._answer(status, "application/json", data)
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"there are / and /data.json\n")

        def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

    return Handler


# ---------------------------------------------------------------- its data


def page_data(folder: Path) -> dict[str, Any]:
    """The state, the curves and the ranks of a run, from the records in its folder. Raises: RecordDamaged for records
    with unexpected content."""
    records = Records.of(folder, most_lines=MAX_LINES)
    status, summary, steps, curves = records.status, records.summary, records.steps, records.curves
    try:
        step = status.get("step", records.num_steps)
        num_left = status.get("total_steps", records.num_steps) - step
        left = None if status.get("ended") else left_s(steps, num_left)
        has_ended = status.get("ended") or (summary and not status)
        recoveries = [*map(Recovery.from_json, summary.get("recoveries") or status.get("recoveries") or [])]
        resumes = summary.get("resumed_from") or status.get("resumed_from") or []
        is_stopped = status.get("error") == STOPPED_BY_USER
        error = "" if is_stopped else status.get("error")
        end = STOPPED if is_stopped else FAILED if error else "ended" if has_ended else ""
        return {
            "run": status.get("run") or folder.resolve().name,
            "phase": end or str(status.get("phase", "unknown")),
            "error": "; ".join(filter(None, (error, *records.damaged))),
            "is_live": bool(status) and not status.get("ended"),
            "updated_unix_s": status.get("updated_unix_s"),
            "step": step,
            "total_steps": status.get("total_steps", records.num_steps),
            "term": status.get("term"),
            "generation": status.get("generation"),
            "mesh": status.get("mesh"),
            "tokens_per_s": newest_rate(steps) or None,
            "left": "" if left is None else duration(left),
            "goodput": summary.get("goodput"),
            "exact": summary.get("exact"),
            "loss": _curve(curves, "loss"),
            "validation": {name: _curve(curves, name) for name in loss_names(curves)},
            **{name: _curve(curves, name) for name in ("step_s", "lr", "grad_norm")},
            "rate": _curve(curves, "tokens_per_s"),
            "resumes": sorted({resume["step"] for resume in resumes}),
            "generations": _generations(curves),
            "recoveries": [{"step": record.step, "line": recovery_line(record)} for record in recoveries],
            "ranks": sorted(status.get("members") or [], key=lambda member: int(member["global_rank"])),
            "spares": status.get("spares") or [],
            "story": status.get("story") or [],
        }
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        reason = f"the records in {folder} have unexpected content ({type(error).__name__}: {error})"
        raise RecordDamaged(reason, path=str(folder)) from error


def _curve(steps: Sequence[MetricsLine], name: str) -> list[tuple[int, float]]:
    return thinned([(step, value) for step, value in values_of(steps, name) if value is not None])


def thinned(points: Sequence[tuple[int, float]], most: int = MAX_POINTS) -> list[tuple[int, float]]:
    """At most `most` points: the lowest and the highest of each stretch, so that spikes stay."""
    if len(points) <= most:
        return list(points)
    kept: dict[int, float] = {}
    size = 2 * len(points) / most
    for index in range(most // 2):
        stretch = points[round(index * size) : round((index + 1) * size)]
        for point in (min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])):
            kept[point[0]] = point[1]
    return sorted(kept.items())


def _generations(steps: Sequence[MetricsLine]) -> list[dict[str, int]]:
    """The mesh over the steps: the first and last step of each generation."""
    bands = []
    for generation, lines in groupby(steps, key=lambda line: line["generation"]):
        band = list(lines)
        bands.append({"generation": generation, "first": band[0]["step"], "last": band[-1]["step"], **band[0]["mesh"]})
    return bands
