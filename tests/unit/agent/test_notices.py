"""Notices of providers: asked over HTTP of a server that answers as their metadata services do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ring.config import Timeouts
from elastic_ring.runtime.agent import notices
from elastic_ring.runtime.agent.agent import AgentSpec, NodeAgent

SOON_S = 120


class Metadata(ThreadingHTTPServer):
    """The metadata services of three providers. `is_leaving`: whether they take this machine away."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.is_leaving = False
        self.base = f"http://127.0.0.1:{self.server_address[1]}"
        self.at = datetime.now(UTC) + timedelta(seconds=SOON_S)


class Answer(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        self._say("token-1" if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else None, 400)

    def do_GET(self) -> None:
        leaving, headers = self.server.is_leaving, self.headers
        if self.path == "/latest/meta-data/spot/instance-action":
            if headers["X-aws-ec2-metadata-token"] != "token-1":
                return self._say(None, 401)
            at = self.server.at.strftime("%Y-%m-%dT%H:%M:%SZ")
            return self._say(json.dumps({"action": "terminate", "time": at}) if leaving else None)
        if self.path == "/computeMetadata/v1/instance/preempted" and headers["Metadata-Flavor"] == "Google":
            return self._say("TRUE" if leaving else "FALSE")
        if self.path.startswith("/metadata/scheduledevents") and headers["Metadata"] == "true":
            event = {"EventType": "Preempt", "NotBefore": format_datetime(self.server.at, usegmt=True)}
            return self._say(json.dumps({"Events": [{**event, "EventType": "Reboot"}] + [event] * leaving}))
        return self._say(None, 403)

    def _say(self, text: str | None, otherwise: int = 404) -> None:
        self.send_response(200 if text is not None else otherwise)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *told: Any) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("name", "expected_s"), [("aws", SOON_S), ("gcp", notices.GCP_NOTICE_S), ("azure", SOON_S)])
def test_a_provider_says_when_it_takes_the_machine_away(metadata: Metadata, name: str, expected_s: float) -> None:
    ask = partial(notices.PROVIDERS[name], metadata.base)  # type: ignore[call-arg]
    assert ask() is None
    metadata.is_leaving = True
    in_s = ask()
    assert in_s is not None
    assert expected_s - 5 < in_s <= expected_s


def test_a_notice_is_told_once_and_failures_before_it_do_not_end_the_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "ASK_EVERY_S", 0.01)
    answers: list[Any] = [OSError("no route"), OSError("no route"), None, 7.0]
    told, failed, heard = list[float](), list[str](), threading.Event()

    def ask() -> float | None:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def tell(in_s: float) -> None:
        told.append(in_s)
        heard.set()

    monkeypatch.setattr(notices, "find", lambda name: ask)
    notices.Notices("mine:ask", tell, failed.append).open()
    assert heard.wait(10.0)
    assert (told, answers) == ([7.0], [])
    assert failed == ["notices='mine:ask' does not say whether this machine is taken away: no route"]


def test_what_an_agent_has_to_say_before_it_is_connected_is_said_once_it_is() -> None:
    agent: Any = NodeAgent(AgentSpec("node", Timeouts()))
    agent._tell("the provider does not answer")
    sent = list[Any]()
    agent._link = SimpleNamespace(connection=SimpleNamespace(send=sent.append))
    agent._tell("it answers")
    assert [message.text for message in sent] == ["node node: the provider does not answer", "node node: it answers"]


def test_an_agent_without_that_function_does_not_begin_and_refuses_again_when_it_is_asked_again() -> None:
    agent: Any = NodeAgent(AgentSpec("node", Timeouts(), notices="elastic_ring.nowhere:ask"))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"notices='elastic_ring\.nowhere:ask'"):
            agent._start()
    assert not agent._started


def test_a_function_is_named_by_its_module_and_must_be_there() -> None:
    assert notices.find("elastic_ring.runtime.agent.notices:gcp") is notices.gcp
    for name in ("awss", "elastic_ring.nowhere:ask", "elastic_ring.config:nothing"):
        with pytest.raises(ValueError, match=rf"notices={name!r}: give one of aws, gcp, azure, or MODULE:FUNCTION"):
            notices.find(name)
