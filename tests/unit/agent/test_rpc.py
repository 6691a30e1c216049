"""What the coordinator's server of node agents takes from clients without the key: little, and not for long."""

from __future__ import annotations

import json
import logging
import queue
import resource
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ring.control.messages import to_json
from elastic_ring.runtime.agent import rpc
from elastic_ring.runtime.agent.messages import Beat, Death, Echo, Hello, HungUp
from elastic_ring.runtime.agent.rpc import AgentServer, JsonConnection, dial

HOST = "127.0.0.1"
KEY = "the key"
WAIT_S = 30.0
Delivered = queue.Queue[tuple[str, dict[str, Any]]]


@pytest.fixture
def delivered() -> Delivered:
    return queue.Queue()


@pytest.fixture
def server(delivered: Delivered) -> Iterator[AgentServer]:
    opened = AgentServer(KEY, lambda node, message: delivered.put((node, message))).open(HOST)
    yield opened
    for node in opened.nodes:
        opened.hang_up(node)


def hello(node: str, key: str = KEY) -> Hello:
    return Hello(node, key, 1, 1.0)


def agent(server: AgentServer, delivered: Delivered, node: str) -> JsonConnection:
    """A client that has authenticated itself."""
    connection = dial(HOST, server.port, WAIT_S)
    assert connection.send(hello(node))
    assert delivered.get(timeout=WAIT_S) == (node, hello(node))
    return connection


def test_a_node_is_known_by_the_address_that_it_comes_from(server: AgentServer, delivered: Delivered) -> None:
    assert server.came_from("n") == ""
    sock = socket.create_connection((HOST, server.port), timeout=WAIT_S, source_address=("127.0.0.9", 0))
    connection = JsonConnection(sock)
    assert connection.send(hello("n"))
    assert delivered.get(timeout=WAIT_S) == ("n", hello("n"))
    assert server.came_from("n") == "127.0.0.9"
    connection.close()


def round_trip(server: AgentServer, connection: JsonConnection, delivered: Delivered, node: str) -> None:
    assert connection.send(Beat())
    assert delivered.get(timeout=WAIT_S) == (node, Beat())
    assert server.send(node, Echo())
    assert connection.receive() == [{"type": "Echo"}]


def num_bytes_taken(sock: socket.socket, num_bytes: int) -> int:
    """How much of an endless line the server, and the kernel's buffers before it, take until it closes."""
    sent, block = 0, b"x" * (1 << 20)
    try:
        while sent < num_bytes:
            sent += sock.send(block)
    except OSError:
        return sent
    return sent


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(WAIT_S)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_client_without_the_key_is_closed_after_a_few_kilobytes_while_agents_are_served(
    server: AgentServer, delivered: Delivered, caplog: pytest.LogCaptureFixture
) -> None:
    good = agent(server, delivered, "n")
    peak_kib, cpu_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with caplog.at_level(logging.WARNING), socket.create_connection((HOST, server.port)) as stranger:
        address = "{}:{}".format(*stranger.getsockname())
        assert num_bytes_taken(stranger, 256 << 20) < 32 << 20
        round_trip(server, good, delivered, "n")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 16 << 10
    assert time.process_time() - cpu_s < 2.0
    assert f"rejected an unauthenticated connection from {address}" in caplog.text
    good.close()


@pytest.mark.parametrize(
    "line",
    [
        json.dumps(to_json(hello("n", "another key"))).encode(),
        json.dumps({**to_json(hello("n")), "key": None}).encode(),
        json.dumps({"type": "Beat"}).encode(),
        b"[1]",
        b"no JSON",
        b"[" * 4000,
        b"\xff\xfe",
    ],
)
def test_a_first_line_that_is_no_hello_with_the_key_closes_the_connection(
    server: AgentServer, delivered: Delivered, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), socket.create_connection((HOST, server.port)) as stranger:
        stranger.sendall(line + b"\n")
        assert is_closed(stranger)
    assert delivered.empty()
    assert "rejected an unauthenticated connection" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_client_that_sends_no_key_in_time_is_closed(
    server: AgentServer, delivered: Delivered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "HELLO_S", 0.1)
    good = agent(server, delivered, "n")
    with socket.create_connection((HOST, server.port)) as silent:
        silent.sendall(b'{"type": "Hello"')
        assert is_closed(silent)
    round_trip(server, good, delivered, "n")
    good.close()


