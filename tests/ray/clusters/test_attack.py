"""A cluster attacked from this host's own address, as another machine reaches it: with a token all is refused, without
one what docs/operating/security.md says is possible is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

import grpc
import psutil
import pytest
from ray._private.services import resolve_ip_for_localhost

from tests.ray.clusters.test_jobs import listening
from tests.ray.conftest import wait_for

PORT, DASHBOARD, AGENT = 7691, 9691, 9692
HOST = resolve_ip_for_localhost("127.0.0.1")
WRONG = "b" * 64
CALLS = {
    "gcs_server": "/ray.rpc.NodeInfoGcsService/GetClusterId",
    "raylet": "/ray.rpc.NodeManagerService/GetNodeStats",
}


@pytest.fixture(params=["token", "disabled"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def head(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[psutil.Process]:
    """A Ray whose dashboard listens on all interfaces, as the manifests' does."""
    ports = f"--port={PORT} --dashboard-port={DASHBOARD} --dashboard-agent-listen-port={AGENT}"
    words = f"start --head --num-cpus=1 --block {ports} --dashboard-host=0.0.0.0"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_USAGE_STATS_ENABLED": "0", "PATH": path}
    command = [sys.executable, "-m", "ray.scripts.scripts", *words.split()]
    output = tmp_path_factory.mktemp("head") / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
    try:
        token = os.environ["RAY_AUTH_TOKEN"] if mode == "token" else ""
        wait_for(lambda: process.poll() is None and asked("", token) == 200)
        running = psutil.Process(process.pid)
        wait_for(lambda: all(listening(running, part) for part in CALLS))
        yield running
    finally:
        process.terminate()
        process.wait(60)
        sys.stdout.write(output.read_text(errors="replace")[-4000:])


def asked(entrypoint: str, token: str) -> int:
    """The status of the list of jobs or, with an entry point, of submitting one; 0 without an answer."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    data = json.dumps({"entrypoint": entrypoint}).encode() if entrypoint else None
    request = Request(f"http://{HOST}:{DASHBOARD}/api/jobs/", data=data, headers=headers)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=30) as answer:
            return int(answer.status)
    except URLError as error:
        return int(getattr(error, "code", 0))


def called(address: str, method: str, token: str) -> str:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=3, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def answers_of(head: psutil.Process, part: str, method: str, token: str) -> set[str]:
    """What the ports of a process of this Ray say; one that has just begun may be late."""
    answers = set[str]()

    def has_answered() -> bool:
        answers.update(called(address, method, token) for address in listening(head, part))
        return bool(answers & {"OK", "UNAUTHENTICATED"})

    wait_for(has_answered, limit_s=30)
    return answers


@pytest.mark.slow
def test_an_attack_from_this_hosts_own_address_is_refused_with_a_token_and_possible_without(
    mode: str, head: psutil.Process, tmp_path: Path
) -> None:
    refused = mode == "token"
    for token in ("", WRONG):
        mark = tmp_path / f"ran{len(token)}"
        status = asked(f"touch {mark}", token)
        assert status in ((401, 403) if refused else (200,))
        for part, method in CALLS.items():
            answers = answers_of(head, part, method, token)
            assert ("OK" in answers, "UNAUTHENTICATED" in answers) == (not refused, refused), (part, token, answers)
        if not refused:
            wait_for(mark.exists)
    assert len(list(tmp_path.glob("ran*"))) == (0 if refused else 2)