def test_of_many_clients_without_a_key_the_oldest_is_closed_and_an_agent_still_gets_in(
    server: AgentServer, delivered: Delivered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "MAX_UNAUTHENTICATED", 4)
    silent = [socket.create_connection((HOST, server.port)) for _ in range(5)]
    assert is_closed(silent[0])
    good = agent(server, delivered, "n")
    round_trip(server, good, delivered, "n")
    for sock in (*silent, good):
        sock.close()


def test_an_agents_long_line_arrives_whole_and_one_beyond_the_bound_ends_its_connection(
    server: AgentServer, delivered: Delivered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "MAX_LINE_BYTES", 1 << 20)
    good = agent(server, delivered, "n")
    lines = ("x" * (1 << 19), "x" * ((1 << 19) - 400), "\n" * 9)
    message = Death("w", 1, "died", "killed", 0.0, log_lines=lines)
    assert good.send(message)
    assert good.send(Beat())
    assert delivered.get(timeout=WAIT_S) == ("n", message)
    assert delivered.get(timeout=WAIT_S) == ("n", Beat())
    good.send(replace(message, log_lines=("x" * (1 << 21),)))
    assert delivered.get(timeout=WAIT_S) == ("n", HungUp())
    good.close()


def test_a_flood_of_strangers_is_logged_in_one_line_until_its_number_is_due(
    server: AgentServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def knock() -> None:
        with socket.create_connection((HOST, server.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\n")
            assert is_closed(stranger)

    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            knock()
        assert len(caplog.records) == 1
        monkeypatch.setattr(rpc, "REJECTIONS_S", 0.0)
        knock()
    assert "(and 49 before it)" in caplog.records[-1].getMessage()


def test_when_descriptors_run_out_the_server_pauses_serves_its_agents_and_accepts_again(
    server: AgentServer, delivered: Delivered, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "ACCEPT_PAUSE_S", 0.2)
    good, strangers = agent(server, delivered, "n"), [socket.socket() for _ in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cpu_s = time.process_time()
    with caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # fewer than are open: nothing more can be opened
        try:
            for sock in strangers:
                sock.connect((HOST, server.port))
            deadline = time.monotonic() + 1.0  # some pauses, to see at what rate it tries
            while time.monotonic() < deadline:
                round_trip(server, good, delivered, "n")
                time.sleep(0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 1 <= len(caplog.records) <= 7
    assert "nobody is accepted for 0.2 s: [Errno 24]" in caplog.text
    assert time.process_time() - cpu_s < 0.7
    agent(server, delivered, "m").close()
    for sock in (*strangers, good):
        sock.close()


def test_a_process_may_open_what_the_system_allows_it(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = min(hard, rpc.MAX_OPEN_FILES) if hard != resource.RLIM_INFINITY else rpc.MAX_OPEN_FILES
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed // 2, hard))
        with caplog.at_level(logging.INFO):
            rpc.raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (allowed, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert f"may open {allowed} files now; its limit was {allowed // 2}" in caplog.text


PIECES = st.one_of(
    st.binary(max_size=5000),
    st.sampled_from(
        [b"\n", b"{", b"[" * 4000, json.dumps(to_json(hello("n", "no"))).encode() + b"\n", b'{"type": "Hello"}\n']
    ),
    st.recursive(
        st.none() | st.integers() | st.text(), lambda leaf: st.dictionaries(st.text(), leaf), max_leaves=5
    ).map(lambda found: json.dumps({"type": "Hello", "key": found, "node": found}).encode() + b"\n"),
    st.sampled_from(["\ud800", "a\udfff"]).map(lambda key: json.dumps({"type": "Hello", "key": key}).encode() + b"\n"),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, max_size=4))
def test_whatever_a_stranger_says_nothing_is_delivered_and_no_traceback_is_logged(
    server: AgentServer, delivered: Delivered, caplog: pytest.LogCaptureFixture, said: list[bytes]
) -> None:
    with socket.create_connection((HOST, server.port), timeout=WAIT_S) as stranger:
        try:
            for piece in said:
                stranger.sendall(piece)
            stranger.shutdown(socket.SHUT_WR)
        except OSError:  # closed in the midst of it
            pass
        assert is_closed(stranger)
    assert delivered.empty()
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.WARNING]
    assert not server.nodes
